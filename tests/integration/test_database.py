"""The fixtures themselves: what the other tests take for granted about their Postgres."""

import asyncio

import psycopg
import pytest

from tests.cluster import Cluster
from tests.database import Database
from tests.pooler import Pooler


def one(dsn: str, query: str) -> object:
    """Return the one value of a query."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row
        return row[0]


def test_the_session_is_far_from_utc(dsn: str):
    """A server on UTC would hide every place that takes its local time for UTC."""
    assert one(dsn, "SHOW timezone") == "Pacific/Chatham"


def test_tickd_connects_as_an_ordinary_role(database: Database):
    """A superuser's DSN would hide each missing right, and take the slots reserved for superusers."""
    assert one(
        database.dsn,
        "SELECT NOT rolsuper AND NOT pg_has_role('pg_monitor', 'member') FROM pg_roles WHERE rolname = current_user",
    )
    assert one(database.admin_dsn, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")


def test_a_role_brings_its_own_defaults(database: Database):
    """The cases about roles hang on these being in force."""
    role = database.role(settings={"statement_timeout": "250ms"}, connection_limit=1)

    assert one(role.dsn, "SHOW statement_timeout") == "250ms"
    with (
        psycopg.connect(role.dsn),
        pytest.raises(psycopg.OperationalError, match="too many connections for role"),
    ):
        psycopg.connect(role.dsn)


def test_a_role_that_owns_nothing_may_not_create(database: Database):
    """Since Postgres 15 nobody but the owner may create in public: the commonest first failure of a deployment."""
    role = database.role(owner=False)

    with psycopg.connect(role.dsn) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("CREATE TABLE t ()")


def test_a_wrong_password_is_refused(database: Database):
    """With trust in place of scram the tests about passwords would prove nothing."""
    wrong = database.dsn.replace(":Sw0rdf1sh-Zq8x@", ":wrong@")

    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


async def test_a_test_may_leave_connections_open(database: Database):
    """A failing test must not hang or poison the ones after it."""
    left = await psycopg.AsyncConnection.connect(database.dsn, autocommit=True)
    await asyncio.to_thread(database.drop)

    with pytest.raises(psycopg.OperationalError):
        await left.execute("SELECT 1")
    await left.close()


def test_a_private_cluster_comes_back_on_its_port(private_cluster: Cluster):
    """A replica reconnects to where the server was, so a restart must not move it."""
    dsn = private_cluster.admin_dsn("postgres")
    before = one(dsn, "SELECT pg_postmaster_start_time()")

    private_cluster.restart("immediate")

    assert one(dsn, "SELECT pg_postmaster_start_time()") != before


def test_the_pooler_hands_each_transaction_another_session(database: Database, pooler: Pooler):
    """In session mode it would hide exactly the faults that the tests use it for."""
    through = pooler.through(database.dsn)
    with (
        psycopg.connect(through, autocommit=True, prepare_threshold=None) as first,
        psycopg.connect(through, autocommit=True, prepare_threshold=None) as second,
    ):
        taken = first.execute("SELECT pg_try_advisory_lock(1, 2), pg_backend_pid()").fetchone()
        second.execute("BEGIN")
        other = second.execute("SELECT pg_backend_pid()").fetchone()
        again = first.execute("SELECT pg_advisory_unlock(1, 2), pg_backend_pid()").fetchone()

    assert taken
    assert other == taken[1:]
    assert again
    assert not again[0]


def test_a_standby_follows_and_is_read_only(private_database: Database, standby: Cluster):
    """A lock taken there excludes nobody, so tickd must be able to tell."""
    dsn = standby.admin_dsn(private_database.name)

    assert one(dsn, "SELECT pg_is_in_recovery()")
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        connection.execute("CREATE TABLE t ()")
