"""The database restarts under a fleet that lives, and a replica starts at that time: it must not think that nobody was there."""

import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster import Cluster
from tests.database import Database
from tests.replicas import Fleet
from tests.witness import GRAPHS
from tickd.tick import instant_text


pytestmark = pytest.mark.chaos

ROWS = "SELECT graph, fire_time, outcome, error_type FROM tickd.ticks ORDER BY graph, fire_time"


@pytest.fixture
def schedule(fleet: Fleet, private_database: Database) -> Path:
    """Graphs of both modes, for which nothing is too late within the test."""
    fleet.dsn = private_database.dsn
    graph = {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "1m"}
    return fleet.schedule(
        {
            f"{missed}_{mode}": {**graph, "missed": missed, "mode": mode}
            for missed in ("all", "skip")
            for mode in ("claim", "skip")
        }
    )


def rows(database: Database) -> list[Any]:
    """Return what the ledger says of every tick."""
    with psycopg.connect(database.admin_dsn) as connection:
        return connection.execute(ROWS).fetchall()


@pytest.mark.parametrize("starts", ["while it is away", "when it is back"])
def test_a_replica_that_starts_with_the_database_does_not_take_itself_for_the_first(
    fleet: Fleet, schedule: Path, private_cluster: Cluster, private_database: Database, starts: str
):
    """What the others had fired meanwhile, and waited to write down, was missed in the ledger, and never ran."""
    live = [fleet.start(name, schedule) for name in "ab"]
    for replica in live:
        replica.wait_for("tick.ran", count=4)

    private_cluster.stop()
    new = fleet.start("c", schedule) if starts == "while it is away" else None
    # So long that whoever waited twice as long each time would now wait for many seconds.
    watch = new or fleet.start("other", schedule)
    watch.wait_for("database.unreachable", count=7, timeout=40)
    private_cluster.start()
    if new is None:
        watch.kill()
        new = fleet.start("c", schedule)
    ready = new.wait_for("daemon.ready", timeout=40)
    new.wait_for_terminal(8, timeout=40)
    for replica in live:
        replica.wait_for("tick.ran", after=replica.lines[-1])
    fleet.stop()

    assert [row for row in rows(private_database) if row[2] == "missed"] == []
    assert fleet.lines("tick.missed") == []
    assert ready["graphs"] == 4


def test_a_replica_that_stood_still_meanwhile_runs_nothing_of_what_was_missed(
    fleet: Fleet, schedule: Path, private_cluster: Cluster, private_database: Database
):
    """It was not there, so its ticks are in the books; when it goes on, they are due there still."""
    still = fleet.start("still", schedule)
    still.wait_for("tick.ran", count=4)
    still.signal(signal.SIGSTOP)
    private_cluster.restart()
    new = fleet.start("new", schedule, env={"TICKD_CONNECT_TIMEOUT": "1s"})
    missed = new.wait_for("tick.missed", timeout=30)
    new.wait_for("daemon.ready")

    still.signal(signal.SIGCONT)
    jumped = still.wait_for("clock.jumped")
    for name in ("skip_claim", "skip_skip"):
        after = still.wait_for("tick.skipped", after=jumped, graph=name)
        assert after["fire_time"] >= missed["fire_time"]
    new.wait_for("tick.ran", count=20, timeout=30)
    fleet.stop()

    written = {
        (graph, instant_text(fire_time)): outcome for graph, fire_time, outcome, _ in rows(private_database)
    }
    told = {(line["graph"], line["fire_time"]) for line in fleet.lines("tick.missed", reason="down")}
    ran = [(line["graph"], line["fire_time"]) for line in fleet.lines("tick.ran")]
    assert told
    assert told == {tick for tick, outcome in written.items() if outcome == "missed"}
    assert len(set(ran)) == len(ran)
    assert {written[tick] for tick in ran} == {"ran"}
