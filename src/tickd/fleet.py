"""The fleet: whether any replica fires, and since when none did.

Every replica that fires shares a lock, the presence, for as long as it lives. Who can take it alone at its start is the
first after all were down; it accounts for the fire times in between. A second lock, the books, lets one replica at a
time arrive, and the first keep it until it has settled: a first that dies in the middle has been seen by nobody, so the
next one to arrive is the first again. The server decides, so a killed replica counts as gone at once.

A restart of the server ends every session, and so the presence of replicas that live. Who finds nobody after that is not
the first yet: the others have time to come back, unless the last that left has said that it was the last. How far the fleet had come is one row per lock space. Only who is present
moves it on, and on the session that makes it so: what is older than the server itself was said by replicas that it has
cut off.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg.errors import LockNotAvailable

from tickd.lock import LockSession
from tickd.stop import Stop
from tickd.tick import Tick, lock_key


POLL = timedelta(milliseconds=50)
# How long a replica whose session has ended waits before it tries again to be present, less up to a half.
REJOIN_EVERY = timedelta(seconds=1.5)
# One key of each per lock space, in the one-integer key space, apart from graphs and from the migrations' key.
PRESENCE = 0x7469636B << 32
BOOKS = 0x74696362 << 32

ALONE = "SELECT pg_try_advisory_lock(%s)"
TOGETHER = "SELECT pg_try_advisory_lock_shared(%s)"
UNLOCK = "SELECT pg_advisory_unlock(%s)"
UNLOCK_SHARED = "SELECT pg_advisory_unlock_shared(%s)"
ALIVE_AT = "SELECT alive_at FROM tickd.spaces WHERE space = %s"
# A crash of one backend ends all sessions and not the server, and leaves the statistics empty; a standby that became the
# primary may have been up for long, and remembers what it replayed last.
CUT_OFF = """
SELECT deserted, alive_at <= GREATEST(
    pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter), pg_last_xact_replay_timestamp()
)
FROM tickd.spaces
WHERE space = %s
"""
# `deserted` is for the last one to leave to say, and for whoever is there to take back. One that leaves at the same time has
# looked a moment before, and may be the later one to write.
BEAT = """
INSERT INTO tickd.spaces (space, alive_at, deserted)
VALUES (
    %(space)s, LEAST(clock_timestamp(), %(unfired_since)s::timestamptz - interval '1 microsecond'),
    %(leaves)s AND NOT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 1 AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND classid::bigint << 32 | objid::bigint = %(presence)s
    )
)
ON CONFLICT (space) DO UPDATE
SET alive_at = GREATEST(spaces.alive_at, EXCLUDED.alive_at),
    deserted = EXCLUDED.deserted OR %(leaves)s AND spaces.deserted
RETURNING ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
"""
# ON CONFLICT locks every row that it meets, also where it leaves it as it is. So it is let meet only those that change, and
# in the order in which an admission of many goes through them: crosswise, the two would wait for each other.
REGISTER = """
INSERT INTO tickd.graphs (space, graph, key, calendar)
SELECT entry.space, entry.graph, entry.key, entry.calendar
FROM (
    SELECT %s::int AS space, *
    FROM unnest(%b::text[], %b::int[], %b::text[]) AS entry (graph, key, calendar)
) AS entry
LEFT JOIN tickd.graphs AS kept USING (space, graph)
WHERE kept.calendar IS DISTINCT FROM entry.calendar
ORDER BY entry.graph
ON CONFLICT (space, graph) DO UPDATE SET calendar = EXCLUDED.calendar, fires_since = clock_timestamp()
WHERE graphs.calendar IS DISTINCT FROM EXCLUDED.calendar
"""
FIRES_SINCE = (
    "SELECT graph, fires_since FROM tickd.graphs WHERE space = %s AND paused_at IS NULL AND graph = ANY(%b)"
)
ACCOUNT = """
INSERT INTO tickd.ticks
    (space, graph, fire_time, mode, attempt, thread_id, run_id, outcome, error_type, finished_at)
SELECT %s, due.graph, due.fire_time, due.mode, 0, due.thread_id, due.run_id, due.outcome, due.reason,
       CASE WHEN due.outcome IS NOT NULL THEN clock_timestamp() END
FROM unnest(%b::text[], %b::timestamptz[], %b::text[], %b::text[], %b::uuid[], %b::text[], %b::text[])
     AS due (graph, fire_time, mode, thread_id, run_id, outcome, reason)
ON CONFLICT (space, graph, fire_time) DO NOTHING
RETURNING graph, fire_time
"""


@dataclass(frozen=True, slots=True)
class Account:
    """The row of one fire time that nobody fired: open (outcome None), or closed at once."""

    tick: Tick
    thread_id: str
    run_id: Any
    outcome: str | None = None
    reason: str | None = None


class Fleet:
    """The place of this replica among those of its lock space, on a session that lives as long as the replica fires."""

    def __init__(self, session: LockSession) -> None:
        self.session = session
        self._space = session.place.space
        self._presence = PRESENCE | (self._space & 0xFFFFFFFF)
        self._books = BOOKS | (self._space & 0xFFFFFFFF)
        # In seconds: how long others who live are given to come back.
        self._patience = (2 * REJOIN_EVERY + session.place.connect_timeout).total_seconds()
        self._joined = False
        self._joined_at = 0.0

    async def arrive(self, stop: Stop, *, waited: bool = False) -> bool:
        """Return True when no other replica fires; until `settle`, no other can begin. False also when stopped.

        `waited` says that the database was out of this one's reach just now. Others that live may have lost their sessions
        then, as when the server has been restarted since anybody was present, and are given the time to come back.
        """
        until = time.monotonic() + self._patience
        while await self._open_books(stop):
            if not await self._ask(ALONE, self._presence):
                await self._ask(TOGETHER, self._presence)
                await self._close_books()
                return False
            if time.monotonic() >= until or not await self._others_may_live(waited=waited):
                return True
            await self._ask(UNLOCK, self._presence)
            await self._ask(UNLOCK, self._books)
            if await stop.wait(REJOIN_EVERY):
                return False
        return False

    async def settle(self) -> None:
        """Let the others begin, having been the first."""
        await self._ask(TOGETHER, self._presence)
        await self._ask(UNLOCK, self._presence)  # the exclusive one, which a session unlocks first
        await self._close_books()

    async def join(self, stop: Stop) -> None:
        """Be one of those that fire, on this session; does nothing where it is one already."""
        if not self._joined and await self._open_books(stop):
            await self._ask(TOGETHER, self._presence)
            await self._close_books()

    async def beat(self, unfired_since: datetime) -> int | None:
        """Move on how far the fleet has come: to now, or to just before what is not fired yet or has no row yet.

        Returns the timeline of the server on which this replica is present, if it is, and that could be said.
        """
        return await self._say(unfired_since, leaves=False)

    async def _say(self, unfired_since: datetime, *, leaves: bool) -> int | None:
        if not self._joined:
            return None
        values = {
            "space": self._space,
            "presence": self._presence,
            "unfired_since": unfired_since,
            "leaves": leaves,
        }
        with suppress(LockNotAvailable):  # somebody's transaction has the row, and the session lives
            timeline: int = (await self.session.fetch(BEAT, values))[0]
            return timeline
        return None

    async def leave(self, unfired_since: datetime) -> None:
        """Be there no more, and say how far this one has fired, for the first to start should it be the last to stop.

        In this order, because the word may have to wait: who starts meanwhile must not count on a replica that fires no more,
        and what it accounts for twice stands. Whether it was the last is only said by one that was there for long enough:
        whoever else lives and had lost its session was back by then.
        """
        if self._joined:
            await self._ask(UNLOCK_SHARED, self._presence)
        await self._say(unfired_since, leaves=time.monotonic() - self._joined_at >= self._patience)

    async def alive_at(self) -> datetime | None:
        """Return how far the fleet had come when it was last seen to fire; None when it never was."""
        row = await self.session.fetch(ALIVE_AT, [self._space])
        return row[0].astimezone(UTC) if row else None

    async def register(self, calendars: dict[str, str]) -> None:
        """Note every graph with its calendar; a new or edited calendar fires from now on, never for the time before."""
        graphs = list(calendars)
        keys = [lock_key(graph) for graph in graphs]
        await self.session.change(
            REGISTER, (self._space, graphs, keys, [calendars[graph] for graph in graphs])
        )

    async def fires_since(self, graphs: Iterable[str]) -> dict[str, datetime]:
        """Return since when each of the graphs fires; paused ones are left out."""
        rows = await self.session.fetch_all(FIRES_SINCE, (self._space, list(graphs)))
        return {graph: since.astimezone(UTC) for graph, since in rows}

    async def account(self, rows: list[Account]) -> set[Tick]:
        """Write the rows that are not there yet and return their ticks."""
        columns = (
            [row.tick.graph for row in rows],
            [row.tick.fire_time for row in rows],
            # Whatever the graph's mode: what is made up for must not be lost again, so it is claimed.
            ["claim" if row.outcome is None else "skip" for row in rows],
            [row.thread_id for row in rows],
            [row.run_id for row in rows],
            [row.outcome for row in rows],
            [row.reason for row in rows],
        )
        written = await self.session.fetch_all(ACCOUNT, (self._space, *columns))
        return {Tick(graph, fire_time.astimezone(UTC)) for graph, fire_time in written}

    async def _others_may_live(self, *, waited: bool) -> bool:
        """Say whether there are replicas, for all that is known, that nothing but their sessions has left."""
        row = await self.session.fetch(CUT_OFF, [self._space])
        if row is None:
            return False
        deserted, cut_off = row
        return not deserted and (waited or cut_off)

    async def _open_books(self, stop: Stop) -> bool:
        """Wait for the books; False when a stop was asked for."""
        while not await self._ask(ALONE, self._books):
            # Another one arrives, and may be accounting for what nobody fired.
            if await stop.wait(POLL):
                return False
        return True

    async def _close_books(self) -> None:
        await self._ask(UNLOCK, self._books)
        self._joined = True
        self._joined_at = time.monotonic()

    async def _ask(self, statement: str, key: int) -> bool:
        return bool((await self.session.fetch(statement, [key]))[0])
