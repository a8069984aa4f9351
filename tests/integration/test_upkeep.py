"""What a replica does beside its ticks, one task at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg import AsyncConnection, sql
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.lock_sessions import place_of
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.proxy import Proxy
from tickd import ledger, upkeep
from tickd.clock import DatabaseClock
from tickd.fleet import Fleet
from tickd.lock import LockPlace, open_session
from tickd.log import Log
from tickd.pool import Pool
from tickd.schedule import parse
from tickd.stop import Stop
from tickd.tick import Tick
from tickd.upkeep import Upkeep


pytestmark = pytest.mark.migrated

HOUR = timedelta(hours=1)
TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
PRESENT = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' AND granted"
)

KEEPING = """
defaults: {keep: 1d, every: 1h, graph: "a:b"}
graphs: {first: {}, second: {}}
"""
OLD_CHECKPOINT = "INSERT INTO checkpoints (thread_id, checkpoint_id, checkpoint, metadata) VALUES (%s, '1', '{}', '{}') RETURNING 1"
OLD_THREAD = """
INSERT INTO tickd.threads (thread_id, space, graph, token, held_at)
VALUES (%s, 7301, %s, 1, now() - interval '2 days')
RETURNING 1
"""
# With a subgraph's, and with all that belongs to checkpoints.
LONG_HISTORY = """
WITH of_subgraph AS (
    INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
    SELECT 'long', CASE WHEN mod(number, 2) = 0 THEN 'below' ELSE '' END, 'c' || number, '{}', '{}'
    FROM generate_series(1, 30) AS number
), written AS (
    INSERT INTO checkpoint_writes (thread_id, checkpoint_id, task_id, idx, channel, blob)
    SELECT 'long', 'c' || number, 't', 0, 'seen', '' FROM generate_series(1, 30) AS number
)
INSERT INTO checkpoint_blobs (thread_id, channel, version, type)
SELECT 'long', 'seen', number, 'empty' FROM generate_series(1, 30) AS number
RETURNING 1
"""
OLD_TICK = """
INSERT INTO tickd.ticks (space, graph, fire_time, attempt, thread_id, run_id, outcome)
VALUES (7301, 'first', now() - interval '2 days', 1, 't', gen_random_uuid(), 'ran')
RETURNING 1
"""
# A tick whose holder is gone.
LEFT_BEHIND = """
INSERT INTO tickd.graphs (space, graph, key, token) VALUES (7301, 'restock_plan', 904759473, 1);
INSERT INTO tickd.ticks (space, graph, fire_time, attempt, token, replica, thread_id, run_id, admitted_at)
VALUES (7301, 'restock_plan', now(), 1, 1, 'gone', 't', gen_random_uuid(), now())
"""
SLOW_REMOVAL = """
CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(CASE WHEN OLD.thread_id LIKE 'huge%' THEN 3600 WHEN OLD.thread_id LIKE 'long%' THEN 0.05 ELSE 0 END);
    RETURN NULL;
END $$;
CREATE TRIGGER be_slow AFTER DELETE ON checkpoints FOR EACH ROW EXECUTE FUNCTION be_slow();
"""


def pool_at(place: LockPlace, *, loan: timedelta) -> Pool:
    """Return a pool that is not open yet."""

    async def parameters() -> dict[str, Any]:
        return {**await place.dsn.connection_parameters(), "autocommit": True}

    return Pool(
        "test",
        parameters,
        minimum=1,
        maximum=2,
        patience=timedelta(seconds=10),
        check_within=timedelta(seconds=10),
        loan=loan,
    )


@pytest.fixture
async def retaining(
    place: LockPlace, onlooker: Onlooker, log: Log, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """A replica that removes what is old all the time, with half a second for a batch."""
    monkeypatch.setattr(upkeep, "RETAIN_EVERY", timedelta(milliseconds=20))
    onlooker.connection.execute(SLOW_REMOVAL)
    short = timedelta(seconds=0.5)
    pool = pool_at(place, loan=short)
    stop = Stop()
    entries = parse(KEEPING, path="schedule.yaml", environment={}).entries.values()
    nothing = dict.fromkeys(
        ("graphs", "clock", "timer", "take_over", "work_off", "displace", "unwritten_since", "fleet")
    )
    kept = Upkeep(
        **cast("Any", nothing),
        pool=pool,
        place=replace(place, answer_timeout=short),
        skew_limit=HOUR,
        entries=entries,
        stop=stop,
        log=log,
    )
    await pool.open()
    task = asyncio.create_task(kept.retain())
    yield
    stop.request()
    await task
    await pool.close()


def leave_behind(onlooker: Onlooker, graph: str, threads: list[str]) -> None:
    """Let the graph have old threads, each with a checkpoint."""
    with onlooker.connection.transaction():
        for thread in threads:
            onlooker.value(OLD_CHECKPOINT, thread)
            onlooker.value(OLD_THREAD, thread, graph)


@pytest.mark.usefixtures("retaining")
async def test_histories_too_long_for_one_batch_go_in_smaller_ones(onlooker: Onlooker, book: Logbook):
    """The whole batch was undone when its time was over, and begun again a minute later, for ever."""
    leave_behind(onlooker, "second", ["short"])
    leave_behind(onlooker, "first", [f"long {number}" for number in range(40)])

    await onlooker.until(
        lambda: onlooker.value("SELECT count(*) FROM tickd.threads NATURAL FULL JOIN checkpoints") == 0,
        seconds=30,
    )
    await book.wait_for("retention.swept", graph="first")
    await book.wait_for("retention.swept", graph="second")
    assert book.find("retention.stuck") == []


@pytest.mark.usefixtures("retaining")
async def test_a_history_too_long_for_one_batch_by_itself_goes_piece_by_piece(
    onlooker: Onlooker, book: Logbook
):
    """It was tried again each minute, whole, and what was behind it in its graph stayed for ever."""
    with onlooker.connection.transaction():
        onlooker.rows(LONG_HISTORY)
        leave_behind(onlooker, "first", ["long"])
        leave_behind(onlooker, "first", [f"short {number}" for number in range(3)])

    await onlooker.until(lambda: onlooker.value("SELECT count(*) FROM tickd.threads") == 0, seconds=30)

    assert [onlooker.value(f"SELECT count(*) FROM {table}") for table in TABLES] == [0, 0, 0]
    await book.wait_for("retention.swept", graph="first")
    assert book.find("retention.stuck") == []


@pytest.mark.usefixtures("retaining")
async def test_a_thread_that_cannot_be_removed_is_said_once_and_keeps_no_other_graph_waiting(
    onlooker: Onlooker, book: Logbook
):
    """Whatever the first graph has, its ticks and the second one are looked after."""
    leave_behind(onlooker, "first", ["huge"])
    await book.wait_for("retention.stuck", graph="first", seconds=30)

    onlooker.rows(OLD_TICK)
    await book.wait_for("retention.swept", graph="first", ticks=1)
    for number in range(3):  # each of them in a visit that comes after one of the first graph
        leave_behind(onlooker, "second", [f"short {number}"])
        await book.wait_for("retention.swept", graph="second", count=number + 1)

    assert len(book.find("retention.stuck")) == 1
    assert onlooker.rows("SELECT thread_id FROM tickd.threads") == [("huge",)]
    assert onlooker.value("SELECT count(*) FROM tickd.ticks") == 0


@asynccontextmanager
async def sweeping(
    place: LockPlace, log: Log, work_off: Callable[[str], None] | None = None
) -> AsyncIterator[None]:
    """Let a replica sweep for as long as the block."""
    stop = Stop()
    pool = pool_at(place, loan=HOUR)
    nothing = dict.fromkeys(("graphs", "clock", "timer", "take_over", "displace", "unwritten_since", "fleet"))
    kept = Upkeep(
        **cast("Any", nothing),
        work_off=cast("Any", work_off),
        pool=pool,
        place=place,
        skew_limit=HOUR,
        entries=(),
        stop=stop,
        log=log,
    )
    await pool.open()
    task = asyncio.create_task(kept.sweep())
    try:
        yield
    finally:
        stop.request()
        await task
        await pool.close()


async def test_a_tick_that_a_sweep_has_closed_is_told_whatever_comes_after_that(
    place: LockPlace, onlooker: Onlooker, log: Log, book: Logbook, monkeypatch: pytest.MonkeyPatch
):
    """No other sweep finds it, here or elsewhere."""
    waiting = ledger.waiting

    async def end_first(connection: AsyncConnection[Any], space: int) -> list[Tick]:
        monkeypatch.setattr(ledger, "waiting", waiting)
        onlooker.terminate(connection.info.backend_pid)
        return await waiting(connection, space)

    monkeypatch.setattr(ledger, "waiting", end_first)
    onlooker.connection.execute(LEFT_BEHIND)
    async with sweeping(place, log):
        line = await book.wait_for("tick.abandoned")

    assert (line["graph"], line["holder"]) == ("restock_plan", "gone")


# A claim of a superuser's that has not been renewed.
LEFT_STANDING = """
INSERT INTO tickd.graphs (space, graph, key, token) VALUES (7301, 'restock_plan', 904759473, 1);
INSERT INTO tickd.ticks
    (space, graph, fire_time, mode, attempt, token, replica, thread_id, run_id, admitted_at, lease_until)
VALUES (7301, 'restock_plan', now(), 'claim', 1, 1, 'other', 't', gen_random_uuid(), now(), now() - interval '1 s');
SELECT pg_advisory_lock(7301, 904759473)
"""


async def test_a_holder_that_cannot_be_ended_is_told_once_and_stops_nobody(
    database: Database, onlooker: Onlooker, log: Log, book: Logbook, monkeypatch: pytest.MonkeyPatch
):
    """A role that sees all sessions and may end only its own: one sweep after the other stopped every replica."""
    monkeypatch.setattr(upkeep, "SWEEP_CLAIMS_EVERY", timedelta(milliseconds=10))
    role = database.role(owner=False)
    grant = sql.SQL("GRANT pg_monitor, {} TO {}").format
    onlooker.connection.execute(grant(sql.Identifier(database.server.owner), sql.Identifier(role.name)))
    onlooker.connection.execute(LEFT_STANDING)
    swept = asyncio.Queue[str]()
    place = place_of(role.dsn)
    place = replace(place, windows=replace(place.windows, lease=timedelta(milliseconds=1)))
    async with asyncio.timeout(20), sweeping(place, log, work_off=swept.put_nowait):
        for _ in range(3):
            assert await swept.get() == "restock_plan"
        (line,) = book.find("claim.expired")
        onlooker.value("SELECT pg_advisory_unlock_all()::text IS NOT NULL")
        await swept.get()

    assert line["graph"] == "restock_plan"
    assert "terminate" in line["error"]
    assert book.find("daemon.failed") == []


@dataclass
class Listening:
    """A replica that listens: how far behind its timer is, since when it has fired and not written, and its clock."""

    clock: DatabaseClock = field(default_factory=DatabaseClock)
    stop: Stop = field(default_factory=Stop)
    behind: timedelta = timedelta(0)
    unwritten_since: datetime | None = None

    def overdue(self) -> timedelta:
        """Return how far behind the timer is."""
        return self.behind

    @asynccontextmanager
    async def at(self, place: LockPlace) -> AsyncIterator[asyncio.Task[None]]:
        """Let it listen at the place for as long as the block, and end then."""
        fleet = Fleet(await open_session(place))
        await self.clock.measure(fleet.session.fetch)
        assert await fleet.arrive(self.stop)
        await fleet.settle()
        nothing = dict.fromkeys(("pool", "graphs", "take_over", "work_off", "displace", "log"))
        kept = Upkeep(
            **cast("Any", nothing),
            clock=self.clock,
            timer=cast("Any", self),
            unwritten_since=lambda: self.unwritten_since,
            place=place,
            skew_limit=HOUR,
            fleet=fleet,
            entries=(),
            stop=self.stop,
        )
        task = asyncio.create_task(kept.listen())
        yield task
        self.stop.request()
        await task


@pytest.fixture
async def listening(place: LockPlace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """A replica that listens, and that would wait for an hour where it waits at all."""
    monkeypatch.setattr(upkeep, "REJOIN_EVERY", HOUR)
    async with Listening().at(place) as task:
        yield task


@pytest.mark.usefixtures("listening")
async def test_a_session_that_ends_is_replaced_at_once(onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch):
    """Until then a replica that starts would take itself for the first, and account for what this one fires."""
    monkeypatch.setattr(upkeep, "PRESENT_FOR", timedelta(0))
    ((before,),) = await onlooker.until(lambda: onlooker.rows(PRESENT))

    onlooker.terminate(before)

    ((after,),) = await onlooker.until(lambda: [row for row in onlooker.rows(PRESENT) if row != (before,)])
    assert after != before


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[timedelta]:
    """How long anybody waits for the stop at most, as soon as they do."""
    waits: asyncio.Queue[timedelta] = asyncio.Queue()
    plain_wait = Stop.wait

    async def wait(stop: Stop, duration: timedelta | None = None) -> bool:
        if duration is not None:
            waits.put_nowait(duration)
        return await plain_wait(stop, duration)

    monkeypatch.setattr(Stop, "wait", wait)
    return waits


async def test_sessions_that_end_one_after_the_other_are_not(
    listening: asyncio.Task[None],
    onlooker: Onlooker,
    monkeypatch: pytest.MonkeyPatch,
    waits: asyncio.Queue[timedelta],
):
    """A server that ends each session as it comes would be asked a hundred times a second."""
    monkeypatch.setattr(upkeep, "PRESENT_FOR", HOUR)
    ((before,),) = await onlooker.until(lambda: onlooker.rows(PRESENT))

    onlooker.terminate(before)

    assert await asyncio.wait_for(waits.get(), 10) >= HOUR / 2
    assert not listening.done()


async def test_however_long_the_database_is_away_it_is_asked_once_a_second(
    place: LockPlace, database: Database, waits: asyncio.Queue[timedelta]
):
    """When it is back, a replica that starts would find nobody, and do the books of what this one fires."""
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format
    name = sql.Identifier(database.name)
    with psycopg.connect(database.admin_dsn, dbname="postgres", autocommit=True) as administrator:
        async with Listening().at(place):
            administrator.execute(allow(name, sql.SQL("false")))
            administrator.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database.name]
            )
            pauses = [await asyncio.wait_for(waits.get(), 10) for _ in range(5)]
            administrator.execute(allow(name, sql.SQL("true")))
            async with asyncio.timeout(10):
                while administrator.execute(PRESENT).fetchone() is None:
                    await asyncio.to_thread(administrator.execute, "SELECT pg_sleep(0.05)")

    assert all(timedelta(seconds=0.5) <= pause <= timedelta(seconds=1.5) for pause in pauses), pauses


async def test_a_link_that_dies_without_a_word_is_replaced(
    database: Database,
    onlooker: Onlooker,
    monkeypatch: pytest.MonkeyPatch,
    waits: asyncio.Queue[timedelta],
):
    """Nobody would be there for the next replica to find, and this one would never know."""
    monkeypatch.setattr(upkeep, "BEAT_EVERY", timedelta(milliseconds=50))
    port = int(conninfo_to_dict(database.dsn)["port"] or 5432)
    with Proxy(port) as proxy:
        dsn = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        async with Listening().at(place_of(dsn, answer_timeout=timedelta(seconds=0.5))):
            ((before,),) = await onlooker.until(lambda: onlooker.rows(PRESENT))
            proxy.freeze()
            onlooker.terminate(before)
            await onlooker.until(lambda: not onlooker.rows(PRESENT))
            await asyncio.wait_for(waits.get(), 10)
            proxy.thaw()
            await onlooker.until(lambda: onlooker.rows(PRESENT))


async def test_a_session_on_a_primary_that_is_no_more_is_replaced(
    place: LockPlace, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """It is healthy, and present where nobody looks any more."""
    monkeypatch.setattr(upkeep, "BEAT_EVERY", timedelta(milliseconds=50))
    listening = Listening()
    async with listening.at(place):
        ((before,),) = await onlooker.until(lambda: onlooker.rows(PRESENT))

        listening.clock.timeline += 1

        await onlooker.until(lambda: [row for row in onlooker.rows(PRESENT) if row != (before,)])


ALIVE_AT = "SELECT max(alive_at) FROM tickd.spaces"


async def test_a_stop_says_nothing_of_what_the_timer_has_not_fired(place: LockPlace, onlooker: Onlooker):
    """What came due while the timer stood still would be nobody's: fired by none, and missed by none."""
    listening = Listening()
    async with listening.at(place):
        before = await onlooker.until(lambda: onlooker.value(ALIVE_AT))
        listening.behind = HOUR

    assert onlooker.value(ALIVE_AT) == before


async def test_a_stop_says_nothing_of_what_has_no_row_yet(place: LockPlace, onlooker: Onlooker):
    """The first to start after that has to find the tick, or to write it down itself."""
    listening = Listening()
    async with listening.at(place):
        before = await onlooker.until(lambda: onlooker.value(ALIVE_AT))
        listening.unwritten_since = before

    assert onlooker.value(ALIVE_AT) == before


async def test_a_stop_says_how_far_this_one_has_fired_before_it_is_gone(place: LockPlace, onlooker: Onlooker):
    """Whoever is the first then would account for what is told already."""
    listening = Listening()
    async with listening.at(place):
        before = await onlooker.until(lambda: onlooker.value(ALIVE_AT))

    assert onlooker.value(ALIVE_AT) > before
    assert onlooker.rows(PRESENT) == []
