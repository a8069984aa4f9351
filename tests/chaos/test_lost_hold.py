"""The server ends a lock session in mid-run: the run stops at once, and says so."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.database import Database, Server
from tests.holds import outcomes, terminate, written
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

# What a machine that is busy with other things may take; `python -m benchmarks.terminations` measures what it takes.
AT_ONCE = timedelta(milliseconds=300)
COMMITS = """
SELECT checkpoint_id, pg_xact_commit_timestamp(xmin) AS at
FROM checkpoints
WHERE thread_id = %(thread_id)s
"""


def test_a_terminated_lock_session_stops_its_run(fleet: Fleet, witness: Witness):
    """A scheduler that learns of it at its next query would let two writers at the graph meanwhile."""
    # With durability sync, what came before the node is written before it begins.
    restock = {"graph": f"{GRAPHS}:steps", "every": "4s", "durability": "sync"}
    schedule = fleet.schedule({"restock": {**restock, "input": {"seconds": 1, "steps": 3}}})
    replica = fleet.start("a", schedule)
    started = replica.wait_for("tick.started")
    witness.wait_for_begin("restock", "step_1")
    before = written(witness, started["thread_id"])

    terminated = terminate(witness, "restock")
    lost = replica.wait_for("tick.lock_lost", timeout=2)

    assert lost["fire_time"] == started["fire_time"]
    assert lost["cause"] == "session_ended"
    assert lost["lock_error"]
    assert lost["duration_ms"] < 1000
    following = replica.wait_for("tick.started", after=lost)
    (node,) = [row for row in witness.nodes() if row.token == lost["token"]]
    assert (node.node, node.ended - terminated < AT_ONCE) == ("step_1", True)
    assert written(witness, started["thread_id"]) == before
    replica.wait_for("tick.ran", fire_time=following["fire_time"])
    assert replica.stop() == 0
    assert [row.outcome for row in outcomes(witness, "restock")][:2] == ["lock_lost", "ran"]
    assert len(replica.terminal_lines()) == len({line["fire_time"] for line in replica.terminal_lines()})


@pytest.fixture
def dated_database() -> Iterator[Database]:
    """A database that remembers when each row was committed."""
    cluster = Cluster({"track_commit_timestamp": "on"})
    try:
        cluster.init()
        cluster.start()
        server = Server(cluster.admin_dsn("postgres"))
        server.make_owner()
        database = Database(server)
        database.create()
        yield database
        database.connection.close()
    finally:
        cluster.remove()


def test_after_each_of_many_terminations_no_node_starts_and_no_checkpoint_lands(
    dated_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Twenty-millisecond steps, so that each loss finds a node, a checkpoint or the gap between them."""
    witness = Witness(dated_database.admin_dsn)
    monkeypatch.setenv("WITNESS_DSN", witness.dsn)
    with Fleet(tmp_path, dated_database.dsn) as fleet:
        schedule = fleet.schedule(
            {
                "restock": {
                    "graph": f"{GRAPHS}:steps",
                    "every": "500ms",
                    "input": {"seconds": 0.02, "steps": 500},
                }
            }
        )
        for name in "ab":
            fleet.start(name, schedule)
        terminated = {}
        row = witness.wait_for_begin("restock", "step_5")
        for _ in range(8):
            terminated[row.token] = (row.replica, terminate(witness, "restock"))
            row = witness.wait_for_begin("restock", "step_5", after=row.id)
        for token, (name, _) in terminated.items():
            fleet.named(name).wait_for("tick.lock_lost", token=token, cause="session_ended")
        assert fleet.stop() == [0, 0]

        assert witness.overlaps() == []
        for token, (name, at) in terminated.items():
            nodes = [row for row in witness.nodes() if row.token == token]
            assert {row.replica for row in nodes} == {name}
            assert max(row.began for row in nodes) < at + AT_ONCE
            commits = witness.query(COMMITS, thread_id=nodes[0].thread_id)
            assert commits
            assert max(commit.at for commit in commits) < at + AT_ONCE
    witness.close()
