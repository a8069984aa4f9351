"""The wall clock is set, or the process stands still: it is said, and every fire time that was passed over is accounted for."""

import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from tests.replicas import Fleet, Replica
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos

SECOND = timedelta(seconds=1)
# To read the file at every look at the clock makes a busy machine stand still.
READ_ONCE_A_SECOND = {"FAKETIME_NO_CACHE": "0", "FAKETIME_CACHE_DURATION": "1"}


def assert_accounted(replica: Replica) -> None:
    """Fail unless each second from the replica's first tick to its last has ended in exactly one line."""
    lines = [parse_instant(line["fire_time"]) for line in replica.terminal_lines()]
    first, last = min(lines), max(lines)
    assert sorted(lines) == [first + n * SECOND for n in range((last - first) // SECOND + 1)], replica.said()


def set_clock(file: Path, seconds: int) -> None:
    """Shift the wall clock of the replica that reads the file; it must never see half of one."""
    whole = file.with_suffix(".new")
    whole.write_text(f"{seconds:+.6f}")
    whole.replace(file)


@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_step_of_the_wall_clock_is_said_and_moves_nothing(
    fleet: Fleet, witness: Witness, tmp_path: Path, jump: int
):
    """Set back by an hour, a timer that sleeps by the wall clock would be silent for an hour."""
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "20s"}})
    replica = fleet.start("a", schedule, clock=str(clock), env=READ_ONCE_A_SECOND)
    replica.wait_for("tick.ran", count=2, timeout=30)

    set_clock(clock, jump)
    jumped = replica.wait_for("clock.jumped")
    skewed = replica.wait_for("clock.skewed")
    replica.wait_for("tick.ran", count=len(replica.events("tick.ran")) + 3)
    assert replica.stop() == 0

    assert jumped["cause"] == "clock_stepped"
    assert jumped["jump_ms"] == pytest.approx(jump * 1000, abs=2000)
    assert skewed["ahead_ms"] == pytest.approx(jump * 1000, abs=2000)
    assert_accounted(replica)
    ends = {(line["event"], line.get("reason")) for line in replica.terminal_lines()}
    # On a busy machine a run may still be at work when the next tick comes.
    assert ends <= {("tick.ran", None), ("tick.skipped", "lock_held"), ("tick.skipped", "draining")}
    assert [
        row for row in witness.runs() if not row.fire_time <= row.began < row.fire_time + 2 * SECOND
    ] == []
    assert witness.repeats() == []


def test_a_process_that_stood_still_says_so_and_accounts_for_what_it_missed(fleet: Fleet, witness: Witness):
    """A suspended container must not come back with a hole in its log."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    replica = fleet.start("a", schedule)
    replica.wait_for("tick.ran", count=2)

    replica.signal(signal.SIGSTOP)
    threading.Event().wait(3.5)  # how long it stands still is what is tested
    replica.signal(signal.SIGCONT)
    jumped = replica.wait_for("clock.jumped")
    replica.wait_for_terminal(len(replica.terminal_lines()) + 5)
    assert replica.stop() == 0

    assert jumped["cause"] == "process_stopped"
    assert jumped["jump_ms"] == pytest.approx(3500, abs=1000)
    assert_accounted(replica)
    missed = replica.events("tick.missed")
    assert len(missed) >= 2
    assert {line["reason"] for line in missed} == {"late"}
    assert all(line["late_ms"] > line["grace_ms"] for line in missed)
    assert witness.repeats() == []
