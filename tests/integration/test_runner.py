"""The runner: one tick, from fire to log line, with its row in the ledger and its lock let go, whatever happens."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.types import interrupt
from psycopg import sql

from tests.cluster import free_port
from tests.database import PASSWORD, Database, Server
from tests.integration.conftest import Places, RowsLocked
from tests.lock_sessions import place_of
from tests.logbook import Line, Logbook
from tests.onlooker import Onlooker
from tests.played import Gate, Played, State, graph_of, played, step
from tickd import admissions, ledger, runner
from tickd.lock import UNLOCK, LockPlace, LockSession
from tickd.log import Log
from tickd.migrations import migrate_at
from tickd.runner import Limits
from tickd.runs import Run
from tickd.tick import Tick, instant_text, lock_key, run_id


pytestmark = pytest.mark.migrated

GRAPH = "restock_plan"
SECOND = timedelta(seconds=1)
ROWS = "SELECT fire_time, replica, outcome, error_type, error FROM tickd.ticks ORDER BY fire_time"
# Whoever reads this column has its session ended.
ENDS_ITS_READER = """
CREATE FUNCTION end_reader() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT CASE WHEN pg_terminate_backend(pg_backend_pid()) THEN NULL::timestamptz END $$;
ALTER TABLE tickd.graphs RENAME TO graphs_below;
CREATE VIEW tickd.graphs AS SELECT space, graph, key, token, end_reader() AS paused_at FROM tickd.graphs_below;
GRANT ALL ON tickd.graphs TO PUBLIC
"""
# Every tick waits to be taken over, and whoever tries meets trouble.
HANDED_OFF = """
UPDATE tickd.ticks SET outcome = 'handed_off';
CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN {trouble}; RETURN NEW; END $$;
CREATE TRIGGER trouble BEFORE UPDATE ON tickd.ticks FOR EACH ROW EXECUTE FUNCTION trouble()
"""
# As by a sweep between the admission and the next try.
CLOSED_AT_ONCE = """
CREATE FUNCTION close() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN UPDATE tickd.ticks SET outcome = 'abandoned'; RETURN NULL; END $$;
CREATE TRIGGER close AFTER INSERT ON tickd.ticks FOR EACH ROW EXECUTE FUNCTION close()
"""
Play = Callable[..., Any]


async def fail(_: State) -> State:
    """Fail as the examples do."""
    raise RuntimeError("supplier feed down")


@pytest.fixture
async def play(places: Places, log: Log):
    """Plays replicas, by their names, with one graph or several."""
    async with AsyncExitStack() as stack:

        async def play(
            graph: Any, name: str = "a", *, place: LockPlace | None = None, **options: Any
        ) -> Played:
            graphs = graph if isinstance(graph, dict) else {GRAPH: graph}
            return await stack.enter_async_context(played(place or places(name), log, graphs, **options))

        yield play


@pytest.fixture
def gate():
    """A gate that is open at the end, whatever the test did."""
    gate = Gate()
    yield gate
    gate.open.set()


async def run(replica: Played, tick: Tick | None = None, seconds: float = 15) -> Tick:
    """Run a tick that is due now to its end."""
    tick = tick or replica.due(GRAPH)
    async with asyncio.timeout(seconds):
        await replica.runner.run_tick(tick)
    return tick


def only(lines: list[Line]) -> Line:
    """Return the one line there is."""
    (line,) = lines
    return line


async def test_a_tick_that_ran_is_told_twice_and_recorded_once(play: Play, book: Logbook, onlooker: Onlooker):
    """A line when it starts and one when it ends, both with its token; nothing is held after that."""
    replica = await play(graph_of(one=step("one"), two=step("two")))

    tick = await run(replica)

    fire_time = instant_text(tick.fire_time)
    started = only(book.find("tick.started"))
    ended = only(book.terminal())
    assert (started["graph"], started["fire_time"], started["thread_id"]) == (GRAPH, fire_time, str(tick))
    assert ended | {"duration_ms": 0, "timestamp": "", "late_ms": 0} == {
        "timestamp": "",
        "level": "info",
        "event": "tick.ran",
        "replica": "a",
        "graph": GRAPH,
        "fire_time": fire_time,
        "token": 1,
        "attempt": 1,
        "duration_ms": 0,
        "late_ms": 0,
        "steps": 2,
    }
    assert 0 <= started["late_ms"] == ended["late_ms"] < 5000
    assert onlooker.rows(ROWS) == [(tick.fire_time, "a", "ran", None, None)]
    assert onlooker.locks() == []


@pytest.mark.parametrize(("ahead", "sessions"), [(SECOND, 1), (-SECOND, 2)], ids=["ahead", "late"])
async def test_who_has_no_time_for_a_new_session_to_learn_the_admission_leaves_it_to_another(
    play: Play, onlooker: Onlooker, gate: Gate, ahead: timedelta, sessions: int
):
    """Of two hundred due at once most come late, and each new backend would take milliseconds for it."""
    replica = await play(graph_of(one=gate.sync_node))
    running = asyncio.create_task(run(replica, replica.due(GRAPH, ahead=ahead)))
    await gate.arrive()

    assert len([row for row in onlooker.sessions("tickd/a") if "checkpoint" not in row[3]]) == sessions
    assert len(onlooker.locks()) == 1
    gate.open.set()
    await running
    assert onlooker.locks() == []


async def test_a_late_tick_that_runs_elsewhere_is_left_to_it_without_a_try(
    play: Play, book: Logbook, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """In a herd most ticks of a replica are those, and a try costs ten times the look that they share."""
    a, b = await play(graph_of(one=gate.sync_node)), await play(graph_of(one=gate.sync_node), "b")
    tick = a.due(GRAPH, late=SECOND)
    running = asyncio.create_task(run(a, tick))
    await gate.arrive()

    monkeypatch.setattr(admissions, "hold_and_admit", None)
    await run(b, tick)

    skip = only(book.terminal())
    assert (skip["event"], skip["reason"], skip["holder"]) == ("tick.skipped", "lock_held", "a")
    assert skip["holder_since"]
    gate.open.set()
    await running


async def test_a_node_finds_its_tick_in_its_config(play: Play, gate: Gate):
    """Traces are searched by it, and a node that writes to the world outside may use the token."""
    replica = await play(
        graph_of(one=gate.sync_node),
        keys={"config": {"tags": ["nightly"], "metadata": {"team": "x"}, "configurable": {"model": "small"}}},
    )
    gate.open.set()

    tick = await run(replica)

    config: Any = gate.config
    assert {key: value for key, value in config["metadata"].items() if key.startswith("tickd_")} == {
        "tickd_graph": GRAPH,
        "tickd_fire_time": instant_text(tick.fire_time),
        "tickd_attempt": 1,
        "tickd_replica": "a",
        "tickd_token": 1,
    }
    assert config["metadata"]["team"] == "x"
    assert {"tickd", "nightly"} <= set(config["tags"])
    assert config["configurable"]["model"] == "small"
    assert config["configurable"]["thread_id"] == str(tick)
    assert str(config["metadata"]["run_id"]) == str(run_id(tick))


async def test_of_two_replicas_one_runs_and_the_other_names_it(
    play: Play, book: Logbook, onlooker: Onlooker, gate: Gate
):
    """At a barrier: the skip says who has it and since when, and comes while the winner still runs."""
    a, b = await play(graph_of(one=gate.sync_node)), await play(graph_of(one=gate.sync_node), "b")
    tick = a.due(GRAPH)
    both = asyncio.gather(run(a, tick), run(b, tick))

    skipped = await book.wait_for("tick.skipped")
    started = only(book.find("tick.started"))
    gate.open.set()
    await both

    assert skipped["reason"] == "lock_held"
    # One log for both, so each line's own replica is a; the ledger knows the winner.
    ((fire_time, winner, outcome, *_),) = onlooker.rows(ROWS)
    assert (fire_time, outcome) == (tick.fire_time, "ran")
    assert skipped["holder"] == winner
    assert instant_text(tick.fire_time) <= skipped["holder_since"] <= started["timestamp"]
    assert len(book.terminal()) == 2
    assert only(book.find("tick.ran"))["token"] == 1


async def test_a_replica_that_is_late_finds_the_tick_run(play: Play, book: Logbook, onlooker: Onlooker):
    """B1, B11: the lock is free by then, and only the row says that there is nothing to do."""
    a, b = await play(graph_of(one=step("one"))), await play(graph_of(one=step("one")), "b")

    tick = await run(a)
    await run(b, tick)

    assert [(line["reason"], line["holder"]) for line in book.find("tick.skipped")] == [("already_ran", "a")]
    assert len(onlooker.rows(ROWS)) == 1
    assert onlooker.locks() == []


async def test_a_graph_that_raises_fails_its_tick_and_not_the_next(
    play: Play, book: Logbook, onlooker: Onlooker
):
    """The lock is let go all the same."""
    replica = await play({GRAPH: graph_of(one=fail), "pack_audit": graph_of(one=step("one"))})

    await run(replica)
    await run(replica)
    await run(replica, replica.due("pack_audit"))

    first, second, third = book.terminal()
    assert (first["event"], first["level"]) == ("tick.failed", "error")
    assert (first["error_type"], first["error"]) == ("RuntimeError", "supplier feed down")
    assert first["exception"].count("Traceback (most recent call last)") == 1
    assert (second["event"], second["token"]) == ("tick.failed", 2)
    assert third["event"] == "tick.ran"
    assert [row[2:] for row in onlooker.rows(ROWS)][:2] == [
        ("failed", "RuntimeError", "supplier feed down")
    ] * 2
    assert onlooker.locks() == []


async def test_an_error_may_have_any_text(play: Play, book: Logbook, onlooker: Onlooker):
    """Half characters, zero bytes and line ends: neither the log nor the ledger chokes on them."""

    async def odd(_: State) -> State:
        raise ValueError("\ud800\0\u2028\r\n")

    await run(await play(graph_of(one=odd)))

    assert only(book.terminal())["event"] == "tick.failed"
    assert onlooker.rows(ROWS)[0][2:4] == ("failed", "ValueError")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
@pytest.mark.parametrize("hold", ["dedicated", "shared"])
async def test_an_error_is_kept_in_a_database_of_any_encoding(
    server: Server, log: Log, book: Logbook, encoding: str, hold: str
):
    """Who cannot write a character could not record the end, and every tick that was recorded with it was lost as well."""

    async def cost(_: State) -> State:
        raise ValueError("5 €")

    database = Database(server)
    try:
        database.create(encoding=encoding)
        place = place_of(database.dsn)
        await migrate_at(place, deadline=math.inf)
        graphs = {name: graph_of(one=cost) for name in ("first", "second")}
        async with played(place, log, graphs, {"hold": hold}) as replica:
            await asyncio.gather(*(run(replica, replica.due(graph)) for graph in graphs))
        with psycopg.connect(database.dsn, client_encoding="UTF8") as looking:
            rows = looking.execute("SELECT outcome, error FROM tickd.ticks").fetchall()
    finally:
        database.close()

    assert [(line["event"], line["error"]) for line in book.terminal()] == [("tick.failed", "5 €")] * 2
    assert rows == [("failed", "5 \\u20ac")] * 2


async def test_a_graphs_error_takes_no_password_into_the_ledger(play: Play, onlooker: Onlooker, dsn: str):
    """Graphs read the same environment, and quote it when they cannot connect."""

    async def leak(_: State) -> State:
        raise ConnectionError(f"cannot reach {dsn}")

    await run(await play(graph_of(one=leak)))

    ((*_, error),) = onlooker.rows(ROWS)
    assert PASSWORD not in error
    assert error.startswith("cannot reach postgresql://")


async def test_a_run_past_its_time_out_is_stopped(play: Play, book: Logbook, onlooker: Onlooker, gate: Gate):
    """Its graph's next tick would otherwise be skipped for ever."""
    replica = await play(graph_of(one=gate.node), keys={"timeout": "200ms"})

    await run(replica)

    line = only(book.terminal())
    assert (line["event"], line["timeout_ms"]) == ("tick.timed_out", 200.0)
    assert line["duration_ms"] >= 200
    assert onlooker.rows(ROWS)[0][2] == "timed_out"
    assert onlooker.locks() == []


async def test_the_hold_outlasts_the_thread_of_a_sync_node(
    play: Play, book: Logbook, onlooker: Onlooker, gate: Gate
):
    """D12: the thread writes on after its run was cancelled; nobody else may start before it has ended."""
    # Long enough for the node's thread to have begun.
    a = await play(graph_of(one=gate.sync_node), keys={"timeout": "1s"})
    b = await play(graph_of(one=step("one")), "b")
    running = asyncio.create_task(run(a))
    waiting = await book.wait_for("tick.waiting")
    assert (waiting["reason"], waiting["threads"]) == ("sync_node", 1)

    await run(b)

    assert only(book.terminal())["reason"] == "lock_held"
    assert len(onlooker.locks()) == 1
    gate.open.set()
    await running
    assert book.terminal()[-1]["event"] == "tick.timed_out"
    await run(b)
    assert book.terminal()[-1]["event"] == "tick.ran"


async def test_a_graph_that_asks_is_interrupted_and_its_next_tick_is_not(
    play: Play, book: Logbook, onlooker: Onlooker
):
    """D8: with the question in the line, the lock let go, and a thread of its own for each tick."""

    async def ask(_: State) -> State:
        return {"answer": interrupt("approve?")}

    replica = await play(graph_of(one=ask))

    await run(replica)
    await run(replica)

    assert [(line["event"], line["interrupts"]) for line in book.terminal()] == [
        ("tick.interrupted", ["approve?"])
    ] * 2
    assert len({line["thread_id"] for line in book.find("tick.started")}) == 2
    assert [row[2] for row in onlooker.rows(ROWS)] == ["interrupted"] * 2


async def test_a_tick_that_meets_its_own_replica_at_work_skips_by_its_own_name(
    play: Play, book: Logbook, gate: Gate
):
    """B5: a run that is longer than the period; the library would only count instances."""
    replica = await play(graph_of(one=gate.sync_node))
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    assert replica.runner.running == 1

    await run(replica)

    skipped = only(book.terminal())
    assert (skipped["event"], skipped["reason"], skipped["holder"]) == ("tick.skipped", "lock_held", "a")
    assert skipped["holder_since"] <= skipped["timestamp"]
    gate.open.set()
    await running
    assert replica.runner.running == 0


async def test_a_hold_that_is_ended_stops_its_run(play: Play, book: Logbook, onlooker: Onlooker, gate: Gate):
    """C5: no further node, no tick.ran; the row says what happened, and the next tick runs."""
    ran = threading.Event()

    def two(_: State) -> State:
        ran.set()
        return {}

    replica = await play({GRAPH: graph_of(one=gate.node, two=two), "pack_audit": graph_of(one=step("one"))})
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    onlooker.terminate(onlooker.locks()[0][0])
    await running

    line = only(book.terminal())
    assert (line["event"], line["cause"]) == ("tick.lock_lost", "session_ended")
    assert line["lock_error"]
    assert "error" not in line
    assert not ran.is_set()
    assert onlooker.rows(ROWS)[0][2] == "lock_lost"
    gate.came.clear()
    again = asyncio.create_task(run(replica))
    await gate.arrive()
    onlooker.terminate(onlooker.locks()[0][0])
    await again


@pytest.mark.parametrize("node", [fail, step("one")], ids=["failed", "ran"])
async def test_a_session_that_dies_before_the_end_is_recorded_is_a_lost_hold(
    play: Play, book: Logbook, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch, node: Any
):
    """F14: the graph's own error stays the news; and a success whose last moments were unguarded is not one."""
    record = ledger.record

    async def too_late(*arguments: Any, **options: Any) -> bool:
        onlooker.terminate(onlooker.locks()[0][0])
        await onlooker.until(lambda: not onlooker.locks())
        return await record(*arguments, **options)

    monkeypatch.setattr(ledger, "record", too_late)
    await run(await play(graph_of(one=node)))

    line = only(book.terminal())
    assert line["event"] == "tick.lock_lost"
    assert line.get("error") == ("supplier feed down" if node is fail else None)
    assert (line["cause"], bool(line["lock_error"])) == ("session_ended", True)
    assert onlooker.rows(ROWS)[0][2] == "lock_lost"


@pytest.mark.parametrize("hold", ["dedicated", "shared"])
async def test_an_end_waits_under_its_hold_for_a_row_that_somebody_has_locked(
    play: Play,
    places: Places,
    book: Logbook,
    onlooker: Onlooker,
    gate: Gate,
    rows_locked: RowsLocked,
    hold: str,
):
    """The run came to its end, and nobody else had the lock: to call that a lost hold sends an operator after a fault that is not there."""
    place = places("a", answer_timeout=SECOND)
    replica = await play(graph_of(one=gate.sync_node), place=place, keys={"hold": hold})
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    await rows_locked.lock()
    gate.open.set()
    await onlooker.until(lambda: onlooker.locked_rows_looked_at() or running.done())
    assert running.done() or onlooker.locks()
    await rows_locked.let_go()
    await running

    assert only(book.terminal())["event"] == "tick.ran"
    assert onlooker.rows(ROWS)[0][2] == "ran"
    assert onlooker.locks() == []


@pytest.mark.parametrize("ends_by", ["limit", "stop"])
async def test_an_end_does_not_wait_for_its_row_for_ever_and_tells_why(
    play: Play,
    places: Places,
    book: Logbook,
    onlooker: Onlooker,
    gate: Gate,
    rows_locked: RowsLocked,
    monkeypatch: pytest.MonkeyPatch,
    ends_by: str,
):
    """The graph's next ticks, and a replica that is to stop, wait behind it; and the session was there all the time."""
    if ends_by == "limit":
        monkeypatch.setattr("tickd.supervision.ROW_PATIENCE", SECOND)
    place = places("a", answer_timeout=SECOND)
    replica = await play(graph_of(one=gate.sync_node), place=place, keys={"hold": "shared"})
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    await rows_locked.lock()
    gate.open.set()
    await onlooker.until(lambda: onlooker.locked_rows_looked_at() or running.done())
    if ends_by == "stop":
        replica.stop.request()
    await running

    line = only(book.terminal())
    assert (line["event"], line["cause"]) == ("tick.lock_lost", "row_locked")
    assert "lock timeout" in line["lock_error"]
    assert book.find("database.unreachable") == []
    assert onlooker.locks() == []


async def test_a_lock_that_was_not_held_any_more_is_told(
    play: Play, book: Logbook, monkeypatch: pytest.MonkeyPatch
):
    """The unlock answers false: the run was unguarded, for who knows how long."""
    refused = replace(UNLOCK, one=f"{UNLOCK.one} AND false")
    monkeypatch.setattr("tickd.lock.UNLOCK", refused)

    await run(await play(graph_of(one=step("one"))))

    assert only(book.find("lock.unlock_failed"))["level"] == "warning"
    assert only(book.terminal())["event"] == "tick.ran"


def nowhere(place: LockPlace) -> LockPlace:
    """Return a place at which nobody listens."""
    parameters = {**place.dsn.parameters, "port": str(free_port())}
    return replace(place, dsn=replace(place.dsn, parameters=parameters))


async def test_a_database_that_cannot_be_reached_is_an_error_and_never_a_skip(
    play: Play, place: LockPlace, book: Logbook
):
    """Nobody else may have run it either; and it is tried for as long as the tick's grace."""
    replica = await play(
        graph_of(one=step("one")), place=nowhere(place), reachable=place, keys={"grace": "700ms"}
    )
    began = time.monotonic()

    await run(replica)
    await run(replica)

    first, second = book.terminal()
    assert (first["event"], first["level"], first["reason"]) == ("tick.error", "error", "db_connect")
    assert first["tries"] >= 3
    assert "Connection refused" in first["error"]
    assert second["event"] == "tick.error"
    assert len(book.find("database.unreachable")) == 1
    assert time.monotonic() - began < 5


async def test_a_database_that_comes_back_within_the_grace_costs_no_tick(
    play: Play, database: Database, book: Logbook
):
    """A fail-over takes seconds, and a tick has patience."""
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format
    replica = await play(graph_of(one=step("one")))
    database.connection.execute(allow(sql.Identifier(database.name), sql.SQL("false")))
    running = asyncio.create_task(run(replica))
    unreachable = await book.wait_for("database.unreachable")
    assert "not currently accepting connections" in unreachable["error"]

    database.connection.execute(allow(sql.Identifier(database.name), sql.SQL("true")))
    await running

    assert only(book.terminal())["event"] == "tick.ran"
    assert [line["event"] for line in book.lines if line["event"].startswith("database.")] == [
        "database.unreachable",
        "database.reachable",
    ]


def two_or_more(sessions: list[Any]) -> list[Any]:
    """Return the pool's connection and the lock session, when both are there."""
    return sessions if len(sessions) > 1 else []


@pytest.mark.parametrize("hold", ["dedicated", "shared"])
async def test_a_session_that_dies_before_its_tick_is_due_costs_no_tick(
    play: Play, book: Logbook, onlooker: Onlooker, hold: str
):
    """A restart of the server ends those of all replicas, and nobody else is left to run it."""
    replica = await play(graph_of(one=step("one")), keys={"hold": hold})
    running = asyncio.create_task(run(replica, replica.due(GRAPH, ahead=SECOND)))
    sessions = await onlooker.until(lambda: two_or_more(onlooker.sessions("tickd/a")))
    for session in sessions:
        onlooker.terminate(session[0])
    await running

    line = only(book.terminal())
    assert line["event"] == "tick.ran"
    assert line["late_ms"] < 500
    assert onlooker.locks() == []


async def test_a_database_that_never_takes_the_try_is_an_error_when_the_grace_is_over(
    play: Play, book: Logbook, onlooker: Onlooker
):
    """It connects, and then it ends every session: there is a pause between the tries, and an end to them."""
    replica = await play(graph_of(one=step("one")), keys={"grace": "1s"})
    await run(replica)
    onlooker.connection.execute(ENDS_ITS_READER)

    await run(replica)

    line = book.terminal()[-1]
    assert (line["event"], line["error_type"]) == ("tick.error", "AdminShutdown")
    assert 2 <= line["tries"] <= 6


LoseAnswer = Callable[..., None]


async def nothing() -> None:
    """Do nothing."""


@pytest.fixture
def lose_answer(onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch) -> LoseAnswer:
    """Have the session of the next admission end between its commit and its answer, and do something before."""
    admit = admissions.admit

    def prepare(meanwhile: Callable[[], Awaitable[None]] = nothing) -> None:
        async def lose(session: LockSession, admission: Any) -> Any:
            monkeypatch.setattr(admissions, "admit", admit)
            await admit(session, admission)
            await meanwhile()
            onlooker.terminate(session.connection.info.backend_pid)
            return await session.fetch("SELECT 1")

        monkeypatch.setattr(admissions, "admit", lose)

    return prepare


@pytest.mark.parametrize("hold", ["dedicated", "shared"])
@pytest.mark.parametrize("ahead", [SECOND, -SECOND], ids=["ahead", "late"])
async def test_a_tick_whose_admission_had_no_answer_runs(
    play: Play, book: Logbook, onlooker: Onlooker, lose_answer: LoseAnswer, hold: str, ahead: timedelta
):
    """Nobody else is admitted to it, so it was told as one that this very replica had run, and was abandoned."""
    replica = await play(graph_of(one=step("one")), keys={"hold": hold})
    lose_answer()

    await run(replica, replica.due(GRAPH, ahead=ahead))

    line = only(book.terminal())
    assert (line["event"], line["token"], line["attempt"]) == ("tick.ran", 2, 1)
    assert onlooker.rows("SELECT outcome, attempt, token FROM tickd.ticks") == [("ran", 1, 2)]
    assert onlooker.locks() == []


async def test_a_tick_whose_admission_had_no_answer_waits_until_its_session_has_ended(
    play: Play, book: Logbook, onlooker: Onlooker, lose_answer: LoseAnswer, admin_dsn: str
):
    """A server that has not noticed keeps the lock for a while, and the tick is this replica's all the same."""
    replica = await play(graph_of(one=step("one")))
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as keeper:
        keeping: list[asyncio.Task[Any]] = []

        async def keep() -> None:
            lock = keeper.execute("SELECT pg_advisory_lock(7301, %s)", [lock_key(GRAPH)])
            keeping.append(asyncio.create_task(lock))
            await onlooker.until(onlooker.waiters)

        lose_answer(keep)
        running = asyncio.create_task(run(replica))
        await onlooker.until(
            lambda: [row for row in onlooker.sessions("tickd/a") if row[2] == "idle" and "held" in row[3]]
        )
        assert book.terminal() == []

    await running
    assert only(book.terminal())["event"] == "tick.ran"


async def test_a_tick_whose_admission_had_no_answer_and_that_a_sweep_has_closed_is_an_error(
    play: Play, book: Logbook, onlooker: Onlooker, lose_answer: LoseAnswer
):
    """It has not run, and no line of this replica's may say so."""
    replica = await play(graph_of(one=step("one")))
    onlooker.connection.execute(CLOSED_AT_ONCE)
    lose_answer()

    await run(replica)

    line = only(book.terminal())
    assert (line["event"], line["reason"], line["error_type"]) == ("tick.error", "no_answer", "AdminShutdown")
    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [("abandoned",)]


async def test_a_take_over_that_comes_to_nothing_leaves_no_dead_session_to_the_next_tick(
    play: Play, onlooker: Onlooker
):
    """The next would try on it in vain."""
    replica = await play(graph_of(one=step("one")))
    places = replica.runner._places
    places._waiting = 1  # a tick that waits for a session

    await replica.continuation.take_over(replica.due(GRAPH))

    session = places.take_spare()
    assert session is not None
    assert not session.connection.closed
    await session.close()
    assert onlooker.locks() == []


def pids(onlooker: Onlooker) -> set[int]:
    """Return the backends of the replica's sessions."""
    return {row[0] for row in onlooker.sessions("tickd/a")}


@pytest.mark.parametrize(
    "trouble", ["PERFORM pg_terminate_backend(pg_backend_pid())", "RAISE lock_not_available"]
)
async def test_a_take_over_that_could_not_be_tried_is_no_error_of_the_tick(
    play: Play, book: Logbook, onlooker: Onlooker, trouble: str
):
    """The tick waits, or runs elsewhere. Each replica would tell it again with each sweep."""
    replica = await play(graph_of(one=step("one")))
    tick = replica.due(GRAPH)
    await run(replica, tick)
    onlooker.connection.execute(HANDED_OFF.format(trouble=trouble).encode())
    open_before = pids(onlooker)

    await replica.continuation.take_over(tick)
    await replica.continuation.take_over(tick)

    assert [line["event"] for line in book.terminal()] == ["tick.ran"]
    assert len(book.find("database.unreachable")) == 1
    assert onlooker.locks() == []
    await onlooker.until(lambda: pids(onlooker) == open_before)
    onlooker.connection.execute("DROP TRIGGER trouble ON tickd.ticks")
    await replica.continuation.take_over(tick)
    assert [line["event"] for line in book.terminal()] == ["tick.ran", "tick.ran"]


@pytest.mark.parametrize("way", ["take_over", "run_tick"])
async def test_what_goes_wrong_after_the_admission_is_told(
    play: Play, book: Logbook, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch, way: str
):
    """Taken for a try that failed, it would be passed over in silence, or tried again and told as a tick that has run."""
    replica = await play(graph_of(one=step("one")))
    tick = replica.due(GRAPH)
    if way == "take_over":
        await run(replica, tick)
        onlooker.connection.execute("UPDATE tickd.ticks SET outcome = 'handed_off'")

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(runner, "order_of", full)
    story = replica.continuation.take_over if way == "take_over" else replica.runner.run_tick
    await story(tick)

    line = book.terminal()[-1]
    assert (line["event"], line["error"]) == ("tick.error", "no space left on device")
    assert onlooker.locks() == []


async def test_a_tick_past_its_grace_is_missed(play: Play, book: Logbook, onlooker: Onlooker):
    """By nobody's doing but lateness; the numbers say by how much."""
    replica = await play(graph_of(one=step("one")), keys={"grace": "1s"})

    await run(replica, replica.due(GRAPH, late=3 * SECOND))

    line = only(book.terminal())
    assert (line["event"], line["level"], line["reason"]) == ("tick.missed", "warning", "late")
    assert line["late_ms"] >= 3000
    assert line["grace_ms"] == 1000
    assert onlooker.rows(ROWS) == []


async def test_a_tick_past_its_grace_that_another_ran_is_not_missed(play: Play, book: Logbook):
    """The replica stood still while the fleet went on."""
    a, b = (
        await play(graph_of(one=step("one"))),
        await play(graph_of(one=step("one")), "b", keys={"grace": "1s"}),
    )
    tick = await run(a, a.due(GRAPH, late=3 * SECOND))

    await run(b, tick)

    assert [line["event"] for line in book.terminal()] == ["tick.ran", "tick.skipped"]
    assert book.terminal()[1]["holder"] == "a"


async def test_a_look_that_fails_costs_no_tick(play: Play, book: Logbook):
    """It only saves an attempt; the attempt itself goes over a session of its own, and decides."""
    replica = await play(graph_of(one=step("one")))
    await replica.pool.close()

    await run(replica, replica.due(GRAPH, late=SECOND))

    assert only(book.terminal())["event"] == "tick.ran"


async def test_a_tick_that_is_not_due_waits_on_the_databases_clock(
    play: Play, book: Logbook, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """A replica whose own clock is ahead must not run it before the others think that it is time.

    It is admitted a moment ahead, so that its row is on the disk when it is due, and no graph waits for the disk then.
    """
    monkeypatch.setattr("tickd.runner.ADMIT_AHEAD", 0.3 * SECOND)
    began: list[datetime] = []

    async def note(_: State) -> State:
        began.append(onlooker.value("SELECT clock_timestamp()"))
        return {}

    replica = await play(graph_of(one=note))
    tick = replica.due(GRAPH, ahead=0.6 * SECOND)

    await run(replica, tick)

    assert only(book.terminal())["event"] == "tick.ran"
    assert only(book.find("tick.started"))["late_ms"] >= 0
    assert [instant >= tick.fire_time for instant in began] == [True]
    assert onlooker.value("SELECT admitted_at >= fire_time FROM tickd.ticks")


async def test_a_stop_after_the_admission_lets_no_node_run_before_its_time(
    play: Play, book: Logbook, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """The tick is admitted, so it goes to another replica, which begins where nothing has been done yet."""
    for ahead in ("LEAD", "ADMIT_AHEAD"):
        monkeypatch.setattr(f"tickd.runner.{ahead}", 10 * SECOND)
    ran, begin = threading.Event(), Run.begin

    def begin_while_the_main_loop_has_other_work(run: Run) -> None:
        begin(run)
        ran.wait(0.3)

    monkeypatch.setattr(Run, "begin", begin_while_the_main_loop_has_other_work)

    async def note(_: State) -> State:
        ran.set()
        return {}

    replica = await play(graph_of(one=note))
    running = asyncio.create_task(run(replica, replica.due(GRAPH, ahead=10 * SECOND)))
    await onlooker.until(lambda: onlooker.value("SELECT count(*) FROM tickd.ticks"))

    replica.stop.request()
    async with asyncio.timeout(5):
        await running

    assert only(book.terminal())["event"] == "tick.handed_off"
    assert not ran.is_set()


async def test_a_stop_lets_go_of_what_has_not_begun(play: Play, book: Logbook):
    """At once, with a line: another replica runs it."""
    replica = await play(graph_of(one=step("one")))
    far, near = replica.due(GRAPH, ahead=3600 * SECOND), replica.due(GRAPH, ahead=0.2 * SECOND)
    waiting = [asyncio.create_task(run(replica, tick)) for tick in (far, near)]
    await asyncio.wait(waiting, timeout=0.05)

    replica.stop.request()
    async with asyncio.timeout(1):
        await asyncio.gather(*waiting)

    assert [(line["event"], line["reason"]) for line in book.terminal()] == [("tick.skipped", "draining")] * 2


async def test_a_stop_hands_a_run_off_and_another_replica_goes_on(
    play: Play, book: Logbook, onlooker: Onlooker, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """At the next super-step, with a newer token, and no node twice."""
    asked = asyncio.Event()
    drain = Run.drain

    def noted(run: Run, reason: str) -> None:
        drain(run, reason)
        asked.set()

    monkeypatch.setattr(Run, "drain", noted)
    nodes = {"one": gate.sync_node, "two": step("two"), "three": step("three")}
    a, b = await play(graph_of(**nodes)), await play(graph_of(**nodes), "b")
    tick = a.due(GRAPH)
    running = asyncio.create_task(run(a, tick))
    await gate.arrive()
    a.stop.request()
    async with asyncio.timeout(10):
        await asked.wait()
    gate.open.set()
    await running

    assert (only(book.terminal())["event"], only(book.terminal())["next_nodes"]) == (
        "tick.handed_off",
        ["two"],
    )
    gate.came.clear()
    await b.continuation.take_over(tick)
    await b.continuation.take_over(tick)

    handed_off, ran = book.terminal()
    assert (ran["event"], ran["attempt"], ran["token"]) == ("tick.ran", 2, 3)
    assert book.find("tick.started", resumed=True, token=3, last_holder="a")
    assert not gate.came.is_set()
    assert onlooker.rows(ROWS) == [(tick.fire_time, "b", "ran", None, None)]
    assert handed_off["token"] == 1


async def test_a_tick_that_loses_is_skipped_when_it_is_due_and_not_before(
    play: Play, book: Logbook, gate: Gate
):
    """An earlier tick's run may end in the moments between the first try and the fire time."""
    replica, other = await play(graph_of(one=gate.sync_node)), await play(graph_of(one=gate.sync_node), "b")
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    tick = other.due(GRAPH, ahead=SECOND / 2)
    skipped = asyncio.create_task(run(other, tick))
    await skipped

    assert other.clock.now() >= tick.fire_time
    assert (only(book.terminal())["event"], only(book.terminal())["reason"]) == ("tick.skipped", "lock_held")
    gate.open.set()
    await running


async def test_a_graph_that_is_freed_between_the_first_try_and_the_fire_time_runs(
    play: Play, book: Logbook, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """A run that takes exactly as long as its interval must not cost the graph every other tick."""
    monkeypatch.setattr("tickd.runner.ADMIT_AHEAD", SECOND)
    replica, other = await play(graph_of(one=gate.sync_node)), await play(graph_of(one=step("one")), "b")
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    refused = asyncio.Event()
    hold_and_admit = admissions.hold_and_admit

    async def noted(*args: Any, **options: Any) -> Any:
        held, granted = await hold_and_admit(*args, **options)
        if held is False:
            refused.set()
        return held, granted

    monkeypatch.setattr(admissions, "hold_and_admit", noted)
    following = asyncio.create_task(run(other, other.due(GRAPH, ahead=2 * SECOND)))
    async with asyncio.timeout(10):
        await refused.wait()
    gate.open.set()
    await asyncio.gather(running, following)

    assert [line["event"] for line in book.terminal()] == ["tick.ran", "tick.ran"]


async def test_a_run_that_does_not_stop_in_time_is_cancelled(play: Play, book: Logbook, gate: Gate):
    """One node that never comes to its end keeps no process alive."""
    limits = Limits(max_running=4, lock_attempts=4, drain_timeout=timedelta(milliseconds=200))
    replica = await play(graph_of(one=gate.node), limits=limits)
    running = asyncio.create_task(run(replica))
    await gate.arrive()

    replica.stop.request()
    await running

    line = only(book.terminal())
    assert (line["event"], line["reason"], line["error_type"]) == ("tick.failed", "shutdown", "Cancelled")
    assert replica.runner.drain_ran_out


async def test_a_replica_runs_no_more_than_it_may(play: Play, book: Logbook, gate: Gate):
    """The tick waits for room within its grace, and says that there was none."""
    graphs = {GRAPH: graph_of(one=gate.sync_node), "pack_audit": graph_of(one=step("one"))}
    limits = Limits(max_running=1, lock_attempts=1, drain_timeout=SECOND)
    replica = await play(graphs, limits=limits, keys={"grace": "10s"})
    running = asyncio.create_task(run(replica))
    await gate.arrive()

    await run(replica, replica.due("pack_audit", late=9.5 * SECOND))

    missed = only(book.terminal())
    assert (missed["event"], missed["graph"], missed["reason"]) == ("tick.missed", "pack_audit", "no_room")
    gate.open.set()
    await running
    await run(replica, replica.due("pack_audit"))
    assert [line["event"] for line in book.terminal()] == ["tick.missed", "tick.ran", "tick.ran"]


async def test_in_a_herd_no_session_learns_the_admission_for_itself(
    play: Play, book: Logbook, monkeypatch: pytest.MonkeyPatch
):
    """Many are admitted together over one session, and what each would learn is worth more than it saves."""
    warmed: list[Tick] = []
    warm = admissions.warm

    async def noted(session: LockSession, tick: Tick) -> None:
        warmed.append(tick)
        await warm(session, tick)

    monkeypatch.setattr(admissions, "warm", noted)
    names = [f"graph_{number}" for number in range(4)]
    limits = Limits(max_running=4, lock_attempts=1, drain_timeout=SECOND)
    replica = await play({name: graph_of(one=step("one")) for name in names}, limits=limits)
    fire_time = replica.due(names[0], ahead=SECOND).fire_time

    await asyncio.gather(*(run(replica, Tick(name, fire_time)) for name in names))

    assert [line["event"] for line in book.terminal()] == ["tick.ran"] * 4
    assert warmed == []
    await run(replica, replica.due(names[0], ahead=SECOND))
    assert len(warmed) == 1


async def test_a_graph_that_blocks_the_graph_loop_holds_no_other_graph(
    play: Play, book: Logbook, onlooker: Onlooker, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """B6: held, and not begun, it would be kept from the replicas that could run it."""
    # The loop has come round for the graph that blocks it, maybe a moment ago.
    monkeypatch.setattr("tickd.places.LATELY", 0)
    graphs = {GRAPH: graph_of(one=gate.blocking_node), "pack_audit": graph_of(one=step("one"))}
    replica = await play(graphs, keys={"grace": "10s"})
    running = asyncio.create_task(run(replica))
    await gate.arrive()

    await run(replica, replica.due("pack_audit", late=9.5 * SECOND))

    missed = only(book.terminal())
    assert (missed["event"], missed["graph"], missed["reason"]) == (
        "tick.missed",
        "pack_audit",
        "loop_blocked",
    )
    assert len(onlooker.locks()) == 1
    gate.open.set()
    await running
    assert book.terminal()[-1]["event"] == "tick.ran"


async def test_a_failed_attempt_is_tried_again_under_the_same_hold(
    play: Play, book: Logbook, onlooker: Onlooker
):
    """Retries: a line for each failure that is not the end, one terminal line, one row; and the pause costs no hold."""
    attempts: list[int] = []

    async def third_time(_: State, config: RunnableConfig) -> State:
        attempts.append(config["metadata"]["tickd_attempt"])
        if len(attempts) < 3:
            raise TimeoutError("not yet")
        return {}

    replica = await play(
        graph_of(one=third_time), keys={"retries": {"attempts": 3, "backoff": "50ms", "on": ["OSError"]}}
    )

    await run(replica)

    assert attempts == [1, 2, 3]
    retrying = book.find("tick.retrying")
    assert [(line["failed_as"], line["error"]) for line in retrying] == [("failed", "not yet")] * 2
    assert (only(book.terminal())["event"], only(book.terminal())["attempt"]) == ("tick.ran", 3)
    assert onlooker.rows("SELECT attempt, token, outcome FROM tickd.ticks") == [(3, 1, "ran")]
    assert onlooker.locks() == []


async def test_a_fault_of_tickd_itself_is_the_ticks_outcome(play: Play, book: Logbook):
    """One tick must not end the others: no error leaves run_tick."""
    replica = await play(graph_of(one=step("one")))
    replica.runner._looks.remember = None  # as good a fault as any

    await run(replica)

    line = only(book.terminal())
    assert (line["event"], line["error_type"]) == ("tick.error", "TypeError")
    assert "Traceback" in line["exception"]


async def test_a_tick_that_is_cancelled_takes_its_run_along(play: Play, onlooker: Onlooker, gate: Gate):
    """A replica that falls over must not let go of a hold whose run goes on in the other thread."""
    replica = await play(graph_of(one=gate.sync_node))
    running = asyncio.create_task(run(replica))
    await gate.arrive()

    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=0.3)
    assert not done
    assert len(onlooker.locks()) == 1
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert gate.left.is_set()
    assert onlooker.locks() == []


REFUSALS = {
    "paused": "UPDATE tickd.graphs SET paused_at = now()",
    "interrupted": """
INSERT INTO tickd.ticks (space, graph, fire_time, attempt, thread_id, run_id, outcome)
SELECT space, graph, '2026-05-04', 1, thread_id, run_id, 'interrupted' FROM tickd.ticks
""",
    "already_ran": """
INSERT INTO tickd.ticks (space, graph, fire_time, attempt, thread_id, run_id, outcome)
SELECT space, graph, %s, 1, thread_id, run_id, 'ran' FROM tickd.ticks
""",
}


@pytest.mark.parametrize("reason", REFUSALS)
async def test_no_run_makes_room_for_a_tick_that_is_refused(
    play: Play, book: Logbook, onlooker: Onlooker, gate: Gate, reason: str
):
    """`overlap: cancel` would leave the graph with neither of the two."""
    keys = {"overlap": "cancel", "thread": "per_graph", "grace": "2s"}
    replica = await play(graph_of(one=gate.sync_node, two=step("two")), keys=keys)
    running = asyncio.create_task(run(replica))
    await gate.arrive()
    newer = replica.due(GRAPH)
    refusal = REFUSALS[reason]
    onlooker.connection.execute(refusal.encode(), [newer.fire_time] if "%s" in refusal else [])

    await run(replica, newer)

    assert only(book.terminal())["reason"] == reason
    gate.open.set()
    await running
    assert book.terminal()[-1]["event"] == "tick.ran"


async def test_a_paused_graph_is_skipped(play: Play, book: Logbook, onlooker: Onlooker):
    """`tickd pause` reaches every replica through the ledger."""
    replica = await play(graph_of(one=step("one")))
    await run(replica)
    onlooker.connection.execute("UPDATE tickd.graphs SET paused_at = now()")

    await run(replica)

    assert book.terminal()[-1]["reason"] == "paused"
