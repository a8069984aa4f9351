"""A holder that stands still: its process is stopped, its session lives on, and only its lease tells."""

import signal
from typing import Any

import pytest

from tests.ledger_rows import FALLIBLE, state_of, ticks, wait_for_row
from tests.replicas import Fleet
from tests.witness import Witness
from tickd.tick import instant_text


pytestmark = pytest.mark.chaos

# lease >= 3 x renewal + one time-out, and longer than the client's own window of 0.3 + 0.5 + 0.7 s.
SHORT_LEASE = {
    "TICKD_PROBE_INTERVAL": "300ms",
    "TICKD_PROBE_TIMEOUT": "500ms",
    "TICKD_STOP_ALLOWANCE": "700ms",
    "TICKD_LEASE": "2s",
}


def claimed(**given: Any) -> dict[str, Any]:
    """Return a graph of the nodes a and b in claim mode, with this input."""
    return {"graph": f"{FALLIBLE}:letters", "every": "1s", "mode": "claim", "input": {"log": [], **given}}


@pytest.mark.parametrize("hold", ["dedicated", "shared"])
def test_a_holder_that_stands_still_is_taken_over_when_its_lease_runs_out(
    fleet: Fleet, witness: Witness, hold: str
):
    """The server sees a healthy session, and would keep the graph for it for ever; a slow run renews and is left alone."""
    schedule = fleet.schedule(
        {"stopped": claimed(hang="a/b") | {"hold": hold}, "slow": claimed(seconds=2) | {"hold": hold}}
    )
    a = fleet.start("a", schedule, env=SHORT_LEASE)
    at_work = witness.wait_for_begin("stopped", "b", timeout=60)
    b = fleet.start("b", schedule, env=SHORT_LEASE)
    b.wait_for("daemon.ready", timeout=60)
    thread_id = ticks(witness, "stopped")[0].thread_id

    a.signal(signal.SIGSTOP)
    b.wait_for("claim.expired", timeout=30)  # of either graph: a shared session ends for both at once
    fire_time = instant_text(at_work.fire_time)
    started = b.wait_for("tick.started", graph="stopped", fire_time=fire_time, timeout=30)
    b.wait_for("tick.ran", graph="stopped", fire_time=fire_time, timeout=30)
    # Each of its two nodes takes as long as the lease.
    slow = wait_for_row(
        witness, "slow", lambda row: row.replica == "b" and row.attempt == 1 and row.outcome, timeout=60
    )
    nodes = len(witness.nodes("stopped"))
    a.signal(signal.SIGCONT)
    lost = a.wait_for("tick.lock_lost", graph="stopped", timeout=30)

    assert (started["attempt"], started["resumed"], started["last_holder"]) == (2, True, "a")
    assert lost["cause"] in {"session_ended", "not_confirmed", "superseded", "no_answer"}
    row = ticks(witness, "stopped")[0]
    assert (row.outcome, row.replica, row.attempt, row.failures) == ("ran", "b", 2, 1)
    assert state_of(witness, thread_id)["log"] == ["a", "b"]
    # What the stopped process had begun is over, and it has begun nothing after it.
    late = [node for node in witness.nodes("stopped")[nodes:] if node.fire_time == at_work.fire_time]
    assert late == []
    assert (slow.outcome, slow.failures) == ("ran", 0)
    assert a.process.poll() is None
