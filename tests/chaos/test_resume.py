"""A claimed tick whose replica is killed: another one goes on where the checkpoints end."""

from typing import Any

import pytest

from tests.ledger_rows import FALLIBLE, state_of, ticks, wait_for_row
from tests.replicas import Fleet
from tests.witness import Witness


pytestmark = pytest.mark.chaos

ROW_OF = "SELECT 1 AS one FROM tickd.ticks WHERE fire_time = %(at)s FOR UPDATE"
END_SESSIONS = """
SELECT pg_terminate_backend(pid, 10000) AS ended
FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'tickd/a'
"""


def claimed(**keys: Any) -> dict[str, Any]:
    """Return a graph of the nodes a and b in claim mode, with a tick every second."""
    keys["input"] = {"log": [], **keys.get("input", {})}
    return {"graph": f"{FALLIBLE}:letters", "every": "1s", "mode": "claim", **keys}


def first_tick(witness: Witness, graph: str) -> tuple[Any, list[tuple[str, int]]]:
    """Return the final log of the graph's first tick, and which node began on which attempt."""
    row = ticks(witness, graph)[0]
    nodes = [(node.node, node.attempt) for node in witness.nodes(graph) if node.fire_time == row.fire_time]
    assert (row.outcome, row.attempt, row.replica, row.failures) == ("ran", 2, "b", 1)
    return state_of(witness, row.thread_id)["log"], nodes


def test_a_killed_tick_goes_on_from_its_last_checkpoint(fleet: Fleet, witness: Witness):
    """Claim mode saves each step before the next begins, unless told otherwise; without a checkpoint the input counts."""
    in_a, in_b = {"hang": "a/a"}, {"hang": "a/b"}
    schedule = fleet.schedule(
        {
            "killed_in_b": claimed(input=in_b),
            "killed_in_a": claimed(input=in_a),
            "nothing_saved": claimed(input=in_b, durability="exit"),
        }
    )
    a = fleet.start("a", schedule)
    for graph, node in {"killed_in_b": "b", "killed_in_a": "a", "nothing_saved": "b"}.items():
        witness.wait_for_begin(graph, node, timeout=60)
    b = fleet.start("b", schedule)
    b.wait_for("daemon.ready", timeout=60)
    a.kill()
    witness.bury("a", witness.now())

    for graph in ("killed_in_b", "killed_in_a", "nothing_saved"):
        started = b.wait_for("tick.started", graph=graph, timeout=30)
        assert (started["attempt"], started["resumed"]) == (2, True)
        wait_for_row(witness, graph, lambda row: row.outcome == "ran")
    assert b.stop() == 0

    done = ["a", "b"]
    assert first_tick(witness, "killed_in_b") == (done, [("a", 1), ("b", 1), ("b", 2)])
    assert first_tick(witness, "killed_in_a") == (done, [("a", 1), ("a", 2), ("b", 2)])
    assert first_tick(witness, "nothing_saved") == (done, [("a", 1), ("b", 1), ("a", 2), ("b", 2)])
    assert witness.overlaps() == []


def test_a_tick_that_had_finished_and_was_not_recorded_runs_no_node_again(fleet: Fleet, witness: Witness):
    """Between the last checkpoint and the ledger's row there is a moment, too."""
    schedule = fleet.schedule({"letters": claimed(input={"seconds": 0.5})})
    a = fleet.start("a", schedule)
    began = witness.wait_for_node("b", timeout=60)
    thread_id = ticks(witness, "letters")[0].thread_id
    with witness.connection.transaction():
        # Nobody can write the row while this transaction has it.
        witness.query(ROW_OF, at=began.fire_time)
        while state_of(witness, thread_id)["log"] != ["a", "b"]:
            assert a.events("tick.ran") == []
        a.kill()
        witness.query(END_SESSIONS)  # one of which would write the row yet, for a client that is gone
    b = fleet.start("b", schedule)

    started = b.wait_for("tick.started", timeout=60)
    b.wait_for("tick.ran", fire_time=started["fire_time"])
    assert first_tick(witness, "letters") == (["a", "b"], [("a", 1), ("b", 1)])
