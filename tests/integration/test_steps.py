"""How many super-steps a run took, as the fenced saver counts them, in every durability mode."""

from typing import Any

import pytest
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.runtime import RunControl
from langgraph.types import Command, interrupt

from tests.fences import THREAD, State, admit, config, connect, open_pool, prepare, run, saver


RUN_ID = "11111111-1111-1111-1111-111111111111"

pytestmark = pytest.mark.parametrize("durability", ["sync", "async", "exit"])


@pytest.fixture
async def pool(dsn: str):
    """The pool of a holder of the thread, under token 5."""
    await prepare(dsn)
    async with await connect(dsn) as connection, open_pool(dsn) as pool:
        await admit(connection, 5)
        yield pool


def chain(**nodes: Any) -> Any:
    """Return the builder of a chain of these nodes."""
    builder: Any = StateGraph(State)
    last = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(last, name)
        last = name
    return builder


def leaves(mark: str) -> Any:
    """Return a node that leaves its mark."""
    return lambda _: {"seen": [mark]}


async def test_a_thread_that_lives_on_changes_nothing(pool, durability):
    """An operator reads them in the log, and compares one tick with another."""
    counts = []
    for steps in (3, 1, 4):
        held = saver(pool, 5)
        await run(held, steps=steps, durability=durability)
        counts.append(held.steps)

    assert counts == [3, 1, 4]


async def test_two_runs_with_one_saver_add_up(pool, durability):
    """Whoever holds a graph by hand may well run it twice."""
    held = saver(pool, 5)
    for _ in range(2):
        await run(held, steps=3, durability=durability)

    assert held.steps == 6


async def test_a_new_thread_after_a_look_at_an_old_one(pool, durability):
    """What was read of one thread is nothing to start from on another."""
    await run(saver(pool, 5), steps=6, durability=durability)
    held = saver(pool, 5)
    assert await held.aget_tuple(config()) is not None

    await run(held, "new", steps=2, durability=durability)

    assert held.steps == 2


async def test_a_run_that_is_continued_counts_from_where_it_was(pool, durability):
    """A tick that was handed off is reported by two replicas, each with its own part."""
    control = RunControl()

    def drains(_: State) -> State:
        control.request_drain("test")
        return {"seen": ["b"]}

    graph = chain(a=leaves("a"), b=drains, c=leaves("c"), d=leaves("d"), e=leaves("e"))
    run_config = {"configurable": {"thread_id": THREAD, "run_id": RUN_ID}}
    first, second = saver(pool, 5), saver(pool, 5)

    with pytest.raises(Exception, match="test"):
        await graph.compile(checkpointer=first).ainvoke(
            {"seen": []}, run_config, durability=durability, control=control
        )
    result = await graph.compile(checkpointer=second).ainvoke(None, run_config, durability=durability)

    assert result == {"seen": ["a", "b", "c", "d", "e"]}
    assert (first.steps, second.steps) == (2, 3)


async def test_a_node_that_waits_for_an_answer_counts_when_it_has_it(pool, durability):
    """The node has not finished its super-step; answered, it is run again."""
    graph = chain(a=leaves("a"), asks=lambda _: {"seen": [interrupt("sure?")]}, c=leaves("c"))
    run_config = {"configurable": {"thread_id": THREAD, "run_id": RUN_ID}}
    first, second = saver(pool, 5), saver(pool, 5)

    await graph.compile(checkpointer=first).ainvoke({"seen": []}, run_config, durability=durability)
    await graph.compile(checkpointer=second).ainvoke(Command(resume="yes"), run_config, durability=durability)

    assert (first.steps, second.steps) == (1, 2)


async def test_a_graph_that_fails_counts_what_it_finished(pool, durability):
    """A failed tick says how far it came."""

    def fails(_: State) -> State:
        raise RuntimeError("supplier feed down")

    held = saver(pool, 5)
    with pytest.raises(RuntimeError):
        await (
            chain(a=leaves("a"), b=leaves("b"), c=fails)
            .compile(checkpointer=held)
            .ainvoke({"seen": []}, config(), durability=durability)
        )

    assert held.steps == 2


async def test_a_functional_graph_is_one_step(pool, durability):
    """A graph made with @entrypoint has no pseudo-node for its input, and is one super-step however many tasks it has."""
    held = saver(pool, 5)

    @task
    async def double(number: int) -> int:
        return number * 2

    @entrypoint(checkpointer=held)
    async def workflow(number: int) -> int:
        return await double(await double(number))

    assert await workflow.ainvoke(1, config(), durability=durability) == 4
    assert held.steps == 1
