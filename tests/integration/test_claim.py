"""Claims on a real Postgres: one row per tick, one claimer per row, and nobody who keeps a row for ever."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from tests.database import Database, Server
from tests.lock_sessions import SPACE, Open, sessions
from tests.young_ledger import FEW, ROUNDS, grow, rows_read
from tickd import admissions, claim, ledger
from tickd.claim import Claimed, Due, Enqueued, Row, Work
from tickd.fleet import Fleet
from tickd.ledger import Finish
from tickd.lock import TRY_LOCK, LockSession
from tickd.policy import TrustWindows
from tickd.tick import Outcome, Tick, lock_key, run_id


pytestmark = pytest.mark.migrated

Onlooker = psycopg.AsyncConnection[Any]

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEASE = 30 * SECOND
SECONDS = 20
NO_LEASE = -SECOND  # has run out when it is given

# Stands in for the try-lock, and waits at a gate of the test's before it tries.
GATE = """
CREATE SCHEMA gate;
GRANT USAGE ON SCHEMA gate TO PUBLIC;
CREATE FUNCTION gate.pg_try_advisory_lock(integer, integer) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_lock_shared(1);
    PERFORM pg_advisory_unlock_shared(1);
    RETURN pg_catalog.pg_try_advisory_lock($1, $2);
END $$
"""
WITHOUT_INDEXES = "-c%20enable_indexscan%3Doff%20-c%20enable_bitmapscan%3Doff"
THROUGH_THE_GATE = "-c%20search_path%3Dgate,pg_catalog"
AT_THE_GATE = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objsubid = 1"
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted"


@pytest.fixture
async def open_as(dsn: str) -> AsyncIterator[Open]:
    """Open lock sessions on the migrated database, by replica."""
    async with sessions(dsn) as open_as:
        yield open_as


@pytest.fixture
async def look(open_as: Open, admin_dsn: str) -> AsyncIterator[Onlooker]:  # noqa: ARG001  # the tables are there
    """Look on, and do what an administrator does, over a connection of no replica."""
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as connection:
        yield connection


def tick(second: int = 0, graph: str = "restock") -> Tick:
    """Return the graph's tick so many seconds after noon."""
    return Tick(graph, NOON + second * SECOND)


async def enqueue(
    session: LockSession,
    *ticks: Tick,
    thread: str | None = None,
    most: int = 1000,
    refusal: str = "backlog_full",
    heed_interrupt: bool = True,
) -> list[Enqueued]:
    """Enqueue ticks one after the other, as a replica that was never late."""
    found = []
    for one in ticks:
        due = Due(one, thread or str(one), run_id(one), most, refusal, heed_interrupt)
        found += await claim.enqueue(session.connection, session.place.space, [due])
    return found


async def claimed(session: LockSession, graph: str = "restock", lease: timedelta = LEASE) -> Claimed:
    """Claim, where there is something to be had."""
    held, got = await claim.claim(session, graph=graph, lease=lease)
    assert held
    assert got is not None
    return got


async def finish(session: LockSession, got: Claimed, outcome: Outcome = Outcome.RAN) -> None:
    """Record how a claimed tick ended, and let go of its graph."""
    token, attempt = got.admission.token, got.admission.attempt
    assert await ledger.record(session, got.tick, token=token, finish=Finish(outcome, attempt))
    assert await session.unlock(got.tick.graph)


async def put_back(session: LockSession, got: Claimed, pause: timedelta = timedelta(0)) -> None:
    """Give a claimed tick back as failed, and let go of its graph."""
    token = got.admission.token
    assert await claim.put_back(session, got.tick, token=token, pause=pause, error_type="E", error="e")
    assert await session.unlock(got.tick.graph)


async def rows(look: Onlooker, columns: str) -> list[Any]:
    """Return these columns of every tick, in fire-time order."""
    cursor = await look.execute(f"SELECT {columns} FROM tickd.ticks ORDER BY graph, fire_time")
    return await cursor.fetchall()


async def value(look: Onlooker, query: Any) -> Any:
    """Return the one value of a query."""
    row = await (await look.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def lose(session: LockSession, look: Onlooker) -> None:
    """End a session as a killed process does, and return when the server has noticed."""
    pid = session.connection.info.backend_pid
    await session.close()
    async with asyncio.timeout(SECONDS):
        while await value(look, f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"):
            pass


# Enqueueing


async def test_a_tick_has_one_row_whoever_enqueues_it_and_however_often(open_as: Open, look: Onlooker):
    """Every replica fires every tick: what makes them one is the row."""
    replicas = [await open_as(f"r{n}") for n in range(6)]

    for second in range(5):
        await asyncio.gather(*(enqueue(session, tick(second)) for session in replicas))

    assert await rows(look, "mode, attempt, outcome, token, thread_id, run_id") == [
        ("claim", 0, None, None, str(tick(second)), run_id(tick(second))) for second in range(5)
    ]


async def test_many_ticks_are_one_statement_and_replicas_do_not_wait_for_each_other(
    open_as: Open, look: Onlooker
):
    """A hundred graphs are due at the same instant, on every replica, and each goes through them in its own order."""
    graphs = [f"graph_{n}" for n in range(100)]
    dues = [Due(tick(0, graph), graph, run_id(tick(0, graph)), 9, "backlog_full") for graph in graphs]
    a, b = await open_as("a"), await open_as("b")

    one, other = await asyncio.gather(
        claim.enqueue(a.connection, SPACE, dues), claim.enqueue(b.connection, SPACE, dues[::-1])
    )

    assert {found.tick for found in one} == {found.tick for found in other} == {due.tick for due in dues}
    assert sorted(found.tick.graph for found in [*one, *other] if found.new) == sorted(graphs)
    assert len(await rows(look, "graph")) == 100


async def test_whoever_enqueues_hears_how_the_tick_stands(open_as: Open):
    """It saves a lock session where there is nothing to be had, and the line says who has it."""
    a, b = await open_as("a"), await open_as("b")

    (new,) = await enqueue(a, tick(0))
    assert (new.tick, new.new, new.holder) == (tick(0), True, None)
    assert new.row.waits
    (known,) = await enqueue(b, tick(0))
    assert (known.new, known.holder) == (False, None)
    assert known.row.waits

    running = await claimed(a)
    (behind,) = await enqueue(b, tick(1))
    (held,) = await enqueue(b, tick(0))
    assert (behind.new, behind.holder, behind.row.waits) == (True, "a", True)
    assert (held.holder, held.row.replica, held.row.claimed, held.row.waits) == ("a", "a", True, False)
    assert held.row.since is not None
    assert held.row.since.tzinfo is UTC

    await finish(a, running, Outcome.HANDED_OFF)
    (handed_off,) = await enqueue(b, tick(0))
    assert (handed_off.holder, handed_off.row.outcome, handed_off.row.waits) == (None, "handed_off", True)
    (refused,) = await enqueue(b, tick(2), most=1)
    assert (refused.new, refused.row.outcome, refused.row.reason) == (True, "skipped", "backlog_full")
    (again,) = await enqueue(a, tick(2), most=1)
    assert (again.new, again.row) == (False, refused.row)


REFUSE: LiteralString = """
INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, thread_id, run_id, outcome, error_type)
VALUES (%s, %s, %s, 'claim', 0, '', gen_random_uuid(), 'skipped', 'paused')
"""


async def test_a_row_that_came_after_the_statement_began_is_told_as_it_is(open_as: Open, look: Onlooker):
    """Of two replicas that fire together one sees neither its own row nor the other's; it took that for one that waits."""
    session = await open_as("a")
    async with look.transaction():
        await look.execute(REFUSE, (SPACE, tick().graph, tick().fire_time))
        enqueuing = asyncio.create_task(enqueue(session, tick()))
        async with asyncio.timeout(SECONDS):
            while not await value(look, "SELECT count(*) FROM pg_locks WHERE NOT granted"):
                pass

    (found,) = await enqueuing
    assert not found.new
    assert (found.row.outcome, found.row.reason, found.row.waits) == ("skipped", "paused", False)


async def test_a_finished_tick_is_not_enqueued_again(open_as: Open, look: Onlooker):
    """I2: a replica whose clock is behind fires a tick that is long over."""
    a = await open_as("a")
    await enqueue(a, tick())
    await finish(a, await claimed(a))

    await enqueue(a, tick())

    assert await rows(look, "outcome") == [("ran",)]


async def test_a_full_backlog_refuses_and_the_refusal_is_a_row(open_as: Open, look: Onlooker):
    """Nothing grows without end in silence; the running tick counts, a finished one does not."""
    a = await open_as("a")
    await enqueue(a, tick(0), tick(1), tick(2), most=2)
    running = await claimed(a)
    await enqueue(a, tick(3), most=2)
    await finish(a, running)
    await enqueue(a, tick(4), tick(5), most=2)

    assert await rows(look, "outcome, error_type, finished_at IS NULL") == [
        ("ran", None, False),
        (None, None, True),
        ("skipped", "backlog_full", False),
        ("skipped", "backlog_full", False),
        (None, None, True),
        ("skipped", "backlog_full", False),
    ]


async def test_a_tick_that_was_handed_off_still_counts(open_as: Open, look: Onlooker):
    """It has an outcome, and it waits all the same."""
    a = await open_as("a")
    await enqueue(a, tick(0))
    await finish(a, await claimed(a), Outcome.HANDED_OFF)

    await enqueue(a, tick(1), most=1, refusal="lock_held")

    assert await rows(look, "outcome, error_type") == [("handed_off", None), ("skipped", "lock_held")]


async def test_other_graphs_and_other_lock_spaces_do_not_count(open_as: Open, look: Onlooker):
    """A graph's limit is its own."""
    a, elsewhere = await open_as("a"), await open_as("e", space=SPACE + 1)
    await enqueue(a, tick(0, "audit"))
    await enqueue(elsewhere, tick(0))

    await enqueue(a, tick(1), most=1)

    assert await rows(look, "space, outcome") == [(SPACE, None), (SPACE + 1, None), (SPACE, None)]


async def test_a_paused_graph_takes_in_nothing(open_as: Open, look: Onlooker):
    """What comes due in a pause is skipped, and says so; it does not wait for the end of the pause."""
    a = await open_as("a")
    await enqueue(a, tick(0))
    await finish(a, await claimed(a))
    await look.execute("UPDATE tickd.graphs SET paused_at = clock_timestamp()")

    await enqueue(a, tick(1))

    assert await rows(look, "outcome, error_type") == [("ran", None), ("skipped", "paused")]
    assert await claim.look_up(look, SPACE, tick(1)) == Row("skipped", "paused", None, None, claimed=False)


async def test_a_tick_whose_thread_waits_for_an_answer_is_not_taken_in(open_as: Open, look: Onlooker):
    """It would run into the middle of a conversation; on a thread of its own it may."""
    a = await open_as("a")
    await enqueue(a, tick(0), thread="restock")
    await finish(a, await claimed(a), Outcome.INTERRUPTED)

    await enqueue(a, tick(1), thread="restock")
    await enqueue(a, tick(2), thread="restock", heed_interrupt=False)
    await enqueue(a, tick(3))

    assert await rows(look, "outcome, error_type") == [
        ("interrupted", None),
        ("skipped", "interrupted"),
        (None, None),
        (None, None),
    ]
    waits = await claimed(a)
    assert (waits.tick, waits.interrupted) == (tick(2), True)
    await finish(a, waits)
    assert not (await claimed(a)).interrupted


# Claiming


async def test_ready_ticks_are_claimed_in_fire_time_order_each_with_a_new_token(open_as: Open):
    """A queue that overtakes itself would give later state to an earlier tick; the order is no index's doing."""
    a = await open_as("a", options=WITHOUT_INDEXES)
    await enqueue(a, tick(2), tick(0), tick(1))

    got = []
    for _ in range(3):
        got.append(await claimed(a))
        await finish(a, got[-1])

    assert [one.tick for one in got] == [tick(0), tick(1), tick(2)]
    assert [one.admission.token for one in got] == [1, 2, 3]
    assert [(one.admission.attempt, one.failures) for one in got] == [(1, 0)] * 3
    assert [one.admission.thread_id for one in got] == [str(tick(n)) for n in range(3)]


async def test_where_nothing_is_ready_no_lock_is_taken(open_as: Open, look: Onlooker):
    """A lock that is held to learn that there is nothing to do makes others skip."""
    a = await open_as("a")

    assert await claim.claim(a, graph="restock", lease=LEASE) == (None, None)
    assert await value(look, HELD) == 0
    assert await value(look, "SELECT count(*) FROM tickd.graphs") == 0


async def test_while_another_session_has_the_graph_nothing_is_claimed(open_as: Open, look: Onlooker):
    """I1: one run of a graph at a time, whatever else is ready."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick(0), tick(1), tick(2, "audit"))
    await claimed(a)

    assert await claim.claim(b, graph="restock", lease=LEASE) == (False, None)
    assert (await claimed(b, "audit")).tick == tick(2, "audit")
    assert await rows(look, "replica, attempt") == [("b", 1), ("a", 1), (None, 0)]


async def test_nothing_of_a_paused_graph_is_claimed(open_as: Open, look: Onlooker):
    """Whoever pauses a graph wants it to do nothing: what waits then waits for the end of the pause."""
    a = await open_as("a")
    await Fleet(a).register({"restock": "every 1s"})
    await enqueue(a, tick(0))
    await look.execute("UPDATE tickd.graphs SET paused_at = clock_timestamp()")

    assert await claim.claim(a, graph="restock", lease=LEASE) == (None, None)
    assert not await claim.has_ready(look, SPACE, "restock")
    assert await claim.work(look, SPACE, NO_LEASE) == [Work("restock", ready=False, expired=False)]
    await look.execute("UPDATE tickd.graphs SET paused_at = NULL")
    assert (await claimed(a)).tick == tick(0)


async def test_two_claimers_never_get_one_row(open_as: Open, look: Onlooker):
    """The whole promise, under as much concurrency as one server gives: every row once, and no two at a time."""
    sessions = [await open_as(f"r{n}") for n in range(6)]
    await enqueue(sessions[0], *(tick(n) for n in range(60)))
    at_work: set[str] = set()
    got: list[Claimed] = []

    async def work(session: LockSession, name: str) -> None:
        while await value(look, "SELECT count(*) FROM tickd.ticks WHERE outcome IS NULL"):
            _, one = await claim.claim(session, graph="restock", lease=LEASE)
            if one is None:
                continue
            at_work.add(name)
            assert at_work == {name}
            got.append(one)
            token, attempt = one.admission.token, one.admission.attempt
            assert await ledger.record(session, one.tick, token=token, finish=Finish(Outcome.RAN, attempt))
            at_work.remove(name)
            await session.unlock("restock")

    await asyncio.gather(*(work(session, str(n)) for n, session in enumerate(sessions)))

    assert [one.tick for one in got] == [tick(n) for n in range(60)]
    assert [one.admission.token for one in got] == list(range(1, 61))
    assert await rows(look, "attempt, outcome") == [(1, "ran")] * 60


async def test_a_row_that_was_finished_after_the_statement_began_is_passed_over(
    open_as: Open, look: Onlooker
):
    """The snapshot still shows it open, and the lock is free by then: only the second look at the row tells."""
    a = await open_as("a")
    await enqueue(a, tick(0), tick(1))
    running = await claimed(a)
    await look.execute(GATE)
    b = await open_as("b", options=THROUGH_THE_GATE)
    await look.execute("SELECT pg_advisory_lock(1)")

    late = asyncio.create_task(claimed(b))
    while not await value(look, AT_THE_GATE):
        assert not late.done()
    await finish(a, running)
    await look.execute("SELECT pg_advisory_unlock(1)")

    got = await late
    assert (got.tick, got.admission.attempt) == (tick(1), 1)
    assert await rows(look, "outcome, attempt") == [("ran", 1), (None, 1)]


async def test_when_the_only_row_was_finished_meanwhile_the_lock_is_held_for_nothing(
    open_as: Open, look: Onlooker
):
    """No row, no token: a hold that runs nothing must not move the fence either."""
    a = await open_as("a")
    await enqueue(a, tick(0))
    running = await claimed(a)
    await look.execute(GATE)
    b = await open_as("b", options=THROUGH_THE_GATE)
    await look.execute("SELECT pg_advisory_lock(1)")

    late = asyncio.create_task(claim.claim(b, graph="restock", lease=LEASE))
    while not await value(look, AT_THE_GATE):
        assert not late.done()
    await finish(a, running)
    await look.execute("SELECT pg_advisory_unlock(1)")

    assert await late == (True, None)
    assert await value(look, "SELECT token FROM tickd.graphs") == 1
    assert await value(look, "SELECT token FROM tickd.threads") == 1


async def test_nothing_is_claimed_of_a_graph_that_is_paused_after_the_look(open_as: Open, look: Onlooker):
    """Once `tickd pause` has returned, no attempt begins."""
    await enqueue(await open_as("a"), tick(0))
    await look.execute("INSERT INTO tickd.graphs (space, graph, key) VALUES (%s, 'restock', 0)", [SPACE])
    await look.execute(GATE)
    b = await open_as("b", options=THROUGH_THE_GATE)
    await look.execute("SELECT pg_advisory_lock(1)")

    late = asyncio.create_task(claim.claim(b, graph="restock", lease=LEASE))
    while not await value(look, AT_THE_GATE):
        assert not late.done()
    await look.execute("UPDATE tickd.graphs SET paused_at = clock_timestamp()")
    await look.execute("SELECT pg_advisory_unlock(1)")

    assert await late == (True, None)
    assert await rows(look, "attempt, replica") == [(0, None)]


async def test_rows_of_skip_mode_are_not_claimed(open_as: Open, look: Onlooker):
    """They belong to the hold that admitted them; a sweep calls them abandoned, and nobody runs them again."""
    a, b = await open_as("a"), await open_as("b")
    held, _ = await admissions.hold_and_admit(a, tick(), thread_id="t", run_id=run_id(tick()))
    assert held
    await lose(a, look)

    assert await claim.claim(b, graph="restock", lease=LEASE) == (None, None)
    await enqueue(b, tick(1))
    assert (await claimed(b)).tick == tick(1)


async def test_a_claim_moves_the_fence_of_its_thread(open_as: Open, look: Onlooker):
    """I3: a checkpoint of the attempt before carries an old token from here on."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick())
    await claimed(a)
    await lose(a, look)

    got = await claimed(b)

    cursor = await look.execute("SELECT thread_id, graph, token FROM tickd.threads")
    assert await cursor.fetchall() == [(str(tick()), "restock", got.admission.token)]
    assert got.admission.token == 2


# Failing, and being lost


async def test_a_tick_that_was_put_back_waits_out_its_pause(open_as: Open, look: Onlooker):
    """The next one may run meanwhile; the pause is the failed tick's own."""
    a = await open_as("a")
    await enqueue(a, tick(0), tick(1))
    await put_back(a, await claimed(a), pause=timedelta(hours=1))

    got = await claimed(a)

    assert got.tick == tick(1)
    await finish(a, got)
    assert await claim.claim(a, graph="restock", lease=LEASE) == (None, None)
    assert await rows(look, "failures, error_type, error, lease_until, ready_at > clock_timestamp()") == [
        (1, "E", "e", None, True),
        (0, None, None, None, False),
    ]


async def test_every_attempt_counts_and_so_does_every_failure(open_as: Open):
    """After `retries` a tick is failed for good, across replicas: the count has to outlive each of them."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick())
    await put_back(a, await claimed(a))
    await put_back(b, await claimed(b))

    got = await claimed(a)

    assert (got.admission.attempt, got.failures) == (3, 2)


async def test_a_lost_holder_counts_as_a_failure_and_one_that_handed_off_does_not(
    open_as: Open, look: Onlooker
):
    """A tick that takes its process with it must not do so for ever; a deployment may have as many as it likes."""
    a, b, c = await open_as("a"), await open_as("b"), await open_as("c")
    await enqueue(a, tick())
    await claimed(a)
    await lose(a, look)

    taken_over = await claimed(b)
    assert (taken_over.admission.attempt, taken_over.failures) == (2, 1)
    await finish(b, taken_over, Outcome.HANDED_OFF)

    continued = await claimed(c)
    assert (continued.admission.attempt, continued.failures) == (3, 1)
    row = await claim.look_up(look, SPACE, tick())
    assert row is not None
    assert (row.outcome, row.replica, row.claimed) == (None, "c", True)


async def test_only_the_newest_token_gives_a_tick_back(open_as: Open, look: Onlooker):
    """A holder that was taken over, and wakes up to a failure, has nothing to say any more."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick())
    old = await claimed(a)
    await a.unlock("restock")  # as the server does for a session that has ended
    await claimed(b)

    arguments: dict[str, Any] = {"pause": SECOND, "error_type": "E", "error": "e"}
    assert not await claim.put_back(a, tick(), token=old.admission.token, **arguments)
    assert await rows(look, "replica, failures, lease_until IS NULL") == [("b", 1, False)]


@pytest.mark.parametrize(("error", "kept"), [("a\0b", "a\\0b"), ("a\ud800b", "a\\ud800b")])
async def test_an_error_that_postgres_cannot_hold_is_kept(
    open_as: Open, look: Onlooker, error: str, kept: str
):
    """Postgres has no text with a NUL or half a character in it, and an error may have any."""
    a = await open_as("a")
    await enqueue(a, tick())
    token = (await claimed(a)).admission.token

    await claim.put_back(a, tick(), token=token, pause=SECOND, error_type="E", error=error)

    assert await rows(look, "error") == [(kept,)]


async def test_an_error_with_characters_that_the_database_lacks_is_kept(server: Server):
    """Its tick would have no line but that of an error of tickd's own, and run again and again."""
    database = Database(server)
    try:
        database.create(encoding="LATIN1")
        async with sessions(database.dsn) as open_as:
            a = await open_as("a")
            await enqueue(a, tick())
            token = (await claimed(a)).admission.token
            await claim.put_back(a, tick(), token=token, pause=SECOND, error_type="Teuer€", error="5 €")
            kept = await a.fetch("SELECT error_type, error FROM tickd.ticks")
    finally:
        database.close()

    assert kept == ("Teuer\\u20ac", "5 \\u20ac")


# Leases


async def test_a_lease_is_renewed_by_its_token_only(open_as: Open, look: Onlooker):
    """The probe of a claimed run: with its answer comes the server's timeline, without one the hold is lost."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick())
    old = (await claimed(a)).admission.token
    (until,) = (await rows(look, "lease_until"))[0]

    renewed = await a.ask(*claim.renewal(tick(), old, 2 * LEASE))

    assert renewed == (1,)
    assert (await rows(look, "lease_until"))[0][0] >= until + LEASE
    await a.unlock("restock")
    await claimed(b)
    assert await a.ask(*claim.renewal(tick(), old, LEASE)) is None


@pytest.mark.parametrize("kind", ["dedicated", "shared"])
async def test_a_renewal_does_not_wait_for_a_row_that_somebody_has_locked(
    dsn: str, admin_dsn: str, kind: str
):
    """It has a probe's time: a transaction that an operator has left open would cost every run of the session its hold."""
    async with (
        sessions(dsn, kind=kind) as open_as,
        await psycopg.AsyncConnection.connect(admin_dsn) as operator,
        asyncio.timeout(10),
    ):
        a = await open_as("a")
        await enqueue(a, tick())
        token = (await claimed(a)).admission.token
        await operator.execute("SELECT FROM tickd.ticks FOR UPDATE")
        assert await a.ask(*claim.renewal(tick(), token, LEASE)) in [(1,), [1]]
        assert await a.ask(*claim.renewal(tick(), token + 1, LEASE)) is None
        await operator.rollback()

        until = (await (await operator.execute("SELECT lease_until FROM tickd.ticks")).fetchall())[0][0]
        await a.ask(*claim.renewal(tick(), token, 2 * LEASE))
        renewed = (await (await operator.execute("SELECT lease_until FROM tickd.ticks")).fetchall())[0][0]
        assert renewed > until


async def test_the_watch_hears_that_a_claim_was_superseded(open_as: Open):
    """A holder whose row has a newer token stops, even if its own session lives."""
    a, b = await open_as("a", windows=TrustWindows(probe_interval=SECOND / 10)), await open_as("b")
    await enqueue(a, tick())
    old = (await claimed(a)).admission.token
    await a.unlock("restock")
    await claimed(b)

    loss = await asyncio.wait_for(a.watch(probe=claim.renewal(tick(), old, LEASE)), 10)

    assert loss.cause == "superseded"


async def test_a_finished_tick_is_not_renewed(open_as: Open):
    """A late renewal must not give a lease to a row that is closed."""
    a = await open_as("a")
    await enqueue(a, tick())
    got = await claimed(a)
    await finish(a, got)

    assert await a.ask(*claim.renewal(tick(), got.admission.token, LEASE)) is None


async def test_an_expired_lease_ends_its_holders_session(open_as: Open, look: Onlooker):
    """A process that stands still keeps its session, and would keep the graph for ever."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick())
    await claimed(a, lease=NO_LEASE)
    assert await claim.work(look, SPACE, NO_LEASE) == [Work("restock", ready=False, expired=True)]

    assert await claim.end_holder(look, SPACE, "restock", NO_LEASE)

    with pytest.raises(psycopg.OperationalError):
        await a.fetch("SELECT 1")
    taken_over = await claimed(b)
    assert (taken_over.tick, taken_over.failures) == (tick(), 1)
    assert not await claim.end_holder(look, SPACE, "restock", NO_LEASE)


async def test_a_holder_that_renews_is_left_alone(open_as: Open, look: Onlooker):
    """A slow run is not a lost one."""
    a = await open_as("a")
    await enqueue(a, tick())
    got = await claimed(a, lease=NO_LEASE)
    await a.ask(*claim.renewal(tick(), got.admission.token, LEASE))

    assert await claim.work(look, SPACE, NO_LEASE) == [Work("restock", ready=False, expired=False)]
    assert not await claim.end_holder(look, SPACE, "restock", NO_LEASE)
    assert await a.fetch("SELECT 1") == (1,)


async def test_a_holder_that_cannot_renew_a_locked_row_keeps_its_session_and_all_holds_on_it(
    dsn: str, admin_dsn: str
):
    """An operator's open transaction outlasts the lease: to end the session would cost every run that shares it, for a row that nobody could take."""
    async with (
        sessions(dsn, kind="shared") as open_as,
        await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as look,
        await psycopg.AsyncConnection.connect(admin_dsn) as operator,
    ):
        shared, other = await open_as("a"), await open_as("b")
        await enqueue(shared, tick(), tick(0, "pack_audit"))
        got = await claimed(shared, lease=NO_LEASE)
        await claimed(shared, "pack_audit")
        await operator.execute("SELECT FROM tickd.ticks FOR UPDATE")
        assert await shared.ask(*claim.renewal(tick(), got.admission.token, LEASE)) is not None

        assert [one for one in await claim.work(look, SPACE, LEASE) if one.expired] == []
        assert not await claim.end_holder(look, SPACE, "restock", LEASE)
        assert await value(look, HELD) == 2
        assert (await claim.claim(other, graph="restock", lease=LEASE))[0] is False

        await operator.rollback()
        await shared.ask(*claim.renewal(tick(), got.admission.token, LEASE))
        await finish(shared, got)
        assert await rows(look, "outcome") == [(None,), ("ran",)]


async def test_an_expired_lease_does_not_end_a_hold_of_another_tick(open_as: Open, look: Onlooker):
    """The lock may have gone to a fired tick of skip mode, or to one that was resumed, before the row was claimed."""
    a, b = await open_as("a"), await open_as("b")
    await enqueue(a, tick(0))
    await claimed(a, lease=NO_LEASE)
    await lose(a, look)
    held, _ = await admissions.hold_and_admit(b, tick(9), thread_id="t", run_id=run_id(tick(9)))
    assert held

    assert await claim.work(look, SPACE, NO_LEASE) == [Work("restock", ready=False, expired=False)]
    assert not await claim.end_holder(look, SPACE, "restock", NO_LEASE)
    assert await b.fetch("SELECT 1") == (1,)


async def test_an_expired_lease_does_not_end_a_session_that_came_later(open_as: Open, look: Onlooker):
    """Its token may not be in the statement's snapshot yet."""
    a = await open_as("a")
    await enqueue(a, tick(0))
    await claimed(a, lease=NO_LEASE)
    await lose(a, look)
    b = await open_as("b")
    await b.fetch(TRY_LOCK, (SPACE, lock_key("restock")))

    assert await claim.work(look, SPACE, NO_LEASE) == [Work("restock", ready=False, expired=False)]
    assert not await claim.end_holder(look, SPACE, "restock", NO_LEASE)


# Looking


async def test_work_says_of_each_graph_what_a_sweep_needs(open_as: Open, look: Onlooker):
    """One query tells what may be claimed, what is being worked on, and what its holder has let go."""
    a, b = await open_as("a"), await open_as("b")
    await Fleet(a).register(dict.fromkeys(("ready", "running", "later", "done", "left"), "every 1s"))
    await enqueue(
        a, tick(0, "ready"), tick(0, "running"), tick(1, "running"), tick(0, "later"), tick(0, "done")
    )
    await claimed(a, "running")
    await put_back(b, await claimed(b, "later"), pause=timedelta(hours=1))
    await finish(b, await claimed(b, "done"))
    await enqueue(a, tick(0, "left"))
    c = await open_as("c")
    await claimed(c, "left", lease=NO_LEASE)
    await lose(c, look)

    found = {one.graph: (one.ready, one.expired) for one in await claim.work(look, SPACE, NO_LEASE)}

    assert found == {
        "ready": (True, False),
        "running": (False, False),
        "later": (False, False),
        "left": (True, False),
    }
    ready = {
        graph: await claim.has_ready(look, SPACE, graph) for graph in ("ready", "running", "later", "done")
    }
    assert ready == {"ready": True, "running": True, "later": False, "done": False}


async def test_a_tick_nobody_has_heard_of_has_no_row(look: Onlooker):
    """Then it is simply not there, which is different from any outcome."""
    assert await claim.look_up(look, SPACE, tick()) is None


async def test_a_look_finds_open_ticks_by_their_index(open_as: Open, look: Onlooker):
    """Sweeps run all the time, and the ledger keeps its finished rows for months."""
    a = await open_as("a")
    await look.execute(
        "INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, thread_id, run_id, outcome)"
        " SELECT 7301, 'restock', timestamptz '2026-01-01Z' + n * interval '1 s', 'claim', 1, 't', gen_random_uuid(), 'ran'"
        " FROM generate_series(1, 20000) AS n"
    )
    await enqueue(a, tick())
    await look.execute("ANALYZE tickd.ticks")

    graph = {"space": SPACE, "graph": "restock", "key": 1, "replica": "a", "lease": LEASE}
    for statement in (claim.HAS_READY, claim.WORK, claim.CLAIM):
        cursor = await look.execute(f"EXPLAIN {statement}", graph)
        plan = "\n".join(line for (line,) in await cursor.fetchall())
        assert "Index Scan using ticks_" in plan
        assert "Seq Scan on ticks" not in plan


async def test_no_claim_reads_the_whole_ledger_even_while_postgres_has_no_statistics_of_it(
    open_as: Open, admin_dsn: str
):
    """However many ticks there have been, one is enqueued, claimed and finished by its key."""
    session = await open_as("a")

    async def a_tick(second: int) -> None:
        await enqueue(session, tick(second))
        await finish(session, await claimed(session))
        assert not await claim.has_ready(session.connection, session.place.space, "restock")

    for second in range(ROUNDS):
        await a_tick(second)
    grow(admin_dsn, graph="restock", mode="claim")
    before = await rows_read(session, admin_dsn)
    for second in range(ROUNDS, ROUNDS + 10):
        await a_tick(second)

    assert await rows_read(session, admin_dsn) - before < FEW
