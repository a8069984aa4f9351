"""Roles with limits of their own: a lock session must outlive them, and a missing right must be named."""

import psycopg
import pytest
from psycopg import sql

from tests.database import Database
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_a_role_that_ends_idle_sessions_does_not_end_a_hold(
    fleet: Fleet, database: Database, witness: Witness
):
    """C3: The lock's session says nothing during a run; culled, it would give the graph to another replica in mid-run."""
    role = database.role(settings={"idle_session_timeout": "1s", "idle_in_transaction_session_timeout": "1s"})
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 3.5}}}
    )
    for name in "ab":
        fleet.start(name, schedule, dsn=role.dsn)
    for replica in fleet.replicas:
        replica.wait_for_terminal(5, timeout=20)
    assert fleet.stop() == [0, 0]

    assert fleet.lines("tick.lock_lost") == []
    assert fleet.lines("tick.failed") == []
    assert fleet.lines("tick.error") == []
    assert fleet.lines("tick.ran")
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_role_with_short_time_outs_runs_long(fleet: Fleet, database: Database, witness: Witness):
    """C13: A try-lock never waits, so neither time-out can hit it; a run lasts longer than any of its statements."""
    role = database.role(settings={"statement_timeout": "200ms", "lock_timeout": "200ms"})
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 1.5}}}
    )
    for name in "ab":
        fleet.start(name, schedule, dsn=role.dsn)
    for replica in fleet.replicas:
        replica.wait_for_terminal(4)
    assert fleet.stop() == [0, 0]

    said = "".join(replica.said() for replica in fleet.replicas)
    assert "canceling statement" not in said
    assert {line["event"] for replica in fleet.replicas for line in replica.terminal_lines()} == {
        "tick.ran",
        "tick.skipped",
    }
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_checkpoint_slower_than_the_role_allows_fails_its_tick_only(
    fleet: Fleet, database: Database, witness: Witness
):
    """The time-out is the role's own choice; tickd reports it and lets go of the graph."""
    role = database.role(settings={"statement_timeout": "300ms"})
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    replica = fleet.start("a", schedule, dsn=role.dsn)
    replica.wait_for("tick.ran")

    with psycopg.connect(database.admin_dsn) as blocker:
        blocker.execute("LOCK TABLE checkpoints IN EXCLUSIVE MODE")
        failed = replica.wait_for("tick.failed")
    replica.wait_for("tick.ran", after=failed)

    assert failed["error_type"] in {"QueryCanceled", "LockNotAvailable"}
    assert replica.events("tick.skipped") == []
    assert (witness.overlaps(), witness.repeats()) == ([], [])


@pytest.mark.parametrize(
    ("grant", "said"),
    [("CONNECT", "permission denied for database"), ("CREATE", "permission denied for schema public")],
)
def test_a_role_that_may_not_create_is_told_so(fleet: Fleet, database: Database, grant: str, said: str):
    """Since Postgres 15 this is the commonest first failure, and a traceback does not say what to grant."""
    role = database.role(owner=False)
    statement = sql.SQL("GRANT {} ON DATABASE {} TO {}")
    names = (sql.SQL(grant), sql.Identifier(database.name), sql.Identifier(role.name))
    database.connection.execute(statement.format(*names))
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})

    replica = fleet.start("a", schedule, dsn=role.dsn)

    assert replica.wait() == 3
    failed = replica.wait_for("daemon.failed")
    assert said in failed["error"]
    assert "tickd migrate" in failed["error"]
    assert "CREATE ON SCHEMA public" in failed["error"]
    assert "Traceback" not in replica.said()


def test_a_role_without_rights_runs_on_tables_that_are_there(fleet: Fleet, database: Database):
    """Many let one role migrate and another one run; the second must not need the first one's rights."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    owner = fleet.start("owner", schedule)
    owner.wait_for("daemon.ready")
    assert owner.stop() == 0
    role = database.role(owner=False)
    with psycopg.connect(database.admin_dsn, autocommit=True) as connection:
        for statement in (
            "GRANT USAGE ON SCHEMA tickd, public TO {}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tickd, public TO {}",
        ):
            connection.execute(sql.SQL(statement).format(sql.Identifier(role.name)))

    replica = fleet.start("a", schedule, dsn=role.dsn)

    replica.wait_for("tick.ran")
    assert replica.stop() == 0
