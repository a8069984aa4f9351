"""The tables, brought up by whichever replica comes first, and left alone by everybody after that."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from math import inf

import psycopg
import pytest
from psycopg import sql

from tests.database import PASSWORD, Database
from tests.integration.conftest import Places
from tests.lock_sessions import place_of
from tests.onlooker import Onlooker
from tickd.clock import DatabaseClock
from tickd.database import DatabaseStart
from tickd.errors import DatabaseUnusable
from tickd.lock import LockPlace, closing, open_session
from tickd.log import Log
from tickd.migrations import LOCK_KEY, STEPS, Versions, migrate, migrate_at
from tickd.stop import Stop


INVALID = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"
TABLES = """
SELECT count(*) FROM pg_tables
WHERE schemaname = 'tickd' AND tablename = ANY (ARRAY['migrations', 'graphs', 'ticks', 'threads'])
   OR schemaname = 'public' AND tablename = ANY (ARRAY['checkpoints', 'checkpoint_blobs', 'checkpoint_writes'])
"""
# Raises at any DDL, whoever does it.
NO_DDL = """
CREATE FUNCTION no_ddl() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'DDL: %', tg_tag; END $$;
CREATE EVENT TRIGGER no_ddl ON ddl_command_start EXECUTE FUNCTION no_ddl()
"""


async def bring_up(
    place: LockPlace, *, stop: Stop | None = None, seconds: float = 30
) -> tuple[Versions, Versions]:
    """Migrate as a replica does at its start."""
    async with closing(await open_session(place)) as session:
        return await migrate(session.connection, stop=stop or Stop(), deadline=time.monotonic() + seconds)


async def test_an_empty_database_gets_all_tables(place: LockPlace, onlooker: Onlooker):
    """Tickd's own and the checkpointer's, and the answer says what was there before and after."""
    before, after = await bring_up(place)

    assert (before.ledger, before.saver, before.current) == (0, -1, False)
    assert (after.ledger, after.current) == (len(STEPS), True)
    assert onlooker.value(TABLES) == 7
    assert onlooker.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@pytest.mark.migrated
async def test_a_database_that_is_up_to_date_is_not_touched(place: LockPlace, onlooker: Onlooker):
    """A role without any right to create runs the daemon; and a busy table is not locked at each start."""
    onlooker.connection.execute(NO_DDL)

    before, after = await bring_up(place)

    assert before == after
    assert after.current


async def test_replicas_that_start_together_all_come_up(places: Places, onlooker: Onlooker):
    """D1, D2: unserialised most would fail; with a blocking lock they would wait for each other for ever."""
    waited: set[int] = set()
    starting = [asyncio.create_task(bring_up(places(f"r{n}"))) for n in range(5)]
    while any(not start.done() for start in starting):
        waited.add(await asyncio.to_thread(onlooker.waiters))

    answers = [start.result() for start in starting]

    assert all(after.current for _, after in answers)
    assert [before.ledger for before, _ in answers].count(0) == 1
    assert waited == {0}
    assert onlooker.value(INVALID) == 0


async def test_an_index_that_was_left_half_built_is_built(place: LockPlace, onlooker: Onlooker):
    """A setup() that was cut off leaves it invalid, and its IF NOT EXISTS passes over it for good."""
    await bring_up(place)
    onlooker.connection.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'checkpoints_thread_id_idx'::regclass"
    )

    before, after = await bring_up(place)

    assert before.invalid_indexes == (("public", "checkpoints_thread_id_idx"),)
    assert not before.current
    assert after.current
    assert onlooker.value(INVALID) == 0


async def test_a_ledger_of_a_newer_version_does_not_pass_for_the_checkpointers_tables(
    place: LockPlace,
):
    """During a roll-back this version meets a newer ledger; each of the two has to be looked at on its own."""
    _, after = await bring_up(place)
    newer = replace(after, ledger=len(STEPS) + 1)

    assert newer.current
    assert not replace(newer, saver=after.saver - 1).current


@pytest.mark.parametrize(
    ("grants", "said"),
    [
        ((), "permission denied for database"),
        (("CREATE ON DATABASE {database}",), "permission denied for schema public"),
    ],
)
async def test_a_role_that_may_not_create_is_told_what_to_grant(
    database: Database, grants: tuple[str, ...], said: str
):
    """D4: a traceback would tell the same to nobody who can do something about it."""
    role = database.role(owner=False)
    for grant in grants:
        database.connection.execute(
            sql.SQL(f"GRANT {grant} TO {{role}}").format(
                database=sql.Identifier(database.name), role=sql.Identifier(role.name)
            )
        )

    with pytest.raises(DatabaseUnusable) as refused:
        await bring_up(place_of(role.dsn))

    assert said in str(refused.value)
    assert "`tickd migrate`" in str(refused.value)


@pytest.mark.migrated
async def test_a_role_that_may_only_look_is_told_so(database: Database):
    """Everything is current, so nothing is created, and the first write would be refused in the middle of the start."""
    role = database.role(owner=False)
    with psycopg.connect(database.admin_dsn, autocommit=True) as admin:
        for grant in (
            "GRANT USAGE ON SCHEMA tickd TO {}",
            "GRANT SELECT ON ALL TABLES IN SCHEMA tickd, public TO {}",
            "GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA tickd TO {}",
        ):
            admin.execute(sql.SQL(grant).format(sql.Identifier(role.name)))

    with pytest.raises(
        DatabaseUnusable, match="read and write checkpoints, checkpoint_blobs, checkpoint_writes"
    ):
        await bring_up(place_of(role.dsn))


async def test_a_search_path_that_leads_nowhere_is_said(database: Database):
    """Postgres then has no place for the checkpointer's tables, and says so in the middle of the migration."""
    with pytest.raises(DatabaseUnusable, match="search_path"):
        await bring_up(place_of(f"{database.dsn}?options=-csearch_path%3Dnowhere"))


@pytest.mark.migrated
async def test_a_role_that_may_not_even_look_is_told_so(database: Database):
    """The tables are there, made by another role, which has granted nothing."""
    with pytest.raises(DatabaseUnusable, match="permission denied for schema tickd"):
        await bring_up(place_of(database.role(owner=False).dsn))


async def test_a_migration_that_does_not_end_is_waited_for_up_to_the_deadline(
    place: LockPlace, onlooker: Onlooker
):
    """Somebody has the lock and does not come to an end; the message says where to look."""
    onlooker.connection.execute("SELECT pg_advisory_lock(%s)", [LOCK_KEY])

    with pytest.raises(DatabaseUnusable, match="TICKD_DATABASE_DEADLINE"):
        await bring_up(place, seconds=0.2)


async def test_a_replica_that_is_stopped_while_another_migrates_just_stops(
    place: LockPlace, onlooker: Onlooker, log: Log
):
    """It was asked to end, and there is nothing wrong with the database."""
    onlooker.connection.execute("SELECT pg_advisory_lock(%s)", [LOCK_KEY])
    stop = Stop()
    start = DatabaseStart(place.dsn, place, clock=DatabaseClock(), stop=stop, log=log)
    starting = asyncio.create_task(start.wait(place.connect_timeout * 4))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_try" in row[3]])

    stop.request()

    async with asyncio.timeout(2):
        assert await starting is None


async def test_tickd_migrate_says_which_database_it_cannot_reach():
    """The command waits for nothing, and shows no password."""
    dsn = f"postgresql://tickd:{PASSWORD}@127.0.0.1:1/shop"

    with pytest.raises(DatabaseUnusable, match=r"tickd@127\.0\.0\.1:1/shop is not reachable") as refused:
        await migrate_at(place_of(dsn), deadline=inf)

    assert PASSWORD not in str(refused.value)


@pytest.fixture
def cut_off_in_the_middle(
    onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[None]:
    """For the length of a block, end the session of whoever comes to the saver's own tables."""

    async def cut_off(_: object) -> None:
        ((pid, *_rest),) = onlooker.sessions("tickd/a")
        onlooker.terminate(pid)

    @contextmanager
    def cutting_off() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("tickd.migrations.AsyncPostgresSaver.setup", cut_off)
            yield

    return cutting_off()


async def test_tickd_migrate_says_that_its_session_was_ended(
    place: LockPlace, cut_off_in_the_middle: AbstractContextManager[None]
):
    """A database that restarts in the middle is no fault of tickd's: a sentence and exit code 3, and it goes on from there."""
    with (
        cut_off_in_the_middle,
        pytest.raises(DatabaseUnusable, match="broke off, and what has been done stands"),
    ):
        await migrate_at(place, deadline=inf)

    _, after = await migrate_at(place, deadline=inf)
    assert after.current


async def test_a_migration_cut_off_by_its_server_leaves_the_lock_to_the_next(
    place: LockPlace, cut_off_in_the_middle: AbstractContextManager[None]
):
    """The error that comes out is the one that happened, not that of the unlock after it."""
    with cut_off_in_the_middle, pytest.raises(psycopg.OperationalError):
        await bring_up(place)

    _, after = await bring_up(place)
    assert after.current
