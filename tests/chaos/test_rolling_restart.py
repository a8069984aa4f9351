"""A deploy: each replica in turn is stopped and started anew, under runs that are longer than a stop may take."""

from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest

from tests.holds import outcomes
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


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
        gaps = {later - earlier for earlier, later in pairwise(fire_times)}
        assert gaps <= {timedelta(seconds=4), timedelta(seconds=8)}
        for row in rows:
            if row.outcome == "ran":
                nodes = [node.node for node in witness.nodes(graph) if node.fire_time == row.fire_time]
                assert nodes == [f"step_{number}" for number in range(1, STEPS + 1)]
    assert witness.overlaps() == []


WAITS = "SELECT count(*) AS waiting FROM pg_stat_activity WHERE application_name = 'tickd/b' AND wait_event_type = 'Lock'"
A_SECOND = "SELECT pg_sleep(1)::text AS slept"


def test_what_comes_due_while_a_replica_joins_is_fired_by_it_when_the_other_one_stops(
    fleet: Fleet, witness: Witness
):
    """The old one had stopped firing, and the new one began with what came after its own start."""
    restock = {"graph": f"{GRAPHS}:quick", "every": "200ms", "grace": "30s"}
    rare = {"graph": f"{GRAPHS}:quick", "every": "1d"}
    old = fleet.start("a", fleet.schedule({"restock": restock, "rare": rare}))
    old.wait_for("tick.ran", count=3)
    with psycopg.connect(witness.dsn) as operator:
        operator.execute("SELECT FROM tickd.graphs WHERE graph = 'rare' FOR UPDATE")
        new = fleet.start("b", fleet.schedule({"restock": restock, "rare": {**rare, "every": "2d"}}))
        while witness.query(WAITS)[0].waiting == 0:
            pass
        assert old.stop() == 0
        witness.query(A_SECOND)
    new.wait_for("tick.ran", count=10)
    assert new.stop() == 0

    told = sorted({parse_instant(line["fire_time"]) for line in old.terminal_lines() + new.terminal_lines()})
    assert {later - earlier for earlier, later in pairwise(told)} == {timedelta(milliseconds=200)}
