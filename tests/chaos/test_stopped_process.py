"""A process that stands still (SIGSTOP, a suspended machine, a starved container) and goes on as if nothing had been."""

import signal

import pytest

from tests.holds import terminate, written
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_a_holder_that_was_stopped_goes_no_further_once_another_has_started(fleet: Fleet, witness: Witness):
    """It comes back in the middle of a node, or of a write; no node follows, and nothing of it is written any more."""
    restock = {"graph": f"{GRAPHS}:steps", "every": "1s", "input": {"seconds": 0.02, "steps": 2000}}
    schedule = fleet.schedule({"restock": restock})
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    for _ in range(5):
        old = witness.wait_for_begin("restock", "step_5", after=witness.last())
        stopped = fleet.named(old.replica)
        stopped.signal(signal.SIGSTOP)
        terminate(witness, "restock")
        new = witness.wait_for_begin("restock", "step_1", after=witness.last())
        assert new.replica != old.replica
        before = written(witness, old.thread_id)

        stopped.signal(signal.SIGCONT)
        stopped.wait_for("tick.lock_lost", token=old.token, cause="session_ended")

        assert written(witness, old.thread_id) == before
        nodes = [row for row in witness.nodes() if row.token == old.token]
        assert max(row.entered for row in nodes) < new.began
