"""A holder that is killed, and one whose session is ended: the lock is free at once, and nobody writes twice."""

import signal
from datetime import timedelta

import pytest

from tests.replicas import Fleet, Line
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos

LOCK_HOLDERS = """
SELECT l.pid, a.application_name
FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = 7301 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
TERMINATE = "SELECT pg_terminate_backend(%(pid)s)"


def in_a_run_of_a(fleet: Fleet, seconds: float) -> Line:
    """Start a, let it begin a run, and only then start b; return a's line about the run."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": seconds}}}
    )
    started = fleet.start("a", schedule).wait_for("tick.started")
    fleet.start("b", schedule).wait_for("tick.skipped", reason="lock_held", holder="a")
    return started


def test_a_killed_holder_frees_its_graph_for_the_very_next_tick(fleet: Fleet, witness: Witness):
    """C15: No lease has to run out: the lock is a session's, and the kernel closes a dead process's sockets."""
    abandoned = in_a_run_of_a(fleet, seconds=60)
    a, b = fleet.replicas

    killed_at = witness.now()
    a.kill()
    witness.bury("a", killed_at)
    started = b.wait_for("tick.started", timeout=5)

    assert a.process.returncode == -signal.SIGKILL
    # The first tick that came due when the dead session was gone; a server on a busy machine may take a moment.
    assert parse_instant(started["fire_time"]) - killed_at < timedelta(seconds=1.5)
    assert started["token"] > abandoned["token"]
    assert started["fire_time"] != abandoned["fire_time"]
    left = b.wait_for("tick.abandoned", timeout=10)
    assert {key: left[key] for key in ("graph", "fire_time", "holder")} == {
        "graph": "restock",
        "fire_time": abandoned["fire_time"],
        "holder": "a",
    }
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_an_ended_session_stops_its_run_and_frees_its_graph(fleet: Fleet, witness: Witness):
    """An administrator, a fail-over or a time-out ends sessions; the run must not go on as if it still had the lock."""
    in_a_run_of_a(fleet, seconds=60)
    a, b = fleet.replicas
    ((pid, name),) = witness.query(LOCK_HOLDERS)
    assert name == "tickd/a"

    ended_at = witness.now()
    witness.query(TERMINATE, pid=pid)
    lost = a.wait_for("tick.lock_lost", timeout=2)
    assert lost["cause"] == "session_ended"
    # Either of them may have the next tick.
    while len(runs := witness.runs()) < 2:
        b.wait_for_terminal(len(b.terminal_lines()) + 1)

    assert runs[1].fire_time - ended_at < timedelta(seconds=2)
    assert a.events("tick.ran") == []
    assert a.process.poll() is None
    assert (witness.overlaps(), witness.repeats()) == ([], [])
