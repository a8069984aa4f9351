"""The oracle itself: a test of exclusion proves nothing unless its oracle notices a breach."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from tests.graphs import witnessed
from tests.witness import Witness


NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def run(
    witness: Witness,
    second: int,
    begin: int,
    end: int | None,
    replica: str = "a",
    token: int = 1,
    node: str = "n",
) -> None:
    """Write the row of a node that ran from `begin` to `end` (seconds after noon) for the tick at `second`."""
    witness.connection.execute(
        "INSERT INTO witness.node_run (graph, fire_time, attempt, replica, token, thread_id, node, pid, began, ended)"
        " VALUES ('g', %s, 1, %s, %s, 't', %s, 1, %s, %s)",
        [
            NOON + timedelta(seconds=second),
            replica,
            token,
            node,
            NOON + timedelta(seconds=begin),
            None if end is None else NOON + timedelta(seconds=end),
        ],
    )


def test_runs_one_after_the_other_are_in_order(witness: Witness):
    """The oracle must not cry wolf, or nobody would believe it."""
    run(witness, 0, 0, 1)
    run(witness, 1, 1, 2, replica="b", token=2)

    assert (witness.overlaps(), witness.repeats(), witness.gaps("g", timedelta(seconds=1))) == ([], [], [])


def test_two_runs_at_the_same_time_are_noticed(witness: Witness):
    """The breach that tickd exists to prevent."""
    run(witness, 0, 0, 5)
    run(witness, 3, 3, 4, replica="b", token=2)

    (pair,) = witness.overlaps()

    assert (pair.replica, pair.other_replica) == ("a", "b")


def test_nodes_of_one_run_may_overlap(witness: Witness):
    """A graph may run nodes in parallel: that is one writer still."""
    run(witness, 0, 0, 5, node="left")
    run(witness, 0, 1, 4, node="right")

    assert witness.overlaps() == []


def test_a_pause_between_two_nodes_belongs_to_the_run(witness: Witness):
    """Somebody else between two nodes of a run is a second writer as well."""
    run(witness, 0, 0, 1, node="first")
    run(witness, 0, 4, 5, node="second")
    run(witness, 2, 2, 3, replica="b", token=2)

    assert len(witness.overlaps()) == 1


def test_a_tick_that_ran_twice_is_noticed(witness: Witness):
    """Two runs in a row of one tick never overlap, so only the count shows them."""
    run(witness, 0, 0, 1)
    run(witness, 0, 2, 3, replica="b", token=2)

    (repeat,) = witness.repeats()

    assert (repeat.fire_time, repeat.runs) == (NOON, 2)
    assert witness.overlaps() == []


def test_a_tick_that_nobody_ran_is_noticed(witness: Witness):
    """A replica that excludes everybody, itself too, would pass a test that looks for duplicates only."""
    run(witness, 0, 0, 1)
    run(witness, 3, 3, 4)

    assert witness.gaps("g", timedelta(seconds=1)) == [
        NOON + timedelta(seconds=1),
        NOON + timedelta(seconds=2),
    ]


def test_a_run_without_an_end_goes_on_until_its_replica_is_buried(witness: Witness):
    """A frozen process is still a writer; a killed one is not."""
    run(witness, 0, 0, None)
    run(witness, 9, 9, 10, replica="b", token=2)

    assert len(witness.overlaps()) == 1
    assert [run.ended for run in witness.runs()] == [None, NOON + timedelta(seconds=10)]
    witness.bury("a", NOON + timedelta(seconds=8))
    assert witness.overlaps() == []


def test_a_node_is_waited_for(witness: Witness):
    """A test that stops a replica in mid-run must know that the node is at work, not only that the tick started."""
    run(witness, 0, 0, 1)

    assert witness.wait_for_node("n").fire_time == NOON
    with pytest.raises(AssertionError, match="has not begun"):
        witness.wait_for_node("n", count=2, timeout=0.2)


CONFIG: Any = {
    "configurable": {"thread_id": "g/2026-05-04T12:00:00Z"},
    "metadata": {
        "tickd_graph": "g",
        "tickd_fire_time": "2026-05-04T12:00:00Z",
        "tickd_attempt": 1,
        "tickd_replica": "a",
        "tickd_token": 7,
    },
}


@pytest.mark.parametrize("name", ["quick", "slow", "sync_sleep", "blocking", "interrupting"])
async def test_each_graph_bears_witness(witness: Witness, name: str):
    """The rows carry the tick's names, in UTC, from whichever thread a node runs in."""
    graph = getattr(witnessed, name).compile(checkpointer=InMemorySaver())

    await graph.ainvoke({"seconds": 0.01}, CONFIG)

    (node,) = witness.nodes()
    assert (node.graph, node.fire_time, node.token, node.node) == ("g", NOON, 7, name)
    assert node.ended > node.began


@pytest.mark.parametrize(("name", "error"), [("failing", RuntimeError), ("hostile", witnessed.HostileError)])
async def test_a_graph_that_raises_bears_witness_to_its_end(
    witness: Witness, name: str, error: type[Exception]
):
    """A failed run must not look like one that never ended."""
    with pytest.raises(error):
        await getattr(witnessed, name).compile().ainvoke({"seconds": 0}, CONFIG)

    (node,) = witness.nodes()
    assert node.ended


async def test_steps_are_told_apart(witness: Witness):
    """Whether a continued run repeats a step that was done shows only if steps have names."""
    await witnessed.steps.compile().ainvoke({"seconds": 0, "steps": 3}, CONFIG)

    assert [node.node for node in witness.nodes()] == ["step_1", "step_2", "step_3"]
    assert len(witness.runs()) == 1


async def test_the_accumulating_graph_accumulates_on_one_thread(witness: Witness):
    """Only with this can a test tell whether each tick has a thread of its own."""
    graph = witnessed.accumulating.compile(checkpointer=InMemorySaver())

    await graph.ainvoke({"log": []}, CONFIG)

    assert len((await graph.ainvoke({"log": []}, CONFIG))["log"]) == 2
    assert len(witness.nodes()) == 2
