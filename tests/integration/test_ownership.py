"""Who owns a thread: a stale writer stopped before, between and after its statements, and a take-over at that moment.

A writer is parked at an exact place by triggers that wait for an advisory lock, and is known to wait when Postgres says
so. `aa` fires before the guard's own trigger and `zz` after it, for triggers of one kind fire in the order of names.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base.id import uuid6
from psycopg import AsyncConnection, sql

from tests.fences import (
    GRAPH,
    SPACE,
    THREAD,
    admit,
    asking,
    config,
    connect,
    open_pool,
    prepare,
    rows,
    run,
    saver,
)
from tests.lock_sessions import sessions
from tickd import admissions, lock
from tickd.admissions import Admission, hold_and_admit
from tickd.dsn import parse_dsn
from tickd.fence import FencedSaver, is_refused
from tickd.lock import LockPlace, closing, open_session
from tickd.stale_writers import PATIENCE, StaleWriters
from tickd.tick import Tick, run_id


GATE_FUNCTION = """
CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(4711);
    RETURN COALESCE(NEW, OLD);
END $$
"""
GATE_AT_ROW = "CREATE TRIGGER {name} BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION wait_at_gate()"
GATE_AT_STATEMENT = (
    "CREATE TRIGGER {name} {when} DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION wait_at_gate()"
)
FAILS = " LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'the trigger fires'; END $$"
BLOCKERS = "SELECT pg_blocking_pids(%s)"
WAITING = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"

ALL_THREE_WRITE = """
SELECT count(DISTINCT left(task_id, 2)) = 3 AND count(*) > 30 FROM checkpoint_writes WHERE task_id LIKE '_/%%'
"""

OPERATIONS = ("put", "put_writes", "delete")
# Where a writer of each kind is parked: before it has passed the guard anywhere, or when it has.
BEFORE_THE_GUARD = [
    ("put", "aa", "checkpoint_blobs"),
    ("put_writes", "aa", "checkpoint_writes"),
    ("delete", "BEFORE", "checkpoints"),
]
BEHIND_THE_GUARD = [
    ("put", "zz", "checkpoint_blobs"),
    ("put", "aa", "checkpoints"),
    ("put", "zz", "checkpoints"),
    ("put_writes", "zz", "checkpoint_writes"),
    ("delete", "BEFORE", "checkpoint_blobs"),
    ("delete", "BEFORE", "checkpoint_writes"),
    ("delete", "AFTER", "checkpoint_writes"),
]


class Stage:
    """A thread with the state of hold 5, a pool for the stale writer, and a connection for each other part."""

    def __init__(self, pool: Any, onlooker: AsyncConnection[Any], admitting: AsyncConnection[Any]) -> None:
        self.stale = saver(pool, 5)
        self.new = saver(pool, 6)
        self.onlooker = onlooker
        self.admitting = admitting

    async def act(self, operation: str, writer: FencedSaver) -> None:
        """Let a writer do one operation, of two statements at least, on the thread's newest checkpoint."""
        found: Any = await self.new.aget_tuple(config())
        checkpoint: Any = {**found.checkpoint, "id": str(uuid6())}
        match operation:
            case "put":
                version = writer.get_next_version(found.checkpoint["channel_versions"]["seen"], None)
                checkpoint["channel_versions"] = {**checkpoint["channel_versions"], "seen": version}
                await writer.aput(found.config, checkpoint, {"step": 99, "source": "loop"}, {"seen": version})
            case "put_writes":
                await writer.aput_writes(found.config, [("seen", ["a"]), ("seen", ["b"])], "late")
            case _:
                await writer.adelete_thread(THREAD)

    async def blocked_by(self, waiting: int) -> set[int]:
        """Return who blocks a session, once it is blocked at all."""
        return set(await self.until(BLOCKERS, waiting))

    async def until(self, query: Any, *parameters: Any) -> Any:
        """Ask until the answer is something; fail after ten seconds."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            row = await (await self.onlooker.execute(query, parameters)).fetchone()
            if row is not None and row[0]:
                return row[0]
        raise AssertionError(f"still nothing: {query}")

    @asynccontextmanager
    async def parked(
        self, operation: str, name: str, table: str
    ) -> AsyncIterator[tuple[asyncio.Task[None], int]]:
        """Let the stale writer act and park it at a gate; yields the task and the writer's backend."""
        statement, when = (GATE_AT_STATEMENT, name) if operation == "delete" else (GATE_AT_ROW, "")
        trigger = sql.SQL(statement).format(
            name=sql.Identifier(f"{name.lower()}_gate"), table=sql.Identifier(table), when=sql.SQL(when)
        )
        await self.onlooker.execute(GATE_FUNCTION)
        await self.onlooker.execute(trigger)
        await self.onlooker.execute("SELECT pg_advisory_lock(4711)")
        task = asyncio.create_task(self.act(operation, self.stale))
        try:
            yield task, await self.until(WAITING)
        finally:
            await self.onlooker.execute("SELECT pg_advisory_unlock_all()")

    async def open_gate(self) -> None:
        """Let whoever is parked go on."""
        await self.onlooker.execute("SELECT pg_advisory_unlock(4711)")


@pytest.fixture
async def stage(dsn: str):
    """The stage, set: hold 5 has run twice."""
    await prepare(dsn)
    async with await connect(dsn) as onlooker, await connect(dsn) as admitting, open_pool(dsn) as pool:
        await admit(onlooker, 5)
        stage = Stage(pool, onlooker, admitting)
        await run(stage.stale, tickd_token=5)
        await run(stage.stale, tickd_token=5)
        yield stage


async def refused(awaitable: Any) -> None:
    """Fail unless the guard refuses."""
    with pytest.raises(psycopg.DatabaseError) as caught:
        await awaitable
    assert is_refused(caught.value)


async def sees_only_the_new_holder(stage: Stage) -> None:
    """Let the new holder run, and check that it is what a reader sees and that the stale writer adds nothing to it."""
    before = await rows(stage.onlooker)
    result = await run(stage.new, tickd_token=6)
    after = await rows(stage.onlooker)
    found: Any = await stage.stale.aget_tuple(config())
    assert found.metadata["tickd_token"] == 6
    assert found.checkpoint["channel_values"] == result
    assert set(before) <= set(after)
    for operation in OPERATIONS:
        await refused(stage.act(operation, stage.stale))
    assert await rows(stage.onlooker) == after


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_stopped_before_a_stale_writer_does_nothing(stage, operation):
    """The writer was stopped before it sent anything; the take-over has not even seen it."""
    before = await rows(stage.onlooker)
    await admit(stage.admitting, 6)

    await refused(stage.act(operation, stage.stale))

    assert await rows(stage.onlooker) == before
    await sees_only_the_new_holder(stage)


@pytest.mark.parametrize(("operation", "name", "table"), BEFORE_THE_GUARD)
async def test_stopped_on_the_way_in_it_is_refused_when_it_goes_on(stage, operation, name, table):
    """Its statement is under way in Postgres already, but has no row yet: the take-over need not wait for it."""
    before = await rows(stage.onlooker)
    async with stage.parked(operation, name, table) as (writing, _):
        await admit(stage.admitting, 6)
        assert not writing.done()
        await stage.open_gate()
        await refused(writing)

    assert await rows(stage.onlooker) == before
    await sees_only_the_new_holder(stage)


@pytest.mark.parametrize(("operation", "name", "table"), BEHIND_THE_GUARD)
async def test_stopped_in_between_it_makes_the_take_over_wait(stage, operation, name, table):
    """What has passed the guard will be committed as a whole, so the new holder must not read before it is."""
    before = await rows(stage.onlooker)
    async with stage.parked(operation, name, table) as (writing, backend):
        admitting = asyncio.create_task(admit(stage.admitting, 6))
        assert backend in await stage.blocked_by(stage.admitting.info.backend_pid)
        assert not admitting.done()
        assert await rows(stage.onlooker) == before
        await stage.open_gate()
        await writing
        await admitting

    after = await rows(stage.onlooker)
    assert after == [] if operation == "delete" else set(before) < set(after)
    await sees_only_the_new_holder(stage)


async def test_a_take_over_on_another_thread_waits_as_well(stage):
    """Each tick has its own thread by default; the write that is under way is still one of the graph's."""
    async with stage.parked("put", "aa", "checkpoints") as (writing, backend):
        admitting = asyncio.create_task(admit(stage.admitting, 6, thread="restock/next"))
        assert backend in await stage.blocked_by(stage.admitting.info.backend_pid)
        await stage.open_gate()
        await writing
        await admitting
    for operation in OPERATIONS:
        await refused(stage.act(operation, stage.stale))


@pytest.mark.parametrize(("operation", "name", "table"), BEHIND_THE_GUARD)
async def test_killed_in_between_it_leaves_nothing(stage, operation, name, table):
    """A host that is gone in mid-write; all of the operation is undone, and the take-over goes on."""
    before = await rows(stage.onlooker)
    async with stage.parked(operation, name, table) as (writing, backend):
        admitting = asyncio.create_task(admit(stage.admitting, 6))
        await stage.blocked_by(stage.admitting.info.backend_pid)
        await stage.onlooker.execute("SELECT pg_terminate_backend(%s)", [backend])
        with pytest.raises(psycopg.OperationalError):
            await writing
        await admitting

    assert await rows(stage.onlooker) == before
    await sees_only_the_new_holder(stage)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("admitted", [True, False])
async def test_sent_while_a_take_over_is_under_way_it_learns_how_that_ended(stage, operation, admitted):
    """The write waits for the thread's row and then reads it again: new token, or the old one if nothing came of it."""
    before = await rows(stage.onlooker)
    async with stage.admitting.transaction(force_rollback=not admitted):
        await admit(stage.admitting, 6)
        writing = asyncio.create_task(stage.act(operation, stage.stale))
        row = await stage.until("SELECT pid FROM pg_stat_activity WHERE wait_event = 'transactionid'")
        assert stage.admitting.info.backend_pid in await stage.blocked_by(row)
    if admitted:
        await refused(writing)
        assert await rows(stage.onlooker) == before
        await sees_only_the_new_holder(stage)
    else:
        await writing
        assert await rows(stage.onlooker) != before


async def admit_past_stale_writers(stage: Stage, dsn: str) -> None:
    """Admit token 6 as the ledger admits."""
    waiting = stage.admitting.info.backend_pid
    await StaleWriters(waiting, asking(dsn)).past(admit(stage.admitting, 6))


@pytest.mark.parametrize(("operation", "name", "table"), BEHIND_THE_GUARD)
async def test_stopped_for_good_in_between_its_session_is_ended(stage, dsn, operation, name, table):
    """A process under SIGSTOP keeps its transaction open; the graph must not stand still with it."""
    before = await rows(stage.onlooker)
    async with stage.parked(operation, name, table) as (writing, _):
        await admit_past_stale_writers(stage, dsn)
        with pytest.raises(psycopg.OperationalError):
            await writing

    assert await rows(stage.onlooker) == before
    await sees_only_the_new_holder(stage)


async def test_an_admission_of_the_ledger_gets_past_a_stopped_writer(stage, dsn):
    """The statement that tries the lock also moves the thread, and must not wait for a writer of the past for ever."""
    place = LockPlace(parse_dsn(dsn, setting="DSN"), "b", SPACE)
    tick = Tick(GRAPH, datetime(2026, 5, 4, 10, tzinfo=UTC))
    async with stage.parked("put", "aa", "checkpoints") as (writing, _):
        async with closing(await open_session(place)) as session:
            held, admission = await hold_and_admit(session, tick, thread_id=THREAD, run_id=run_id(tick))
        with pytest.raises(psycopg.OperationalError):
            await writing

    assert held
    assert admission == Admission(6, 1, THREAD)
    await refused(stage.act("put", stage.stale))


async def test_an_admission_that_waits_for_somebody_else_gives_up_in_the_server_too(stage, dsn):
    """A backend that went on waiting would keep the graph's lock, and admit a tick for a client that has long gone."""
    place = LockPlace(parse_dsn(dsn, setting="DSN"), "b", SPACE, answer_timeout=timedelta(seconds=1.5))
    tick = Tick(GRAPH, datetime(2026, 5, 4, 10, tzinfo=UTC))
    await stage.admitting.execute("BEGIN")
    await admit(stage.admitting, 6)

    async with closing(await open_session(place)) as session:
        with pytest.raises((psycopg.OperationalError, TimeoutError)):
            await hold_and_admit(session, tick, thread_id=THREAD, run_id=run_id(tick))
    # The operator is still in the way, and nobody waits behind him.
    await stage.until("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'tickd/b')")
    await stage.admitting.execute("COMMIT")

    assert await (await stage.onlooker.execute("SELECT count(*) FROM tickd.ticks")).fetchone() == (0,)


async def test_only_a_writer_is_ended(stage, dsn):
    """An operator who has changed the row and not yet committed loses nothing; the admission waits, or gives up."""
    async with await connect(dsn) as operator:
        async with operator.transaction():
            await operator.execute("DELETE FROM tickd.threads")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(PATIENCE.total_seconds() * 2.5):
                    await admit_past_stale_writers(stage, dsn)
        assert not operator.closed
        await operator.execute("SELECT")


async def admissions_that_end_while_a_connection_is_opened(
    dsn: str, monkeypatch: Any, *replicas: str
) -> list[str]:
    """Let each of these have an admission wait on its session until the last one looks; return who opened a connection."""
    opened: list[str] = []
    last_looks, over = asyncio.Event(), asyncio.Event()

    async def never_open(place: LockPlace) -> None:
        opened.append(place.replica)
        if place.replica == replicas[-1]:
            last_looks.set()
        await asyncio.Event().wait()

    async with sessions(dsn, kind="shared") as open_as, asyncio.timeout(20):
        session_of = {replica: await open_as(replica) for replica in replicas}
        monkeypatch.setattr(lock, "open_session", never_open)
        waiting = [
            asyncio.create_task(admissions.admit(session_of[replica], over.wait())) for replica in replicas
        ]
        await last_looks.wait()
        over.set()
        assert all(await asyncio.gather(*waiting))
    return opened


async def test_an_admission_that_ends_is_not_kept_waiting_for_a_connection(dsn, monkeypatch):
    """It has the lock, and a server that is slow takes seconds for a connection that nobody needs any more."""
    assert await admissions_that_end_while_a_connection_is_opened(dsn, monkeypatch, "a") == ["a"]


async def test_all_that_wait_on_one_session_share_a_connection(dsn, monkeypatch):
    """A server that is slow got one for each of them each second, for one and the same backend."""
    opened = await admissions_that_end_while_a_connection_is_opened(dsn, monkeypatch, "a", "a", "a", "b")

    assert opened == ["a", "b"]


async def test_an_admission_that_fails_fails_as_itself(stage, dsn):
    """Whoever waits for the admission branches on its error."""
    waiting = stage.admitting.info.backend_pid
    with pytest.raises(psycopg.errors.UndefinedTable):
        await StaleWriters(waiting, asking(dsn)).past(stage.admitting.execute("SELECT FROM nowhere"))


async def test_an_admission_takes_the_graph_s_other_threads_in_its_own_statement(dsn: str):
    """The guard's trigger would load a language into a backend that is new for each run; all others still meet it."""
    await prepare(dsn)
    place = LockPlace(parse_dsn(dsn, setting="DSN"), "b", SPACE)
    first, second = (Tick(GRAPH, datetime(2026, 5, 4, 10, minute, tzinfo=UTC)) for minute in (0, 1))
    async with await connect(dsn) as look, closing(await open_session(place)) as session:
        await hold_and_admit(session, first, thread_id="first", run_id=run_id(first))
        await look.execute("CREATE OR REPLACE FUNCTION tickd.guard_supersede() RETURNS trigger" + FAILS)

        held, _ = await hold_and_admit(session, second, thread_id="second", run_id=run_id(second))

        assert held
        cursor = await look.execute("SELECT thread_id, token FROM tickd.threads ORDER BY 1")
        assert await cursor.fetchall() == [("first", 0), ("second", 2)]
        with pytest.raises(psycopg.errors.RaiseException, match="fires"):
            await admit(look, 3)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_stopped_after_a_write_it_has_written_for_the_next_holder(stage, operation):
    """What was committed under the lock is the thread's state, and the next holder goes on from there."""
    before = await rows(stage.onlooker)
    await stage.act(operation, stage.stale)
    after = await rows(stage.onlooker)
    await admit(stage.admitting, 6)

    assert after != before
    await sees_only_the_new_holder(stage)
    assert set(after) <= set(await rows(stage.onlooker))


async def test_of_two_writers_at_once_each_writes_under_its_own_hold_only(stage, dsn):
    """Two holders run the same graph again and again while the thread changes hands between them."""
    refusals: list[tuple[int, int]] = []
    token = 5

    async def keep_running(pool: Any, mine: int) -> None:
        """Run under a hold until it is over; under the last one, run once."""
        try:
            await run(saver(pool, mine), steps=3, tickd_token=mine)
            while mine < 30:
                await run(saver(pool, mine), steps=3, tickd_token=mine)
        except psycopg.DatabaseError as error:
            if not is_refused(error):
                raise
            refusals.append((mine, token))

    async with open_pool(dsn) as one, open_pool(dsn) as two:
        running = [asyncio.create_task(keep_running(one, token))]
        for token in range(6, 31):
            await admit(stage.admitting, token)
            running.append(asyncio.create_task(keep_running((one, two)[token % 2], token)))
            taken: Any = await stage.new.aget_tuple(config())
            assert taken.metadata["tickd_token"] <= token
        await asyncio.gather(*running)

    tokens = await (
        await stage.onlooker.execute(
            "SELECT (metadata ->> 'tickd_token')::int FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id",
            [THREAD],
        )
    ).fetchall()
    assert sorted(mine for mine, _ in refusals) == list(range(5, 30))
    assert all(mine < then for mine, then in refusals)
    # In the order in which they were made, checkpoints never go back to an earlier hold.
    assert tokens == sorted(tokens)


async def test_a_stream_of_writes_does_not_starve_a_take_over(stage, dsn):
    """Shared locks may be taken while an update waits for them to be free; they must run out all the same."""
    async with open_pool(dsn) as one, open_pool(dsn) as two, open_pool(dsn) as three:

        async def write(pool: Any, name: str) -> int:
            """Write until refused; returns how often it got through."""
            writer = saver(pool, 5)
            found: Any = await writer.aget_tuple(config())
            for count in itertools.count():
                try:
                    await writer.aput_writes(found.config, [("seen", [count])], f"{name}/{count}")
                except psycopg.DatabaseError as error:
                    if not is_refused(error):
                        raise
                    return count
            raise AssertionError("it counts for ever")

        writers = [
            asyncio.create_task(write(pool, name)) for pool, name in ((one, "a"), (two, "b"), (three, "c"))
        ]
        await stage.until(ALL_THREE_WRITE)
        async with asyncio.timeout(10):
            await admit(stage.admitting, 6)
        assert all(count > 0 for count in await asyncio.gather(*writers))
