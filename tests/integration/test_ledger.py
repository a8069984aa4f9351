"""The ledger: who is admitted, under which token, and what is written of it, with several replicas at it."""

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, LiteralString

import psycopg
import pytest

from tests.database import Database
from tests.integration.conftest import Places
from tests.lock_sessions import Open, place_of, sessions
from tests.mutation import SLOW_TRY, taking_its_lock
from tests.onlooker import Onlooker
from tests.young_ledger import FEW, ROUNDS, grow, rows_read
from tickd import admissions, ledger
from tickd.admissions import Admission, Refusal, Unfinished
from tickd.ledger import Abandoned, Finish
from tickd.lock import UNLOCK, LockSession, closing, open_session, sole_writer
from tickd.tick import Outcome, SkipReason, Tick, lock_key, run_id


pytestmark = pytest.mark.migrated

GRAPH = "restock_plan"
TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
RAN = Finish(Outcome.RAN, 1)

UNCLAIMED = f"""
INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, thread_id, run_id)
VALUES (7301, '{GRAPH}', '2026-05-04T09:00Z', 'claim', 0, 't', gen_random_uuid())
"""


def tick(second: int = 0, graph: str = GRAPH) -> Tick:
    """Return the tick of so many seconds after ten."""
    return Tick(graph, TEN + timedelta(seconds=second))


@pytest.fixture(params=["dedicated", "shared", "apart"])
async def open_as(dsn: str, request: pytest.FixtureRequest):
    """Opens a lock session for a replica's name: for one hold, for many, and for one whose ledger is apart."""
    async with sessions(dsn, kind=request.param) as open_as:
        yield open_as


# The statement looks, and then it tries. Where the ledger is apart the try comes first.
LOOKS_FIRST = pytest.mark.parametrize("open_as", ["dedicated", "shared"], indirect=True)


async def admit(session: LockSession, one: Tick, *, thread: str | None = None, **options: Any) -> Any:
    """Try the lock and admit the tick; return both answers."""
    return await admissions.hold_and_admit(
        session, one, thread_id=thread or str(one), run_id=run_id(one), **options
    )


async def ended(session: LockSession, one: Tick, finish: Finish = RAN) -> Admission:
    """Admit, record and let go of a tick, as a run does from beginning to end."""
    held, admission = await admit(session, one)
    assert held
    assert await ledger.record(session, one, token=admission.token, finish=finish)
    assert await session.unlock(one.graph)
    return admission  # type: ignore[no-any-return]  # it was held


async def test_a_tick_is_admitted_in_the_statement_that_takes_the_lock(open_as: Open, onlooker: Onlooker):
    """One round trip: lock, row, token, and the fence of its thread."""
    session = await open_as("a")

    assert await admit(session, tick(), thread="t") == (True, Admission(1, 1, "t"))

    ((pid, *_),) = onlooker.locks()
    assert pid == session.connection.info.backend_pid
    assert onlooker.rows(
        "SELECT fire_time, attempt, token, replica, thread_id, outcome FROM tickd.ticks"
    ) == [(TEN, 1, 1, "a", "t", None)]
    assert onlooker.value("SELECT run_id FROM tickd.ticks") == run_id(tick())
    assert onlooker.rows("SELECT thread_id, space, graph, token FROM tickd.threads") == [
        ("t", 7301, GRAPH, 1)
    ]


async def test_tokens_grow_with_every_hold_of_a_graph(open_as: Open):
    """A late write carries an old one, and is told by it. Another graph or lock space has its own."""
    a, b, elsewhere = await open_as("a"), await open_as("b"), await open_as("c", space=1)

    tokens = [(await ended(session, tick(n))).token for n, session in enumerate((a, b, a))]

    assert tokens == [1, 2, 3]
    assert (await ended(a, tick(0, "pack_audit"))).token == 1
    assert (await ended(elsewhere, tick(0))).token == 1


async def test_a_tick_that_runs_is_refused_by_the_lock(open_as: Open, onlooker: Onlooker):
    """Nobody knows yet what becomes of it; whoever asks is told that it is held."""
    a, b = await open_as("a"), await open_as("b")
    await admit(a, tick())

    assert await admit(b, tick()) == (False, None)
    assert await admit(b, tick(1)) == (False, None)
    assert onlooker.value("SELECT count(*) FROM tickd.ticks") == 1


async def test_a_tick_that_has_ended_is_refused_without_taking_the_lock(open_as: Open, onlooker: Onlooker):
    """Held only to learn that there is nothing to do, it would make others skip the graph's next tick."""
    a, b = await open_as("a"), await open_as("b")
    await ended(a, tick())

    assert await admit(b, tick()) == (None, Refusal(SkipReason.ALREADY_RAN, "a"))
    assert onlooker.locks() == []


async def test_a_tick_whose_holder_is_gone_is_not_run_again(open_as: Open):
    """In skip mode it is abandoned: a run may have done half its work, and nobody asked for a second one."""
    a, b = await open_as("a"), await open_as("b")
    await admit(a, tick())
    await a.unlock(GRAPH)

    assert await admit(b, tick()) == (True, Refusal(SkipReason.ALREADY_RAN, "a"))


@LOOKS_FIRST
async def test_a_row_that_came_after_the_statement_began_is_seen_all_the_same(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """The late replica looks, the early one runs the whole tick, the late one gets the lock: it must not run it again."""
    early, late = await open_as("a"), await open_as("b")
    slowly = taking_its_lock(SLOW_TRY)
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_ADMIT", slowly)
        trying = asyncio.create_task(admit(late, tick()))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/b") if "pg_sleep" in row[3]])

    await ended(early, tick())

    assert await trying == (None, Refusal(SkipReason.ALREADY_RAN, "a"))
    assert onlooker.locks() == []
    assert onlooker.rows("SELECT replica, outcome FROM tickd.ticks") == [("a", "ran")]


@LOOKS_FIRST
async def test_a_tick_that_looked_before_a_hand_off_comes_after_it(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """It saw a graph at work and got its lock free: it must not overtake the tick that waits to be continued."""
    early, late = await open_as("a"), await open_as("b")
    _, admission = await admit(early, tick())
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_ADMIT", taking_its_lock(SLOW_TRY))
        trying = asyncio.create_task(admit(late, tick(1)))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/b") if "pg_sleep" in row[3]])

    handed_off = Finish(Outcome.HANDED_OFF, 1)
    assert await ledger.record(early, tick(), token=admission.token, finish=handed_off)
    await early.unlock(GRAPH)

    held, waiting = await trying
    assert held is None
    assert isinstance(waiting, Unfinished)
    assert waiting.fire_time == tick().fire_time
    assert onlooker.locks() == []
    assert onlooker.rows("SELECT fire_time, outcome FROM tickd.ticks") == [(tick().fire_time, "handed_off")]


@LOOKS_FIRST
async def test_a_tick_that_looked_before_a_pause_is_not_admitted_after_it(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Once `tickd pause` has returned, no tick begins."""
    session = await open_as("a")
    await ended(session, tick())
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_ADMIT", taking_its_lock(SLOW_TRY))
        trying = asyncio.create_task(admit(session, tick(1)))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])

    onlooker.connection.execute("UPDATE tickd.graphs SET paused_at = now()")

    assert await trying == (None, Refusal(SkipReason.PAUSED))
    assert onlooker.locks() == []


@LOOKS_FIRST
async def test_a_tick_that_cannot_let_go_to_look_again_is_an_error(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Session locks stack: the second try would succeed, and one unlock would leave the graph locked for good."""
    session = await open_as("a")
    await ended(session, tick())
    monkeypatch.setattr("tickd.lock.UNLOCK", replace(UNLOCK, one="SELECT 1 / 0", many="SELECT 1 / 0"))
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_ADMIT", taking_its_lock(SLOW_TRY))
        trying = asyncio.create_task(admit(session, tick(1)))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])

    onlooker.connection.execute("UPDATE tickd.graphs SET paused_at = now()")

    with pytest.raises(psycopg.OperationalError, match="could not be let go"):
        await trying


async def test_of_eight_replicas_one_runs_each_tick(places: Places, onlooker: Onlooker):
    """I1 and I2 over many short ticks; whoever gets the lock late finds the row."""
    runs: list[tuple[Tick, str]] = []

    async def replica(name: str) -> None:
        for n in range(6):
            attempt = partial(
                admissions.hold_and_admit, tick=tick(n), thread_id=str(tick(n)), run_id=run_id(tick(n))
            )
            async with sole_writer(GRAPH, places(name), attempt=attempt) as hold:
                if isinstance(hold.granted, Admission):
                    runs.append((tick(n), name))
                    await ledger.record(hold.session, tick(n), token=hold.granted.token, finish=RAN)

    async with asyncio.TaskGroup() as group:
        for n in range(8):
            group.create_task(replica(f"r{n}"))

    rows = onlooker.rows("SELECT fire_time, replica FROM tickd.ticks WHERE outcome = 'ran'")
    assert sorted((one.fire_time, name) for one, name in runs) == sorted(rows)
    assert onlooker.value("SELECT count(DISTINCT token) FROM tickd.ticks") == len(runs)


async def test_admission_is_right_whatever_isolation_the_role_has_by_default(
    database: Database, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Under a stricter level the conflict would be an error, and the tick a failure of ours."""
    role = database.role(settings={"default_transaction_isolation": "serializable"}, owner=False)
    onlooker.connection.execute(f"GRANT ALL ON SCHEMA tickd TO {role.name}")
    onlooker.connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA tickd TO {role.name}")
    async with (
        sessions(database.dsn) as open_owner,
        closing(await open_session(place_of(role.dsn, "b"))) as late,
    ):
        early = await open_owner("a")
        slowly = taking_its_lock(SLOW_TRY)
        with monkeypatch.context() as patch:
            patch.setattr(admissions, "HOLD_AND_ADMIT", slowly)
            trying = asyncio.create_task(admit(late, tick()))
            await onlooker.until(
                lambda: [row for row in onlooker.sessions("tickd/b") if "pg_sleep" in row[3]]
            )
        await ended(early, tick())

        assert await trying == (None, Refusal(SkipReason.ALREADY_RAN, "a"))


@pytest.mark.parametrize("error", ["a\0b", "\ud800", "line\nline \u2028 \U0001f4a5", "x" * 1_000_000])
async def test_every_error_can_be_written(open_as: Open, onlooker: Onlooker, error: str):
    """What a graph raises is not ours to choose, and a row that cannot be written is a tick that looks abandoned."""
    session = await open_as("a")

    await ended(session, tick(), Finish(Outcome.FAILED, 1, "RuntimeError", error))

    outcome, error_type, text = onlooker.rows("SELECT outcome, error_type, error FROM tickd.ticks")[0]
    assert (outcome, error_type) == ("failed", "RuntimeError")
    assert text.startswith(error[0] if error[0] in "alx" else "\\ud800")


async def test_an_end_is_written_once_and_by_its_own_token(open_as: Open, onlooker: Onlooker):
    """Whoever is late finds the row finished, or under a newer token, and must not overwrite it."""
    session = await open_as("a")
    _, admission = await admit(session, tick())

    assert not await ledger.record(session, tick(), token=admission.token - 1, finish=RAN)
    assert await ledger.record(session, tick(), token=admission.token, finish=RAN)
    assert not await ledger.record(
        session, tick(), token=admission.token, finish=Finish(Outcome.FAILED, 1, "E", "e")
    )
    assert onlooker.rows("SELECT outcome, error, finished_at > admitted_at FROM tickd.ticks") == [
        ("ran", None, True)
    ]


async def test_the_end_of_a_lost_hold_is_written_over_another_connection(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """The lock session is gone; the token still decides. A sweep may have called the tick abandoned already."""
    session = await open_as("a")
    _, admission = await admit(session, tick())
    lost = Finish(Outcome.LOCK_LOST, 1, "OperationalError", "server closed the connection")
    onlooker.connection.execute("UPDATE tickd.ticks SET outcome = 'abandoned'")
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        write = partial(ledger.record_without_hold, pooled, 7301, tick(), finish=lost)

        assert not await write(token=admission.token + 1)
        assert await write(token=admission.token)
        assert not await write(token=admission.token)

    assert onlooker.value("SELECT outcome FROM tickd.ticks") == "lock_lost"


async def test_the_cheap_look_tells_what_runs_from_what_has_ended(open_as: Open, admin_dsn: str):
    """One that still runs may yet be looked for by its lock; to who is too late for that, it is not missed either."""
    a = await open_as("a")
    await ended(a, tick(0))
    await ended(a, tick(0, "pack_audit"))
    await admit(a, tick(1))
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        asked = [tick(0), tick(1), tick(2), tick(0, "pack_audit"), tick(1, "pack_audit")]

        found = await ledger.admitted(pooled, 7301, asked)

        assert {one for one, admitted in found.items() if admitted.ended} == {tick(0), tick(0, "pack_audit")}
        assert set(found) == {tick(0), tick(1), tick(0, "pack_audit")}
        assert {admitted.replica for admitted in found.values()} == {"a"}
        assert {one.fire_time.tzinfo for one in found} == {UTC}
        assert await ledger.admitted(pooled, 7302, asked) == {}
        assert await ledger.admitted(pooled, 7301, []) == {}


async def test_the_cheap_look_is_not_planned_anew_for_its_length(admin_dsn: str):
    """A herd looks every few milliseconds, and each time for fewer ticks."""
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        for count in range(1, 31):
            await ledger.admitted(pooled, 7301, [tick(0, f"graph-{number}") for number in range(count)])

        cursor = await pooled.execute("SELECT generic_plans, custom_plans FROM pg_prepared_statements")
        generic, custom = (await cursor.fetchall())[0]

    # Postgres plans the first five for their values, whatever they are.
    assert generic > 0
    assert custom == 5


@LOOKS_FIRST
async def test_a_loser_can_be_told_in_the_same_statement_which_tick_runs(open_as: Open):
    """In a herd most attempts lose, and a second question each would cost as much as the attempt."""
    a, b = await open_as("a"), await open_as("b")
    await admit(a, tick())

    assert await admit(b, tick(1)) == (False, None)
    held, running = await admit(b, tick(1), tell_running=True)

    assert held is False
    assert (running.replica, running.fire_time) == ("a", TEN)


async def test_a_row_that_nobody_has_claimed_yet_is_nobodys_run(open_as: Open, onlooker: Onlooker):
    """What an absence left behind waits as such a row, of a graph in skip mode as well."""
    a, b = await open_as("a"), await open_as("b")
    onlooker.connection.execute(UNCLAIMED)
    assert (await a.fetch("SELECT pg_try_advisory_lock(%s, %s)", (7301, lock_key(GRAPH))))[0]

    assert await admissions.unfinished(b, GRAPH) is None
    assert await admit(b, tick(), tell_running=True) == (False, None)


async def test_the_unfinished_tick_of_a_graph_is_the_newest(open_as: Open):
    """A skip says since when the holder runs; an old row that was left behind says nothing of it."""
    a = await open_as("a")
    assert await admissions.unfinished(a, GRAPH) is None
    await admit(a, tick(0))
    await a.unlock(GRAPH)
    b = await open_as("b")
    await admit(b, tick(1))

    found = await admissions.unfinished(a, GRAPH)

    assert found is not None
    assert found.replica == "b"
    assert found.since.tzinfo is UTC


# Looks long before it tries.
SLOW_RESUME = admissions.HOLD_AND_RESUME.replace(
    "pg_try_advisory_lock(%(space)s::int, %(key)s::int)",
    "(SELECT pg_try_advisory_lock(%(space)s::int, %(key)s::int) FROM pg_sleep(0.3))",
)


async def hand_off(open_as: Open, one: Tick) -> None:
    """Have replica a begin a tick and hand it off."""
    await ended(await open_as("a"), one, Finish(Outcome.HANDED_OFF, 1))


async def test_a_tick_that_was_handed_off_goes_on_as_its_next_attempt(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """The same thread, a newer token: what the first holder still writes is refused."""
    await hand_off(open_as, tick())
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        assert await ledger.waiting(pooled, 7301) == [tick()]
        b = await open_as("b")

        assert await admissions.hold_and_resume(b, tick()) == (True, Admission(3, 2, str(tick())))

        assert await ledger.waiting(pooled, 7301) == []
    assert onlooker.rows("SELECT replica, attempt, token, outcome, finished_at FROM tickd.ticks") == [
        ("b", 2, 3, None, None)
    ]
    assert onlooker.value("SELECT token FROM tickd.threads") == 3
    assert len(onlooker.locks()) == 1


async def test_of_all_that_hear_of_it_one_takes_a_tick_over(open_as: Open, onlooker: Onlooker):
    """Every replica tries at the same moment."""
    await hand_off(open_as, tick())
    replicas = [await open_as(f"r{n}") for n in range(5)]

    answers = await asyncio.gather(*(admissions.hold_and_resume(each, tick()) for each in replicas))

    assert [held for held, _ in answers if held] == [True]
    assert [admission for _, admission in answers if admission] == [Admission(3, 2, str(tick()))]
    assert len(onlooker.locks()) == 1


async def test_a_tick_that_another_took_over_and_ended_meanwhile_is_left_alone(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """The late one began to look before, and gets the lock after: it holds the graph for nothing."""
    await hand_off(open_as, tick())
    early, late = await open_as("b"), await open_as("c")
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_RESUME", SLOW_RESUME)
        trying = asyncio.create_task(admissions.hold_and_resume(late, tick()))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/c") if "pg_sleep" in row[3]])

    _, admission = await admissions.hold_and_resume(early, tick())
    assert admission is not None
    await ledger.record(early, tick(), token=admission.token, finish=Finish(Outcome.RAN, admission.attempt))
    await early.unlock(GRAPH)

    assert await trying == (True, None)
    assert onlooker.rows("SELECT replica, attempt, outcome FROM tickd.ticks") == [("b", 2, "ran")]


PAUSE: LiteralString = "UPDATE tickd.graphs SET paused_at = now()"
RESUME: LiteralString = "UPDATE tickd.graphs SET paused_at = NULL"


async def test_a_hand_off_of_a_paused_graph_waits_until_it_is_resumed(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """A paused graph runs on no replica, as in claim mode; and no sweep opens sessions for it."""
    await hand_off(open_as, tick())
    b = await open_as("b")
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        onlooker.connection.execute(PAUSE)
        assert await ledger.waiting(pooled, 7301) == []
        assert await admissions.hold_and_resume(b, tick()) == (None, None)
        assert onlooker.locks() == []

        onlooker.connection.execute(RESUME)
        assert await ledger.waiting(pooled, 7301) == [tick()]
    held, admission = await admissions.hold_and_resume(b, tick())
    assert held
    assert admission is not None


async def test_a_refusal_settles_a_try_that_had_no_answer(open_as: Open, onlooker: Onlooker):
    """The tick is not in the ledger: to tell it as one that may have been admitted here would hide the reason."""
    await ended(await open_as("a"), tick())
    onlooker.connection.execute(PAUSE)
    unanswered: dict[Tick, Exception] = {tick(1): TimeoutError("no answer")}

    answer = await admit(await open_as("b"), tick(1), unanswered=unanswered)

    assert answer == (None, Refusal(SkipReason.PAUSED))
    assert unanswered == {}


async def test_a_hand_off_whose_graph_is_paused_after_the_look_is_not_resumed(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Once `tickd pause` has returned, no attempt begins."""
    await hand_off(open_as, tick())
    session = await open_as("b")
    with monkeypatch.context() as patch:
        patch.setattr(admissions, "HOLD_AND_RESUME", SLOW_RESUME)
        trying = asyncio.create_task(admissions.hold_and_resume(session, tick()))
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/b") if "pg_sleep" in row[3]])

    onlooker.connection.execute(PAUSE)

    assert await trying == (True, None)
    assert onlooker.rows("SELECT replica, attempt, outcome FROM tickd.ticks") == [("a", 1, "handed_off")]


async def test_a_tick_that_waits_comes_before_the_graphs_next_one(open_as: Open):
    """On a thread that all ticks share, the next one would continue what was not finished."""
    await hand_off(open_as, tick())

    held, granted = await admit(await open_as("b"), tick(1))

    assert not held
    assert isinstance(granted, Unfinished)
    assert granted.replica == "a"


async def test_nothing_is_resumed_that_was_not_handed_off(open_as: Open, onlooker: Onlooker):
    """Neither a tick that ran, nor one that nobody has heard of; and no lock is taken for it."""
    a = await open_as("a")
    await ended(a, tick())

    assert await admissions.hold_and_resume(a, tick()) == (None, None)
    assert await admissions.hold_and_resume(a, tick(1)) == (None, None)
    assert onlooker.locks() == []


async def test_a_paused_graph_admits_nothing(open_as: Open, onlooker: Onlooker):
    """`tickd pause` takes effect on all replicas at their next tick."""
    a = await open_as("a")
    await ended(a, tick())
    onlooker.connection.execute("UPDATE tickd.graphs SET paused_at = now()")

    assert await admit(a, tick(1)) == (None, Refusal(SkipReason.PAUSED))
    assert await admit(a, tick(0)) == (None, Refusal(SkipReason.ALREADY_RAN, "a"))
    assert onlooker.locks() == []


async def test_a_thread_that_waits_for_an_answer_is_left_alone(open_as: Open):
    """A new input would throw the question away. A thread of its own per tick is not concerned."""
    a = await open_as("a")
    _, admission = await admit(a, tick(), thread="shared")
    await ledger.record(a, tick(), token=admission.token, finish=Finish(Outcome.INTERRUPTED, 1))
    await a.unlock(GRAPH)

    assert await admit(a, tick(1), thread="shared") == (None, Refusal(SkipReason.INTERRUPTED))
    held, _ = await admit(a, tick(1), thread="another")
    assert held
    await a.unlock(GRAPH)
    held, _ = await admit(a, tick(2), thread="shared", heed_interrupt=False)
    assert held


OF_AN_OUTCOME = """
INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, thread_id, run_id, outcome)
VALUES (%s, 'restock', '2026-05-04T12:00Z', 'skip', 1, 'restock/1', gen_random_uuid(), %s)
"""


@pytest.mark.parametrize(
    ("outcome", "is_open"),
    [(None, True), ("handed_off", True), ("ran", False), ("interrupted", False), ("abandoned", False)],
)
async def test_the_ledger_says_whether_any_tick_is_open(
    onlooker: Onlooker, admin_dsn: str, outcome: str | None, *, is_open: bool
):
    """Where none is, which is most of the time, a sweep needs no further statement."""
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        onlooker.connection.execute(OF_AN_OUTCOME, (7302, None))
        assert not await ledger.any_open(pooled, 7301)
        onlooker.connection.execute(OF_AN_OUTCOME, (7301, outcome))
        assert await ledger.any_open(pooled, 7301) is is_open


async def test_an_admitted_tick_without_a_holder_is_abandoned_once_over_all_replicas(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """Each replica sweeps; one of them says so, with the holder's name."""
    a = await open_as("a")
    await admit(a, tick())
    async with (
        await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as one,
        await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as other,
    ):
        assert await ledger.abandon(one, 7301) == []  # its holder lives
        onlooker.terminate(onlooker.locks()[0][0])
        await onlooker.until(lambda: not onlooker.locks())

        answers = await asyncio.gather(ledger.abandon(one, 7301), ledger.abandon(other, 7301))

        ((found,),) = [answer for answer in answers if answer]
        assert isinstance(found, Abandoned)
        assert (found.tick, found.token, found.attempt, found.replica) == (tick(), 1, 1, "a")
        assert await ledger.abandon(one, 7301) == []
    assert onlooker.value("SELECT outcome FROM tickd.ticks") == "abandoned"


FENCES = "SELECT thread_id, token FROM tickd.threads ORDER BY thread_id"


async def test_the_next_tick_of_a_graph_takes_the_thread_of_one_that_lost_its_holder(
    open_as: Open, onlooker: Onlooker
):
    """The holder may only stand still. When it goes on, its thread is still its own unless somebody has moved it."""
    a, b, c = await open_as("a"), await open_as("b"), await open_as("c")
    await ended(a, tick(0))
    await admit(a, tick(1), thread="lost")
    await admit(c, tick(1, "pack_audit"), thread="of another graph")
    onlooker.terminate(a.connection.info.backend_pid)
    await onlooker.until(lambda: len(onlooker.locks()) == 1)

    assert await admit(b, tick(2), thread="next") == (True, Admission(3, 1, "next"))

    assert onlooker.rows(FENCES) == [("lost", 0), ("next", 3), ("of another graph", 1), (str(tick(0)), 0)]


async def test_an_abandoned_tick_s_thread_is_nobody_s(open_as: Open, onlooker: Onlooker, admin_dsn: str):
    """Until the graph's next tick it may be a day. A sweep does not wait for a write that is under way."""
    a = await open_as("a")
    await admit(a, tick(), thread="lost")
    await admit(a, tick(0, "pack_audit"), thread="being written")
    onlooker.terminate(a.connection.info.backend_pid)
    await onlooker.until(lambda: not onlooker.locks())
    async with (
        await psycopg.AsyncConnection.connect(admin_dsn) as writer,
        await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled,
    ):
        await writer.execute("SELECT FROM tickd.threads WHERE thread_id = 'being written' FOR SHARE")

        found = await ledger.abandon(pooled, 7301)

    assert {one.tick.graph for one in found} == {GRAPH, "pack_audit"}
    assert onlooker.rows(FENCES) == [("being written", 1), ("lost", 0)]


@pytest.mark.parametrize("graph", [GRAPH, "pack_audit"])
@pytest.mark.parametrize("space", [-(2**31), -7, 7301])
async def test_a_holder_is_seen_whatever_the_signs_of_its_lock_are(
    open_as: Open, admin_dsn: str, graph: str, space: int
):
    """Abandoned by mistake, its own end would look like somebody else's."""
    await admit(await open_as("a", space=space), tick(0, graph))
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        assert await ledger.abandon(pooled, space) == []


async def test_a_locked_row_keeps_no_sweep_from_the_others(open_as: Open, onlooker: Onlooker, admin_dsn: str):
    """Every replica's sweep waited for it, and took over no hand-off and no claim for as long as an operator's transaction was open."""
    a = await open_as("a")
    await admit(a, tick(0, "locked"))
    await admit(a, tick(0, "left"))
    onlooker.terminate(a.connection.info.backend_pid)
    await onlooker.until(lambda: not onlooker.locks())
    async with (
        await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled,
        await psycopg.AsyncConnection.connect(admin_dsn) as operator,
    ):
        await operator.execute("SELECT FROM tickd.ticks WHERE graph = 'locked' FOR UPDATE")
        async with asyncio.timeout(10):
            assert [one.tick.graph for one in await ledger.abandon(pooled, 7301)] == ["left"]
        await operator.rollback()
        assert [one.tick.graph for one in await ledger.abandon(pooled, 7301)] == ["locked"]


async def test_a_tick_that_ends_between_the_look_and_the_verdict_is_not_abandoned(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """The look reads rows of an older moment than the locks; the verdict looks at the row again."""
    a = await open_as("a")
    await admit(a, tick())
    await a.unlock(GRAPH)
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        suspects = await (await pooled.execute(ledger.SUSPECTS, [7301])).fetchall()
        assert len(suspects) == 1
        await ledger.record(a, tick(), token=1, finish=RAN)
        graphs, fire_times, tokens = (list(column) for column in zip(*suspects, strict=True))
        suspected = {"graphs": graphs, "fire_times": fire_times, "tokens": tokens, "space": 7301}
        verdict = await pooled.execute(ledger.ABANDON, suspected)

        assert await verdict.fetchall() == []
    assert onlooker.value("SELECT outcome FROM tickd.ticks") == "ran"


def test_run_ids_are_uuids_that_postgres_takes():
    """The column's type is the check."""
    assert isinstance(run_id(tick()), uuid.UUID)


async def test_no_tick_reads_the_whole_ledger_even_while_postgres_has_no_statistics_of_it(
    open_as: Open, admin_dsn: str
):
    """However many ticks there have been, a tick is found by its key."""
    session = await open_as("a")

    async def a_tick(second: int) -> None:
        one = tick(second)
        held, admission = await admit(session, one, tell_running=True)
        assert held
        assert one in await ledger.admitted(session.connection, 7301, [one])
        assert await ledger.record(session, one, token=admission.token, finish=RAN)
        assert await session.unlock(GRAPH)

    for second in range(ROUNDS):
        await a_tick(second)
    grow(admin_dsn, graph=GRAPH, mode="skip")
    before = await rows_read(session, admin_dsn)
    for second in range(ROUNDS, ROUNDS + 10):
        await a_tick(second)

    assert await rows_read(session, admin_dsn) - before < FEW
