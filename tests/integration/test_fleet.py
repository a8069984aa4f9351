"""The fleet on a real Postgres: who is the first after all were down, and since when was nobody there."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.cluster import Cluster
from tests.database import Database
from tests.lock_sessions import SPACE, Open, place_of, sessions
from tickd import fleet as fleets
from tickd.admissions import HOLD_AND_ADMIT, NO_RUN
from tickd.fleet import Account, Fleet
from tickd.lock import LockSession, closing, open_session
from tickd.migrations import migrate_at
from tickd.operation import Operation
from tickd.stop import Stop
from tickd.tick import Tick, run_id


pytestmark = pytest.mark.migrated

Onlooker = psycopg.AsyncConnection[Any]

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
SECONDS = 20
HOUR = timedelta(hours=1)
# Of no tick: the beat is of this moment.
FAR = NOON + timedelta(days=36_500)
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
PRESENT = "SELECT mode FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted ORDER BY mode"
END = "SELECT pg_terminate_backend(%s, 10000)"  # and wait until it has ended, for so many milliseconds


@pytest.fixture
async def open_as(dsn: str) -> AsyncIterator[Open]:
    """Open lock sessions on the migrated database, by replica."""
    async with sessions(dsn) as open_as:
        yield open_as


@pytest.fixture
async def look(open_as: Open, admin_dsn: str) -> AsyncIterator[Onlooker]:  # noqa: ARG001  # the tables are there
    """Look on, and do what an administrator does, over a connection of no replica."""
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as connection:
        yield connection


async def column(look: Onlooker, query: Any) -> list[Any]:
    """Return the first column of a query's rows."""
    return [row[0] for row in await (await look.execute(query)).fetchall()]


async def end(look: Onlooker, fleet: Fleet) -> None:
    """End a replica's session on the server, as the death of its process does."""
    await look.execute(END, [fleet.session.connection.info.backend_pid])


def stopped() -> Stop:
    """Return a stop that has been asked for."""
    stop = Stop()
    stop.request()
    return stop


# Who is the first


async def test_the_first_keeps_everybody_else_out_until_it_has_settled(open_as: Open, look: Onlooker):
    """While it accounts for what nobody fired, a second one would fire, or account for the same once more."""
    first, second = Fleet(await open_as("a")), Fleet(await open_as("b"))
    assert await first.arrive(Stop())

    arriving = asyncio.create_task(second.arrive(Stop()))
    assert not (await asyncio.wait({arriving}, timeout=0.3))[0]
    await first.settle()

    assert await arriving is False
    assert await column(look, PRESENT) == ["ShareLock", "ShareLock"]


async def test_of_two_firsts_one_is(open_as: Open):
    """A whole deployment starts at once, and only one may do the books."""
    fleets = [Fleet(await open_as(f"r{n}")) for n in range(5)]

    async def start(fleet: Fleet) -> bool:
        first = await fleet.arrive(Stop())
        if first:
            await fleet.settle()
        return first

    async with asyncio.timeout(SECONDS):
        firsts = await asyncio.gather(*(start(fleet) for fleet in fleets))

    assert sorted(firsts) == [False, False, False, False, True]


async def test_whoever_comes_while_others_fire_is_not_the_first(open_as: Open):
    """Otherwise each deployment would account for time in which the fleet was at work."""
    a, b, c = [Fleet(await open_as(name)) for name in "abc"]
    assert await a.arrive(Stop())
    await a.settle()
    assert not await b.arrive(Stop())

    await a.session.close()

    assert not await c.arrive(Stop())


async def test_after_the_last_has_died_there_is_a_first_again(open_as: Open, look: Onlooker):
    """A killed process says no good-bye: the server's knowledge of its session is the only one there is."""
    a, b, c = [Fleet(await open_as(name)) for name in "abc"]
    assert await a.arrive(Stop())
    await a.settle()
    assert not await b.arrive(Stop())

    await end(look, a)
    await end(look, b)

    assert await c.arrive(Stop())


async def test_a_first_that_dies_at_its_books_leaves_them_to_one_other(open_as: Open, look: Onlooker):
    """What it had not written yet must not stay unaccounted for, however many come to see at the same time."""
    first, *others = [Fleet(await open_as(f"r{n}")) for n in range(6)]
    assert await first.arrive(Stop())
    arriving = [asyncio.create_task(fleet.arrive(Stop())) for fleet in others]

    await end(look, first)

    async with asyncio.timeout(SECONDS):
        done, waiting = await asyncio.wait(arriving, return_when=asyncio.FIRST_COMPLETED)
        (second,) = done
        assert second.result()
        await others[arriving.index(second)].settle()
        assert [await arrival for arrival in waiting] == [False] * 4


async def test_lock_spaces_have_a_fleet_each(open_as: Open):
    """Two applications in one database know nothing of each other's absences."""
    here, there = Fleet(await open_as("a")), Fleet(await open_as("b", space=-1))

    assert await here.arrive(Stop())
    assert await there.arrive(Stop())


async def test_presence_is_apart_from_the_locks_of_graphs(open_as: Open, look: Onlooker):
    """A key shared with a graph's lock would make a run look like a fleet."""
    a = Fleet(await open_as("a", space=0))
    assert await a.arrive(Stop())

    assert await column(look, "SELECT DISTINCT objsubid FROM pg_locks WHERE locktype = 'advisory'") == [1]


async def test_a_replica_that_is_stopped_does_not_wait_to_join(open_as: Open):
    """SIGTERM during a start must not hang behind somebody's books."""
    first, second = Fleet(await open_as("a")), Fleet(await open_as("b"))
    assert await first.arrive(Stop())

    assert not await second.arrive(stopped())
    await second.join(stopped())


async def test_a_replica_joins_again_with_a_new_session(open_as: Open, look: Onlooker):
    """Its session was ended by an administrator; until it is back, it looks as if nobody fired."""
    a, again, b = [Fleet(await open_as(name)) for name in "aab"]
    assert await a.arrive(Stop())
    await a.settle()
    await end(look, a)

    await again.join(Stop())
    await again.join(Stop())

    assert await column(look, PRESENT) == ["ShareLock"]
    assert not await b.arrive(Stop())


async def test_joining_waits_for_a_first_that_is_at_its_books(open_as: Open):
    """It has been taken for dead: what it fires now would be accounted for twice."""
    first, back = Fleet(await open_as("a")), Fleet(await open_as("b"))
    assert await first.arrive(Stop())
    joining = asyncio.create_task(back.join(Stop()))
    assert not (await asyncio.wait({joining}, timeout=0.3))[0]

    await first.settle()

    async with asyncio.timeout(SECONDS):
        await joining


# Whether others live that only the database has cut off

HOUR_AGO = "INSERT INTO tickd.spaces VALUES (%s, pg_postmaster_start_time() - interval '1 h')"
REPLAYED = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn FROM pg_sleep(0.01)"
ALIVE = "INSERT INTO tickd.spaces VALUES (%s, clock_timestamp())"


def would_be_first(session: LockSession, *, patience: timedelta) -> Fleet:
    """Return a replica that gives others at least so long to come back."""
    session.place = replace(session.place, connect_timeout=patience)
    return Fleet(session)


@pytest.mark.parametrize(("kept", "waited"), [(HOUR_AGO, False), (ALIVE, True)])
async def test_after_an_outage_whoever_finds_nobody_lets_others_come_back_first(
    open_as: Open, look: Onlooker, kept: LiteralString, *, waited: bool
):
    """They live, and have fired: what they are about to write down would be missed in the books."""
    await look.execute(kept, [SPACE])
    new = would_be_first(await open_as("new"), patience=HOUR)
    live = Fleet(await open_as("live"))

    arriving = asyncio.create_task(new.arrive(Stop(), waited=waited))
    assert not (await asyncio.wait({arriving}, timeout=0.3))[0]
    async with asyncio.timeout(SECONDS):
        await live.join(Stop())
        assert await column(look, PRESENT) == ["ShareLock"]
        assert not await arriving
    assert await column(look, PRESENT) == ["ShareLock", "ShareLock"]


@pytest.mark.parametrize(("kept", "waited"), [(ALIVE, False), (None, True), (None, False)])
async def test_where_no_outage_can_have_hidden_anybody_the_first_does_not_wait(
    open_as: Open, look: Onlooker, kept: LiteralString | None, *, waited: bool
):
    """Each restart of a single replica would cost the ticks of the time; and a first deployment has nobody to wait for."""
    if kept is not None:
        await look.execute(kept, [SPACE])
    new = would_be_first(await open_as("new"), patience=HOUR)

    async with asyncio.timeout(SECONDS):
        assert await new.arrive(Stop(), waited=waited)


async def test_whoever_comes_after_the_last_has_left_does_not_wait(
    open_as: Open, look: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Everything was stopped in order, the server last: each start of a development database would take seconds."""
    monkeypatch.setattr(fleets, "REJOIN_EVERY", timedelta(0))
    a, b = [would_be_first(await open_as(name), patience=timedelta(0)) for name in ("a", "b")]
    for one in (a, b):
        await one.join(Stop())
        await one.beat(FAR)
    await look.execute("UPDATE tickd.spaces SET alive_at = pg_postmaster_start_time() - interval '1 h'")
    said = []
    for one in (a, b):
        await one.leave(NOON)
        said += await column(look, "SELECT deserted FROM tickd.spaces")

    assert said == [False, True]
    async with asyncio.timeout(SECONDS):
        assert await would_be_first(await open_as("new"), patience=HOUR).arrive(Stop(), waited=True)


async def test_who_was_there_for_a_moment_does_not_say_that_it_was_the_last(open_as: Open, look: Onlooker):
    """Others that live may be about to come back."""
    a = would_be_first(await open_as("a"), patience=HOUR)
    await a.join(Stop())
    await a.leave(FAR)

    assert await column(look, "SELECT deserted FROM tickd.spaces") == [False]


async def test_who_leaves_at_the_same_time_does_not_take_back_that_nobody_is_there(
    open_as: Open, look: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """It has looked while the last one was there, and writes after it."""
    monkeypatch.setattr(fleets, "REJOIN_EVERY", timedelta(0))
    a, b = [would_be_first(await open_as(name), patience=timedelta(0)) for name in ("a", "b")]
    for one in (a, b):
        await one.join(Stop())
    await look.execute("INSERT INTO tickd.spaces VALUES (%s, clock_timestamp(), true)", [SPACE])
    await a.leave(FAR)

    assert await column(look, "SELECT deserted FROM tickd.spaces") == [True]


async def test_whoever_is_there_takes_back_that_nobody_is(open_as: Open, look: Onlooker):
    """A restart of the server would hide it, and the next to start would not wait for it."""
    await look.execute("INSERT INTO tickd.spaces VALUES (%s, clock_timestamp(), true)", [SPACE])
    await (await joined(await open_as("a"))).beat(FAR)

    assert await column(look, "SELECT deserted FROM tickd.spaces") == [False]


async def test_when_nobody_comes_back_there_is_a_first(
    open_as: Open, look: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """The whole site had no power; whoever comes up with the server has to do the books."""
    monkeypatch.setattr(fleets, "REJOIN_EVERY", timedelta(milliseconds=50))
    await look.execute(HOUR_AGO, [SPACE])
    news = [would_be_first(await open_as(f"r{n}"), patience=timedelta(seconds=0.3)) for n in range(3)]

    async def start(fleet: Fleet) -> bool:
        first = await fleet.arrive(Stop(), waited=True)
        if first:
            await fleet.settle()
        return first

    async with asyncio.timeout(SECONDS):
        assert sorted(await asyncio.gather(*map(start, news))) == [False, False, True]


async def test_a_stop_ends_the_wait_for_others(open_as: Open, look: Onlooker):
    """Idle is idle."""
    await look.execute(HOUR_AGO, [SPACE])
    stop = Stop()
    arriving = asyncio.create_task(would_be_first(await open_as("new"), patience=HOUR).arrive(stop))
    assert not (await asyncio.wait({arriving}, timeout=0.3))[0]

    stop.request()

    async with asyncio.timeout(1):
        assert not await arriving
    assert await column(look, PRESENT) == []


async def waits(dsn: str) -> bool:
    """Say whether a replica that finds nobody there lets others come back first."""
    stop = Stop()
    async with closing(await open_session(place_of(dsn))) as session:
        arriving = asyncio.create_task(would_be_first(session, patience=HOUR).arrive(stop))
        first = bool((await asyncio.wait({arriving}, timeout=1))[0])
        stop.request()
        assert await arriving is first
        return not first


async def beat_at(dsn: str) -> None:
    """Let a replica be there for a moment, and say so."""
    async with closing(await open_session(place_of(dsn))) as session:
        fleet = Fleet(session)
        await fleet.join(Stop())
        await fleet.beat(FAR)


async def test_the_crash_of_one_backend_cuts_everybody_off(
    private_cluster: Cluster, private_database: Database
):
    """Postgres then ends all sessions, and begins anew without a restart of its own."""
    dsn = private_database.dsn
    await migrate_at(place_of(dsn), deadline=inf)
    await beat_at(dsn)
    assert not await waits(dsn)
    victim = private_database.connection

    os.kill(victim.info.backend_pid, signal.SIGKILL)
    with pytest.raises(psycopg.OperationalError):
        victim.execute("SELECT pg_sleep(60)")
    while private_cluster.log.read_text().count("ready to accept connections") < 2:
        await asyncio.to_thread(threading.Event().wait, 0.05)

    assert await waits(dsn)
    await beat_at(dsn)
    assert not await waits(dsn)


async def test_a_standby_that_becomes_the_primary_has_seen_nobody_yet(
    private_database: Database, standby: Cluster
):
    """It was up before the fleet's last word, which it has from the old primary."""
    await migrate_at(place_of(private_database.dsn), deadline=inf)
    await beat_at(private_database.dsn)
    port = conninfo_to_dict(private_database.dsn)["port"]
    dsn = private_database.dsn.replace(f":{port}/", f":{standby.port}/")
    word = (private_database.connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ("",))[0]
    with psycopg.connect(standby.admin_dsn(private_database.name), autocommit=True) as connection:
        while connection.execute(REPLAYED, [word]).fetchone() != (True,):
            pass
        connection.execute("SELECT pg_promote()")

    assert await waits(dsn)
    await beat_at(dsn)
    assert not await waits(dsn)


# How far the fleet had come


async def joined(session: LockSession) -> Fleet:
    """Return a replica that is there."""
    fleet = Fleet(session)
    await fleet.join(Stop())
    return fleet


async def test_a_fleet_that_never_fired_has_missed_nothing(open_as: Open):
    """A first deployment has no past to make up for."""
    assert await Fleet(await open_as("a")).alive_at() is None


async def test_a_beat_moves_on_and_never_back(open_as: Open, look: Onlooker):
    """Beats of many replicas arrive in any order; the latest instant is the fleet's."""
    a = await joined(await open_as("a"))
    await a.beat(FAR)
    once = await a.alive_at()
    await a.beat(FAR)
    twice = await a.alive_at()
    await look.execute("UPDATE tickd.spaces SET alive_at = clock_timestamp() + interval '1 day'")
    ahead = await a.alive_at()
    await a.beat(FAR)

    assert once is not None
    assert twice is not None
    assert once < twice
    assert await a.alive_at() == ahead
    assert once.tzinfo is UTC


async def test_a_beat_stops_short_of_what_is_not_fired_or_has_no_row_yet(open_as: Open, look: Onlooker):
    """Whoever is the first after all were down looks after that instant, and must find the tick there."""
    a = await joined(await open_as("a"))
    due = (await (await look.execute("SELECT clock_timestamp() - interval '3 s'")).fetchone() or (NOON,))[0]

    await a.beat(due)
    assert await a.alive_at() == due - timedelta(microseconds=1)
    await a.beat(due + timedelta(hours=1))

    alive_at = await a.alive_at()
    assert alive_at is not None
    assert due < alive_at < due + timedelta(minutes=1)


async def test_only_who_is_there_beats(open_as: Open):
    """A stop while it waits for a first at its books would say of the time in which nobody fired that all was fired."""
    first, stopped_one = Fleet(await open_as("a")), Fleet(await open_as("b"))
    assert await first.arrive(Stop())
    assert not await stopped_one.arrive(stopped())

    await stopped_one.beat(FAR)

    assert await first.alive_at() is None


async def test_a_beat_that_finds_the_row_locked_leaves_the_session_alone(open_as: Open, admin_dsn: str):
    """To be there does not depend on an administrator's open transaction, nor on a commit that waits for a standby."""
    a = await joined(await open_as("a"))
    await a.beat(FAR)
    await a.session.change("SET lock_timeout = '50ms'")

    async with await psycopg.AsyncConnection.connect(admin_dsn) as administrator:
        await administrator.execute("SELECT FROM tickd.spaces FOR UPDATE")
        assert await a.beat(FAR) is None

    assert await a.beat(FAR) == 1


async def test_nobody_counts_on_a_replica_whose_last_word_has_to_wait(open_as: Open, admin_dsn: str):
    """It has fired its last tick: what comes due from now on is for the next one, which is the first."""
    a, b = await joined(await open_as("a")), Fleet(await open_as("b"))
    await a.beat(FAR)
    before = await a.alive_at()

    async with await psycopg.AsyncConnection.connect(admin_dsn) as administrator:
        await administrator.execute("SELECT FROM tickd.spaces FOR UPDATE")
        leaving = asyncio.create_task(a.leave(FAR))
        async with asyncio.timeout(SECONDS):
            while await column(b.session.connection, WAITING) != [1]:
                await b.session.fetch("SELECT pg_sleep(0.01)")
            assert await b.arrive(Stop())
    await leaving

    after = await b.alive_at()
    assert before is not None
    assert after is not None
    assert before < after


async def test_a_lock_space_has_its_own_beat(open_as: Open):
    """Nothing of one application's life says anything about the other's."""
    other = await joined(await open_as("b", space=SPACE + 1))
    await other.beat(FAR)

    assert await Fleet(await open_as("a")).alive_at() is None


# Since when a graph fires


async def since(fleet: Fleet, *graphs: str) -> dict[str, datetime]:
    """Return since when the graphs fire."""
    return await fleet.fires_since(graphs)


async def test_an_unchanged_calendar_fires_since_it_was_first_seen(open_as: Open):
    """A restart changes nothing: what fell into the absence is this graph's to make up for."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s"})
    before = await since(a, "restock")

    await a.register({"restock": "every 5s"})

    assert await since(a, "restock") == before


async def test_an_unchanged_calendar_waits_for_nobody(open_as: Open, admin_dsn: str):
    """At a start of many replicas, every graph would be kept from being admitted by each of them in turn."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s", "audit": "every 1h"})

    async with await psycopg.AsyncConnection.connect(admin_dsn) as admitting, asyncio.timeout(5):
        await admitting.execute("UPDATE tickd.graphs SET token = token + 1 WHERE graph = 'restock'")
        await a.register({"restock": "every 5s", "audit": "every 2h"})

    assert await column(a.session.connection, "SELECT calendar FROM tickd.graphs ORDER BY 1") == [
        "every 2h",
        "every 5s",
    ]


@pytest.mark.parametrize("scheduled", [("audit", "pack", "restock"), ("restock", "pack", "audit")])
async def test_calendars_and_admissions_go_through_the_graphs_in_one_order(
    open_as: Open, look: Onlooker, admin_dsn: str, scheduled: tuple[str, ...]
):
    """Crosswise they would wait for each other, and Postgres would end a start, or the admission of many ticks."""
    a, b = Fleet(await open_as("a")), await open_as("b")
    graphs = ["restock", "pack", "audit"]
    await a.register(dict.fromkeys(graphs, "every 5s"))
    values = {
        "space": SPACE, "replica": "b", "graph": graphs, "key": [1, 2, 3], "fire_time": [NOON] * 3,
        "thread_id": graphs, "run_id": [NO_RUN] * 3, "heed_interrupt": [True] * 3,
    }  # fmt: skip

    async def wait_for_waiting(sessions: int) -> None:
        while await column(look, WAITING) != [sessions]:
            await look.execute("SELECT pg_sleep(0.01)")

    async with await psycopg.AsyncConnection.connect(admin_dsn) as operator, asyncio.timeout(SECONDS):
        await operator.execute("SELECT FROM tickd.graphs WHERE graph = 'pack' FOR UPDATE")
        admitting = asyncio.create_task(b.fetch_all(HOLD_AND_ADMIT.many, values))
        await wait_for_waiting(1)
        registering = asyncio.create_task(a.register(dict.fromkeys(scheduled, "@daily")))
        await wait_for_waiting(2)
        await operator.rollback()
        await registering
        assert [held for _, held, *_ in await admitting] == [True] * 3


async def test_an_edited_calendar_fires_from_now_on(open_as: Open):
    """No fire time that the new expression names in the past was ever promised to anybody."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s", "audit": "every 1h"})
    before = await since(a, "restock", "audit")

    await a.register({"restock": "every 6s", "audit": "every 1h"})

    after = await since(a, "restock", "audit")
    assert after["restock"] > before["restock"]
    assert after["audit"] == before["audit"]


async def test_a_new_or_renamed_graph_fires_from_now_on(open_as: Open):
    """To the ledger a new name is a new graph, with a lock, threads and a past of its own: none."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s"})
    before = await since(a, "restock")

    await a.register({"restock_plan": "every 5s"})

    assert (await since(a, "restock_plan"))["restock_plan"] > before["restock"]


async def test_a_paused_graph_fires_at_no_time(open_as: Open, look: Onlooker):
    """Nothing of its pause is made up for."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s", "audit": "every 5s"})
    await look.execute("UPDATE tickd.graphs SET paused_at = clock_timestamp() WHERE graph = 'restock'")

    assert list(await since(a, "restock", "audit")) == ["audit"]


async def test_only_a_pause_is_forgotten_when_a_graph_is_resumed(open_as: Open, look: Onlooker):
    """An order too many must not take away what is made up for after all replicas were down."""
    a = Fleet(await open_as("a"))
    await a.register({"restock": "every 5s"})
    before = await since(a, "restock")
    operation = Operation(look, SPACE)

    assert await operation.resume("restock") == before["restock"]
    assert await since(a, "restock") == before
    await operation.pause("restock")
    await operation.resume("restock")
    assert (await since(a, "restock"))["restock"] > before["restock"]


# The books


def account(second: int, outcome: str | None = None, reason: str | None = None) -> Account:
    """Return the row of a tick so many seconds after noon."""
    tick = Tick("restock", NOON + timedelta(seconds=second))
    return Account(tick, str(tick), run_id(tick), outcome, reason)


async def test_an_account_writes_what_is_not_there_and_says_so(open_as: Open, look: Onlooker):
    """A row that is there stands, whoever wrote it: a first that died in the middle may have."""
    a = Fleet(await open_as("a"))
    await a.account([account(0), account(5, "missed", "down")])

    written = await a.account([account(0, "missed", "down"), account(5), account(10)])

    assert {tick.fire_time for tick in written} == {NOON + timedelta(seconds=10)}
    rows = await look.execute(
        "SELECT mode, outcome, error_type, finished_at IS NULL, attempt FROM tickd.ticks ORDER BY fire_time"
    )
    assert await rows.fetchall() == [
        ("claim", None, None, True, 0),
        ("skip", "missed", "down", False, 0),
        ("claim", None, None, True, 0),
    ]


async def test_an_account_of_nothing_writes_nothing(open_as: Open):
    """Most restarts fall between two fire times."""
    assert await Fleet(await open_as("a")).account([]) == set()
