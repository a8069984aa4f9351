"""A process that stands still (SIGSTOP, a suspended machine, a starved container) and goes on as if nothing had been."""

import signal
import threading
import time
from collections import Counter

import pytest

from tests.holds import terminate, written
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_a_holder_that_was_stopped_goes_no_further_once_another_has_started(fleet: Fleet, witness: Witness):
    """Its node comes back in mid-air and finishes; no other follows it, and what it returns is not written."""
    restock = {"graph": f"{GRAPHS}:steps", "every": "1s", "input": {"seconds": 1, "steps": 100}}
    schedule = fleet.schedule({"restock": restock})
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    for _ in range(3):
        old = witness.wait_for_begin("restock", "step_2", after=witness.last())
        stopped = fleet.named(old.replica)
        wait_until_written(witness, old.thread_id, checkpoints=3, writes=5)
        stopped.signal(signal.SIGSTOP)
        terminate(witness, "restock")
        new = witness.wait_for_begin("restock", "step_1", after=witness.last())
        assert new.replica != old.replica
        before = written(witness, old.thread_id)

        stopped.signal(signal.SIGCONT)
        stopped.wait_for("tick.lock_lost", token=old.token, cause="session_ended")

        assert written(witness, old.thread_id) == before
        nodes = [row for row in witness.nodes() if row.token == old.token]
        assert max(row.began for row in nodes) < new.began


def wait_until_written(
    witness: Witness, thread_id: str, *, checkpoints: int, writes: int, timeout: float = 5
) -> None:
    """Return when so much of the thread is there: then nothing is under way until its node ends."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        kinds = Counter(row.split()[0] for row in written(witness, thread_id))
        if kinds["checkpoint"] >= checkpoints and kinds["write"] >= writes:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{thread_id} has only {written(witness, thread_id)}")
