"""A resumed run finds its own models again, also when LangGraph is told to bring back nothing that is not listed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fences import prepare
from tests.replicas import python_path


SCHEDULE = "graphs:\n  orders:\n    graph: ./orders.py:graph\n    every: 1d\n"
ORDERS = """
from typing import TypedDict

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel


class Order(BaseModel):
    item: str


class State(TypedDict, total=False):
    order: Order
    answer: str


def make(state):
    return {"order": Order(item="rice")}


def ask(state):
    answer = interrupt("approve?")
    if type(state["order"]) is not Order:
        raise TypeError(f"the order came back as {type(state['order']).__name__}")
    return {"answer": answer}


graph = StateGraph(State)
graph.add_node("make", make)
graph.add_node("ask", ask)
graph.add_edge(START, "make")
graph.add_edge("make", "ask")
"""


def run(folder: Path, dsn: str, strict: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one command of tickd in the folder."""
    environment = {
        "TICKD_DATABASE_URL": dsn,
        "PATH": "/usr/bin:/bin",
        "LANGGRAPH_STRICT_MSGPACK": strict,
        **python_path(),
    }
    return subprocess.run(
        [sys.executable, "-m", "tickd", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("compiled", ["graph", "graph = graph.compile()"])
async def test_models_come_back_as_models(dsn: str, tmp_path: Path, compiled: str):
    """D11: The flag is a safety measure; it must not turn a state into something its graph does not know."""
    await prepare(dsn)
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "orders.py").write_text(ORDERS + compiled + "\n")

    fired = run(tmp_path, dsn, "true", "fire", "orders")
    assert "interrupted" in fired.stdout, fired.stderr
    fire_time = fired.stdout.split()[0].removeprefix("orders/")
    resumed = run(tmp_path, dsn, "true", "resume-tick", "orders", fire_time, "--value", '"yes"')

    assert resumed.returncode == 0, resumed.stderr
    assert " ran in " in resumed.stdout
    assert "Blocked deserialization" not in resumed.stderr
