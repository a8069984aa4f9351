"""A stop loses nothing: what can end ends, what can be handed off is handed off, and what can do neither is named."""

import signal
import time

import pytest

from tests.holds import holder, outcomes
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

SHORT_DRAIN = {"TICKD_DRAIN_TIMEOUT": "1s", "TICKD_STOP_ALLOWANCE": "1s"}


def test_a_run_that_ends_within_the_drain_ends_as_if_nothing_had_been(fleet: Fleet, witness: Witness):
    """APScheduler's own `shutdown(wait=True)` cancels what it says it waits for."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "grace": "1s", "input": {"seconds": 2.5}}}
    )
    replica = fleet.start("a", schedule)
    started = replica.wait_for("tick.started")
    witness.wait_for_begin("restock", "slow")

    assert replica.stop() == 0

    draining, stopped = replica.wait_for("daemon.draining"), replica.wait_for("daemon.stopped")
    assert (draining["running"], stopped["exit_code"]) == (1, 0)
    assert replica.wait_for("tick.ran", fire_time=started["fire_time"])["duration_ms"] >= 2500
    assert [line for line in replica.events("tick.started") if line is not started] == []
    later = [line for line in replica.terminal_lines() if line["fire_time"] != started["fire_time"]]
    assert {(line["event"], line["reason"]) for line in later} <= {
        ("tick.skipped", "lock_held"),
        ("tick.skipped", "draining"),
    }
    assert holder(witness, "restock") is None


def test_a_run_that_outlasts_the_drain_is_cancelled_and_accounted_for(fleet: Fleet, witness: Witness):
    """An orchestrator kills what does not stop in time; the log has to say what was lost before."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 20}}}
    )
    replica = fleet.start("a", schedule, env=SHORT_DRAIN)
    started = replica.wait_for("tick.started")
    witness.wait_for_begin("restock", "slow")

    assert replica.stop(timeout=4) == 1

    failed = replica.wait_for("tick.failed", fire_time=started["fire_time"])
    assert (failed["reason"], "TICKD_DRAIN_TIMEOUT" in failed["error"]) == ("shutdown", True)
    assert replica.wait_for("daemon.stopped")["exit_code"] == 1
    (row,) = outcomes(witness, "restock")
    assert row.outcome == "failed"
    (node,) = witness.nodes()
    assert node.ended is not None


def test_a_drained_run_goes_on_elsewhere_at_its_next_step(fleet: Fleet, witness: Witness):
    """The same tick on the same thread, as the next attempt; no finished step is paid for twice."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:steps", "every": "3s", "input": {"seconds": 0.3, "steps": 8}}}
    )
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    node = witness.wait_for_begin("restock", "step_2", after=witness.last())
    first = fleet.named(node.replica)
    (second,) = (replica for replica in fleet.replicas if replica is not first)

    assert first.stop() == 0

    handed_off = first.wait_for("tick.handed_off")
    started = second.wait_for("tick.started", resumed=True)
    ran = second.wait_for("tick.ran", attempt=2)
    assert handed_off["next_nodes"] == ["step"]
    assert handed_off["fire_time"] == started["fire_time"] == ran["fire_time"]
    assert first.wait_for("tick.started")["thread_id"] == started["thread_id"]
    assert started["token"] > handed_off["token"]
    steps = [row for row in witness.nodes() if row.thread_id == started["thread_id"]]
    assert [row.node for row in steps] == [f"step_{number}" for number in range(1, 9)]
    assert [row.replica for row in steps] == sorted((row.replica for row in steps), key=node.replica.__ne__)
    assert witness.overlaps() == []
    assert second.stop() == 0


def test_what_nobody_could_take_over_waits_for_the_next_replica_to_start(fleet: Fleet, witness: Witness):
    """A deploy that stops all before it starts any must lose nothing either."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:steps", "every": "1s", "input": {"seconds": 0.3, "steps": 6}}}
    )
    first = fleet.start("first", schedule)
    witness.wait_for_begin("restock", "step_2")
    assert first.stop() == 0
    handed_off = first.wait_for("tick.handed_off")

    second = fleet.start("second", schedule)
    started = second.wait_for("tick.started")
    second.wait_for("tick.ran", fire_time=handed_off["fire_time"], attempt=2)
    assert second.stop() == 0

    assert (started["fire_time"], started["resumed"]) == (handed_off["fire_time"], True)
    steps = [row.node for row in witness.nodes() if row.thread_id == started["thread_id"]]
    assert steps == [f"step_{number}" for number in range(1, 7)]
    assert witness.overlaps() == []


def test_a_second_interrupt_leaves_at_once(fleet: Fleet, witness: Witness):
    """Whoever presses Ctrl-C twice is at a terminal and wants it back, whatever the run is doing."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:blocking", "every": "1s", "input": {"seconds": 30}}}
    )
    replica = fleet.start("a", schedule)
    witness.wait_for_begin("restock", "blocking")
    replica.signal(signal.SIGINT)
    replica.wait_for("daemon.draining")

    began = time.monotonic()
    replica.signal(signal.SIGINT)

    assert replica.wait() == 130
    assert time.monotonic() - began < 1
    assert replica.lines[-1]["event"] == "daemon.stopped"
    assert replica.lines[-1]["exit_code"] == 130


def test_a_sync_node_that_cannot_be_stopped_keeps_its_hold_until_the_process_ends(
    fleet: Fleet, witness: Witness
):
    """Nothing stops a thread. Letting go of the lock before the process ends would let a second writer in."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:sync_sleep", "every": "1s", "input": {"seconds": 30}}}
    )
    stuck = fleet.start("stuck", schedule, env={**SHORT_DRAIN, "TICKD_STOP_ALLOWANCE": "2s"})
    started = stuck.wait_for("tick.started")
    node = witness.wait_for_begin("restock", "sync_sleep")
    other = fleet.start("other", schedule)
    other.wait_for("tick.skipped", holder="stuck")

    stuck.signal(signal.SIGTERM)
    failed = stuck.wait_for("tick.failed")
    session = holder(witness, "restock")
    assert session is not None
    assert session.application_name == "tickd/stuck"
    assert stuck.wait(timeout=5) == 1
    at = witness.now()

    assert (failed["fire_time"], failed["reason"]) == (started["fire_time"], "shutdown")
    assert stuck.wait_for("tick.waiting")["threads"] == 1
    assert stuck.lines[-1]["exit_code"] == 1
    taken = other.wait_for("tick.started")
    assert taken["fire_time"] > started["fire_time"]
    witness.bury("stuck", at)
    assert witness.wait_for_begin("restock", "sync_sleep", after=node.id).replica == "other"
    assert witness.overlaps() == []
