"""The first deployment: all replicas start at once on a database that has nothing in it."""

import threading
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver

from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

WAITERS = """
SELECT query
FROM pg_stat_activity
WHERE wait_event_type = 'Lock' AND wait_event = 'advisory'
   OR query ~ 'pg_advisory_(xact_)?lock' AND pid <> pg_backend_pid()
"""
INVALID = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"
SAVER_VERSIONS = "SELECT max(v), count(*) FROM checkpoint_migrations"


@pytest.mark.parametrize("_trial", [1, 2])
def test_all_replicas_come_up_on_an_empty_database(fleet: Fleet, witness: Witness, _trial: int):
    """The saver's own setup() fails most of such starts, and a blocking lock around it hangs them for good."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1h"}})
    waiting: list[Any] = []
    over = threading.Event()

    def look() -> None:
        with psycopg.connect(witness.dsn, autocommit=True) as connection:
            while not over.wait(0.01):
                waiting.extend(connection.execute(WAITERS).fetchall())

    looking = threading.Thread(target=look)
    looking.start()
    for name in "abcd":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready", timeout=30)
    over.set()
    looking.join()

    assert waiting == []
    assert witness.query(INVALID) == []
    assert witness.query(SAVER_VERSIONS) == [
        (len(PostgresSaver.MIGRATIONS) - 1, len(PostgresSaver.MIGRATIONS))
    ]
    assert len(fleet.lines("database.migrated")) <= 4
    assert fleet.stop() == [0, 0, 0, 0]
