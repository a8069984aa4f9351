"""Fixtures: a real Postgres for the session, and a fresh database in it for each test."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.cluster import Cluster
from tests.database import Database, Server
from tests.lock_sessions import place_of
from tests.pooler import Pooler
from tests.replicas import Fleet
from tests.witness import Witness
from tickd.migrations import migrate_at


# A property is not wrong because the machine is busy.
settings.register_profile("tickd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tickd")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The Postgres of the session: TICKD_TEST_DSN (a superuser's) if set, else a throwaway cluster; never none."""
    given = os.environ.get("TICKD_TEST_DSN")
    if given:
        server = Server(given)
        server.make_owner()
        yield server
        server.drop_owner()
        return
    cluster = Cluster()
    try:
        cluster.init()
        cluster.start()
        server = Server(cluster.admin_dsn("postgres"))
        server.make_owner()
        yield server
    finally:
        cluster.remove()


@pytest.fixture(scope="session")
def migrated_template(server: Server) -> Iterator[str]:
    """A database with the tables of tickd and of the checkpointer, to be copied."""
    template = Database(server)
    try:
        template.create()
        with ThreadPoolExecutor(1) as other_thread:  # where no event loop runs already
            other_thread.submit(asyncio.run, migrate_at(place_of(template.dsn), deadline=inf)).result()
        yield template.name
    finally:
        template.close()


@pytest.fixture
def database(server: Server, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database, dropped with everybody who is still connected: empty, or with tables if marked `migrated`."""
    marked = request.node.get_closest_marker("migrated")
    template = request.getfixturevalue("migrated_template") if marked else "template0"
    database = Database(server)
    try:
        database.create(template)
        yield database
    finally:
        database.close()


@pytest.fixture
def dsn(database: Database) -> str:
    """The URL of the test's database, as its owner."""
    return database.dsn


@pytest.fixture
def admin_dsn(database: Database) -> str:
    """The conninfo of the test's database as superuser, to look on from outside."""
    return database.admin_dsn


@pytest.fixture
def private_cluster() -> Iterator[Cluster]:
    """A cluster of the test's own, running, which it may stop and restart."""
    cluster = Cluster()
    try:
        cluster.init()
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


@pytest.fixture
def witness(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    """The oracle of the test's database: the graphs of `tests/graphs/witnessed.py`, here and in children, write there."""
    witness = Witness(database.admin_dsn)
    monkeypatch.setenv("WITNESS_DSN", witness.dsn)
    yield witness
    witness.close()


@pytest.fixture
def private_database(private_cluster: Cluster) -> Iterator[Database]:
    """A fresh database on the cluster of the test's own; it goes away with the cluster."""
    server = Server(private_cluster.admin_dsn("postgres"))
    server.make_owner()
    database = Database(server)
    database.create()
    yield database
    database.connection.close()


@pytest.fixture
def standby(private_cluster: Cluster) -> Iterator[Cluster]:
    """A hot standby that streams from `private_cluster`."""
    standby = Cluster()
    try:
        standby.init_standby(private_cluster)
        standby.start()
        yield standby
    finally:
        standby.remove()


@pytest.fixture
def pooler(server: Server) -> Iterator[Pooler]:
    """A PgBouncer in transaction mode before the session's server."""
    pooler = Pooler(server.admin)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.remove()


@pytest.fixture
def fleet(dsn: str, witness: Witness, tmp_path: Path) -> Iterator[Fleet]:  # noqa: ARG001  # its graphs bear witness
    """Real replicas on the test's database; none of them survives the test."""
    with Fleet(tmp_path, dsn) as fleet:
        yield fleet
