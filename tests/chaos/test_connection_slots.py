"""Connections run out: a tick that could not be tried is an error that says so, and is tried again in its grace."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.database import Database, Server
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, Witness, Database]]:
    """A fleet on a server that admits twenty connections."""
    # The witness and its graphs connect as superuser, one each, and must not fail for want of a slot themselves.
    cluster = Cluster({"max_connections": "20", "superuser_reserved_connections": "6"})
    try:
        cluster.init()
        cluster.start()
        server = Server(cluster.admin_dsn("postgres"))
        server.make_owner()
        database = Database(server)
        database.create()
        witness = Witness(database.admin_dsn)
        monkeypatch.setenv("WITNESS_DSN", witness.dsn)
        with Fleet(tmp_path, database.dsn) as fleet:
            yield fleet, witness, database
        witness.close()
        database.connection.close()
    finally:
        cluster.remove()


def test_more_graphs_than_connections_all_run(small: tuple[Fleet, Witness, Database]):
    """C12: At the full minute every replica wants every graph: two replicas, fifteen graphs, twenty slots."""
    fleet, witness, _ = small
    graphs = {
        f"graph_{n:02}": {"graph": f"{GRAPHS}:slow", "every": "4s", "input": {"seconds": 0.2}, "grace": "4s"}
        for n in range(15)
    }
    schedule = fleet.schedule(graphs)
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    for replica in fleet.replicas:
        replica.wait_for_terminal(45, timeout=30)
    assert fleet.stop() == [0, 0]

    assert [line["error"] for line in fleet.lines("tick.failed")] == []
    ticks = [list(lines.values()) for graph in graphs for lines in fleet.accounts(graph).values()]
    for line in (line for lines in ticks for line in lines):
        # Within the grace a busy machine may not get round to it; then it says so, and blames no holder.
        assert line["event"] in {"tick.ran", "tick.skipped", "tick.error"}
        assert line["event"] != "tick.error" or line["reason"] == "db_connect"
        assert line["event"] != "tick.skipped" or line["holder"] in {"a", "b"}
    assert len(fleet.lines("tick.ran")) > len(ticks) / 2
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_tick_without_a_connection_is_an_error_and_never_a_skip(small: tuple[Fleet, Witness, Database]):
    """`lock_held` would say that somebody runs the graph, while nobody does."""
    fleet, _, database = small
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "1s"}})
    role = database.role()
    replica = fleet.start("a", schedule, dsn=role.dsn)
    replica.wait_for("tick.ran")

    database.limit_connections(role, 1)
    error = replica.wait_for("tick.error")
    assert "too many connections for role" in error["error"]
    assert error["reason"] == "db_connect"
    assert len(replica.events("database.unreachable")) == 1
    database.limit_connections(role, -1)
    replica.wait_for("tick.ran", after=error)

    assert replica.events("tick.skipped") == []
    assert len(replica.events("database.reachable")) == 1
    assert replica.stop() == 0
