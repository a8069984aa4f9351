"""A graph that blocks its event loop: the others' ticks are accounted for, and no hold is lost or kept by mistake."""

from datetime import timedelta
from typing import Any

import pytest

from tests.holds import terminate, written
from tests.replicas import Fleet, Line, Replica
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos

# Windows that are over long before the block is.
IMPATIENT = {
    "TICKD_PROBE_INTERVAL": "500ms",
    "TICKD_PROBE_TIMEOUT": "500ms",
    "TICKD_STOP_ALLOWANCE": "500ms",
    "TICKD_KEEPALIVE_IDLE": "1s",
    "TICKD_KEEPALIVE_INTERVAL": "1s",
    "TICKD_KEEPALIVE_COUNT": "2",
}
SECOND = timedelta(seconds=1)


def by_second(lines: list[Line]) -> dict[object, Line]:
    """Return the lines by fire time; a second that is missing or there twice is a failure."""
    found = {parse_instant(line["fire_time"]): line for line in lines}
    first, last = min(found), max(found)
    assert len(found) == len(lines)
    assert sorted(found) == [first + n * SECOND for n in range((last - first) // SECOND + 1)]
    return dict(sorted(found.items()))


# One graph that fires each second, and one that blocks the loop, beginning in the middle between two of its ticks: none
# of them is held then and waits for the loop.
TWO_GRAPHS: dict[str, dict[str, Any]] = {
    "blocker": {
        "graph": f"{GRAPHS}:blocking",
        "every": "10s",
        "anchor": "2026-01-01T00:00:00.250Z",
        "input": {"seconds": 4},
    },
    "restock": {"graph": f"{GRAPHS}:quick", "every": "1s"},
}


def run_until_unblocked(replica: Replica, witness: Witness) -> Line:
    """Return the line that says the block is over, once a second after it has gone by."""
    witness.wait_for_begin("blocker", "blocking")
    over = replica.wait_for("loop.blocked", over=True)
    replica.wait_for_terminal(len(replica.terminal_lines("restock")) + 2, graph="restock")
    return over


def test_a_blocked_loop_is_named_and_each_tick_it_cost_is_logged(fleet: Fleet, witness: Witness):
    """APScheduler merged four ticks into none, and neither an event nor a line told."""
    schedule = fleet.schedule(TWO_GRAPHS)
    replica = fleet.start("a", schedule, env=IMPATIENT)
    over = run_until_unblocked(replica, witness)
    ran = replica.wait_for("tick.ran", graph="blocker")

    begin = replica.wait_for("loop.blocked", over=False)
    assert (begin["graph"], over["graph"]) == ("blocker", "blocker")
    assert 1000 <= begin["lag_ms"] < 2500
    assert 3000 <= over["lag_ms"] <= ran["duration_ms"] + 500
    lines = by_second(replica.terminal_lines("restock"))
    missed = [line for line in lines.values() if line.get("reason") == "loop_blocked"]
    assert len(missed) >= 2
    assert {line["event"] for line in missed} == {"tick.missed"}
    assert {line["event"] for line in lines.values()} <= {"tick.ran", "tick.missed", "tick.skipped"}
    assert fleet.lines("tick.lock_lost") == []
    assert replica.stop() == 0


def test_other_replicas_run_what_a_blocked_one_cannot(fleet: Fleet, witness: Witness):
    """A replica that held graphs it cannot start would make the block everybody's."""
    schedule = fleet.schedule(TWO_GRAPHS)
    for name in "ab":
        fleet.start(name, schedule, env=IMPATIENT)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    blocked = fleet.named(witness.wait_for_begin("blocker", "blocking").replica)
    run_until_unblocked(blocked, witness)
    assert fleet.stop() == [0, 0]

    began = next(row for row in witness.nodes("blocker")).began
    during = [row for row in witness.nodes("restock") if SECOND < row.began - began < 3 * SECOND]
    assert {row.replica for row in during} == {r.name for r in fleet.replicas if r is not blocked}
    assert witness.gaps("restock", SECOND) == []
    for replica in fleet.replicas:
        ends = by_second(replica.terminal_lines("restock")).values()
        # The stop may meet a run.
        assert {line["event"] for line in ends} <= {
            "tick.ran",
            "tick.skipped",
            "tick.missed",
            "tick.handed_off",
        }
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_tick_that_runs_elsewhere_is_not_called_missed(fleet: Fleet, witness: Witness):
    """It is past its grace here, and another replica is in the middle of it: an alarm would be false."""
    pack_audit = {"graph": f"{GRAPHS}:slow", "every": "2s", "grace": "500ms", "input": {"seconds": 1.5}}
    schedule = fleet.schedule({"blocker": TWO_GRAPHS["blocker"], "pack_audit": pack_audit})
    for name in "ab":
        fleet.start(name, schedule, env=IMPATIENT)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    blocked = fleet.named(witness.wait_for_begin("blocker", "blocking", after=witness.last()).replica)
    blocked.wait_for("loop.blocked", over=True)
    (other,) = (replica for replica in fleet.replicas if replica is not blocked)
    # Either replica may be the quicker one, time and again.
    ran_by_now = len(other.events("tick.ran", graph="pack_audit"))
    other.wait_for("tick.ran", graph="pack_audit", count=ran_by_now + 1, timeout=60)
    assert fleet.stop() == [0, 0]

    ran = {line["fire_time"] for line in other.events("tick.ran", graph="pack_audit")}
    ends = {line["fire_time"]: line for line in blocked.terminal_lines("pack_audit")}
    assert ran & set(ends)
    assert [
        ends[fire_time] for fire_time in ran & set(ends) if ends[fire_time]["event"] == "tick.missed"
    ] == []


def test_a_hold_lost_during_the_block_is_noticed(fleet: Fleet, witness: Witness):
    """The watch lives on the other loop, so that a block hides no loss; what the node returns is not written."""
    schedule = fleet.schedule(
        {
            "blocker": {
                "graph": f"{GRAPHS}:blocking",
                "every": "6s",
                "durability": "sync",
                "input": {"seconds": 3},
            }
        }
    )
    replica = fleet.start("a", schedule)
    started = replica.wait_for("tick.started")
    witness.wait_for_begin("blocker", "blocking")
    before = written(witness, started["thread_id"])

    terminate(witness, "blocker")
    lost = replica.wait_for("tick.lock_lost")

    assert (lost["fire_time"], lost["cause"]) == (started["fire_time"], "session_ended")
    assert written(witness, started["thread_id"]) == before
    assert replica.events("tick.ran") == []


def test_a_run_longer_than_its_period_skips_by_its_own_name(fleet: Fleet, witness: Witness):
    """Who wonders why a tick did not run finds the run that was in its way, on each replica."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 2.5}}}
    )
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    for replica in fleet.replicas:
        replica.wait_for_terminal(len(replica.terminal_lines()) + 6)
    assert fleet.stop() == [0, 0]

    for replica in fleet.replicas:
        for line in by_second(
            [ln for ln in replica.terminal_lines() if ln.get("reason") != "draining"]
        ).values():
            assert line["event"] == "tick.ran" or (line["reason"], line["holder"] in "ab") == (
                "lock_held",
                True,
            )
    by_itself = [line for line in fleet.lines("tick.skipped") if line.get("holder") == line["replica"]]
    assert by_itself
    assert all(line["holder_since"] >= line["fire_time"][:10] for line in by_itself)
    assert witness.overlaps() == []


def test_a_hung_run_is_ended_by_its_time_out_and_the_next_ones_run(fleet: Fleet, witness: Witness):
    """Without it, one hung call would skip every later tick for ever."""
    schedule = fleet.schedule(
        {
            "restock": {
                "graph": f"{GRAPHS}:slow",
                "every": "1s",
                "timeout": "1500ms",
                "input": {"seconds": 600},
            }
        }
    )
    replica = fleet.start("a", schedule)
    first = replica.wait_for("tick.timed_out")
    second = replica.wait_for("tick.timed_out", count=2)

    assert first["duration_ms"] < 2500
    assert second["fire_time"] > first["fire_time"]
    assert witness.overlaps() == []
