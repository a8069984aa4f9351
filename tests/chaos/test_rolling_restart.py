"""A deploy: each replica in turn is stopped and started anew, under runs that are longer than a stop may take."""

import itertools
from datetime import timedelta

import pytest

from tests.holds import outcomes
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

STEPS = 8


def test_a_rolling_restart_loses_no_tick_and_runs_no_node_twice(fleet: Fleet, witness: Witness):
    """What was begun on the old replicas is finished on the new ones, at the step where it was."""
    steps = {"graph": f"{GRAPHS}:steps", "every": "4s", "input": {"seconds": 0.3, "steps": STEPS}}
    graphs = [f"graph_{number}" for number in range(4)]
    schedule = fleet.schedule(dict.fromkeys(graphs, steps))
    for name in "abc":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    witness.wait_for_begin(graphs[0], "step_2", after=witness.last())
    for name in "abc":
        assert fleet.named(name).stop() == 0
        fleet.start(f"{name}2", schedule).wait_for("daemon.ready")
    # Whatever was begun before the last of them was stopped has its end once the following tick has begun.
    for graph in graphs:
        begun = witness.wait_for_begin(graph, "step_1", after=witness.last())
        witness.wait_for_begin(graph, f"step_{STEPS}", after=begun.id)
    assert fleet.stop()[3:] == [0, 0, 0]

    assert fleet.lines("tick.handed_off")
    for graph in graphs:
        rows = outcomes(witness, graph)
        assert {row.outcome for row in rows} <= {"ran", "handed_off"}
        assert [row.fire_time for row in rows if row.outcome == "handed_off"] in ([], [rows[-1].fire_time])
        fire_times = [row.fire_time for row in rows]
        gaps = {later - earlier for earlier, later in itertools.pairwise(fire_times)}
        assert gaps <= {timedelta(seconds=4), timedelta(seconds=8)}
        for row in rows:
            if row.outcome == "ran":
                nodes = [node.node for node in witness.nodes(graph) if node.fire_time == row.fire_time]
                assert nodes == [f"step_{number}" for number in range(1, STEPS + 1)]
    assert witness.overlaps() == []
