"""The server of a benchmark: a Postgres of its own with default durability, and what it can tell about its load."""

import os
import secrets
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql

from tests.cluster import Cluster, server_binary


# Durability as shipped: a commit waits for the disk, since that is part of every ratio that is published.
SETTINGS = {
    "timezone": "UTC",
    "fsync": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_connections": "300",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.max": "5000",
    "pg_stat_statements.track_planning": "off",
}
HBA = """\
local all all              trust
host  all all 127.0.0.1/32 {method}
"""
ROLE = "bench"
PASSWORD = "Kf7-wq2"  # noqa: S105  # of a server that lives for one run of the suite
SAMPLE_SECONDS = 0.025
BACKENDS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = %s AND backend_type = 'client backend' AND application_name <> 'benchmark'
"""
LOAD = """
SELECT (SELECT coalesce(sum(calls), 0) FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid
        WHERE d.datname = %(name)s),
       (SELECT sessions FROM pg_stat_database WHERE datname = %(name)s),
       (SELECT xact_commit FROM pg_stat_database WHERE datname = %(name)s),
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')
"""
STATEMENTS = r"""
SELECT calls, round(mean_exec_time::numeric, 3)::float8 AS mean_ms, left(regexp_replace(query, '\s+', ' ', 'g'), 80) AS query
FROM pg_stat_statements AS s JOIN pg_database AS d ON d.oid = s.dbid
WHERE d.datname = %s ORDER BY calls DESC LIMIT 12
"""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Server:
    """A throwaway cluster for one run of the suite."""

    def __init__(self, *, method: str = "trust", settings: dict[str, str] | None = None) -> None:
        self._cluster = Cluster({**SETTINGS, **(settings or {})})
        self._method = method

    def start(self) -> None:
        """Make the cluster and start it."""
        self._cluster.init()
        (self._cluster.data / "pg_hba.conf").write_text(HBA.format(method=self._method))
        self._cluster.start()
        self._share_priority()
        with self.admin("postgres") as connection:
            connection.execute("CREATE EXTENSION pg_stat_statements")
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
                    sql.Identifier(ROLE), sql.Literal(PASSWORD)
                )
            )

    def _share_priority(self) -> None:
        """Give the server's autogroup our own's niceness: it runs in a session of its own, and Linux weighs sessions."""
        ours = Path("/proc/self/autogroup")
        if ours.exists() and self._cluster.process is not None:
            # Empty where the process is in no autogroup of its own, as in a container's control group.
            niceness = ours.read_text().rpartition(" ")[2].strip()
            if niceness not in {"", "0"}:
                Path(f"/proc/{self._cluster.process.pid}/autogroup").write_text(niceness)

    def put_ahead(self) -> None:
        """Let the server run before everything else on the machine."""
        if self._cluster.process is not None:
            put_ahead(self._cluster.process.pid)

    def remove(self) -> None:
        """Stop it and delete everything."""
        self._cluster.remove()

    def admin(self, database: str) -> "psycopg.Connection[Any]":
        """Connect as superuser over the Unix socket, under a name by which samples leave it out."""
        return psycopg.connect(
            host=str(self._cluster.home),
            port=self._cluster.port,
            user="postgres",
            dbname=database,
            application_name="benchmark",
            autocommit=True,
        )

    def new_database(self) -> "Database":
        """Make an empty database."""
        name = f"bench_{secrets.token_hex(4)}"
        with self.admin("postgres") as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0").format(
                    sql.Identifier(name), sql.Identifier(ROLE)
                )
            )
        return Database(self, name, self._cluster.dsn(ROLE, PASSWORD, name))

    def cpu_seconds(self) -> float:
        """Return the processor time of the server with all its processes, those that have ended included."""
        process = self._cluster.process
        return 0.0 if process is None else tree_cpu_seconds(process.pid)


class Database:
    """One database of the server, for one contender on one workload."""

    def __init__(self, server: Server, name: str, dsn: str) -> None:
        self.server = server
        self.name = name
        self.dsn = dsn

    def load(self) -> dict[str, float]:
        """Return the counters so far: statements, sessions begun, commits, bytes of WAL, processor seconds."""
        with self.server.admin("postgres") as connection:
            row = connection.execute(LOAD, {"name": self.name}).fetchone()
        assert row is not None  # noqa: S101  # a SELECT without FROM has one row
        names = ("statements", "sessions", "commits", "wal_bytes")
        counters = {name: float(value or 0) for name, value in zip(names, row, strict=True)}
        return {**counters, "server_cpu_s": self.server.cpu_seconds()}

    def statements(self) -> list[dict[str, Any]]:
        """Return the statements that were called most."""
        with self.server.admin("postgres") as connection:
            cursor = connection.execute(STATEMENTS, [self.name])
            columns = [column.name for column in cursor.description or ()]
            return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]

    def drop(self) -> None:
        """Drop it, whoever is still connected."""
        with self.server.admin("postgres") as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self.name)))


class ConnectionSampler:
    """Counts the server connections of a database again and again, in a thread, and keeps the most."""

    def __init__(self, database: Database) -> None:
        self.most = 0
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        with self._database.server.admin("postgres") as connection:
            while not self._stop.wait(SAMPLE_SECONDS):
                row = connection.execute(BACKENDS, [self._database.name]).fetchone()
                self.most = max(self.most, row[0] if row else 0)


def server_version() -> str:
    """Return the version of the server's program."""
    told = subprocess.run(
        [server_binary("postgres"), "--version"], check=True, capture_output=True, text=True
    )
    return told.stdout.split()[2]


def put_ahead(pid: int) -> None:
    """Put a process with its threads and children ahead of everything else on the machine; what it starts later, too."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
        for child in (task / "children").read_text().split():
            put_ahead(int(child))


def tree_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, its children and the children it has waited for."""
    own = _cpu_ticks(pid, waited=True)
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        own += sum(_cpu_ticks(int(child), waited=True) for child in task.read_text().split())
    return own / TICKS_PER_SECOND


def _cpu_ticks(pid: int, *, waited: bool) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0  # it has ended; its parent's count of waited children has it
    return sum(int(field) for field in (fields[11:15] if waited else fields[11:13]))


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has resident now; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
