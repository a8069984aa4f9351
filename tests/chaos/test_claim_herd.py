"""Many graphs, a tick a second each, and replicas that die at random: nothing lost, nothing doubled."""

import random

import pytest

from tests.herd import Herd
from tests.replicas import Fleet
from tests.witness import Witness


pytestmark = pytest.mark.chaos

GRAPHS = 20
KILLS = 4


def test_a_herd_of_graphs_on_dying_replicas_loses_nothing_and_doubles_nothing(fleet: Fleet, witness: Witness):
    """benchmarks/claim_herd.py does it with a hundred graphs for three minutes."""
    seed = random.randrange(1_000_000)
    herd = Herd(fleet, witness, GRAPHS, seed)
    herd.start(3)
    herd.wait_until_ready()
    for _ in range(KILLS):
        herd.run_on(3 * GRAPHS)
        herd.kill_one()
    herd.wait_until_ready()
    herd.run_on(3 * GRAPHS)

    until = witness.now()
    found = herd.books(until, timeout=120)

    assert {kind: wrong for kind, wrong in found.items() if wrong} == {}, f"seed {seed}"
    counts = herd.counts(until)
    assert (counts["graphs"], counts["open"]) == (GRAPHS, 0)
    assert counts["ticks"] >= GRAPHS * 3 * (KILLS + 1)
