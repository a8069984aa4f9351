"""Graphs whose nodes write down when they began and ended, straight into the test's database.

The rows go over a connection of their own, as superuser (WITNESS_DSN), so that neither a fault that a test injects
into tickd's connections nor a limit on tickd's role can silence the witness.
"""

import asyncio
import atexit
import operator
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, LiteralString, NotRequired, TypedDict

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


BEGIN = """
INSERT INTO witness.node_run (graph, fire_time, attempt, replica, token, thread_id, node, pid, entered)
VALUES (%(graph)s, %(fire_time)s, %(attempt)s, %(replica)s, %(token)s, %(thread_id)s, %(node)s, %(pid)s, %(entered)s)
RETURNING id
"""
END_ = "UPDATE witness.node_run SET ended = clock_timestamp() WHERE id = %(id)s"

_connection: psycopg.Connection | None = None
_turn = threading.Lock()


class State(TypedDict):
    """What the schedule's `input` may set, and what the nodes leave behind."""

    seconds: NotRequired[float]
    steps: NotRequired[int]
    done: NotRequired[int]
    answer: NotRequired[str]


class Log(TypedDict):
    """A state that grows with every run of its thread."""

    log: Annotated[list[str], operator.add]


@contextmanager
def witnessed(config: RunnableConfig, node: str) -> Iterator[None]:
    """Write one row around a node: its begin now, its end when the block is left, however that happens."""
    tick = {
        key.removeprefix("tickd_"): value
        for key, value in config["metadata"].items()
        if key.startswith("tickd_")
    }
    row = {
        "graph": None,
        "fire_time": None,
        "attempt": None,
        "replica": None,
        "token": None,
        **tick,
        "thread_id": config["configurable"]["thread_id"],
        "node": node,
        "pid": os.getpid(),
        # A process that is stopped right here writes its row when it goes on.
        "entered": datetime.now(UTC),  # noqa: TID251  # the host's clock, whatever a test makes of it
    }
    (row_id,) = _write(BEGIN, row)
    try:
        yield
    finally:
        _write(END_, {"id": row_id})


def _write(statement: LiteralString, values: dict[str, Any]) -> tuple[Any, ...]:
    # One connection per process, at 0.2 ms a row: connecting anew would make the shortest graph fifty times longer.
    global _connection  # noqa: PLW0603  # a connection per process is the point
    with _turn:
        for _ in range(2):
            if _connection is None or _connection.closed:
                _connection = _connect()
            try:
                cursor = _connection.execute(statement, values)
            except psycopg.OperationalError:
                # The server was restarted under the test: the connection is good for one such surprise.
                _connection.close()
                continue
            return cursor.fetchone() or () if cursor.description else ()
        raise RuntimeError("the witness cannot write")


def _connect() -> psycopg.Connection:
    # Where slots run out, whoever is still proving a password has one, even of those reserved for superusers.
    for _ in range(100):
        try:
            return psycopg.connect(os.environ["WITNESS_DSN"], autocommit=True)
        except psycopg.OperationalError as error:
            if "too many clients" not in str(error):
                raise
            threading.Event().wait(0.05)
    raise RuntimeError("no slot for the witness")


@atexit.register
def _leave() -> None:
    if _connection is not None:
        _connection.close()


async def pause(seconds: float) -> None:
    """Wait as a node that awaits a model does: the loop runs on, and a cancellation gets through."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        return


def one_node(name: str, node: Any, state: type[Any] = State) -> "StateGraph[Any]":
    """Return a graph of this one node."""
    builder = StateGraph(state)
    builder.add_node(name, node)
    builder.add_edge(START, name)
    builder.add_edge(name, END)
    return builder


async def _quick(_state: State, config: RunnableConfig) -> State:
    with witnessed(config, "quick"):
        return {}


async def _slow(state: State, config: RunnableConfig) -> State:
    with witnessed(config, "slow"):
        await pause(state["seconds"])
        return {}


async def _step(state: State, config: RunnableConfig) -> State:
    done = state.get("done", 0) + 1
    with witnessed(config, f"step_{done}"):
        await pause(state["seconds"])
        return {"done": done}


def _next_step(state: State) -> str:
    return "step" if state["done"] < state["steps"] else END


def _sync_sleep(state: State, config: RunnableConfig) -> State:
    with witnessed(config, "sync_sleep"):
        threading.Event().wait(state["seconds"])
        return {}


async def _blocking(state: State, config: RunnableConfig) -> State:
    with witnessed(config, "blocking"):
        threading.Event().wait(state["seconds"])
        return {}


async def _failing(_state: State, config: RunnableConfig) -> State:
    with witnessed(config, "failing"):
        raise RuntimeError("supplier feed down")


async def _interrupting(_state: State, config: RunnableConfig) -> State:
    with witnessed(config, "interrupting"):
        return {"answer": interrupt("approve?")}


async def _accumulating(_state: Log, config: RunnableConfig) -> Log:
    with witnessed(config, "accumulating"):
        return {"log": ["one item"]}


class HostileError(Exception):
    """An error that breaks every log that is careless with text: it spans lines, and does not survive repr or UTF-8."""

    def __init__(self) -> None:
        super().__init__('first\nsecond\r\nthird\u2028fourth\x00\x1b[31m\ud800 {"event": "forged"}')
        self.add_note("a note\nof two lines")

    def __repr__(self) -> str:
        raise ValueError("no repr either")


async def _hostile(_state: State, config: RunnableConfig) -> State:
    with witnessed(config, "hostile"):
        raise HostileError


quick = one_node("quick", _quick)
slow = one_node("slow", _slow)
sync_sleep = one_node("sync_sleep", _sync_sleep)
blocking = one_node("blocking", _blocking)
failing = one_node("failing", _failing)
interrupting = one_node("interrupting", _interrupting)
accumulating = one_node("accumulating", _accumulating, Log)
hostile = one_node("hostile", _hostile)

steps = StateGraph(State)
steps.add_node("step", _step)
steps.add_edge(START, "step")
steps.add_conditional_edges("step", _next_step)
