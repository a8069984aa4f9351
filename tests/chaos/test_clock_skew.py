"""Replicas whose clocks are wrong, and one whose clock is set back: what is due is the database's to say."""

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

EVERY = timedelta(seconds=2)


def test_clocks_that_are_seconds_apart_make_no_tick_run_twice(fleet: Fleet, witness: Witness):
    """A clock ahead would run each tick early, and one behind would run it again, long after the lock was freed."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "2s", "grace": "10s", "input": {"seconds": 0.05}}}
    )
    clocks = {"right": None, "ahead": "+2s", "behind": "-2s", "far-ahead": "+20s", "far-behind": "-20s"}
    for name, clock in clocks.items():
        fleet.start(name, schedule, clock=clock)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready", timeout=40)
    for replica in fleet.replicas:
        replica.wait_for_terminal(5, timeout=40)
    assert fleet.stop() == [0] * 5

    accounts = fleet.accounts("restock")
    assert len(accounts) >= 3
    for lines in accounts.values():
        assert Counter(line["event"] for line in lines.values()) == {"tick.ran": 1, "tick.skipped": 4}
        assert {line["reason"] for line in lines.values() if "reason" in line} <= {"already_ran", "lock_held"}
    assert (witness.overlaps(), witness.repeats(), witness.gaps("restock", EVERY)) == ([], [], [])
    assert [run for run in witness.runs() if run.began < run.fire_time] == []


def test_a_wrong_clock_is_warned_of_once(fleet: Fleet):
    """Nothing breaks by it, but the time stamps of this host's log mislead whoever reads them."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "500ms"}})
    right, ahead = fleet.start("right", schedule), fleet.start("ahead", schedule, clock="+20s")
    for replica in (right, ahead):
        replica.wait_for_terminal(3)

    (warning,) = ahead.events("clock.skewed")

    assert warning["level"] == "warning"
    assert warning["ahead_ms"] == pytest.approx(20_000, abs=1_000)
    assert right.events("clock.skewed") == []


def test_a_clock_that_is_set_back_makes_no_tick_run_again(fleet: Fleet, witness: Witness, tmp_path: Path):
    """B9: Half a minute of fire times lies ahead of that clock for a second time, and a restart forgets what was fired."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    replica = fleet.start("a", schedule, clock=str(clock))
    replica.wait_for("tick.ran")

    clock.write_text("-30\n")
    jumped = replica.wait_for("clock.jumped")
    replica.wait_for("tick.ran", after=jumped, count=2)
    assert jumped["jump_ms"] == pytest.approx(-30_000, abs=500)
    assert replica.stop() == 0
    again = fleet.start("a", schedule, clock=str(clock))
    again.wait_for("tick.ran", count=2)

    assert witness.repeats() == []
    assert [line for line in again.terminal_lines() if line.get("reason") == "already_ran"] == []
    assert [run for run in witness.runs() if run.began < run.fire_time] == []


def test_a_clock_that_jumps_ahead_runs_nothing_early(fleet: Fleet, witness: Witness, tmp_path: Path):
    """A laptop that wakes, or a first NTP step, must not let a replica run the next half minute at once."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    replica = fleet.start("a", schedule, clock=str(clock))
    replica.wait_for("tick.ran")

    clock.write_text("+30\n")
    jumped = replica.wait_for("clock.jumped")
    replica.wait_for("tick.ran", after=jumped, count=3)

    assert jumped["jump_ms"] == pytest.approx(30_000, abs=500)
    assert [run for run in witness.runs() if run.began < run.fire_time] == []
    assert (witness.repeats(), witness.gaps("restock", timedelta(seconds=1))) == ([], [])
