"""The backlog of one replica: from a fired tick in claim mode to its line, and to those of whatever waits behind it."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, LiteralString

import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import InsufficientPrivilege

from tests.database import Database, Server
from tests.inside import Inside, replica_inside
from tests.integration.conftest import Places, RowsLocked
from tests.ledger_rows import FALLIBLE, state_of, ticks
from tests.lock_sessions import SPACE, place_of
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.proxy import Proxy
from tests.witness import GRAPHS, Witness
from tickd import announcement, claim, runner
from tickd.admissions import admit
from tickd.backlog import MOST_LOST_HOLDERS
from tickd.claim import Due
from tickd.continuation import Continuation
from tickd.lock import LockPlace, LockSession, closing, open_session
from tickd.log import Log
from tickd.migrations import migrate_at
from tickd.supervision import order_of
from tickd.tick import Tick, instant_text, run_id


pytestmark = pytest.mark.migrated

GRAPH = "letters"
SECOND = timedelta(seconds=1)
Start = Callable[..., AbstractAsyncContextManager[Inside]]

# Ends the session that writes a row of the ledger, at the moment when it gives a failed tick back, or when it claims one.
END_AT: LiteralString = """
CREATE FUNCTION public.end_session() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END';
CREATE TRIGGER end_session BEFORE UPDATE ON tickd.ticks FOR EACH ROW
WHEN (NEW.{moment} IS DISTINCT FROM OLD.{moment}) EXECUTE FUNCTION public.end_session()
"""
END_AT_PUT_BACK = END_AT.format(moment="ready_at")
END_AT_CLAIM = END_AT.format(moment="attempt")


def letters(*, keys: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """Return a schedule of one graph in claim mode, of the nodes a and b, with this input."""
    entry = {"graph": f"{FALLIBLE}:letters", "every": "1h", "mode": "claim", **(keys or {})}
    return {GRAPH: {**entry, "input": {"log": [], **given}}}


@pytest.fixture
def start(places: Places, log: Log, witness: Witness) -> Start:  # noqa: ARG001  # the graphs bear witness
    """Put a replica together: `start(graphs)`, with a name if it is not a."""

    def start(
        graphs: dict[str, Any], name: str = "a", *, place: LockPlace | None = None, **kept: Any
    ) -> AbstractAsyncContextManager[Inside]:
        return replica_inside(place or places(name), graphs, log, **kept)

    return start


@pytest.fixture
async def enqueue(places: Places) -> AsyncIterator[Callable[[Tick], Any]]:
    """Enqueue a tick as another replica would."""
    async with closing(await open_session(places("other"))) as session:

        async def put(tick: Tick, thread: str | None = None) -> None:
            due = Due(tick, thread or str(tick), run_id(tick), 1000, "backlog_full")
            await claim.enqueue(session.connection, SPACE, [due])

        yield put


def told(book: Logbook, *fields: str) -> list[tuple[Any, ...]]:
    """Return the event of every line about a tick, and these fields of it."""
    return [
        (line["event"].removeprefix("tick."), *(line.get(field) for field in fields))
        for line in book.lines
        if line["event"].startswith("tick.")
    ]


def nodes(witness: Witness) -> list[tuple[str, int]]:
    """Return which node began on which attempt."""
    return [(node.node, node.attempt) for node in witness.nodes()]


# What a fire comes to


async def test_a_fired_tick_is_enqueued_claimed_and_run(start: Start, book: Logbook, witness: Witness):
    """The whole story of a tick that nothing happens to."""
    async with start(letters()) as replica:
        tick = replica.tick(GRAPH)
        await replica.backlog.run_tick(tick)

    assert told(book, "attempt") == [("started", 1), ("ran", 1)]
    (row,) = ticks(witness)
    assert (row.mode, row.outcome, row.attempt, row.replica) == ("claim", "ran", 1, "a")
    assert row.lease_until is None
    assert state_of(witness, str(tick))["log"] == ["a", "b"]


async def test_what_came_due_earlier_runs_first(start: Start, book: Logbook, enqueue: Callable[[Tick], Any]):
    """The fired tick has its line at once, and its run has one of its own when its turn comes."""
    async with start(letters()) as replica:
        earlier, fired = replica.tick(GRAPH, seconds_ago=60), replica.tick(GRAPH)
        await enqueue(earlier)
        await replica.backlog.run_tick(fired)

    first, second = instant_text(earlier.fire_time), instant_text(fired.fire_time)
    assert told(book, "fire_time", "reason") == [
        ("skipped", second, "queued"),
        ("started", first, None),
        ("ran", first, None),
        ("started", second, None),
        ("ran", second, None),
    ]


async def test_a_tick_that_another_replica_enqueued_is_left_to_it(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any], witness: Witness
):
    """Its sweep would find the row in a moment, should that replica die; until then a session would be for nothing."""
    async with start(letters()) as replica:
        tick = replica.tick(GRAPH)
        await enqueue(tick)
        await replica.backlog.run_tick(tick)
        assert told(book, "reason") == [("skipped", "queued")]
        assert witness.nodes() == []

        await replica.backlog.work_off(GRAPH)

    assert told(book, "reason") == [("skipped", "queued"), ("started", None), ("ran", None)]


async def test_a_tick_that_has_ended_says_so(start: Start, book: Logbook):
    """I2: a replica whose clock is behind fires what is long over, and names who ran it."""
    async with start(letters()) as replica, start(letters(), "b") as late:
        tick = replica.tick(GRAPH)
        await replica.backlog.run_tick(tick)
        await late.backlog.run_tick(tick)

    assert told(book, "reason", "holder")[-1] == ("skipped", "already_ran", "a")


async def test_a_run_under_way_is_named_by_whoever_comes_late(start: Start, book: Logbook, witness: Witness):
    """For the running tick itself and for the next one, the line says who has the graph."""
    graphs = letters(seconds=0.5)
    async with start(graphs) as a, start(graphs, "b") as b:
        tick, following = a.tick(GRAPH, seconds_ago=1), a.tick(GRAPH)
        running = asyncio.create_task(a.backlog.run_tick(tick))
        await asyncio.to_thread(witness.wait_for_node, "a")
        await b.backlog.run_tick(tick)
        await b.backlog.run_tick(following)
        await running

    assert told(book, "reason", "holder")[1:3] == [
        ("skipped", "lock_held", "a"),
        ("skipped", "queued", "a"),
    ]
    # Whoever had the graph goes on with what has come to wait behind it.
    assert told(book)[3:] == [("ran",), ("started",), ("ran",)]


async def test_two_replicas_that_fire_together_run_once(start: Start, book: Logbook, witness: Witness):
    """One writes the row and runs; for the other there is nothing to do, however the race goes."""
    async with start(letters()) as a, start(letters(), "b") as b:
        for seconds in range(8, 0, -1):
            tick = a.tick(GRAPH, seconds_ago=seconds)
            await asyncio.gather(a.backlog.run_tick(tick), b.backlog.run_tick(tick))

    assert [row.outcome for row in ticks(witness)] == ["ran"] * 8
    assert witness.repeats() == []
    assert [event for (event,) in told(book)].count("ran") == 8


async def test_many_graphs_that_are_due_together_are_one_statement(start: Start, onlooker: Onlooker):
    """A connection per graph and replica, only to write a row, once brought the server to a stand."""
    graphs = {f"graph_{n}": {**letters()[GRAPH], "graph": f"{GRAPHS}:quick"} for n in range(40)}
    async with start(graphs) as replica:
        sessions = onlooker.value("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
        fired = [replica.tick(graph) for graph in graphs]
        for tick in fired:  # another replica was quicker
            due = Due(tick, str(tick), run_id(tick), 9, "backlog_full")
            async with replica.pool.connection() as connection:
                await claim.enqueue(connection, SPACE, [due])
        await asyncio.gather(*(replica.backlog.run_tick(tick) for tick in fired))
        await onlooker.until(lambda: onlooker.value("SELECT pg_stat_force_next_flush() IS NOT NULL"))

    assert onlooker.value("SELECT count(*) FROM tickd.ticks WHERE attempt = 0") == 40
    later = onlooker.value("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
    assert later - sessions <= 1


# What keeps a tick from its run


async def test_without_a_place_to_run_the_row_is_written_all_the_same(
    start: Start, book: Logbook, witness: Witness
):
    """It must not wait in the memory of a process that may be killed: another replica may have room."""
    graphs = {"busy": letters(seconds=1)[GRAPH], **letters(keys={"grace": "200ms"})}
    async with start(graphs, max_running=1) as replica:
        busy = asyncio.create_task(replica.backlog.run_tick(replica.tick("busy")))
        await asyncio.to_thread(witness.wait_for_node, "a")
        await replica.backlog.run_tick(replica.tick(GRAPH))
        (row,) = ticks(witness, GRAPH)
        assert (row.outcome, row.attempt) == (None, 0)
        await busy

    (skip,) = book.find("tick.skipped", graph=GRAPH)
    assert skip["reason"] == "queued"


async def test_a_tick_that_is_due_while_the_replica_stops_is_enqueued_and_no_more(
    start: Start, book: Logbook, witness: Witness
):
    """B4: the last replica to stop must not take with it what came due in its last moment."""
    async with start(letters()) as replica:
        replica.stop.request()
        await replica.backlog.run_tick(replica.tick(GRAPH))

        assert told(book, "reason") == [("skipped", "queued")]
        assert [(row.outcome, row.attempt) for row in ticks(witness)] == [(None, 0)]


async def test_a_tick_that_is_not_due_yet_when_the_replica_stops_is_left_to_others(
    start: Start, book: Logbook, witness: Witness
):
    """The word that the replica leaves behind ends before it."""
    async with start(letters()) as replica:
        replica.stop.request()
        tick = replica.tick(GRAPH, seconds_ago=-30)
        await replica.backlog.run_tick(tick)

        assert told(book, "reason") == [("skipped", "draining")]
        assert ticks(witness) == []
        assert replica.backlog.unwritten_since == tick.fire_time


async def test_a_tick_without_a_row_holds_back_the_word_of_its_replica(
    start: Start, book: Logbook, onlooker: Onlooker
):
    """Killed now, the replica would leave nothing of the tick, and only this word lets somebody find it."""
    async with start(letters()) as replica:
        tick = replica.tick(GRAPH)
        onlooker.connection.execute("BEGIN")
        onlooker.connection.execute("LOCK TABLE tickd.ticks IN EXCLUSIVE MODE")
        firing = asyncio.create_task(replica.backlog.run_tick(tick))
        await onlooker.until(lambda: onlooker.value("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        assert replica.backlog.unwritten_since == tick.fire_time
        onlooker.connection.execute("COMMIT")
        await firing
        assert replica.backlog.unwritten_since is None

    assert told(book) == [("started",), ("ran",)]


@pytest.mark.usefixtures("witness")
async def test_while_the_ledger_is_away_no_more_ticks_wait_for_it_than_may_wait_in_it(
    database: Database, log: Log, book: Logbook
):
    """A graph that is due each second would fill the memory of every replica, and nobody would run all of that."""
    port = int(conninfo_to_dict(database.admin_dsn)["port"] or 5432)
    with Proxy(port) as proxy:
        place = place_of(database.dsn.replace(f":{port}/", f":{proxy.port}/"))
        async with replica_inside(place, letters(keys={"max_backlog": 2}), log) as replica:
            proxy.freeze()
            replica.pool.timeout = 0.2
            await replica.pool.drain()
            async with asyncio.TaskGroup() as firing:
                for seconds in (4, 3, 2, 1):
                    tick = replica.tick(GRAPH, seconds_ago=seconds)
                    firing.create_task(replica.backlog.run_tick(tick))
                await book.wait_for("tick.skipped", reason="backlog_full", count=2)
                replica.pool.timeout = 30
                proxy.thaw()

    refused = [line["fire_time"] for line in book.find("tick.skipped", reason="backlog_full")]
    ran = [line["fire_time"] for line in book.find("tick.ran")]
    assert (len(refused), len(ran)) == (2, 2)
    assert max(ran) < min(refused)


async def test_a_tick_is_caught_up_for_so_long_and_no_longer(start: Start, book: Logbook, witness: Witness):
    """A process that stood still for a night must not run a night's ticks by surprise."""
    async with start(letters(keys={"catch_up": "1m", "grace": "1s"})) as replica:
        for seconds in (70, 50):
            await replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=seconds))

    assert told(book, "reason") == [("missed", "late"), ("started", None), ("ran", None)]
    assert len(ticks(witness)) == 1


async def test_a_late_tick_that_others_took_care_of_is_not_missed(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any]
):
    """The replica stood still, the fleet did not."""
    async with start(letters(keys={"catch_up": "1m", "grace": "1s"})) as replica:
        tick = replica.tick(GRAPH, seconds_ago=70)
        await enqueue(tick)
        await replica.backlog.run_tick(tick)

    assert told(book, "reason") == [("skipped", "queued")]


async def test_a_refused_tick_says_why(start: Start, book: Logbook, onlooker: Onlooker, witness: Witness):
    """Paused, full, still running, or in the middle of a conversation: each has its word."""
    skipping = letters(keys={"overlap": "skip"}, seconds=1)
    async with start(skipping) as replica:
        running = asyncio.create_task(replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=5)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        await replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=4))
        await running
        onlooker.connection.execute("UPDATE tickd.graphs SET paused_at = clock_timestamp()")
        await replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=3))

    assert [(line["reason"], line.get("holder")) for line in book.find("tick.skipped")] == [
        ("lock_held", "a"),
        ("paused", None),
    ]


async def test_nobody_makes_room_for_a_tick_that_somebody_else_enqueued(
    start: Start, book: Logbook, witness: Witness, enqueue: Callable[[Tick], Any]
):
    """Whoever enqueued it has asked already; and asked for by each replica, a later run would make room as well."""
    async with start(letters(keys={"overlap": "cancel"}, seconds=0.3)) as replica:
        running = asyncio.create_task(replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=5)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        newer = replica.tick(GRAPH)
        await enqueue(newer)
        await replica.backlog.run_tick(newer)
        await running

    assert told(book, "reason")[:3] == [("started", None), ("skipped", "queued"), ("ran", None)]


async def test_a_graph_that_is_not_in_the_schedule_is_left_alone(
    start: Start, enqueue: Callable[[Tick], Any]
):
    """It was renamed or removed, and its rows wait for whoever has it still."""
    async with start(letters()) as replica:
        await enqueue(replica.tick("renamed"))
        await replica.backlog.work_off("renamed")
        await replica.backlog.take_over(replica.tick("renamed"))


# Failures


async def test_a_failed_tick_is_tried_again_where_it_failed(start: Start, book: Logbook, witness: Witness):
    """Finished nodes are not run again, and only the last attempt is the tick's end."""
    retries = {"attempts": 2, "backoff": "0s"}
    async with start(letters(keys={"retries": retries}, fail="b", fails=2)) as replica:
        await replica.backlog.run_tick(replica.tick(GRAPH))

    assert told(book, "attempt", "failed_as") == [
        ("started", 1, None),
        ("retrying", 1, "failed"),
        ("started", 2, None),
        ("retrying", 2, "failed"),
        ("started", 3, None),
        ("ran", 3, None),
    ]
    assert nodes(witness) == [("a", 1), ("b", 1), ("b", 2), ("b", 3)]
    (row,) = ticks(witness)
    assert (row.outcome, row.attempt, row.failures) == ("ran", 3, 2)


@pytest.mark.parametrize(
    ("retries", "attempts"),
    [
        (None, 1),
        ({"attempts": 1, "backoff": "0s"}, 2),
        ({"attempts": 5, "backoff": "0s", "on": "ConnectionError"}, 1),
    ],
)
async def test_a_tick_that_has_failed_for_good_stays_with_its_error(
    start: Start, book: Logbook, witness: Witness, retries: dict[str, Any] | None, attempts: int
):
    """`tickd history` shows it long after the log is gone."""
    async with start(letters(keys={"retries": retries}, fail="b", fails=99)) as replica:
        await replica.backlog.run_tick(replica.tick(GRAPH))

    (row,) = ticks(witness)
    assert (row.outcome, row.error_type, row.attempt) == ("failed", "RuntimeError", attempts)
    assert told(book, "attempt")[-1] == ("failed", attempts)


async def test_a_tick_that_waits_out_its_pause_lets_the_next_one_by(
    start: Start, book: Logbook, witness: Witness
):
    """The pause is told, and who looks into the ledger sees when it ends."""
    retries = {"attempts": 2, "backoff": "1h", "max_backoff": "1h"}
    async with start(letters(keys={"retries": retries}, fail="a", fails=1)) as replica:
        failing = replica.tick(GRAPH, seconds_ago=9)
        await replica.backlog.run_tick(failing)
        (row,) = ticks(witness)
        await replica.backlog.run_tick(replica.tick(GRAPH))

    (retrying, _) = book.find("tick.retrying")
    assert (row.outcome, row.attempt, row.failures, row.error_type) == (None, 1, 1, "RuntimeError")
    assert (row.ready_at - failing.fire_time).total_seconds() > retrying["retry_in_ms"] / 1000 > 1799
    assert len(witness.nodes()) == 2


async def test_a_failure_in_a_stopping_replica_is_tried_again_by_another(
    start: Start, book: Logbook, witness: Witness
):
    """A deployment must not turn a passing failure into the tick's end."""
    graphs = letters(keys={"retries": {"attempts": 1, "backoff": "0s"}}, seconds=0.3, fail="a", fails=1)
    async with start(graphs) as a:
        running = asyncio.create_task(a.backlog.run_tick(a.tick(GRAPH)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        a.stop.request()
        await running
    assert told(book) == [("started",), ("retrying",)]

    async with start(graphs, "b") as b:
        await b.backlog.work_off(GRAPH)

    (row,) = ticks(witness)
    assert (row.outcome, row.attempt, row.replica) == ("ran", 2, "b")


async def test_a_session_that_ends_while_its_tick_is_given_back_leaves_one_line_and_a_row_to_claim(
    start: Start, book: Logbook, witness: Witness, onlooker: Onlooker
):
    """Each run has one terminal line, whatever happens after it."""
    onlooker.connection.execute(END_AT_PUT_BACK)
    async with start(letters(keys={"retries": {"attempts": 1}}, fail="a", fails=1)) as replica:
        await replica.backlog.run_tick(replica.tick(GRAPH))

    assert told(book, "cause", "error_type") == [
        ("started", None, None),
        ("lock_lost", "session_ended", "RuntimeError"),
        ("started", None, None),
        ("ran", None, None),
    ]
    (row,) = ticks(witness)
    assert (row.outcome, row.attempt, row.failures) == ("ran", 2, 1)


async def test_a_tick_is_given_back_when_its_row_is_free(
    start: Start,
    places: Places,
    book: Logbook,
    witness: Witness,
    onlooker: Onlooker,
    rows_locked: RowsLocked,
    monkeypatch: pytest.MonkeyPatch,
):
    """Its hold is not lost for that, and its pause before the next attempt is not either."""
    put_back = claim.put_back
    lock = [rows_locked.lock]

    async def meet_a_lock(*arguments: Any, **options: Any) -> bool:
        while lock:
            await lock.pop()()
        return await put_back(*arguments, **options)

    monkeypatch.setattr(claim, "put_back", meet_a_lock)
    keys = {"retries": {"attempts": 1}, "hold": "shared"}
    place = places("a", answer_timeout=SECOND)
    async with start(letters(keys=keys, fail="a", fails=1), place=place) as replica:
        running = asyncio.create_task(replica.backlog.run_tick(replica.tick(GRAPH)))
        await onlooker.until(lambda: onlooker.locked_rows_looked_at() or running.done())
        await rows_locked.let_go()
        await running

    assert told(book, "cause") == [("started", None), ("retrying", None)]
    (row,) = ticks(witness)
    assert (row.outcome, row.failures, row.lease_until) == (None, 1, None)


async def test_a_tick_that_could_not_be_claimed_waits(
    start: Start, book: Logbook, onlooker: Onlooker, witness: Witness
):
    """Its row is there, and whoever sees it in a sweep runs it: no error of the tick's."""
    async with start(letters()) as replica:
        onlooker.connection.execute(END_AT_CLAIM)
        tick = replica.tick(GRAPH)
        await replica.backlog.run_tick(tick)

        assert told(book, "reason") == [("skipped", "queued")]
        assert len(book.find("database.unreachable")) == 1
        assert onlooker.locks() == []

        onlooker.connection.execute("DROP TRIGGER end_session ON tickd.ticks")
        await replica.backlog.work_off(GRAPH)

    (row,) = ticks(witness)
    assert row.outcome == "ran"


async def test_a_tick_whose_claim_had_no_answer_is_claimed_again(
    start: Start, book: Logbook, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch, witness: Witness
):
    """Its row has a holder, a lease and an attempt of which nobody knows, and the lock is free."""

    async def lose(session: LockSession, statement: Any) -> Any:
        monkeypatch.setattr(claim, "admit", admit)
        await admit(session, statement)
        onlooker.terminate(session.connection.info.backend_pid)
        return await session.fetch("SELECT 1")

    async with start(letters()) as replica:
        monkeypatch.setattr(claim, "admit", lose)
        await replica.backlog.run_tick(replica.tick(GRAPH))
        assert told(book, "reason") == [("skipped", "queued")]
        await replica.backlog.work_off(GRAPH)

    assert told(book, "attempt")[1:] == [("started", 2), ("ran", 2)]
    assert [(row.outcome, row.failures) for row in ticks(witness)] == [("ran", 1)]


# Fails for whoever claims a row.
FAIL_AT_CLAIM: LiteralString = """
CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS
'BEGIN RAISE EXCEPTION ''trouble'' USING ERRCODE = TG_ARGV[0]; END';
CREATE TRIGGER fail BEFORE UPDATE ON tickd.ticks FOR EACH ROW
WHEN (NEW.attempt IS DISTINCT FROM OLD.attempt) EXECUTE FUNCTION public.fail('{code}')
"""


@pytest.mark.parametrize("code", ["25P03", "25P04", "42501", "22P05", "53300", "57P01", "XX000"])
async def test_no_error_of_the_database_goes_beyond_the_graph_that_has_met_it(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any], onlooker: Onlooker, code: str
):
    """It left the task of a sweep and ended the replica, with all that ran on it."""
    async with start(letters()) as replica:
        await enqueue(replica.tick(GRAPH))
        onlooker.connection.execute(FAIL_AT_CLAIM.format(code=code).encode())

        await replica.backlog.work_off(GRAPH)
        await replica.backlog.work_off(GRAPH)

        (told_once,) = book.find("database.unreachable")
        assert told_once["error"].startswith("trouble")
        assert onlooker.locks() == []
        onlooker.connection.execute("DROP TRIGGER fail ON tickd.ticks")
        await replica.backlog.work_off(GRAPH)

    assert told(book) == [("started",), ("ran",)]
    assert len(book.find("database.reachable")) == 1


async def test_a_fault_of_tickd_itself_costs_no_run_beside_it(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any], monkeypatch: pytest.MonkeyPatch
):
    """The row waits for whoever has no such fault, and the log has where it is."""

    async def faulty(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    async with start(letters()) as replica:
        await enqueue(replica.tick(GRAPH))
        with monkeypatch.context() as patch:
            patch.setattr(claim, "claim", faulty)
            await replica.backlog.work_off(GRAPH)
        await replica.backlog.work_off(GRAPH)

    (fault,) = book.find("database.unreachable")
    assert fault["error_type"] == "ZeroDivisionError"
    assert "Traceback" in fault["exception"]
    assert told(book) == [("started",), ("ran",)]


async def test_a_hand_off_that_cannot_be_announced_is_told(
    start: Start, book: Logbook, witness: Witness, monkeypatch: pytest.MonkeyPatch
):
    """An announcement only saves time, and the tick's own line comes after it."""

    async def refused(*_: Any) -> None:
        raise InsufficientPrivilege("permission denied for function pg_notify")

    monkeypatch.setattr(announcement, "announce", refused)
    async with start(letters(seconds=0.3)) as replica:
        running = asyncio.create_task(replica.backlog.run_tick(replica.tick(GRAPH)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        replica.stop.request()
        await running

    assert told(book) == [("started",), ("handed_off",)]


async def test_what_goes_wrong_after_the_claim_is_told(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any], monkeypatch: pytest.MonkeyPatch
):
    """Each claimed run has a line of its own; taken for a database out of reach, this one had none."""

    def full(*_: Any) -> None:
        monkeypatch.setattr(runner, "order_of", order_of)
        raise OSError("no space left on device")

    monkeypatch.setattr(runner, "order_of", full)
    async with start(letters()) as replica:
        await enqueue(replica.tick(GRAPH))
        await replica.backlog.work_off(GRAPH)

    assert told(book, "error", "attempt") == [
        ("error", "no space left on device", None),
        ("started", None, 2),
        ("ran", None, 2),
    ]


async def test_a_tick_that_takes_its_holders_with_it_is_given_up(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any], witness: Witness, onlooker: Onlooker
):
    """A node that is killed for its memory would go through the fleet for ever."""
    async with start(letters()) as replica:
        await enqueue(replica.tick(GRAPH))
        onlooker.connection.execute("UPDATE tickd.ticks SET failures = %s", [MOST_LOST_HOLDERS + 1])
        await replica.backlog.work_off(GRAPH)

    assert told(book, "reason", "error_type") == [("failed", "holders_lost", "HoldersLost")]
    assert witness.nodes() == []
    (row,) = ticks(witness)
    assert (row.outcome, row.error_type) == ("failed", "HoldersLost")


async def test_a_database_without_an_encoding_has_a_backlog(
    server: Server, log: Log, book: Logbook, monkeypatch: pytest.MonkeyPatch
):
    """Names came back from it as bytes, which are no graph's name, and nothing was ever claimed."""
    database = Database(server)
    try:
        database.create(encoding="SQL_ASCII")
        place = place_of(database.dsn)
        await migrate_at(place, deadline=math.inf)
        witness = Witness(database.admin_dsn)
        monkeypatch.setenv("WITNESS_DSN", witness.dsn)
        try:
            async with replica_inside(place, letters(), log) as replica:
                await replica.backlog.run_tick(replica.tick(GRAPH))
        finally:
            witness.close()
    finally:
        database.close()

    assert told(book) == [("started",), ("ran",)]


# Stopping


async def test_a_stopping_replica_hands_off_at_a_super_step(start: Start, book: Logbook, witness: Witness):
    """Another one goes on with the next node, and no failure is counted."""
    graphs = letters(seconds=0.3)
    async with start(graphs) as a:
        running = asyncio.create_task(a.backlog.run_tick(a.tick(GRAPH)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        a.stop.request()
        await running
    assert told(book, "next_nodes") == [("started", None), ("handed_off", ["b"])]

    async with start(graphs, "b") as b:
        await b.backlog.take_over(b.tick(GRAPH))

    assert nodes(witness) == [("a", 1), ("b", 2)]
    (row,) = ticks(witness)
    assert (row.outcome, row.failures, row.replica) == ("ran", 0, "b")


async def test_what_was_handed_off_is_claimed_under_a_lease(
    start: Start, witness: Witness, enqueue: Callable[[Tick], Any], onlooker: Onlooker
):
    """Taken over without one, it would stay for ever with a holder that stands still."""
    async with start(letters(seconds=0.3)) as replica:
        tick = replica.tick(GRAPH)
        await enqueue(tick)
        onlooker.connection.execute("UPDATE tickd.ticks SET outcome = 'handed_off', attempt = 1")
        await Continuation(
            replica.runner, entries=replica.entries, clock=replica.clock, stop=replica.stop
        ).take_over(tick)
        assert witness.nodes() == []
        running = asyncio.create_task(replica.backlog.take_over(tick))
        await asyncio.to_thread(witness.wait_for_node, "a")
        assert onlooker.value("SELECT lease_until > clock_timestamp() FROM tickd.ticks")
        await running

    assert [row.outcome for row in ticks(witness)] == ["ran"]


@pytest.mark.parametrize(("before", "after"), [("skip", "claim"), ("claim", "skip")])
async def test_a_tick_goes_on_where_the_mode_of_its_graph_was_edited(
    start: Start, book: Logbook, witness: Witness, before: str, after: str
):
    """In a rolling deployment those that know the old mode hand off to those that do not; the tick would bar its graph."""
    async with start(letters(keys={"mode": before}, seconds=0.3)) as old:
        tick = old.tick(GRAPH)
        firing = old.backlog if before == "claim" else old.runner
        running = asyncio.create_task(firing.run_tick(tick))
        await asyncio.to_thread(witness.wait_for_node, "a")
        old.stop.request()
        await running
    assert told(book) == [("started",), ("handed_off",)]

    async with start(letters(keys={"mode": after}), "b") as new:
        await new.backlog.take_over(tick)

    assert told(book, "attempt")[2:] == [("started", 2), ("ran", 2)]
    assert nodes(witness) == [("a", 1), ("b", 2)]
    assert [(row.mode, row.outcome, row.replica) for row in ticks(witness)] == [(before, "ran", "b")]


async def test_a_tick_that_was_enqueued_runs_where_its_graph_is_in_skip_mode_now(
    start: Start, book: Logbook, enqueue: Callable[[Tick], Any]
):
    """It must not be lost, whoever sees it; what is made up for in skip mode waits in the same way."""
    async with start(letters(keys={"mode": "skip"})) as replica:
        await enqueue(replica.tick(GRAPH))
        await replica.backlog.work_off(GRAPH)

    assert told(book) == [("started",), ("ran",)]


async def test_a_tick_that_runs_in_skip_mode_does_not_wait_for_its_turn(
    start: Start, book: Logbook, witness: Witness
):
    """Told as queued by those that know the graph's new mode, it would be waited for in vain."""
    graphs = letters(keys={"mode": "skip"}, seconds=0.5)
    async with start(graphs) as old, start(letters(), "b") as new:
        tick = old.tick(GRAPH)
        running = asyncio.create_task(old.runner.run_tick(tick))
        await asyncio.to_thread(witness.wait_for_node, "a")
        await new.backlog.run_tick(tick)
        await running

    assert told(book, "reason", "holder")[1] == ("skipped", "lock_held", "a")


async def test_a_run_that_does_not_stop_in_time_is_handed_off_and_not_failed(
    start: Start, book: Logbook, witness: Witness
):
    """Its checkpoints are there; only the node in mid-air is run again."""
    async with start(letters(hang="a/b"), drain_timeout=timedelta(milliseconds=200)) as a:
        running = asyncio.create_task(a.backlog.run_tick(a.tick(GRAPH)))
        await asyncio.to_thread(witness.wait_for_node, "b")
        a.stop.request()
        await running
    assert told(book) == [("started",), ("handed_off",)]

    async with start(letters(hang="a/b"), "b") as b:
        await b.backlog.work_off(GRAPH)

    assert nodes(witness) == [("a", 1), ("b", 1), ("b", 2)]
    assert [(row.outcome, row.failures) for row in ticks(witness)] == [("ran", 0)]


# Interrupts


async def test_a_tick_behind_an_interrupt_on_its_thread_is_skipped(
    start: Start, book: Logbook, witness: Witness, enqueue: Callable[..., Any], onlooker: Onlooker
):
    """It was enqueued before the interrupt came; run now, it would answer a question that nobody has put to it."""
    graphs = letters(keys={"graph": f"{FALLIBLE}:question", "thread": "per_graph"})
    async with start(graphs) as replica:
        asks, behind, later = (replica.tick(GRAPH, seconds_ago=seconds) for seconds in (9, 5, 0))
        for tick in (asks, behind):
            await enqueue(tick, "letters")
        await replica.backlog.work_off(GRAPH)
        await replica.backlog.run_tick(later)

    assert told(book, "reason") == [
        ("started", None),
        ("interrupted", None),
        ("skipped", "interrupted"),
        ("skipped", "interrupted"),
    ]
    assert [(row.outcome, row.error_type) for row in ticks(witness)] == [
        ("interrupted", None),
        ("skipped", "interrupted"),
        ("skipped", "interrupted"),
    ]
    assert onlooker.locks() == []


async def test_a_schedule_may_let_ticks_run_beside_an_interrupt(start: Start, book: Logbook):
    """`after_interrupt: run`, for threads that can take it."""
    keys = {"graph": f"{FALLIBLE}:question", "thread": "per_graph", "after_interrupt": "run"}
    async with start(letters(keys=keys)) as replica:
        for seconds in (5, 0):
            await replica.backlog.run_tick(replica.tick(GRAPH, seconds_ago=seconds))

    assert told(book) == [("started",), ("interrupted",), ("started",), ("interrupted",)]
