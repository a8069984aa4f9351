"""The backlog: how this replica works off the ticks of graphs in claim mode.

A fired tick becomes a row, whoever inserts it first; then each replica tries the graph's lock, and the one that gets it
takes the earliest ready row, which may be another tick than the one that was fired. After a run it looks for the next.
Each fire ends with one line on each replica (ran here, or skipped and why), and each claimed run with one of its own.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tickd import claim, ledger
from tickd.claim import Claimed
from tickd.clock import DatabaseClock
from tickd.ends import End, Ran, skipped
from tickd.entry import Entry
from tickd.lock import Hold, LockPlace, LockSession, closing, sole_writer
from tickd.places import Room
from tickd.runner import LEAD, Runner, Unreachable
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
        self._working_off: set[str] = set()

    async def run_tick(self, tick: Tick) -> None:
        """Take one fired tick of a graph in claim mode to its line here, and go on with what waits behind it."""
        entry = self._entries[tick.graph]
        await self._runner.conclude(tick, self._end_of(entry, tick))
        await self.work_off(tick.graph)

    async def work_off(self, graph: str) -> None:
        """Claim and run the graph's ready ticks, one after the other, until none is left or another replica is at it."""
        entry = self._entries.get(graph)
        if entry is None or graph in self._working_off:
            return
        self._working_off.add(graph)
        try:
            while not self._stop.requested and await self._has_ready(graph):
                if not await self._take_next(entry):
                    return
        except Unreachable as error:
            self._runner.note_unreachable(error)  # the rows stay, and the next sweep comes back to them
        finally:
            self._working_off.discard(graph)

    async def _end_of(self, entry: Entry, tick: Tick) -> End | None:
        """Enqueue the tick when it is due and try to claim; None when it ran here, for then its run has logged its end.

        The row is what must not be lost, so an unreachable database is tried for as long as missed ticks are caught up.
        """
        due = tick.fire_time + entry.start_delay(tick)
        if await self._runner.stopped_before(due - LEAD):
            return skipped(SkipReason.DRAINING)
        until = due + max(entry.grace, entry.catch_up)
        async with self._runner.room(due + entry.grace) as room:
            if room.reason == "draining":
                return skipped(SkipReason.DRAINING)
            opened = await self._runner.open_in_time(entry, tick, until)
            if isinstance(opened, End):
                return opened
            async with closing(opened) as session:
                if await self._runner.stopped_before(due):
                    return skipped(SkipReason.DRAINING)
                await self._enqueue(session, entry, tick)
                if entry.overlap == "cancel":
                    self._runner.displace(tick)
                by_itself = self._runner.skipped_by_itself(tick.graph, SkipReason.QUEUED)
                if by_itself is not None or room.reason is not None:
                    return by_itself or skipped(SkipReason.QUEUED)
                return await self._claim(entry, session, room, tick)

    async def _take_next(self, entry: Entry) -> bool:
        """Open a session, claim and run one tick; False when there was none to be had."""
        async with self._runner.room(self._clock.now() + entry.grace) as room:
            if room.reason is not None:
                return False
            async with closing(await self._runner.open_session(entry)) as session:
                if self._stop.requested or self._runner.skipped_by_itself(entry.name) is not None:
                    return False
                return await self._claim(entry, session, room, None) is None

    async def _claim(self, entry: Entry, session: LockSession, room: Room, fired: Tick | None) -> End | None:
        """Claim the graph's earliest ready tick and run it; return the fired tick's end unless it is the one that ran."""
        attempt = partial(claim.claim, graph=entry.name, lease=self._place.windows.lease)
        with self._runner.occupying(entry.name) as running:
            async with sole_writer(entry.name, self._place, attempt=attempt, session=session) as hold:
                room.settle()
                claimed: Claimed | None = hold.granted
                if claimed is None or (fired is not None and claimed.tick != fired):
                    skip = await self._why_not(hold, fired, entry.overlap == "cancel")
                    if claimed is None:
                        return skip
                    assert fired is not None  # noqa: S101  # it differs from the claimed one
                    self._runner.log_end(fired, skip)
                running.take(claimed.tick)
                end = await self._run(entry, hold.session, claimed)
        if end is not None:
            await self._runner.after_hold(claimed.tick, hold, end)
            self._runner.log_end(claimed.tick, end)
        return None

    async def _run(self, entry: Entry, session: LockSession, claimed: Claimed) -> End | None:
        """Run a claimed tick; record its end, or give it back to be tried again (None: the line is out)."""
        tick, admission = claimed.tick, claimed.admission
        if claimed.failures > max(MOST_LOST_HOLDERS, entry.retries.attempts if entry.retries else 0):
            return await self._runner.record(tick, session, admission, Ran.given_up(claimed.failures))
        if claimed.interrupted and entry.after_interrupt == "skip":
            # The earlier tick came to its interrupt after this one had been enqueued.
            return await self._runner.record(tick, session, admission, Ran.skipped(SkipReason.INTERRUPTED))
        probe = claim.renewal(self._place.space, tick, admission.token, self._place.windows.lease)
        ran = await self._runner.run(entry, tick, session, admission, probe)
        if (
            ran.stopping.draining
            and ran.end.outcome is Outcome.FAILED
            and ran.end.fields.get("reason") == "shutdown"
        ):
            # Its checkpoints are there; another replica continues, though the node in mid-air runs again.
            ran = ran.handed_off()
        pause = ran.retry_pause(entry, tick, claimed.failures + 1)
        if pause is None:
            return await self._runner.record(tick, session, admission, ran)
        finish = ran.finish(admission.attempt, self._place.dsn.redact)
        error_type, error = finish.error_type or finish.outcome.value, finish.error
        if not await claim.put_back(
            session, tick, token=admission.token, pause=pause, error_type=error_type, error=error
        ):
            return await self._runner.record(tick, session, admission, ran)
        self._runner.log_retry(tick, ran.end, pause)
        return None

    async def _enqueue(self, session: LockSession, entry: Entry, tick: Tick) -> None:
        skips_overlap = entry.overlap == "skip"
        await claim.enqueue(
            session,
            tick,
            thread_id=entry.thread_id(tick),
            run_id=run_id(tick),
            most=1 if skips_overlap else entry.max_backlog,
            refusal=(SkipReason.LOCK_HELD if skips_overlap else SkipReason.BACKLOG_FULL).value,
            heed_interrupt=entry.after_interrupt == "skip",
        )

    async def _why_not(self, hold: Hold[Any], fired: Tick | None, displace: bool) -> End:  # noqa: FBT001  # one caller
        """Return what became of a fired tick that this replica did not claim, by its row."""
        row = await claim.look_up(hold.session, fired) if fired is not None else None
        holder = hold.holder.replica if hold.holder else None
        if row is None or (row.outcome is None and not row.claimed):
            if displace and fired is not None:
                await ledger.displace(hold.session, fired)
            return skipped(SkipReason.QUEUED, holder=holder)
        since: datetime | None = row.since
        if row.outcome is None:
            return skipped(
                SkipReason.LOCK_HELD, holder=row.replica, holder_since=since and instant_text(since)
            )
        if row.outcome == Outcome.SKIPPED.value and row.reason in set(SkipReason):
            return skipped(SkipReason(row.reason), holder=holder)
        return skipped(SkipReason.ALREADY_RAN, holder=row.replica)

    async def _has_ready(self, graph: str) -> bool:
        async with self._pool.connection() as connection:
            return await claim.has_ready(connection, self._place.space, graph)
