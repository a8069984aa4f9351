"""A tick that comes due while one of its graph still runs: skipped, queued, or run in its place, as the schedule says."""

from typing import Any

import pytest

from tests.ledger_rows import fates, ticks, wait_for_row
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

DISPLACED = ("failed", "Displaced")


def stepping(mode: str, overlap: str, *, every: str, seconds: float) -> dict[str, Any]:
    """Return a graph whose run takes so many seconds, in steps of a tenth."""
    steps = {"steps": round(seconds * 10), "seconds": 0.1}
    config = {"recursion_limit": 10_000}
    entry = {"graph": f"{GRAPHS}:steps", "every": every, "input": steps, "config": config}
    return {**entry, "mode": mode, "overlap": overlap}


def cancelling() -> dict[str, dict[str, Any]]:
    """Return graphs that outlast their period, and graphs that do not, in both modes."""
    return {
        f"{length}_{mode}": stepping(mode, "cancel", every="3s", seconds=seconds)
        for mode in ("skip", "claim")
        for length, seconds in (("long", 600), ("short", 0.5))
    }


def at_work(fleet: Fleet, graphs: dict[str, dict[str, Any]], names: str) -> None:
    """Start replicas and return when they fire."""
    schedule = fleet.schedule(graphs)
    for name in names:
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready", timeout=60)


def displaced(witness: Witness, graph: str, count: int) -> list[Any]:
    """Return the graph's rows, once so many have made room for a newer tick."""
    wait_for_row(
        witness, graph, lambda _: list(fates(witness, graph).values()).count(DISPLACED) >= count, timeout=60
    )
    return ticks(witness, graph)


def test_a_newer_tick_cancels_the_one_that_runs_on_the_same_replica(fleet: Fleet, witness: Witness):
    """With one replica there is nobody else to ask, and it must not wait for itself."""
    at_work(fleet, cancelling(), "a")

    for graph in ("long_skip", "long_claim"):
        rows = displaced(witness, graph, 2)
        assert [(row.outcome, row.error_type) for row in rows[:2]] == [DISPLACED] * 2
        assert {row.replica for row in rows[:2]} == {"a"}
        assert {row.replica for row in rows[2:]} <= {"a", None}  # what waits in the backlog is nobody's yet
    for graph in ("short_skip", "short_claim"):
        assert set(fates(witness, graph).values()) <= {("ran", None), (None, None)}
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_newer_tick_cancels_the_one_that_runs_elsewhere_and_never_itself(fleet: Fleet, witness: Witness):
    """Every replica fires the new tick and asks for room; the one that has it already must not hear of its own."""
    at_work(fleet, cancelling(), "abc")

    for graph in ("long_skip", "long_claim"):
        rows = displaced(witness, graph, 3)
        assert [(row.outcome, row.error_type) for row in rows[:3]] == [DISPLACED] * 3
        # It had the graph until the next one came.
        spans = [(run.began, run.ended) for run in witness.runs(graph)[:3]]
        assert min((ended - began).total_seconds() for began, ended in spans) > 1
    for graph in ("short_skip", "short_claim"):
        assert set(fates(witness, graph).values()) <= {("ran", None), (None, None)}
        assert list(fates(witness, graph).values()).count(("ran", None)) >= 3
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_in_claim_mode_a_tick_waits_its_turn_or_is_skipped_as_the_schedule_says(
    fleet: Fleet, witness: Witness
):
    """Queued is the default there, for a skip is lost work."""
    queued = stepping("claim", "queue", every="1s", seconds=1.5)
    del queued["overlap"]
    graphs = {"queued": queued, "skipped": stepping("claim", "skip", every="1s", seconds=1.5)}
    at_work(fleet, graphs, "ab")

    wait_for_row(
        witness, "queued", lambda _: list(fates(witness, "queued").values()).count(("ran", None)) >= 3
    )

    ran = [run.fire_time for run in witness.runs("queued")]
    assert ran == [row.fire_time for row in ticks(witness, "queued")][: len(ran)]
    assert set(fates(witness, "queued").values()) == {("ran", None), (None, None)}
    assert ("skipped", "lock_held") in fates(witness, "skipped").values()
    assert set(fates(witness, "skipped").values()) <= {("ran", None), (None, None), ("skipped", "lock_held")}
    lines = fleet.lines("tick.skipped", graph="queued")
    assert {line["reason"] for line in lines} <= {"queued", "lock_held", "already_ran"}
    assert fleet.lines("tick.skipped", graph="queued", reason="queued")
    held = fleet.lines("tick.skipped", graph="skipped", reason="lock_held")
    assert held
    assert (witness.overlaps(), witness.repeats()) == ([], [])
