"""A graph of nodes a and b that hangs on one replica, or fails on its first attempts, as its input says."""

import builtins
import operator
from typing import Annotated, Any, NotRequired, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from tests.graphs.witnessed import pause, witnessed


FOR_EVER = 300


class Log(TypedDict):
    """What the nodes have done, and what is to happen in them; `hang` is `replica/node`."""

    log: Annotated[list[str], operator.add]
    seconds: NotRequired[float]
    hang: NotRequired[str]
    fail: NotRequired[str]
    fails: NotRequired[int]
    error: NotRequired[str]


def _node(name: str) -> Any:
    async def node(state: Log, config: RunnableConfig) -> dict[str, Any]:
        tick = config["metadata"]
        with witnessed(config, name):
            if state.get("hang") == f"{tick['tickd_replica']}/{name}":
                await pause(FOR_EVER)
            await pause(state.get("seconds", 0))
            if state.get("fail") == name and tick["tickd_attempt"] <= state.get("fails", 0):
                raise getattr(builtins, state.get("error", "RuntimeError"))("supplier feed down")
            return {"log": [name]}

    return node


async def _ask(_state: Log, config: RunnableConfig) -> dict[str, Any]:
    with witnessed(config, "ask"):
        return {"log": [interrupt("approve?")]}


def _chain(**nodes: Any) -> "StateGraph[Any]":
    builder: Any = StateGraph(Log)
    previous = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(previous, name)
        previous = name
    builder.add_edge(previous, END)
    return builder  # type: ignore[no-any-return]  # it is one


letters = _chain(a=_node("a"), b=_node("b"))
question = _chain(a=_node("a"), ask=_ask, b=_node("b"))
