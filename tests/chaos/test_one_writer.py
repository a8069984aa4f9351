"""Three real replicas on one schedule: the main promise, in the open and with clocks that disagree."""

from collections import Counter
from datetime import timedelta

import pytest

from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_of_three_replicas_one_runs_a_tick_and_two_name_it(fleet: Fleet, witness: Witness):
    """What an operator of three replicas sees: for each tick a writer, and from the others whom they deferred to."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 0.3}}}
    )
    replicas = [fleet.start(name, schedule) for name in "abc"]
    for replica in replicas:
        replica.wait_for("daemon.ready")
    for replica in replicas:
        replica.wait_for_terminal(6)
    assert fleet.stop() == [0, 0, 0]

    accounts = fleet.accounts("restock")
    assert len(accounts) >= 4
    for lines in accounts.values():
        assert Counter(line["event"] for line in lines.values()) == {"tick.ran": 1, "tick.skipped": 2}
        (writer,) = [name for name, line in lines.items() if line["event"] == "tick.ran"]
        skips = [line for line in lines.values() if line["event"] == "tick.skipped"]
        assert {(line["reason"], line["holder"]) for line in skips} == {("lock_held", writer)}
    assert (witness.overlaps(), witness.repeats()) == ([], [])
    assert witness.gaps("restock", timedelta(seconds=1)) == []


def test_no_tick_runs_twice_however_short_it_is_and_whatever_the_clocks_say(fleet: Fleet, witness: Witness):
    """With the lock alone, clocks 150 ms apart made 180 runs of a minute's 60 ticks: each was over before the next try."""
    second = timedelta(seconds=1)
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "30s"}})
    for name, clock in {"behind": "-150ms", "right": "+0ms", "ahead": "+150ms"}.items():
        fleet.start(name, schedule, clock=clock)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    for replica in fleet.replicas:
        replica.wait_for_terminal(63, graph="restock", timeout=120)
    assert fleet.stop() == [0, 0, 0]

    ticks = list(fleet.accounts("restock").values())[:60]
    assert len(ticks) == 60
    ends = [Counter(line["event"] for line in lines.values()) for lines in ticks]
    assert [
        lines for lines, end in zip(ticks, ends, strict=True) if end != {"tick.ran": 1, "tick.skipped": 2}
    ] == []
    assert (witness.overlaps(), witness.repeats(), witness.gaps("restock", second)) == ([], [], [])
    assert [run for run in witness.runs() if run.began < run.fire_time] == []
