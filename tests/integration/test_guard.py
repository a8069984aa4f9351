"""The guard in the database: what it refuses, how it gets there, who needs which right, and how it goes away."""

import asyncio
import subprocess
from importlib import resources
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.cluster import server_binary
from tests.database import Database
from tests.fences import GRAPH, SPACE, THREAD, admit, config, connect, open_pool, prepare, rows, run, saver
from tests.pages import DOCS, blocks
from tickd.errors import DatabaseUnusable
from tickd.guard import TABLES, guard_is_current, guard_was_removed, install_guard, remove_guard
from tickd.migrations import STEPS


WRITE_BLOB = """
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type) VALUES (%s, '', 'c', '1', 'empty')
"""
NAME_HOLD = "SELECT set_config('tickd.token', %s, true)"
HOLD = f"{SPACE}/{GRAPH}/5"
TRIGGER_ROWS = """
SELECT g.tgrelid::regclass::text, g.tgname, g.xmin::text
FROM pg_trigger AS g
WHERE starts_with(g.tgname::text, 'tickd_guard_')
ORDER BY 1, 2
"""
# A role that may put operators and functions before Postgres's own decides what `<>` means in a careless function.
HOSTILE = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.never(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT false';
CREATE OPERATOR hostile.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.never);
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.never);
CREATE FUNCTION hostile.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT '7301/restock/5' $$;
CREATE FUNCTION hostile.concat_ws(text, int, text, bigint) RETURNS text LANGUAGE sql AS $$ SELECT NULL::text $$;
CREATE TABLE hostile.threads (thread_id text, space int, graph text, token bigint);
"""


@pytest.fixture
async def connection(dsn: str):
    """A connection to a migrated database with the guard, where the holder of token 5 has run once."""
    await prepare(dsn)
    async with await connect(dsn) as connection, open_pool(dsn) as pool:
        await admit(connection, 5)
        await run(saver(pool, 5))
        yield connection


async def refused(connection: Any, statement: Any, *parameters: Any) -> bool:
    """Say whether the guard refuses a statement; any other error is raised."""
    try:
        async with connection.transaction():
            await connection.execute(statement, parameters or None)
    except psycopg.DatabaseError as error:
        if error.sqlstate != "TK001":
            raise
        return True
    return False


@pytest.mark.parametrize("table", TABLES)
async def test_no_way_of_changing_a_row_leads_past_the_guard(connection, table):
    """A migration script, an admin's one-liner and a restore all reach the tables by ways that the saver does not use."""
    name = sql.Identifier(table)
    before = await rows(connection)
    move_in = sql.SQL("UPDATE {} SET thread_id = {} WHERE thread_id = 'other'").format(name, THREAD)
    copy = sql.SQL(
        "INSERT INTO {table} SELECT (r).* FROM (SELECT jsonb_populate_record(t, {thread}) AS r FROM {table} AS t) AS x"
    )
    statements = [
        sql.SQL("UPDATE {} SET checkpoint_ns = 'x'").format(name),
        sql.SQL("UPDATE {} SET thread_id = 'other'").format(name),
        sql.SQL("DELETE FROM {}").format(name),
        sql.SQL("TRUNCATE {}").format(name),
        sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(map(sql.Identifier, TABLES))),
        sql.SQL("WITH gone AS (DELETE FROM {} RETURNING 1) SELECT count(*) FROM gone").format(name),
        sql.SQL("MERGE INTO {} AS t USING (SELECT 1) AS s ON true WHEN MATCHED THEN DELETE").format(name),
    ]
    for statement in statements:
        assert await refused(connection, statement), statement.as_string(connection)
    assert await rows(connection) == before

    async with connection.transaction(force_rollback=True):
        await connection.execute(NAME_HOLD, [HOLD])
        await connection.execute(sql.SQL("UPDATE {} SET thread_id = 'other'").format(name))
        await connection.execute(NAME_HOLD, [""])
        assert await refused(connection, move_in)
        to = sql.Literal('{"thread_id": "' + THREAD + '", "checkpoint_ns": "y"}')
        assert await refused(connection, copy.format(table=name, thread=to))


async def test_copy_is_guarded(connection):
    """A data-only restore goes through COPY."""
    with pytest.raises(psycopg.DatabaseError) as caught:
        async with connection.cursor().copy(
            "COPY checkpoint_blobs (thread_id, channel, version, type) FROM STDIN"
        ) as copy:
            await copy.write_row([THREAD, "c", "1", "empty"])
    assert caught.value.sqlstate == "TK001"


async def test_other_threads_pass_in_every_way(connection):
    """The tables may belong to an application that knows nothing of tickd."""
    for statement in (
        "INSERT INTO checkpoint_blobs (thread_id, channel, version, type) VALUES ('a', 'c', '1', 'empty')",
        "UPDATE checkpoint_blobs SET thread_id = 'b' WHERE thread_id = 'a'",
        "DELETE FROM checkpoint_blobs WHERE thread_id = 'b'",
    ):
        assert not await refused(connection, statement)


async def test_one_foreign_thread_in_a_deletion_of_many_is_enough(connection):
    """A clean-up by age takes the holder's rows along with the rest."""
    for i in range(20):
        await connection.execute(WRITE_BLOB, [f"other/{i}"])
    before = await rows(connection)

    assert await refused(connection, "DELETE FROM checkpoint_blobs")

    assert await rows(connection) == before


async def test_without_protected_threads_the_tables_may_be_truncated(connection):
    """The guard protects threads, not tables."""
    await connection.execute("DELETE FROM tickd.threads")

    assert not await refused(connection, "TRUNCATE checkpoints, checkpoint_blobs, checkpoint_writes")


async def test_a_thread_whose_row_is_gone_is_free(connection):
    """Retention drops a thread's protection and its rows in one transaction."""
    async with connection.transaction():
        await connection.execute("DELETE FROM tickd.threads WHERE thread_id = %s", [THREAD])
        await AsyncPostgresSaver(connection).adelete_thread(THREAD)

    assert await rows(connection) == []


async def test_writers_need_no_right_on_tickds_own_tables(connection, database: Database):
    """A web application with a role of its own writes to its threads as before, and hears a clear no on tickd's."""
    role = database.role(owner=False)
    await connection.execute(
        sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO {}").format(
            sql.SQL(", ").join(map(sql.Identifier, TABLES)), sql.Identifier(role.name)
        )
    )
    async with open_pool(role.dsn) as pool:
        await run(AsyncPostgresSaver(pool), "web/1")
        with pytest.raises(psycopg.DatabaseError, match="tickd refused"):
            await run(AsyncPostgresSaver(pool))
        # The right to write is the table's; the guard asks for the hold and for nothing else.
        await run(saver(pool, 5))
    assert await rows(connection, "web/1") != []


async def test_a_hostile_search_path_changes_nothing(connection):
    """The guard runs with its owner's rights and looks nothing up in a schema that the writer has chosen."""
    await connection.execute(HOSTILE)
    await connection.execute("SET search_path = hostile, public, pg_catalog, pg_temp")
    await connection.execute("CREATE TEMPORARY TABLE threads (thread_id text)")

    assert await refused(connection, WRITE_BLOB, THREAD)
    assert await refused(connection, "DELETE FROM checkpoint_blobs")
    assert await refused(connection, "UPDATE checkpoint_blobs SET thread_id = 'other'")


async def test_a_session_setting_does_not_outrank_the_token(connection):
    """What is written in a DSN's options or a role's defaults is one hold's name at most, and soon an old one."""
    await connection.execute("SET tickd.token = '7301/restock/4'")
    assert await refused(connection, WRITE_BLOB, THREAD)
    await connection.execute("SET tickd.token = '7301/restock/5'")
    assert not await refused(connection, WRITE_BLOB, THREAD)
    await admit(connection, 6)
    assert await refused(connection, "UPDATE checkpoint_blobs SET blob = NULL")


async def test_a_current_guard_is_left_alone(connection, database: Database):
    """Every replica asks at its start; most of them may not create anything, and none may lock the tables for it."""
    before = await (await connection.execute(TRIGGER_ROWS)).fetchall()
    assert len(before) == 13
    role = database.role(owner=False)
    await connection.execute(sql.SQL("GRANT USAGE ON SCHEMA tickd TO {}").format(sql.Identifier(role.name)))

    async with await connect(role.dsn) as other:
        assert not await install_guard(other)

    assert await guard_is_current(connection)
    assert await (await connection.execute(TRIGGER_ROWS)).fetchall() == before


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER TABLE checkpoints DISABLE TRIGGER tickd_guard_write",
        "DROP TRIGGER tickd_guard_delete ON checkpoint_writes",
        "COMMENT ON FUNCTION tickd.guard_write() IS 'tickd guard 0'",
        "DROP FUNCTION tickd.guard_move() CASCADE",
        "DROP FUNCTION tickd.guard_supersede() CASCADE",
    ],
)
async def test_a_guard_that_is_old_or_incomplete_is_brought_up(connection, damage):
    """A table that was made anew, or a version that was half installed, must not pass for protected."""
    await connection.execute(damage)
    assert not await guard_is_current(connection)

    assert await install_guard(connection)

    assert await guard_is_current(connection)
    assert await refused(connection, "DELETE FROM checkpoint_writes")
    assert await refused(connection, "UPDATE checkpoints SET thread_id = 'other'")


async def test_a_removed_guard_is_gone_and_remembered_as_removed(connection):
    """Whoever removed it on purpose must not find it back after the next start."""
    assert not await guard_was_removed(connection)
    assert await remove_guard(connection)

    assert not await guard_is_current(connection)
    assert await guard_was_removed(connection)
    assert not await refused(connection, WRITE_BLOB, THREAD)
    left = await connection.execute(
        "SELECT count(*) FROM pg_proc WHERE pronamespace = to_regnamespace('tickd') AND prorettype <> 0"
    )
    assert await left.fetchone() == (0,)
    assert await (await connection.execute(TRIGGER_ROWS)).fetchall() == []
    assert not await remove_guard(connection)

    await admit(connection, 6, thread="another")
    assert await install_guard(connection)
    assert not await guard_was_removed(connection)
    # Admissions went on without the guard, and the earlier thread is not its holder's any more.
    assert await refused(
        connection, f"SELECT set_config('tickd.token', '{HOLD}', true); DELETE FROM checkpoint_blobs"
    )
    assert await refused(connection, "DELETE FROM checkpoint_blobs")


async def test_a_guard_without_tables_says_what_is_missing(dsn):
    """Installed in the wrong order, or over a search_path that leads elsewhere, it would protect nothing in silence."""
    await prepare(dsn)
    async with await connect(make_conninfo(dsn, options="-c search_path=elsewhere")) as connection:
        assert not await guard_is_current(connection)
        with pytest.raises(
            DatabaseUnusable, match="no table checkpoints, checkpoint_blobs, checkpoint_writes"
        ):
            await install_guard(connection)


async def test_tables_in_a_schema_of_their_own_are_guarded_there(dsn):
    """Many deployments keep LangGraph's tables apart, by the search_path in the DSN."""
    await prepare(dsn)
    async with await connect(dsn) as connection:
        await connection.execute("CREATE SCHEMA apart")
    own = make_conninfo(dsn, options="-c search_path=apart")
    async with await connect(own) as connection, open_pool(own) as pool:
        await AsyncPostgresSaver(pool).setup()
        assert not await guard_is_current(connection)
        assert await install_guard(connection)
        await admit(connection, 5)

        await run(saver(pool, 5))
        with pytest.raises(psycopg.DatabaseError, match="tickd refused"):
            await run(saver(pool, 4))

        assert await remove_guard(connection)
        assert await (await connection.execute(TRIGGER_ROWS)).fetchall() == []


async def test_tables_of_another_owner_need_a_grant_that_the_error_names(dsn, admin_dsn, database: Database):
    """Where a DBA owns the saver's tables, tickd's role may guard them with one right, and remove the guard as well."""
    await prepare(dsn)
    role = database.role(owner=False)
    async with await connect(admin_dsn) as admin, await connect(role.dsn) as connection:
        await remove_guard(admin)
        for statement in (
            "ALTER SCHEMA tickd OWNER TO {}",
            "ALTER TABLE tickd.threads OWNER TO {}",
            "ALTER TABLE tickd.graphs OWNER TO {}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON checkpoints, checkpoint_blobs, checkpoint_writes TO {}",
        ):
            await admin.execute(sql.SQL(statement).format(sql.Identifier(role.name)))

        with pytest.raises(
            DatabaseUnusable, match="GRANT TRIGGER ON checkpoints, checkpoint_blobs, checkpoint_"
        ):
            await install_guard(connection)
        assert not await guard_is_current(connection)

        grant = "GRANT TRIGGER ON checkpoints, checkpoint_blobs, checkpoint_writes TO {}"
        await admin.execute(sql.SQL(grant).format(sql.Identifier(role.name)))
        assert await install_guard(connection)
        await admit(connection, 5)
        assert await refused(admin, WRITE_BLOB, THREAD)

        assert await remove_guard(connection)
        assert await (await connection.execute(TRIGGER_ROWS)).fetchall() == []
        # The role owns tickd's schema, so it has to let go before it can be dropped.
        await admin.execute("DROP SCHEMA tickd CASCADE")


async def test_writers_that_do_not_end_are_not_waited_for(connection, dsn):
    """Whoever changes a trigger waits for the table's writers, and all later writers wait behind it."""
    await remove_guard(connection)
    async with await connect(dsn) as writer, writer.transaction():
        await writer.execute(WRITE_BLOB, ["other"])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await install_guard(connection)
    assert await install_guard(connection)


@pytest.mark.parametrize("version", range(3, len(AsyncPostgresSaver.MIGRATIONS)))
async def test_the_saver_migrates_on_under_the_guard(dsn, version):
    """The guard may come to a database with threads of an older saver, and must outlive the saver's own migrations."""
    async with await connect(dsn) as connection, open_pool(dsn) as pool:
        for number, migration in enumerate(AsyncPostgresSaver.MIGRATIONS[: version + 1]):
            await connection.execute(migration)
            await connection.execute("INSERT INTO checkpoint_migrations (v) VALUES (%s)", [number])
        await connection.execute(OLD_THREADS)
        for step in STEPS:
            await connection.execute(resources.files("tickd").joinpath("sql", step).read_text().encode())
        assert await install_guard(connection)
        await admit(connection, 5)
        assert await refused(connection, "DELETE FROM checkpoints WHERE thread_id = %s", THREAD)

        await AsyncPostgresSaver(pool).setup()

        assert await guard_is_current(connection)
        found = await AsyncPostgresSaver(pool).aget_tuple(config())
        assert found is not None
        assert found.checkpoint["channel_values"]["seen"] == ["of old"]
        with pytest.raises(psycopg.DatabaseError, match="tickd refused"):
            await run(AsyncPostgresSaver(pool))
        assert (await run(saver(pool, 5)))["seen"] == ["of old", "input", "n0", "n1"]
        assert (await run(AsyncPostgresSaver(pool), "other"))["seen"] == ["of old", "input", "n0", "n1"]


OLD_THREADS = """
INSERT INTO checkpoints (thread_id, checkpoint_id, type, checkpoint, metadata)
SELECT thread, '1ef4f797-8335-6428-8001-8a1503f9b875', NULL, '{
    "v": 1, "ts": "2024-07-31T20:14:19.804150+00:00", "id": "1ef4f797-8335-6428-8001-8a1503f9b875",
    "channel_versions": {"seen": "00000000000000000000000000000001.0.5"}, "versions_seen": {}, "pending_sends": [], "channel_values": {}
}', '{"step": 1, "source": "loop"}'
FROM unnest(ARRAY['restock/long-lived', 'other']) AS thread;
INSERT INTO checkpoint_blobs (thread_id, channel, version, type, blob)
SELECT thread, 'seen', '00000000000000000000000000000001.0.5', 'json', '["of old"]'
FROM unnest(ARRAY['restock/long-lived', 'other']) AS thread
"""


def copy_database(source: str, target: str) -> None:
    """Restore a dump of one database into another."""
    dump = subprocess.run([server_binary("pg_dump"), source], capture_output=True, check=True).stdout
    psql = [server_binary("psql"), "-q", "-v", "ON_ERROR_STOP=1", target]
    subprocess.run(psql, input=dump, capture_output=True, check=True)


async def test_a_dump_takes_the_guard_along(connection, dsn, database: Database):
    """A database that was restored from a backup is protected like the one that was lost."""
    copy = Database(database.server)
    copy.create()
    try:
        await asyncio.to_thread(copy_database, dsn, copy.dsn)
        async with await connect(copy.dsn) as restored:
            assert await guard_is_current(restored)
            assert await rows(restored) == await rows(connection)
            assert await refused(restored, "DELETE FROM checkpoints")
    finally:
        copy.close()


async def test_the_pages_way_of_changing_rows_by_hand_works(connection):
    """It is copied in a hurry, by somebody with a broken thread."""
    (statement,) = blocks(DOCS / "fence.md", "sql")
    before = await rows(connection)

    await connection.execute(statement.replace("'restock_plan'", f"'{THREAD}'").replace("'1f1ec33f'", "''"))

    kinds = {kind for kind, *_ in await rows(connection)}
    assert kinds < {kind for kind, *_ in before}
    assert "checkpoint" not in kinds
