"""The database's tables, brought to the present version by whichever replica comes first.

The saver's `setup()` takes no lock of its own, and most concurrent first starts fail in it. A *blocking* advisory lock
around it would be worse: its CREATE INDEX CONCURRENTLY waits for every older snapshot, the waiter's statement holds
one, and Postgres sees no cycle, because lock and index belong to different sessions. So replicas poll a try-lock, and
run no DDL at all when everything is current, which also lets a role without rights to create anything run the daemon.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import resources
from typing import Any, LiteralString

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import AsyncConnection, errors, sql
from psycopg.rows import dict_row

from tickd.errors import DatabaseUnusable
from tickd.guard import guard_is_current, guard_was_removed, install_guard, remove_guard
from tickd.lock import LockPlace, closing, open_session
from tickd.stop import Stop


# The one-integer key space is apart from the graphs' two-integer one, and the same for every lock space: all
# applications of one database share its `tickd` schema.
LOCK_KEY = 0x7469636B64  # "tickd"
POLL = timedelta(milliseconds=50)
STEPS = ("001_ledger.sql", "002_effects.sql", "003_live_threads.sql", "004_deserted.sql")

TRY_LOCK = "SELECT pg_try_advisory_lock(%s) AS held"
UNLOCK = "SELECT pg_advisory_unlock(%s)"
LEDGER_PRESENT = "SELECT to_regclass('tickd.migrations') IS NOT NULL AS present"
LEDGER_VERSION = "SELECT COALESCE(max(version), 0) AS version FROM tickd.migrations"
NOTE_LEDGER_VERSION = "INSERT INTO tickd.migrations (version) VALUES (%s)"
SAVER_PRESENT = "SELECT to_regclass('checkpoint_migrations') IS NOT NULL AS present"
SAVER_VERSION = "SELECT COALESCE(max(v), -1) AS version FROM checkpoint_migrations"
INVALID_INDEXES = """
SELECT n.nspname AS schema, c.relname AS name
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE NOT i.indisvalid
  AND i.indrelid IN (to_regclass('checkpoints'), to_regclass('checkpoint_blobs'), to_regclass('checkpoint_writes'))
"""
MAY_CREATE_SCHEMA = "SELECT has_database_privilege(current_database(), 'CREATE') AS may"
MAY_CREATE_TABLES = "SELECT has_schema_privilege(current_schema(), 'CREATE') AS may"
# What no run can do without; what else a role needs hangs on what its graphs and its schedule do.
NOT_TO_USE = """
SELECT string_agg(name, ', ') AS names
FROM unnest(ARRAY['tickd.spaces', 'tickd.graphs', 'tickd.ticks', 'tickd.threads',
                  'checkpoints', 'checkpoint_blobs', 'checkpoint_writes']) AS name,
     to_regclass(name) AS found
WHERE NOT has_any_column_privilege(found, 'SELECT')
   OR NOT has_any_column_privilege(found, 'INSERT')
   OR (name LIKE 'tickd.%%' AND NOT has_any_column_privilege(found, 'UPDATE'))
"""


@dataclass(frozen=True, slots=True)
class Versions:
    """What the database has: the ledger's version (0: none), the saver's (-1: none), the guard, indexes left half built.

    `guard` is true when the guard is as this version wants it, and also when somebody has removed it on purpose.
    """

    ledger: int
    saver: int
    guard: bool = False
    invalid_indexes: tuple[tuple[str, str], ...] = ()

    @property
    def current(self) -> bool:
        """Say whether there is nothing left to do."""
        present = self.ledger >= len(STEPS) and self.saver >= len(AsyncPostgresSaver.MIGRATIONS) - 1
        return present and self.guard and not self.invalid_indexes


async def migrate(
    connection: AsyncConnection[Any], *, stop: Stop, deadline: float
) -> tuple[Versions, Versions]:
    """Bring ledger and saver to the present version and return the versions before and after this replica's own work.

    A stop that is asked for while another replica is at it leaves everything as it is. The connection is a direct one, in autocommit mode; `deadline` is on the monotonic clock. Raises DatabaseUnusable
    when the role may not create what is missing, or when another replica is still at it at the deadline.
    """
    connection.row_factory = dict_row
    # An index is built when the last transaction that may not see it has ended, however long that takes.
    await connection.execute("SET lock_timeout = 0")
    with _told_what_to_grant():
        before = await read_versions(connection)
        if before.current:
            await _check_use(connection)
            return before, before
        if not await _come_to_turn(connection, stop, deadline):
            return before, before
        try:
            before = await _bring_up(connection)
        finally:
            if not connection.closed:
                await connection.execute(UNLOCK, [LOCK_KEY])
        return before, await read_versions(connection)


async def _come_to_turn(connection: AsyncConnection[Any], stop: Stop, deadline: float) -> bool:
    """Poll the lock until it is ours; False when a stop was asked for."""
    while not await _value(connection, TRY_LOCK, LOCK_KEY):
        if time.monotonic() > deadline:
            raise DatabaseUnusable(
                "another session has been migrating the database all the while; look for its advisory lock in pg_locks, "
                "or raise TICKD_DATABASE_DEADLINE"
            )
        if await stop.wait(POLL):
            return False
    return True


@contextmanager
def _told_what_to_grant() -> Iterator[None]:
    try:
        yield
    except errors.InsufficientPrivilege as error:
        raise _not_allowed(str(error.diag.message_primary)) from error
    except errors.InvalidSchemaName as error:
        raise DatabaseUnusable(
            f"{error.diag.message_primary}. The checkpointer's tables belong in the first schema of the search_path that "
            "exists, and none does: create one, or ALTER ROLE ... SET search_path."
        ) from error


def _not_allowed(what: str) -> DatabaseUnusable:
    return DatabaseUnusable(
        f"{what}. The tables of tickd or of the checkpointer are missing, older than this "
        "version, or not for this role to use. Run `tickd migrate` once with the role that owns the database, and GRANT "
        "this one what it needs of the schema tickd and of the checkpointer's tables; or GRANT it CREATE ON DATABASE "
        "and CREATE ON SCHEMA public."
    )


async def foresee(connection: AsyncConnection[Any]) -> Versions:
    """Return what the database has, and change nothing; raises DatabaseUnusable when the next start with this role would."""
    with _told_what_to_grant():
        found = await read_versions(connection)
        if found.current:
            await _check_use(connection)
            return found
        if found.ledger == 0 and not await _value(connection, MAY_CREATE_SCHEMA):
            raise _not_allowed("permission denied to create the schema tickd")
        if found.saver < 0 and not await _value(connection, MAY_CREATE_TABLES):
            raise _not_allowed("permission denied to create the checkpointer's tables")
        return found


async def _check_use(connection: AsyncConnection[Any]) -> None:
    if names := await _value(connection, NOT_TO_USE):
        raise _not_allowed(f"permission denied to read and write {names}")


async def migrate_at(place: LockPlace, *, deadline: float) -> tuple[Versions, Versions]:
    """Migrate over a session of its own, for a command that waits for nothing else; brings a removed guard back."""
    async with _session(place) as connection:
        before, after = await migrate(connection, stop=Stop(), deadline=deadline)
        if await install_guard(connection):
            before = replace(before, guard=False)
        return before, after


async def remove_guard_at(place: LockPlace) -> bool:
    """Remove the guard, and let no start bring it back; return whether there was one."""
    async with _session(place) as connection:
        return await remove_guard(connection)


@asynccontextmanager
async def _session(place: LockPlace) -> AsyncIterator[AsyncConnection[Any]]:
    try:
        session = await open_session(place)
    except (psycopg.OperationalError, TimeoutError, OSError) as error:
        raise DatabaseUnusable(
            f"the database {place.dsn.describe()} is not reachable: {place.dsn.redact(str(error)).strip()}"
        ) from error
    async with closing(session):
        try:
            yield session.connection
        except psycopg.OperationalError as error:
            raise DatabaseUnusable(
                f"the database {place.dsn.describe()} broke off, and what has been done stands; run the command again: "
                f"{place.dsn.redact(str(error)).strip()}"
            ) from error


async def _bring_up(connection: AsyncConnection[Any]) -> Versions:
    # Read again under the lock: another replica may have done it all while this one waited.
    found = await read_versions(connection)
    for version, step in enumerate(STEPS[found.ledger :], start=found.ledger + 1):
        text = resources.files("tickd").joinpath("sql", step).read_text(encoding="utf-8")
        async with connection.transaction():
            await connection.execute(text.encode())
            await connection.execute(NOTE_LEDGER_VERSION, [version])
    await AsyncPostgresSaver(connection).setup()
    for schema, name in (await read_versions(connection)).invalid_indexes:
        # Left by a setup() that was cut off; its IF NOT EXISTS passes over it for good.
        await connection.execute(
            sql.SQL("REINDEX INDEX CONCURRENTLY {}").format(sql.Identifier(schema, name))
        )
    if not await guard_was_removed(connection):
        await install_guard(connection)
    return found


async def read_versions(connection: AsyncConnection[Any]) -> Versions:
    """Return what the database has; the connection's rows are mappings from here on."""
    connection.row_factory = dict_row
    ledger = await _value(connection, LEDGER_VERSION) if await _value(connection, LEDGER_PRESENT) else 0
    saver = await _value(connection, SAVER_VERSION) if await _value(connection, SAVER_PRESENT) else -1
    guarded = await guard_is_current(connection) or await guard_was_removed(connection)
    cursor = await connection.execute(INVALID_INDEXES)
    invalid = tuple((row["schema"], row["name"]) for row in await cursor.fetchall())
    return Versions(ledger, saver, guarded, invalid)


async def _value(connection: AsyncConnection[Any], query: LiteralString, *parameters: Any) -> Any:
    row = await (await connection.execute(query, parameters)).fetchone()
    return next(iter(row.values())) if row else None
