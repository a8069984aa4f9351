"""Somebody who looks on from outside: what Postgres itself says of sessions and locks, as superuser."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, LiteralString, TypeVar

import psycopg


T = TypeVar("T")

LOCKS = """
SELECT l.pid, l.classid::bigint::bit(32)::int, l.objid::bigint::bit(32)::int
FROM pg_locks AS l
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.pid
"""
# What an event loop that waits for Postgres must never be seen doing.
WAITERS = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND NOT granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
SESSIONS = """
SELECT pid, application_name, state, query
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
ORDER BY backend_start
"""


class Onlooker:
    """A connection of its own to the test's database."""

    def __init__(self, admin_dsn: str) -> None:
        self.connection = psycopg.connect(admin_dsn, autocommit=True)

    def close(self) -> None:
        """Leave."""
        self.connection.close()

    def rows(self, query: LiteralString, *parameters: Any) -> list[Any]:
        """Return the rows of any query."""
        return self.connection.execute(query, parameters).fetchall()

    def value(self, query: LiteralString, *parameters: Any) -> Any:
        """Return the one value of a query."""
        ((value,),) = self.rows(query, *parameters)
        return value

    def locks(self) -> list[tuple[int, int, int]]:
        """Return (backend, lock space, lock key) of each two-integer advisory lock that is held."""
        return self.rows(LOCKS)

    def waiters(self) -> int:
        """Return how many sessions wait for an advisory lock: none ever should."""
        waiting: int = self.value(WAITERS)
        return waiting

    def sessions(self, application: str = "") -> list[Any]:
        """Return (pid, application name, state, query) of the other sessions whose application begins like this."""
        return [row for row in self.rows(SESSIONS) if (row[1] or "").startswith(application)]

    def locked_rows_looked_at(self) -> bool:
        """Say whether a replica has just looked whether a row that it could not write is free by now."""
        return any("FOR NO KEY UPDATE SKIP LOCKED" in query for *_, query in self.sessions("tickd/"))

    def terminate(self, pid: int) -> None:
        """End a session as an administrator does."""
        assert self.value("SELECT pg_terminate_backend(%s)", pid)

    async def until(self, question: Callable[[], T], *, seconds: float = 10) -> T:
        """Ask again and again until the answer is true, and return it; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while not (answer := question()):
            if time.monotonic() > deadline:
                raise AssertionError(f"still {answer!r}; locks {self.locks()}, sessions {self.sessions()}")
            await asyncio.to_thread(self.rows, "SELECT pg_sleep(0.01)")
        return answer
