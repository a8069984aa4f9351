"""A sync node's thread goes on after its run was cancelled: the hold has to outlast it."""

import pytest

from tests.holds import terminate, written
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_the_hold_outlasts_the_thread_of_a_run_that_timed_out(fleet: Fleet, witness: Witness):
    """`ainvoke` returns at once when it is cancelled; a lock freed then would let a second writer beside the thread."""
    restock = {"graph": f"{GRAPHS}:sync_sleep", "every": "1s", "timeout": "500ms"}
    schedule = fleet.schedule({"restock": {**restock, "input": {"seconds": 3}}})
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    first = witness.wait_for_begin("restock", "sync_sleep")
    second = witness.wait_for_begin("restock", "sync_sleep", after=first.id)
    replica = fleet.named(first.replica)

    waiting = replica.wait_for("tick.waiting", reason="sync_node", threads=1)
    timed_out = replica.wait_for("tick.timed_out", token=first.token)

    assert waiting["fire_time"] == timed_out["fire_time"]
    assert (timed_out["timeout_ms"], timed_out["duration_ms"] >= 2900) == (500, True)
    assert second.began > witness.nodes()[0].ended
    assert witness.overlaps() == []
    passed_over = [line for r in fleet.replicas for line in r.events("tick.skipped", holder=first.replica)]
    assert {line["reason"] for line in passed_over} == {"lock_held"}


def test_a_thread_whose_hold_was_lost_writes_no_checkpoint(fleet: Fleet, witness: Witness):
    """It cannot be stopped and its hold cannot be kept; what tickd can do is keep its result out, and say so."""
    restock = {"graph": f"{GRAPHS}:sync_sleep", "every": "1s", "durability": "sync"}
    schedule = fleet.schedule({"restock": {**restock, "input": {"seconds": 3}}})
    replica = fleet.start("a", schedule)
    started = replica.wait_for("tick.started")
    witness.wait_for_begin("restock", "sync_sleep")
    before = written(witness, started["thread_id"])

    terminate(witness, "restock")
    replica.wait_for("tick.waiting", reason="sync_node", fire_time=started["fire_time"])
    lost = replica.wait_for("tick.lock_lost")

    assert (lost["fire_time"], lost["cause"]) == (started["fire_time"], "session_ended")
    assert lost["duration_ms"] >= 2900
    assert written(witness, started["thread_id"]) == before
