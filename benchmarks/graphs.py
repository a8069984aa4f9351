"""The graph that tickd and its floors run: one async node that bears witness, and sleeps where the plan says so."""

import asyncio
import os
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

from benchmarks.plan import Witness, read_plan, seconds_of


class State(TypedDict, total=False):
    """What the node leaves behind."""

    note: str


PLAN = read_plan()
WITNESS = Witness(PLAN.home, os.environ["BENCHMARK_REPLICA"])


async def note(state: State, config: RunnableConfig) -> dict[str, Any]:  # noqa: ARG001  # LangGraph's signature
    """Witness the start, work for as long as the plan says, and change the state."""
    tick = config["metadata"]
    WITNESS.started(tick["tickd_graph"], seconds_of(tick["tickd_fire_time"]))
    if PLAN.seconds:
        await asyncio.sleep(PLAN.seconds)
    return {"note": tick["tickd_fire_time"]}


graph = StateGraph(State).add_node(note).add_edge(START, "note").add_edge("note", END).compile()
