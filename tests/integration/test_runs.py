"""Runs on the graph thread: how each of them ends, and that it has really ended when it says so."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from psycopg import DatabaseError
from psycopg_pool import PoolTimeout

from tests.lock_sessions import place_of
from tests.onlooker import Onlooker
from tests.played import Gate, State, graph_of, graph_thread, step
from tests.turns import turn
from tickd import group_commit
from tickd.errors import Unusable
from tickd.graph_thread import GraphThread
from tickd.graphs import LoadedGraph, Reference
from tickd.group_commit import Save
from tickd.runs import CutOff, EndKind, Run, RunEnd, RunOrder
from tickd.tick import Tick, run_id


pytestmark = pytest.mark.migrated

OF_A_STEP = "(NEW.metadata ->> 'step')::int > 0"
TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
Start = Callable[..., Run]
# The hold that `start` runs under.
PROTECT = """
INSERT INTO tickd.threads (thread_id, space, graph, token) VALUES (%s, 7301, 'restock_plan', 1) RETURNING 1
"""
# Rows that cannot be written: those of a table that a condition is true of.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk full'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW WHEN ({}) EXECUTE FUNCTION refuse()
"""


@pytest.fixture
def gate():
    """A gate that is open at the end, whatever the test did."""
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
async def graphs(dsn: str) -> AsyncIterator[GraphThread]:
    """A graph thread."""
    async with graph_thread(place_of(dsn)) as thread:
        yield thread


@pytest.fixture
def start(graphs: GraphThread) -> Start:
    """Starts a run of a graph."""

    def start(
        builder: "StateGraph[Any]",
        *,
        second: int = 0,
        name: str = "restock_plan",
        resume: bool = False,
        make_input: Any = None,
        in_doubt: Callable[[], bool] = lambda: False,
        begin: bool = True,
        durability: Literal["sync", "async", "exit"] = "sync",
        **compile_options: Any,
    ) -> Run:
        tick = Tick(name, TEN + timedelta(seconds=second))
        order = RunOrder(
            loaded=LoadedGraph(name, builder.compile(**compile_options), make_input, ()),
            tick=tick,
            thread_id=str(tick),
            run_id=run_id(tick),
            space=7301,
            token=1,
            input={"done": []},
            context=None,
            config={
                "configurable": {"thread_id": str(tick), "run_id": str(run_id(tick))},
                "run_id": run_id(tick),
                "metadata": {"tickd_graph": name},
            },
            durability=durability,
            resume=resume,
        )
        run = graphs.run(order, in_doubt=in_doubt)
        if begin:
            run.begin()
        return run

    return start


async def end_of(run: Run, seconds: float = 10) -> RunEnd:
    """Return the run's end."""
    async with asyncio.timeout(seconds):
        return await asyncio.shield(run.ended)


def refuse(onlooker: Onlooker, table: str, rows: str) -> None:
    """Let these rows of a table be refused."""
    onlooker.connection.execute(REFUSE.format(table, rows).encode())


async def test_a_run_that_comes_to_its_end_has_finished(start: Start, onlooker: Onlooker):
    """Its checkpoints are on the thread of the tick."""
    end = await end_of(start(graph_of(one=step("one"), two=step("two"))))

    assert end == RunEnd(EndKind.FINISHED, 2)
    assert onlooker.rows("SELECT DISTINCT thread_id FROM checkpoints") == [
        ("restock_plan/2026-05-04T10:00:00Z",)
    ]


async def test_each_tick_has_a_thread_of_its_own(start: Start, onlooker: Onlooker):
    """D6: on one thread the states would pile up."""
    for second in range(3):
        await end_of(start(graph_of(one=step("one")), second=second))

    finals = onlooker.rows(
        "SELECT DISTINCT ON (thread_id) checkpoint -> 'channel_versions' IS NOT NULL, metadata ->> 'step'"
        " FROM checkpoints ORDER BY thread_id, checkpoint_id DESC"
    )
    assert finals == [(True, "1")] * 3


@asynccontextmanager
async def gathering(graphs: GraphThread, onlooker: Onlooker, count: int) -> AsyncIterator[None]:
    """Let a save be under way for as long as it takes until so many have gathered behind it; the block starts those."""
    commit, gate = graphs._group_commit, asyncio.Event()
    assert commit is not None
    first = asyncio.run_coroutine_threadsafe(commit.save(Save(""), gate.wait), graphs._loop)
    await onlooker.until(lambda: commit._under_way)
    try:
        yield
        await onlooker.until(lambda: len(commit._gathering) == count)
    finally:
        graphs._loop.call_soon_threadsafe(gate.set)
        await asyncio.wrap_future(first)


async def test_runs_that_save_at_one_time_save_together(
    graphs: GraphThread, start: Start, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """One transaction has written the checkpoints of all; each comes to its end as it would by itself."""
    monkeypatch.setattr(group_commit, "OVERDUE", timedelta(minutes=1))
    ticks = [Tick("restock_plan", TEN + timedelta(seconds=second)) for second in range(20)]
    for tick in ticks:
        onlooker.rows(PROTECT, str(tick))

    async with gathering(graphs, onlooker, len(ticks)):
        runs = [start(graph_of(one=step("one"), two=step("two")), second=second) for second in range(20)]
    ends = [await end_of(run) for run in runs]

    assert ends == [RunEnd(EndKind.FINISHED, 2)] * 20
    assert onlooker.rows("SELECT thread_id, count(*) FROM checkpoints GROUP BY 1 ORDER BY 1") == [
        (str(tick), 4) for tick in ticks
    ]
    assert onlooker.value(
        "SELECT max(threads) FROM (SELECT count(DISTINCT thread_id) AS threads FROM checkpoints GROUP BY xmin::text) AS _"
    ) == len(ticks)


async def test_until_it_may_begin_a_run_reads_and_does_nothing_else(start: Start, onlooker: Onlooker):
    """It is started ahead of its fire time, so that its thread is read by then: no factory, no node, no checkpoint."""
    did: list[str] = []

    def make_input(tick: Tick) -> State:
        did.append(f"input of {tick}")
        return {"done": []}

    async def note(_: State) -> State:
        did.append("node")
        return {}

    with_factory = start(graph_of(one=note), begin=False, make_input=make_input)
    plain = start(graph_of(one=note), begin=False, second=1)
    await onlooker.until(lambda: any("checkpoint_ns" in row[3] for row in onlooker.sessions("tickd/a")))
    await asyncio.wait({plain.ended, with_factory.ended}, timeout=0.2)
    before = list(did)
    plain.begin()
    with_factory.begin()

    assert before == []
    assert {(await end_of(run)).kind for run in (plain, with_factory)} == {EndKind.FINISHED}
    assert sorted(did) == ["input of restock_plan/2026-05-04T10:00:00Z", "node", "node"]


async def test_a_run_that_never_began_is_cancelled_like_any_other(start: Start, onlooker: Onlooker):
    """Its hold may be lost in the moments before its fire time."""
    run = start(graph_of(one=step("one")), begin=False)

    run.cancel()

    assert (await end_of(run)).kind is EndKind.CANCELLED
    assert onlooker.value("SELECT count(*) FROM checkpoints") == 0


async def test_what_the_saver_turns_into_bytes_takes_no_thread(start: Start):
    """Handing it to a thread and back, six times a run, is a fifth of what a small run costs."""
    before = node_threads()

    await end_of(start(graph_of(one=step("one"), two=step("two"))))

    assert node_threads() == before


async def test_what_a_task_wrote_is_saved_with_its_step_whatever_its_type(start: Start, onlooker: Onlooker):
    """A text needs no turning into bytes for the step's checkpoint, and must not overtake what is turned for the task's."""

    class Note(TypedDict):
        note: str

    async def write(_: Note) -> Note:
        return {"note": "done"}

    builder: Any = StateGraph(Note)
    builder.add_node("write", write)
    builder.add_edge(START, "write")
    assert (await end_of(start(builder))).kind is EndKind.FINISHED

    number = "SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM checkpoints UNION SELECT xmin FROM checkpoint_writes) _"
    assert onlooker.value(number) == 2


async def test_what_cannot_be_turned_into_bytes_fails_its_run_only(start: Start):
    """The error is raised where the checkpoint was to be written, not on the loop of all graphs."""

    async def leave_a_lock(_: State) -> Any:
        return {"done": [threading.Lock()]}

    end = await end_of(start(graph_of(one=leave_a_lock)))

    assert end.kind is EndKind.RAISED
    assert isinstance(end.error, TypeError)
    assert (await end_of(start(graph_of(one=step("one")), second=1))).kind is EndKind.FINISHED


def node_threads() -> set[threading.Thread]:
    """Return the threads that the graph loop has started for work that blocks."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tickd-node")}


class OddError(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("error", [RuntimeError("no feed"), OddError(), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_whatever_a_node_raises_is_the_end_of_its_run_only(
    start: Start, error: BaseException, kind: str
):
    """A library that calls sys.exit() must not take the graph loop, and with it every other run, along."""

    def fail(_: State) -> State:
        raise error

    async def fail_async(_: State) -> State:
        raise error

    end = await end_of(start(graph_of(one=fail if kind == "sync" else fail_async)))

    assert end.kind is EndKind.RAISED
    assert type(end.error) is type(error)
    assert (await end_of(start(graph_of(one=step("one")), second=1))).kind is EndKind.FINISHED


async def test_a_cancelled_run_ends_where_it_stands(start: Start, gate: Gate):
    """A time-out, or a hold that was lost."""
    run = start(graph_of(one=gate.node, two=step("two")))
    await gate.arrive()

    run.cancel()

    assert await end_of(run) == RunEnd(EndKind.CANCELLED, 0)


async def test_a_run_cancelled_before_it_began_does_nothing(start: Start, onlooker: Onlooker, gate: Gate):
    """The graph loop may be busy, and the stop be quicker."""
    blocking = start(graph_of(one=gate.blocking_node))
    await gate.arrive()
    run = start(graph_of(one=step("one")), second=1)
    run.cancel()
    gate.open.set()

    assert (await end_of(run)).kind is EndKind.CANCELLED
    await end_of(blocking)
    assert onlooker.value("SELECT count(*) FROM checkpoints WHERE thread_id LIKE '%%:01Z'") == 0


async def test_a_cancellation_that_nobody_asked_for_is_the_graphs_own_failure(start: Start):
    """A node may cancel itself, and that is no shutdown."""

    async def node(_: State) -> State:
        raise asyncio.CancelledError

    assert (await end_of(start(graph_of(one=node)))).kind is EndKind.RAISED


async def test_a_node_that_swallows_its_cancellation_is_asked_again(start: Start, gate: Gate):
    """Stubborn, not deaf: each request is a new cancellation."""
    swallowed = threading.Event()

    async def stubborn(_: State) -> State:
        gate.came.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.Event().wait()
        return {}

    run = start(graph_of(one=stubborn))
    await gate.arrive()
    run.cancel()
    assert await asyncio.to_thread(swallowed.wait, 10)
    assert not run.ended.done()

    run.cancel()

    assert (await end_of(run)).kind is EndKind.CANCELLED


async def test_a_run_has_not_ended_before_each_of_its_nodes_has_however_often_it_is_cancelled(
    start: Start, gate: Gate
):
    """LangGraph waits for the nodes of a step once, and leaves them to themselves when it is cancelled again."""
    swallowed: list[str] = []
    let_go = asyncio.Event()

    def stubborn(name: str) -> Any:
        async def node(_: State) -> State:
            gate.came.set()
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    swallowed.append(name)
            return {}

        return node

    run = start(side_by_side(a=stubborn("a"), b=stubborn("b")))
    await gate.arrive()
    for times in range(1, 5):
        run.cancel()
        async with asyncio.timeout(10):
            while swallowed.count("a") < times or swallowed.count("b") < times:
                assert not run.ended.done()
                await turn()
    done, _ = await asyncio.wait({run.ended}, timeout=0.3)
    assert not done
    run._graphs.call_soon_threadsafe(let_go.set)

    assert await end_of(run) == RunEnd(EndKind.CANCELLED, 0)


@pytest.mark.parametrize("error", [None, RuntimeError("too late")])
async def test_a_run_has_not_ended_before_the_thread_of_its_sync_node_has(
    start: Start, gate: Gate, error: Exception | None, caplog: pytest.LogCaptureFixture
):
    """D12: a cancelled ainvoke returns at once while the thread goes on writing; the hold has to outlast it."""
    gate.error = error
    run = start(graph_of(one=gate.sync_node, two=step("two")))
    await gate.arrive()

    run.cancel()
    run.cancel()
    done, _ = await asyncio.wait({run.ended}, timeout=0.3)
    assert not done
    assert run.threads == 1
    gate.open.set()

    assert await end_of(run) == RunEnd(EndKind.CANCELLED, 0)
    assert gate.left.is_set()
    assert run.threads == 0
    # Nor is what the thread raised after all reported as an error that nobody has fetched.
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_threads_belong_to_the_run_that_started_them(start: Start, gate: Gate):
    """Another graph's slow thread must not keep this one's hold."""
    slow = start(graph_of(one=gate.sync_node))
    await gate.arrive()

    quick = start(graph_of(one=lambda _: {"done": ["x"]}), second=1, name="pack_audit")

    assert (await end_of(quick)).kind is EndKind.FINISHED
    assert (slow.threads, quick.threads) == (1, 0)
    gate.open.set()
    await end_of(slow)


async def test_a_graph_that_blocks_the_graph_loop_blocks_nothing_else(
    start: Start, graphs: GraphThread, gate: Gate
):
    """B6: timer and holds are on another loop, which can say who it is that blocks."""
    run = start(graph_of(one=gate.blocking_node))
    await gate.arrive()

    assert graphs.current_graph() == "restock_plan"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await graphs.answer()
    gate.open.set()
    async with asyncio.timeout(10):
        await graphs.answer()

    assert (await end_of(run)).kind is EndKind.FINISHED


async def test_a_drained_run_stops_at_the_next_step_and_goes_on_from_there(start: Start, gate: Gate):
    """The node that is at work comes to its end, the next one is another replica's."""
    ran: list[str] = []

    def note(name: str) -> Any:
        def node(_: State) -> State:
            ran.append(name)
            return {"done": [name]}

        return node

    nodes = {"one": gate.sync_node, "two": note("two"), "three": note("three")}
    run = start(graph_of(**nodes))
    await gate.arrive()
    run.drain("shutdown")
    gate.open.set()

    assert await end_of(run) == RunEnd(EndKind.DRAINED, 1, next_nodes=("two",))
    assert ran == []

    gate.came.clear()
    assert (await end_of(start(graph_of(**nodes), resume=True))).kind is EndKind.FINISHED
    assert ran == ["two", "three"]
    assert not gate.came.is_set()


async def test_a_run_without_a_checkpoint_of_its_own_starts_from_its_input(start: Start):
    """The first holder may have died before anything was written."""
    end = await end_of(start(graph_of(one=step("one")), resume=True))

    assert end == RunEnd(EndKind.FINISHED, 1)


async def test_a_graph_that_asks_is_interrupted(start: Start):
    """D8: interrupt() returns like success, and what it asks is in the line."""

    async def ask(_: State) -> State:
        return {"answer": interrupt({"approve": "12 orders?"})}

    end = await end_of(start(graph_of(one=ask, two=step("two"))))

    assert (end.kind, end.interrupts) == (EndKind.INTERRUPTED, ({"approve": "12 orders?"},))


async def test_a_breakpoint_is_an_interruption_too(start: Start):
    """Set at compile time, it ends the run like success, and only the state tells."""
    graph = graph_of(one=step("one"), two=step("two"))

    end = await end_of(start(graph, interrupt_before=["two"]))

    assert (end.kind, end.interrupts) == (EndKind.INTERRUPTED, ("before two",))
    whole = await end_of(start(graph, second=1, interrupt_after=["two"]))
    assert whole.kind is EndKind.FINISHED


def below(**options: Any) -> Any:
    """Return a subgraph of two steps."""
    return graph_of(one=step("one"), two=step("two")).compile(**options)


async def in_a_node(state: State) -> Any:
    """Invoke a subgraph that nobody but this call knows of."""
    return await below(interrupt_before=["two"]).ainvoke(state)


async def ask(_: State) -> State:
    """Ask, and do nothing else."""
    return {"answer": interrupt("12 orders?")}


def side_by_side(**nodes: Any) -> "StateGraph[Any]":
    """Return a graph that runs these nodes in one super-step."""
    builder = StateGraph(State)
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(START, name)
    return builder


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize(
    ("graph", "interrupts"),
    [
        (graph_of(below=below(interrupt_before=["two"])), ("before below|two",)),
        (graph_of(below=below(interrupt_after=["one"])), ("before below|two",)),
        (graph_of(below=below(interrupt_after=["two"])), ("in below",)),
        (
            graph_of(below=graph_of(deeper=below(interrupt_before="*")).compile()),
            ("before below|deeper|one",),
        ),
        (graph_of(below=in_a_node), ("in below",)),
        (
            side_by_side(a=below(interrupt_before=["two"]), b=in_a_node, c=step("c")),
            ("before a|two", "in b"),
        ),
        (side_by_side(a=ask, b=below(interrupt_before=["two"])), ("12 orders?",)),
    ],
)
async def test_a_breakpoint_in_a_subgraph_is_an_interruption_at_any_depth(
    start: Start, graph: "StateGraph[Any]", interrupts: tuple[str, ...], durability: Any
):
    """Told as finished, nobody would go on with it, and the rest of it would never run."""
    end = await end_of(start(graph, durability=durability))

    assert (end.kind, end.interrupts) == (EndKind.INTERRUPTED, interrupts)


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("checkpoints", f"NEW.checkpoint_ns <> '' AND {OF_A_STEP}"),
        ("checkpoint_writes", "NEW.checkpoint_ns <> '' AND NEW.channel = '__interrupt__'"),
    ],
)
async def test_a_run_has_failed_that_asks_in_a_subgraph_which_could_not_be_saved(
    start: Start, onlooker: Onlooker, durability: Any, table: str, rows: str
):
    """LangGraph drops the error for the question's sake, and the answer would meet a subgraph that begins anew."""

    async def ask(_: State) -> State:
        return {"answer": interrupt("12 orders?")}

    refuse(onlooker, table, rows)
    subgraph = graph_of(one=step("one"), two=ask).compile()

    end = await end_of(start(graph_of(below=subgraph), durability=durability))

    assert (end.kind, "disk full" in str(end.error)) == (EndKind.RAISED, True)


async def test_a_run_has_failed_that_asks_in_a_subgraph_whose_state_cannot_be_turned_into_bytes(
    start: Start,
):
    """That comes to nothing before anything is sent, and is dropped as well."""

    async def one(_: State) -> State:
        return {"done": [cast("Any", threading.Lock())]}

    async def ask(_: State) -> State:
        return {"answer": interrupt("12 orders?")}

    subgraph = graph_of(one=one, two=ask).compile()

    end = await end_of(start(graph_of(below=subgraph), durability="async"))

    assert (end.kind, type(end.error)) == (EndKind.RAISED, TypeError)


async def test_a_run_has_failed_that_drains_in_a_subgraph_after_a_save_that_failed(
    start: Start, onlooker: Onlooker, gate: Gate
):
    """It would be handed off as one that goes on where it stopped, and do what it had done again."""
    refuse(onlooker, "checkpoints", f"NEW.checkpoint_ns = '' AND {OF_A_STEP}")
    subgraph = graph_of(two=gate.sync_node, three=step("three")).compile()
    run = start(graph_of(one=step("one"), below=subgraph), durability="async")
    await gate.arrive()
    run.drain("shutdown")
    gate.open.set()

    end = await end_of(run)

    assert (end.kind, "disk full" in str(end.error)) == (EndKind.RAISED, True)


async def test_a_subgraphs_save_that_failed_may_be_the_graphs_affair(start: Start, onlooker: Onlooker):
    """A node that runs the subgraph itself, and knows how to do without it."""
    refuse(onlooker, "checkpoints", f"NEW.checkpoint_ns <> '' AND {OF_A_STEP}")
    subgraph = graph_of(one=step("one"), two=step("two")).compile()

    async def below(state: State) -> State:
        with pytest.raises(DatabaseError, match="disk full"):
            await subgraph.ainvoke(state)
        return {"done": ["without"]}

    end = await end_of(start(graph_of(below=below)))

    assert end == RunEnd(EndKind.FINISHED, 1)


async def test_a_run_that_is_cut_off_writes_nothing_more(start: Start, onlooker: Onlooker, gate: Gate):
    """Its hold is gone: from that moment no checkpoint lands and no further node starts."""
    ran = threading.Event()

    def two(_: State) -> State:
        ran.set()
        return {}

    run = start(graph_of(one=gate.sync_node, two=two))
    await gate.arrive()
    run.cut_off("the lock was lost")
    written = (
        onlooker.value("SELECT count(*) FROM checkpoints"),
        onlooker.value("SELECT count(*) FROM checkpoint_writes"),
    )
    gate.open.set()

    end = await end_of(run)

    assert isinstance(end.error, CutOff)
    assert not ran.is_set()
    assert written == (
        onlooker.value("SELECT count(*) FROM checkpoints"),
        onlooker.value("SELECT count(*) FROM checkpoint_writes"),
    )


async def test_a_run_that_is_cut_off_still_tells_its_own_error(start: Start, gate: Gate):
    """That a checkpoint was refused is a consequence of the loss; that the feed is down is news."""
    gate.error = RuntimeError("supplier feed down")
    run = start(graph_of(one=gate.sync_node))
    await gate.arrive()
    run.cut_off("the lock was lost")
    gate.open.set()

    end = await end_of(run)

    assert str(end.error) == "supplier feed down"


async def test_while_news_of_the_hold_is_unread_no_step_begins(start: Start):
    """The news may be that the hold is lost; whoever reads it says so, or the doubt is over."""
    doubt = threading.Event()
    doubt.set()
    run = start(graph_of(one=step("one")), in_doubt=doubt.is_set)
    done, _ = await asyncio.wait({run.ended}, timeout=0.2)
    assert not done

    doubt.clear()

    assert (await end_of(run)).kind is EndKind.FINISHED


async def test_an_input_is_made_from_the_tick(start: Start):
    """By a function or a coroutine function; what it raises is the run's failure."""

    async def made(tick: Tick) -> State:
        return {"answer": str(tick)}

    def fails(_: Tick) -> State:
        raise ValueError("no stock")

    async def node(state: State) -> State:
        return {"done": [state["answer"]]}

    assert (await end_of(start(graph_of(one=node), make_input=made))).kind is EndKind.FINISHED
    assert (
        await end_of(start(graph_of(one=node), second=1, make_input=lambda tick: {"answer": str(tick)}))
    ).kind is EndKind.FINISHED
    end = await end_of(start(graph_of(one=node), second=2, make_input=fails))
    assert (end.kind, str(end.error)) == (EndKind.RAISED, "no stock")


async def test_a_pool_without_a_connection_fails_the_run_and_not_the_next(start: Start, onlooker: Onlooker):
    """D5: everybody waits for a connection only so long, and says how long that was."""
    with onlooker.connection.transaction():
        onlooker.connection.execute("LOCK TABLE checkpoints")
        holding = [start(graph_of(one=step("one")), second=second) for second in range(2)]
        await onlooker.until(lambda: onlooker.value("SELECT count(*) = 2 FROM pg_locks WHERE NOT granted"))
        starved = await end_of(start(graph_of(one=step("one")), second=2))

    assert starved.kind is EndKind.RAISED
    assert isinstance(starved.error, PoolTimeout)
    assert "couldn't get a connection after 0.40 sec" in str(starved.error)
    assert [(await end_of(run)).kind for run in holding] == [EndKind.FINISHED] * 2
    assert (await end_of(start(graph_of(one=step("one")), second=3))).kind is EndKind.FINISHED


SHOP = """
import anyio
import asyncio
from contextlib import asynccontextmanager
from tests.played import graph_of, step

closed = []
broke_down = asyncio.Event()

@asynccontextmanager
async def anyios():
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        yield graph_of(one=step("one"))
        group.cancel_scope.cancel()

@asynccontextmanager
async def broken():
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(lose_the_feed())
            yield graph_of(one=step("one"))
    finally:
        broke_down.set()

async def lose_the_feed():
    raise ConnectionError("the feed is gone")

@asynccontextmanager
async def silent():
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        yield graph_of(one=step("one"))

@asynccontextmanager
async def clumsy():
    yield graph_of(one=step("one"))
    raise OSError("disk full")

@asynccontextmanager
async def sound():
    yield graph_of(one=step("one"))
    closed.append("sound")

@asynccontextmanager
async def patient():
    await broke_down.wait()
    yield graph_of(one=step("one"))
    closed.append("patient")

async def cancelled():
    raise asyncio.CancelledError

async def interrupted():
    raise KeyboardInterrupt("stop that")

nothing = None
"""


@dataclass(slots=True)
class Shop:
    """A module of graphs, each called like its factory, and what was said of them."""

    directory: Path
    warnings: asyncio.Queue[tuple[str, str]]

    async def load(self, graphs: GraphThread, *names: str) -> list[str]:
        """Load these graphs and return the names of those that are loaded."""
        references = [Reference(name, f"./shop.py:{name}") for name in names]
        async with asyncio.timeout(10):
            return list(await graphs.load(references, self.directory, self.warn))

    def warn(self, graph: str, warning: str) -> None:
        """Take a warning."""
        self.warnings.put_nowait((graph, warning))

    async def warning(self) -> tuple[str, str]:
        """Return the next warning, once there is one."""
        async with asyncio.timeout(10):
            return await self.warnings.get()

    @property
    def closed(self) -> list[str]:
        """The graphs whose factories have been left in order."""
        (module,) = (m for m in tuple(sys.modules.values()) if getattr(m, "__file__", "") == str(self.path))
        closed: list[str] = module.closed
        return closed

    @property
    def path(self) -> Path:
        """The module's file."""
        return self.directory.resolve() / "shop.py"


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """The module, not yet imported."""
    (tmp_path / "shop.py").write_text(SHOP)
    return Shop(tmp_path, asyncio.Queue())


async def test_what_a_factory_opened_is_closed_by_the_task_that_opened_it(dsn: str, shop: Shop):
    """Clients built on anyio (MCP sessions among them) refuse to be left by another task than the one that entered."""
    async with graph_thread(place_of(dsn)) as graphs:
        assert await shop.load(graphs, "anyios", "sound") == ["anyios", "sound"]

    assert shop.closed == ["sound"]
    assert shop.warnings.empty()


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "ConnectionError: the feed is gone"), ("silent", "it ended by itself")]
)
async def test_a_graph_whose_clients_break_down_takes_no_other_with_it(
    dsn: str, shop: Shop, name: str, said: str
):
    """Its task group cancels the task it is in, and the clients of all graphs were closed without a word."""
    async with graph_thread(place_of(dsn)) as graphs:
        await shop.load(graphs, "sound", name)
        graph, warning = await shop.warning()

        assert shop.closed == []
        assert (graph, said in warning, "restart this replica" in warning) == (name, True, True)

    assert shop.closed == ["sound"]
    assert shop.warnings.empty()


async def test_a_graph_that_breaks_down_while_another_is_loaded_does_not_stop_the_loading(
    dsn: str, shop: Shop
):
    """The other factory was cancelled in its place, and the replica waited for ever to be ready."""
    async with graph_thread(place_of(dsn)) as graphs:
        assert await shop.load(graphs, "broken", "patient") == ["broken", "patient"]
        assert (await shop.warning())[0] == "broken"
        assert shop.closed == []

    assert shop.closed == ["patient"]


async def test_whatever_a_factory_raises_is_said_of_its_graph_and_the_others_are_closed(dsn: str, shop: Shop):
    """All faults together; a cancellation or an interrupt, which nobody asked for, is one as well."""
    async with graph_thread(place_of(dsn)) as graphs:
        with pytest.raises(Unusable) as refused:
            await shop.load(graphs, "sound", "cancelled", "interrupted")
        await graphs.answer()

        assert [line.partition(" (")[0] for line in str(refused.value).splitlines()] == [
            "graph cancelled: its factory raised CancelledError",
            "graph interrupted: its factory raised KeyboardInterrupt: stop that",
        ]
        assert shop.closed == ["sound"]


async def test_a_graph_that_cannot_be_closed_is_named_and_the_others_are(dsn: str, shop: Shop):
    """What goes wrong in the last second must neither keep the others open nor end the replica with a traceback."""
    async with graph_thread(place_of(dsn)) as graphs:
        await shop.load(graphs, "clumsy", "sound")

    graph, warning = await shop.warning()
    assert (graph, warning.partition(" (")[0]) == (
        "clumsy",
        "what its factory held open could not be closed: OSError: disk full",
    )
    assert shop.closed == ["sound"]


async def test_a_graph_that_cannot_be_loaded_leaves_nothing_open(dsn: str, shop: Shop):
    """The refusal comes out of load(), and the thread can be closed as ever."""
    async with graph_thread(place_of(dsn)) as graphs:
        with pytest.raises(Unusable, match="is of type NoneType"):
            await shop.load(graphs, "nothing")


async def test_after_the_close_nothing_is_left(dsn: str, onlooker: Onlooker):
    """Neither a thread nor a connection."""
    async with graph_thread(place_of(dsn)):
        await onlooker.until(lambda: onlooker.sessions("tickd/a"))
        assert [thread for thread in threading.enumerate() if thread.name == "tickd-graphs"]

    assert not [thread for thread in threading.enumerate() if thread.name == "tickd-graphs"]
    await onlooker.until(lambda: not onlooker.sessions("tickd/a"))
