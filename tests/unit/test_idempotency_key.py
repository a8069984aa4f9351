"""Idempotency keys: the same whenever a node of a tick is run again, and different for everything else."""

import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from tickd.effects import idempotency_key


class State(TypedDict, total=False):
    """The keys that the nodes got."""

    keys: Annotated[list[str], operator.add]


def config(graph: str = "restock", fire_time: str = "2026-05-04T10:00:00Z", thread: str = "t") -> Any:
    """Return the config of a run, as far as keys hang on it."""
    return {
        "configurable": {"thread_id": thread},
        "metadata": {"tickd_graph": graph, "tickd_fire_time": fire_time},
    }


def keyed(_: Any, config: RunnableConfig) -> State:
    """Get a key, as a node."""
    return {"keys": [idempotency_key(config, "charge")]}


def graph(*names: str, node: Any = keyed) -> Any:
    """Return the builder of a chain of nodes."""
    builder: Any = StateGraph(State)
    last = START
    for name in names:
        builder.add_node(name, node)
        builder.add_edge(last, name)
        last = name
    return builder


async def keys_of(builder: Any, run: Any = None, *, saver: Any = None, durability: Any = "sync") -> list[str]:
    """Run a graph and return the keys that its nodes got."""
    compiled = builder.compile(checkpointer=saver or InMemorySaver())
    result = await compiled.ainvoke({"keys": []}, run or config(), durability=durability)
    return list(result["keys"])


async def test_a_key_never_changes_between_versions_of_tickd():
    """A tick that failed under one version may be run again under the next."""
    assert await keys_of(graph("pay")) == ["afbcc211-7c5e-519b-bd68-810952f527b2"]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_a_run_from_the_beginning_has_the_same_keys(durability):
    """A replica was killed before anything was saved, and the next attempt begins anew."""
    assert await keys_of(graph("a", "b"), durability=durability) == await keys_of(graph("a", "b"))


async def test_nodes_steps_graphs_ticks_and_names_have_keys_of_their_own():
    """Whatever is a different effect must not be taken for one that was done."""
    builder = graph("a", "b")
    builder.add_conditional_edges("b", lambda state: "a" if len(state["keys"]) < 6 else "__end__")

    def named(_: Any, config: RunnableConfig) -> State:
        return {"keys": [idempotency_key(config, *name) for name in ((), ("1",), (1,), ("x", "y"), ("x/y",))]}

    keys = await keys_of(builder)
    keys += await keys_of(graph("a"), config(graph="pack_audit"))
    keys += await keys_of(graph("a"), config(fire_time="2026-05-04T10:05:00Z"))
    keys += await keys_of(graph("a", node=named))

    assert len(keys) == 6 + 1 + 1 + 5
    assert len(set(keys)) == len(keys)


async def test_the_thread_does_not_matter_and_its_age_does_not_either():
    """A thread that lives on counts its steps further; a tick on it is still told apart by its fire time alone."""
    assert await keys_of(graph("a"), config(thread="other")) == await keys_of(graph("a"))


async def test_each_call_of_a_fan_out_has_a_key_of_its_own():
    """Ten customers are charged by one node in one super-step."""
    builder: Any = StateGraph(State)
    builder.add_node("pay", keyed)
    builder.add_conditional_edges(START, lambda _: [Send("pay", {}) for _ in range(10)], ["pay"])

    keys = await keys_of(builder)

    assert len(set(keys)) == 10
    assert sorted(keys) == sorted(await keys_of(builder, durability="exit"))


async def test_each_call_of_a_subgraph_has_a_key_of_its_own():
    """A subgraph counts its steps from the start each time, in a loop as well as side by side."""
    seen: list[str] = []

    def pays(_: Any, config: RunnableConfig) -> State:
        seen.append(idempotency_key(config))
        return {"keys": []}

    builder: Any = StateGraph(State)
    builder.add_node("sub", graph("pay", node=pays).compile())
    builder.add_conditional_edges(START, lambda _: [Send("sub", {"keys": []}) for _ in range(3)], ["sub"])
    builder.add_conditional_edges("sub", lambda _: "sub" if len(seen) < 5 else "__end__")

    await keys_of(builder)

    assert len(seen) == len(set(seen)) == 5


async def test_a_subgraph_that_is_run_again_has_the_same_keys():
    """The calling node's checkpoint was saved, so the next run goes on from it."""
    seen: list[str] = []

    def breaks(_: Any, config: RunnableConfig) -> State:
        seen.append(idempotency_key(config))
        if len(seen) == 1:
            raise RuntimeError("cut off")
        return {"keys": []}

    builder = graph("sub", node=graph("first", "second", node=breaks).compile())
    compiled = builder.compile(checkpointer=InMemorySaver())
    with pytest.raises(RuntimeError):
        await compiled.ainvoke({"keys": []}, config(), durability="sync")
    await compiled.ainvoke(None, config(), durability="sync")

    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("durability", ["async", "exit", None])
async def test_in_a_subgraph_a_key_that_may_change_is_refused(durability):
    """The calling node's checkpoint might not have been saved; a key that changes would let a payment go out twice."""
    builder = graph("sub", node=graph("pay").compile())
    with pytest.raises(ValueError, match="set `durability: sync` for the graph"):
        await keys_of(builder, durability=durability)


async def test_tasks_of_a_functional_graph_have_keys_by_the_order_of_their_calls():
    """They are called from one node in one super-step; LangGraph counts the calls."""

    @task
    async def pay(number: int, config: RunnableConfig) -> str:
        return idempotency_key(config, number)

    @task
    async def mail(number: int, config: RunnableConfig) -> str:
        return idempotency_key(config, number)

    def workflow(saver: Any) -> Any:
        @entrypoint(checkpointer=saver)
        async def run(_: Any) -> list[str]:
            return [await pay(1), await pay(1), await mail(1), await pay(2)]

        return run

    keys = await workflow(InMemorySaver()).ainvoke(1, config())

    assert len(set(keys)) == 4
    assert await workflow(InMemorySaver()).ainvoke(1, config()) == keys


async def test_outside_of_tickd_there_is_no_key():
    """A key that hangs on nothing would be a new one each time."""
    outside = {"configurable": {"thread_id": "t"}}
    with pytest.raises(RuntimeError, match="effects belong to a tick"):
        await keys_of(graph("pay"), outside)
