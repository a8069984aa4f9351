"""The guard: the triggers on the saver's tables that let through only what is written under a thread's present hold.

What they check, and why in this shape, is written in `sql/guard.sql`; `tickd.fence` is the other side, the saver that
writes under a hold. Installing and removing take one table after the other, each in a transaction of its own: the saver
writes to two of them per transaction, in either order, and whoever locked both at once could deadlock with it.
"""

from collections.abc import Sequence
from importlib import resources
from typing import Any, LiteralString

from psycopg import AsyncConnection, errors, sql
from psycopg.rows import tuple_row

from tickd.errors import DatabaseUnusable


# Raised with every change of sql/guard.sql or of the triggers here; kept in the database as the comment of a function.
GUARD_VERSION = 2
REMOVED = "guard removed"

TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
FUNCTIONS: tuple[LiteralString, ...] = (
    "guard_write()",
    "guard_move()",
    "guard_delete()",
    "guard_truncate()",
    "guard_supersede()",
    "check_thread(text)",
    "refuse_write(text)",
)
TRIGGERS: tuple[LiteralString, ...] = (
    """
CREATE OR REPLACE TRIGGER tickd_guard_write
BEFORE INSERT OR UPDATE ON {table}
FOR EACH ROW
EXECUTE FUNCTION tickd.guard_write()
""",
    """
CREATE OR REPLACE TRIGGER tickd_guard_move
BEFORE UPDATE ON {table}
FOR EACH ROW
WHEN (OLD.thread_id IS DISTINCT FROM NEW.thread_id)
EXECUTE FUNCTION tickd.guard_move()
""",
    """
CREATE OR REPLACE TRIGGER tickd_guard_delete
AFTER DELETE ON {table}
REFERENCING OLD TABLE AS deleted
FOR EACH STATEMENT
EXECUTE FUNCTION tickd.guard_delete()
""",
    """
CREATE OR REPLACE TRIGGER tickd_guard_truncate
BEFORE TRUNCATE ON {table}
FOR EACH STATEMENT
EXECUTE FUNCTION tickd.guard_truncate()
""",
)

# An admission that says so does it within its own statement.
SUPERSEDE = """
CREATE OR REPLACE TRIGGER tickd_guard_supersede
AFTER UPDATE OF token ON tickd.graphs
FOR EACH ROW
WHEN (OLD.token <> NEW.token AND current_setting('tickd.supersedes', true) IS DISTINCT FROM 'itself')
EXECUTE FUNCTION tickd.guard_supersede()
"""

# The tables are those that the saver finds by this connection's search_path.
IS_CURRENT = """
SELECT COALESCE(obj_description(to_regprocedure('tickd.guard_write()'), 'pg_proc') = %s, false)
   AND bool_and(saver.guards = %s)
   AND EXISTS (
    SELECT
    FROM pg_trigger
    WHERE tgrelid = to_regclass('tickd.graphs') AND tgname = 'tickd_guard_supersede' AND tgenabled IN ('O', 'A')
)
FROM (
    SELECT (
        SELECT count(*)
        FROM pg_trigger
        WHERE tgrelid = to_regclass(name) AND starts_with(tgname::text, 'tickd_guard_') AND tgenabled IN ('O', 'A')
    ) AS guards
    FROM unnest(%b::text[]) AS name
) AS saver
"""
WAS_REMOVED = "SELECT obj_description(to_regclass('tickd.threads'), 'pg_class') IS NOT DISTINCT FROM %s"
PRESENT = "SELECT to_regprocedure('tickd.guard_write()') IS NOT NULL"
MISSING = "SELECT name FROM unnest(%b::text[]) AS name WHERE to_regclass(name) IS NULL"
# Every schema's, not only those on the search_path.
INSTALLED = """
SELECT n.nspname, c.relname, g.tgname
FROM pg_trigger AS g
JOIN pg_proc AS p ON p.oid = g.tgfoid AND p.pronamespace = to_regnamespace('tickd')
JOIN pg_class AS c ON c.oid = g.tgrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
ORDER BY g.tgrelid
"""
# Whoever changes a trigger waits for the table's writers, and later writers wait behind it.
WAIT_FOR_WRITERS = "SET LOCAL lock_timeout = '3s'"
NOTE_VERSION = "COMMENT ON FUNCTION tickd.guard_write() IS {version}"
NOTE_REMOVED = "COMMENT ON TABLE tickd.threads IS {note}"
DROP_TRIGGER = "DROP TRIGGER IF EXISTS {trigger} ON {table}"
# CASCADE drops the triggers as well, which a role that does not own the tables could not do otherwise.
DROP_FUNCTION = "DROP FUNCTION IF EXISTS tickd.{function} CASCADE"


async def guard_is_current(connection: AsyncConnection[Any]) -> bool:
    """Say whether this version of the guard stands on all of the saver's tables, and nobody has disabled it."""
    rows = await _rows(connection, IS_CURRENT, _version(), len(TRIGGERS), list(TABLES))
    return bool(rows[0][0])


async def guard_was_removed(connection: AsyncConnection[Any]) -> bool:
    """Say whether somebody has removed the guard on purpose, so that a start does not bring it back."""
    rows = await _rows(connection, WAS_REMOVED, REMOVED)
    return bool(rows[0][0])


async def install_guard(connection: AsyncConnection[Any]) -> bool:
    """Bring the guard to the present version and return whether anything had to be done.

    The connection is in autocommit mode and the caller lets one session at a time do this. Raises DatabaseUnusable when
    the saver's tables are not there or a right is missing, LockNotAvailable when a table's writers do not end.
    """
    if await guard_is_current(connection):
        return False
    if missing := [name for (name,) in await _rows(connection, MISSING, list(TABLES))]:
        raise DatabaseUnusable(
            f"the guard has nothing to stand on: no table {', '.join(missing)} on the search_path; run `tickd migrate`"
        )
    functions = resources.files("tickd").joinpath("sql", "guard.sql").read_text(encoding="utf-8")
    try:
        async with connection.transaction():
            await connection.execute(functions.encode(), prepare=False)
            await connection.execute(WAIT_FOR_WRITERS)
            await connection.execute(SUPERSEDE)
        for table in TABLES:
            async with connection.transaction():
                await connection.execute(WAIT_FOR_WRITERS)
                for trigger in TRIGGERS:
                    await connection.execute(sql.SQL(trigger).format(table=sql.Identifier(table)))
    except errors.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"{error.diag.message_primary}. The guard needs CREATE on the schema tickd and TRIGGER on the saver's tables: "
            f"GRANT TRIGGER ON {', '.join(TABLES)} to this role, or run `tickd migrate` once with the role that owns them"
        ) from error
    await connection.execute(sql.SQL(NOTE_REMOVED).format(note=sql.SQL("NULL")))
    # Last, for this is what says that all of it is there.
    await connection.execute(sql.SQL(NOTE_VERSION).format(version=sql.Literal(_version())))
    return True


async def remove_guard(connection: AsyncConnection[Any]) -> bool:
    """Remove the guard from all tables, note that this was wanted, and return whether there was any.

    The connection is in autocommit mode. The threads' rows stay, so that a guard installed later protects them at once.
    """
    (present,) = (await _rows(connection, PRESENT))[0]
    try:
        for schema, table, trigger in await _rows(connection, INSTALLED):
            drop = sql.SQL(DROP_TRIGGER).format(
                trigger=sql.Identifier(trigger), table=sql.Identifier(schema, table)
            )
            async with connection.transaction():
                await connection.execute(WAIT_FOR_WRITERS)
                await connection.execute(drop)
    except errors.InsufficientPrivilege:
        pass  # only a table's owner may drop its triggers; they go with their functions below
    for function in FUNCTIONS:
        await connection.execute(sql.SQL(DROP_FUNCTION).format(function=sql.SQL(function)))
    await connection.execute(sql.SQL(NOTE_REMOVED).format(note=sql.Literal(REMOVED)))
    return bool(present)


def _version() -> str:
    return f"tickd guard {GUARD_VERSION}"


async def _rows(connection: AsyncConnection[Any], query: LiteralString, *parameters: Any) -> Sequence[Any]:
    # The connection is somebody else's, and may make rows of another kind.
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(query, parameters)
        return await cursor.fetchall()
