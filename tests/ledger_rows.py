"""The ledger and the threads of a test's database, as they stand, and waits for what they come to."""

import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from langgraph.checkpoint.postgres import PostgresSaver

from tests.witness import Witness


FALLIBLE = Path(__file__).parent / "graphs" / "fallible.py"
POLL_SECONDS = 0.05

TICKS = """
SELECT graph, fire_time, mode, attempt, failures, replica, outcome, error_type, thread_id, ready_at, lease_until
FROM tickd.ticks
WHERE graph = coalesce(%(graph)s, graph)
ORDER BY graph, fire_time
"""
OPEN = """
SELECT graph, fire_time, attempt, replica
FROM tickd.ticks
WHERE graph = coalesce(%(graph)s, graph) AND fire_time <= coalesce(%(until)s, 'infinity'::timestamptz)
  AND (outcome IS NULL OR outcome = 'handed_off')
ORDER BY graph, fire_time
"""


def ticks(witness: Witness, graph: str | None = None) -> list[Any]:
    """Return the ledger's rows, of one graph or of all."""
    return witness.query(TICKS, graph=graph)


def fates(witness: Witness, graph: str) -> dict[datetime, tuple[str | None, str | None]]:
    """Return what became of each tick of a graph: its outcome, and the error's type or the reason of its skip."""
    return {row.fire_time: (row.outcome, row.error_type) for row in ticks(witness, graph)}


def open_ticks(witness: Witness, graph: str | None = None, until: datetime | None = None) -> list[Any]:
    """Return the ticks that have not come to their end, of one graph or of all, up to a fire time or all."""
    return witness.query(OPEN, graph=graph, until=until)


def wait_for_row(witness: Witness, graph: str, wanted: Callable[[Any], bool], *, timeout: float = 30) -> Any:
    """Return the graph's first row that is as wanted, once there is one; fails at the timeout (seconds)."""
    deadline = time.monotonic() + timeout
    while True:
        rows = ticks(witness, graph)
        for row in rows:
            if wanted(row):
                return row
        assert time.monotonic() < deadline, f"no such row of {graph}: {rows}"
        threading.Event().wait(POLL_SECONDS)


def wait_until_ended(
    witness: Witness, graph: str | None = None, *, until: datetime | None = None, timeout: float = 60
) -> None:
    """Return once no tick is open, of one graph or of all, up to a fire time or all; fails at the timeout (seconds)."""
    deadline = time.monotonic() + timeout
    while rows := open_ticks(witness, graph, until):
        assert time.monotonic() < deadline, f"{len(rows)} ticks are open: {rows[:20]}"
        threading.Event().wait(POLL_SECONDS)


def state_of(witness: Witness, thread_id: str) -> dict[str, Any]:
    """Return the values of the thread's newest checkpoint."""
    with PostgresSaver.from_conn_string(witness.dsn) as saver:
        found = saver.get_tuple({"configurable": {"thread_id": thread_id}})
    assert found is not None, f"the thread {thread_id} has no checkpoint"
    values: dict[str, Any] = found.checkpoint["channel_values"]
    return values
