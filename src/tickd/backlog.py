"""The backlog: how this replica works off the ticks of graphs in claim mode.

A fired tick becomes a row at once, whoever inserts it first; that replica tries the graph's lock and takes the earliest
ready row, which may be another tick than the one that was fired. After a run it looks for the next. What it cannot take
(no place, no session, another run of the graph) stays a row, and whoever sees it in a sweep may have it.

Each fire ends with one line on each replica (ran here, or skipped and why), and each claimed run with one of its own.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tickd import announcement, claim, ledger
from tickd.claim import Claimed, Due, Enqueued, Row
from tickd.clock import DatabaseClock
from tickd.continuation import Continuation
from tickd.ends import End, Ran, error_end, lost, milliseconds, skipped
from tickd.entry import Entry
from tickd.intake import Intake
from tickd.lock import Hold, LockPlace, LockSession, closing, sole_writer
from tickd.places import Room
from tickd.policy import backoff
from tickd.runner import FIRST_PAUSE, LONGEST_PAUSE, Runner, Unreachable, end_of_story
from tickd.stop import Stop
from tickd.tick import Outcome, SkipReason, Tick, instant_text, run_id


# A tick that takes its holder's process with it, time after time, is given up; hand-offs do not count.
MOST_LOST_HOLDERS = 20


class Backlog:
    """Fires and works off claims on one replica."""

    def __init__(
        self,
        runner: Runner,
        *,
        entries: Mapping[str, Entry],
        pool: AsyncConnectionPool[Any],
        place: LockPlace,
        clock: DatabaseClock,
        stop: Stop,
    ) -> None:
        self._runner = runner
        self._entries = entries
        self._pool = pool
        self._place = place
        self._clock = clock
        self._stop = stop
        self._continuation = Continuation(runner, entries=entries, clock=clock, stop=stop)
        self._intake = Intake(pool, place.space, stop)
        self._unwritten: dict[str, dict[Tick, datetime]] = defaultdict(dict)
        self._working_off: set[str] = set()

    @property
    def unwritten_since(self) -> datetime | None:
        """Return when the earliest tick came due that this replica has fired and that has no row yet."""
        return min(chain.from_iterable(ticks.values() for ticks in self._unwritten.values()), default=None)

    async def run_tick(self, tick: Tick) -> None:
        """Take one fired tick of a graph in claim mode to its line here, and go on with what waits behind it."""
        entry = self._entries[tick.graph]
        due = tick.fire_time + entry.start_delay(tick)
        self._unwritten[tick.graph][tick] = due
        end = await self._runner.conclude(tick, self._end_of(entry, tick, due))
        if not self._stop.requested:
            self._unwritten[tick.graph].pop(tick, None)
        if end is None:
            await self.work_off(tick.graph)

    async def take_over(self, tick: Tick) -> None:
        """Go on with a tick that another replica handed off: resumed where it was admitted, claimed where it was enqueued.

        Its row says which it was: the entry may be of another mode by now.
        """
        entry = self._entries.get(tick.graph)
        if entry is None:
            return
        if entry.mode != "claim" or await self._waits_admitted(tick):
            await self._continuation.take_over(tick)
        await self.work_off(tick.graph)

    async def work_off(self, graph: str) -> None:
        """Claim and run the graph's ready ticks, one after the other, until none is left or another replica is at it."""
        entry = self._entries.get(graph)
        if entry is None or graph in self._working_off:
            return
        self._working_off.add(graph)
        try:
            while not self._stop.requested and await self._has_ready(graph):
                if await self._take_next(entry, None) is not None:
                    return
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end what else runs on this replica
            self._runner.note_unreachable(error)  # the rows stay, and the next sweep comes back to them
        finally:
            self._working_off.discard(graph)

    async def _end_of(self, entry: Entry, tick: Tick, due: datetime) -> End | None:
        """Enqueue the tick when it is due and try to claim; None when something ran here, and its lines are written."""
        if await self._clock.stopped_before(due, self._stop) and self._clock.now() < due:
            return skipped(SkipReason.DRAINING)
        enqueued = await self._enqueue(entry, tick, due + max(entry.grace, entry.catch_up))
        if isinstance(enqueued, End):
            return enqueued
        self._unwritten[tick.graph].pop(tick, None)
        row = enqueued.row
        if row.waits and enqueued.new and entry.overlap == "cancel":
            await self._displace(tick)
        if not row.waits or not enqueued.new or enqueued.holder is not None:
            return _left_alone(row, enqueued.holder)
        return await self._take_next(entry, tick)

    async def _enqueue(self, entry: Entry, tick: Tick, until: datetime) -> Enqueued | End:
        """Give the tick its row; tried for as long as missed ticks are caught up, and once when a stop was asked for."""
        skips_overlap = entry.overlap == "skip"
        due = Due(
            tick,
            entry.thread_id(tick),
            run_id(tick),
            1 if skips_overlap else entry.max_backlog,
            (SkipReason.LOCK_HELD if skips_overlap else SkipReason.BACKLOG_FULL).value,
            heed_interrupt=entry.after_interrupt == "skip",
        )
        tries = 0
        while self._clock.now() < until:
            tries += 1
            try:
                return await self._intake.put(due)
            except Unreachable as error:
                self._runner.note_unreachable(error)
                if tries == 1 and self._waiting_before(tick) >= entry.max_backlog:
                    return skipped(SkipReason.BACKLOG_FULL)
                pause = backoff(tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seed=str(tick))
                if await self._stop.wait(pause):
                    return error_end(error, reason="db_connect", tries=tries)
        row = await self._look_up(tick)
        late_ms = milliseconds(self._clock.now() - tick.fire_time)
        return _left_alone(row, None) if row else End(Outcome.MISSED, {"reason": "late", "late_ms": late_ms})

    def _waiting_before(self, tick: Tick) -> int:
        """Return how many earlier ticks of the graph wait here for their rows: no more than may wait in the ledger."""
        return sum(other < tick for other in self._unwritten[tick.graph])

    async def _displace(self, tick: Tick) -> None:
        """Ask whoever runs an earlier tick of the graph to make room, here and elsewhere."""
        self._runner.occupancy.displace(tick)
        try:
            async with self._pool.connection() as connection:
                await announcement.announce(connection, self._place.space, tick, "displacing")
        except Unreachable as error:
            self._runner.note_unreachable(error)  # the tick waits for its turn then

    async def _take_next(self, entry: Entry, fired: Tick | None) -> End | None:
        """Claim and run the graph's earliest ready tick; return the fired one's end when nothing could be had.

        Without a place, a session, an answer or the lock, nothing is lost: the row waits, and other replicas see it in their
        sweeps.
        """
        async with self._runner.room(self._clock.now() + entry.grace) as room:
            if room.reason is not None:
                return skipped(SkipReason.QUEUED)
            try:
                async with closing(await self._runner.open_session(entry)) as session:
                    if self._stop.requested:
                        return skipped(SkipReason.QUEUED)
                    by_itself = self._runner.skipped_by_itself(entry.name, SkipReason.QUEUED)
                    return by_itself or await self._claim(entry, session, room, fired)
            except Unreachable as error:
                self._runner.note_unreachable(error)
                return skipped(SkipReason.QUEUED)

    async def _claim(self, entry: Entry, session: LockSession, room: Room, fired: Tick | None) -> End | None:
        """Claim the graph's earliest ready tick and run it; return the fired tick's end unless it is the one that ran."""
        attempt = partial(claim.claim, graph=entry.name, lease=self._place.windows.lease)
        with self._runner.occupancy.take(entry.name) as running:
            async with sole_writer(entry.name, self._place, attempt=attempt, session=session) as hold:
                room.settle(session)
                claimed: Claimed | None = hold.granted
                if claimed is None:
                    return await self._end_of_loser(hold, fired)
                self._runner.note_reachable()
                if fired is not None and claimed.tick != fired:
                    self._runner.log_end(fired, skipped(SkipReason.QUEUED, holder=self._place.replica))
                running.take(claimed.tick)
                end = await end_of_story(self._run(entry, hold.session, claimed))
        if end is not None:
            await self._runner.after_hold(claimed.tick, hold, end)
            self._runner.log_end(claimed.tick, end)
        return None

    async def _end_of_loser(self, hold: Hold[Any], fired: Tick | None) -> End:
        """Return what became of the fired tick while this replica got nothing to run."""
        row = await self._look_up(fired) if fired is not None else None
        holder = hold.holder.replica if hold.holder else None
        return _left_alone(row, holder) if row is not None else skipped(SkipReason.QUEUED, holder=holder)

    async def _run(self, entry: Entry, session: LockSession, claimed: Claimed) -> End | None:
        """Run a claimed tick; record its end, or give it back to be tried again (None: the line is out)."""
        tick, admission = claimed.tick, claimed.admission
        if claimed.failures > max(MOST_LOST_HOLDERS, entry.retries.attempts if entry.retries else 0):
            return await self._runner.record(tick, session, admission, Ran.given_up(claimed.failures))
        if claimed.interrupted and entry.after_interrupt == "skip":
            # The earlier tick came to its interrupt after this one had been enqueued.
            return await self._runner.record(tick, session, admission, Ran.skipped(SkipReason.INTERRUPTED))
        probe = claim.renewal(tick, admission.token, self._place.windows.lease)
        ran = await self._runner.run(entry, tick, session, admission, probe)
        if ran.cut_short:
            # Its checkpoints are there; another replica continues, though the node in mid-air runs again.
            ran = ran.handed_off()
        pause = ran.retry_pause(entry, tick, claimed.failures + 1)
        if pause is None:
            return await self._runner.record(tick, session, admission, ran)
        put_back = partial(self._put_back, session, claimed, ran, pause)
        loss = await self._runner.write_end(tick, session, put_back)
        if loss is not None:
            # Maybe nobody knows whether the row was given back; it is open either way.
            return await self._runner.record(tick, session, admission, replace(ran, end=lost(loss, ran.end)))
        self._runner.log_retry(tick, ran.end, pause)
        return None

    async def _put_back(self, session: LockSession, claimed: Claimed, ran: Ran, pause: timedelta) -> bool:
        finish = ran.finish(claimed.admission.attempt, self._place.dsn.redact)
        return await claim.put_back(
            session,
            claimed.tick,
            token=claimed.admission.token,
            pause=pause,
            error_type=finish.error_type or finish.outcome.value,
            error=finish.error,
        )

    async def _has_ready(self, graph: str) -> bool:
        async with self._pool.connection() as connection:
            return await claim.has_ready(connection, self._place.space, graph)

    async def _waits_admitted(self, tick: Tick) -> bool:
        """Say whether the tick was handed off in skip mode; where that cannot be learnt, a sweep comes back to it."""
        try:
            async with self._pool.connection() as connection:
                return tick in await ledger.waiting(connection, self._place.space)
        except Exception as error:  # noqa: BLE001  # as in work_off
            self._runner.note_unreachable(error)
            return False

    async def _look_up(self, tick: Tick) -> Row | None:
        async with self._pool.connection() as connection:
            return await claim.look_up(connection, self._place.space, tick)


def _left_alone(row: Row, holder: str | None) -> End:
    """Return what became of a fired tick that this replica did not run, by its row."""
    if row.waits:
        return skipped(SkipReason.QUEUED, holder=holder)
    if row.outcome is None:
        since = row.since and instant_text(row.since)
        return skipped(SkipReason.LOCK_HELD, holder=row.replica, holder_since=since)
    if row.outcome == Outcome.MISSED.value:
        return End(Outcome.MISSED, {"reason": row.reason})
    if row.outcome == Outcome.SKIPPED.value and row.reason in set(SkipReason):
        return skipped(SkipReason(row.reason), holder=holder)
    return skipped(SkipReason.ALREADY_RAN, holder=row.replica)
