"""Attempts: the tries of one tick at its graph's lock, from a moment before it is due until it is granted or refused.

Losing is a value: whatever comes of an attempt, it is returned.
"""

import asyncio
from datetime import datetime, timedelta
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tickd import admissions, announcement
from tickd.admissions import Admission, Refusal, Unfinished
from tickd.clock import DatabaseClock
from tickd.entry import Entry
from tickd.lock import LockSession
from tickd.occupancy import Occupancy
from tickd.stop import Stop
from tickd.tick import SkipReason, Tick, run_id


LAST_MOMENT = timedelta(milliseconds=1.5)
# Who has lost before the tick is due says so this long after: the winner's first node begins then, maybe on this machine.
GIVE_WAY = timedelta(milliseconds=5)
# A lock that is held while no tick of its graph runs is about to be freed, most often by a replica that came late.
PASSING_HOLD_TRIES = 3
PASSING_HOLD_PAUSE = timedelta(milliseconds=15)
DISPLACED_POLL = timedelta(milliseconds=50)
# Every so many polls the holder is asked again: its ear may have been off the first time.
DISPLACE_AGAIN = 20
# Why the admission would refuse a tick, though the lock were free.
REFUSAL = """
SELECT CASE
    WHEN EXISTS (
        SELECT FROM tickd.ticks WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s
    ) THEN 'already_ran'
    WHEN EXISTS (
        SELECT FROM tickd.graphs WHERE space = %(space)s AND graph = %(graph)s AND paused_at IS NOT NULL
    ) THEN 'paused'
    WHEN %(heed_interrupt)s AND EXISTS (
        SELECT FROM tickd.ticks
        WHERE space = %(space)s AND graph = %(graph)s AND outcome = 'interrupted' AND thread_id = %(thread_id)s
    ) THEN 'interrupted'
    WHEN EXISTS (
        SELECT FROM tickd.ticks WHERE space = %(space)s AND graph = %(graph)s AND outcome = 'handed_off'
    ) THEN 'lock_held'
END
"""


class Attempts:
    """The attempts of one replica."""

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        space: int,
        *,
        occupancy: Occupancy,
        clock: DatabaseClock,
        stop: Stop,
    ) -> None:
        self._pool = pool
        self._space = space
        self._occupancy = occupancy
        self._clock = clock
        self._stop = stop
        # Ticks whose admission was asked for here and had no answer: they may be in the ledger, and nobody runs them.
        self.unanswered: dict[Tick, Exception] = {}

    async def make_room(self, entry: Entry, tick: Tick, until: datetime) -> SkipReason | None:
        """Let an earlier tick's run of this very replica make room, and wait for it within the tick's grace.

        It is left alone for a tick that would be refused then; returns why.
        """
        while self._clock.now() < until:
            running = self._occupancy.of(tick.graph)
            if running is None:
                break
            if not running.displaced.is_set() and (refusal := await self._refusal(entry, tick)) is not None:
                return refusal
            self._occupancy.displace(tick)
            running = self._occupancy.of(tick.graph)
            if running is None or not running.displaced.is_set() or await self._stop.wait(DISPLACED_POLL):
                break
        return None

    async def _refusal(self, entry: Entry, tick: Tick) -> SkipReason | None:
        values = {
            "space": self._space,
            "graph": tick.graph,
            "fire_time": tick.fire_time,
            "thread_id": entry.thread_id(tick),
            "heed_interrupt": entry.after_interrupt == "skip",
        }
        async with self._pool.connection() as connection:
            row = await (await connection.execute(REFUSAL, values)).fetchone()
        return SkipReason(row[0]) if row and row[0] else None

    async def at_due(
        self, session: LockSession, *, entry: Entry, tick: Tick, due: datetime
    ) -> tuple[bool | None, Admission | Refusal | Unfinished | None]:
        """Try, and try again where the lock is held by somebody who is about to let go.

        Returns at once when the tick is admitted, else not before it is due. Where an earlier tick still runs a moment
        before, it is tried again then.
        """
        held, granted = await self._try_again(session, entry, tick, due)
        if not isinstance(granted, Admission) and self._clock.now() < due:
            await self._clock.stopped_before(due + GIVE_WAY, self._stop)
        return held, granted

    async def _try_again(
        self, session: LockSession, entry: Entry, tick: Tick, due: datetime
    ) -> tuple[bool | None, Admission | Refusal | Unfinished | None]:
        tries = 0
        while True:
            ahead = due - self._clock.now()
            held, granted = await self._try(session, entry, tick)
            if held is not False:
                return held, granted
            running = granted if isinstance(granted, Unfinished) else None
            if running is not None and running.fire_time < tick.fire_time and ahead > timedelta(0):
                pause = ahead  # the graph may be free by then
            else:
                tries += 1
                if running is not None and self._may_follow(running, session, entry, tick, due):
                    if running.fire_time < tick.fire_time and tries % DISPLACE_AGAIN == 1:
                        await announcement.displace(session, tick)
                    pause = DISPLACED_POLL
                elif running is not None or tries == PASSING_HOLD_TRIES:
                    return held, granted
                else:
                    pause = PASSING_HOLD_PAUSE * tries
            if await self._stop.wait(pause):
                return held, granted

    async def _try(
        self, session: LockSession, entry: Entry, tick: Tick
    ) -> tuple[bool | None, Admission | Refusal | Unfinished | None]:
        """Try and admit in one statement; where the lock is held, say which tick is known to run."""
        held, granted = await admissions.hold_and_admit(
            session,
            tick,
            thread_id=entry.thread_id(tick),
            run_id=run_id(tick),
            heed_interrupt=entry.after_interrupt == "skip",
            tell_running=True,
            unanswered=self.unanswered,
        )
        if held is False and granted is None:
            # Whoever holds the lock may have admitted its tick after the statement's snapshot.
            granted = await admissions.unfinished(session, tick.graph)
        return held, granted

    async def come_due(self, due: datetime) -> None:
        """Wait until the moment itself, or for a stop.

        A timer of the event loop is late by up to a millisecond and more, so the last one is waited out turn by turn.
        """
        await self._clock.stopped_before(due - LAST_MOMENT, self._stop)
        while self._clock.now() < due and not self._stop.requested:  # noqa: ASYNC110  # an event would be late as well
            await asyncio.sleep(0)  # noqa: TID251  # a turn of the loop, which is no time

    def _may_follow(
        self, running: Unfinished, session: LockSession, entry: Entry, tick: Tick, due: datetime
    ) -> bool:
        """Say whether the tick may still have the graph of the one that is known to run.

        An earlier one is asked to make room; every replica asks, also for its own tick. And this very tick runs nowhere if its
        admission here had no answer: then the server has yet to notice that the session has ended.
        """
        if self._clock.now() >= due + entry.grace:
            return False
        if running.fire_time < tick.fire_time:
            return entry.overlap == "cancel"
        own = (running.fire_time, running.replica) == (tick.fire_time, session.place.replica)
        return own and tick in self.unanswered
