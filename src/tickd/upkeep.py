"""The upkeep of one replica: what it does beside ticks, each in a task of its own.

It measures the database's clock, notices jumps of this host's, watches the graph loop, sweeps the ledger for what other
replicas left behind, is present among those that fire, and listens for what they hand off. None of it is needed for a
tick to be run once: a sweep that is late finds its ticks later, and a replica that hears nothing sweeps (I7).
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import InsufficientPrivilege

from tickd import announcement, claim, ledger
from tickd.clock import DatabaseClock
from tickd.ends import milliseconds
from tickd.entry import Entry
from tickd.fleet import REJOIN_EVERY, Fleet
from tickd.graph_thread import GraphThread
from tickd.lock import LockPlace, closing, open_session
from tickd.log import Log, text_of
from tickd.policy import backoff
from tickd.pool import Pool, shut_down
from tickd.retention import BatchSize, Removed, remove_old_threads, remove_old_ticks
from tickd.runner import Unreachable
from tickd.stop import Stop
from tickd.tick import Tick, instant_text
from tickd.timer import Timer


MEASURE_EVERY = timedelta(seconds=10)
SWEEP_EVERY = timedelta(seconds=2)
# A claim whose holder was killed is found by this; a sweep costs some tenths of a millisecond.
SWEEP_CLAIMS_EVERY = timedelta(milliseconds=400)
LOOK_AT_CLOCK_EVERY = timedelta(milliseconds=500)
RETAIN_EVERY = timedelta(seconds=60)
LEAST_JUMP = timedelta(seconds=1)
BEAT_EVERY = timedelta(seconds=2)
LEAVE_WITHIN = timedelta(seconds=3)
# A session that has listened for so long is replaced without a pause when it ends.
PRESENT_FOR = timedelta(seconds=2)
LOOK_AT_LOOP_EVERY = timedelta(milliseconds=250)
BLOCKED_AFTER = 1.0
LATE_TIMER = timedelta(seconds=5)
DEAD_TIMER = timedelta(seconds=60)


class Upkeep:
    """The tasks beside the ticks; each of its methods runs until the stop event."""

    def __init__(  # noqa: PLR0913  # it is wired once, by the daemon
        self,
        *,
        pool: Pool,
        graphs: GraphThread,
        place: LockPlace,
        clock: DatabaseClock,
        timer: Timer,
        skew_limit: timedelta,
        take_over: Callable[[Tick], None],
        work_off: Callable[[str], None],
        displace: Callable[[Tick], None],
        unwritten_since: Callable[[], datetime | None],
        fleet: Fleet,
        entries: Iterable[Entry],
        stop: Stop,
        log: Log,
    ) -> None:
        self._pool = pool
        self._graphs = graphs
        self._place = place
        self._clock = clock
        self._timer = timer
        self._skew_limit = skew_limit
        self._take_over = take_over
        self._work_off = work_off
        self._displace = displace
        self._unwritten_since = unwritten_since
        self._fleet = fleet
        self._entries = entries
        self._stop = stop
        self._log = log
        self._skewed = False
        self._not_ended: set[str] = set()
        self.failed = False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start every task in the group."""
        works = (
            self.measure,
            self.notice_jumps,
            self.watch_timer,
            self.watch_graph_loop,
            self.sweep,
            self.listen,
            self.retain,
        )
        for work in works:
            group.create_task(self._see_through(work), name=f"upkeep: {work.__name__}")

    async def _see_through(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work until the stop. A fault in it stops the replica, in order: one that is half alive helps nobody."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001  # whatever it is, runs are to be handed off and ticks accounted for
            self.failed = True
            self._log.error(
                "daemon.failed", error_type=type(error).__name__, error=text_of(error), exc_info=error
            )
            self._stop.request()

    async def measure(self) -> None:
        """Measure the database's clock again and again, and warn when this host's is too far from it."""
        self._note_skew()
        while not await self._stop.wait(MEASURE_EVERY):
            await self._measure()

    async def notice_jumps(self) -> None:
        """Compare this host's clocks: a step of the wall clock, or a process that stood still, moves what is due."""
        wall, monotonic = _clocks()
        while not await self._stop.wait(LOOK_AT_CLOCK_EVERY):
            was_wall, was_monotonic = wall, monotonic
            wall, monotonic = _clocks()
            stood_still = monotonic - was_monotonic - LOOK_AT_CLOCK_EVERY
            stepped = (wall - was_wall) - (monotonic - was_monotonic)
            if abs(stepped) >= LEAST_JUMP:
                self._log.warning("clock.jumped", cause="clock_stepped", jump_ms=milliseconds(stepped))
            elif stood_still >= LEAST_JUMP:
                self._log.warning("clock.jumped", cause="process_stopped", jump_ms=milliseconds(stood_still))
            else:
                continue
            await self._measure()
            self._timer.follow_clock()

    async def watch_timer(self) -> None:
        """Wake a timer that is overdue, and end the process when that does not help: alive and not firing is worse."""
        woken = False
        while not await self._stop.wait(LATE_TIMER / 2):
            overdue = self._timer.overdue()
            if woken and overdue > DEAD_TIMER:
                raise RuntimeError(f"the timer has not fired for {overdue.total_seconds():.0f} s")
            # A process that stood still comes here before the timer may have had its turn.
            woken = overdue > LATE_TIMER
            if woken:
                self._timer.follow_clock()

    async def watch_graph_loop(self) -> None:
        """Say when a graph blocks the loop that all graphs of this replica share, and for how long it did."""
        while not await self._stop.wait(LOOK_AT_LOOP_EVERY):
            asked = time.monotonic()
            answer = asyncio.ensure_future(self._graphs.answer())
            if (await asyncio.wait({answer}, timeout=BLOCKED_AFTER))[0]:
                continue
            graph = self._graphs.current_graph()
            lag = milliseconds(timedelta(seconds=time.monotonic() - asked))
            self._log.warning("loop.blocked", graph=graph, lag_ms=lag, over=False)
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({answer, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            lag = milliseconds(timedelta(seconds=time.monotonic() - asked))
            self._log.warning("loop.blocked", graph=graph, lag_ms=lag, over=answer.done())
            answer.cancel()

    async def sweep(self) -> None:
        """Look for ticks whose holder is gone, for ticks that were handed off, and for claims to work off."""
        rounds = 0
        while True:
            rounds += 1
            try:
                pause = await self._sweep()
            except Unreachable:
                pause = SWEEP_EVERY  # whoever meets the same trouble in a tick says so
            # Spread by a half, so that replicas that started together do not sweep together.
            seed = f"{self._place.replica}/{rounds}"
            if await self._stop.wait(backoff(1, first=pause, longest=pause, seed=seed)):
                return

    async def _sweep(self) -> timedelta:
        """Sweep once and return when to sweep again: soon while there are claims that somebody may leave behind."""
        async with self._pool.connection() as connection:
            if not await ledger.any_open(connection, self._place.space):
                return SWEEP_EVERY
            # Told at once: their rows are closed, so no other sweep finds them, and what comes next may fail.
            for gone in await ledger.abandon(connection, self._place.space):
                self._log_abandoned(gone)
            waiting = await ledger.waiting(connection, self._place.space)
            work = await claim.work(connection, self._place.space, self._place.windows.lease)
            for one in work:
                if one.expired:
                    await self._end_holder(connection, one.graph)
        for tick in waiting:
            self._take_over(tick)
        for one in work:
            if one.ready or one.expired:
                self._work_off(one.graph)
        return SWEEP_CLAIMS_EVERY if work else SWEEP_EVERY

    async def _end_holder(self, connection: AsyncConnection[Any], graph: str) -> None:
        """End the session of a holder that has let its lease run out; say once if that is not for this role to do."""
        try:
            if await claim.end_holder(connection, self._place.space, graph, self._place.windows.lease):
                self._log.warning("claim.expired", graph=graph)
            self._not_ended.discard(graph)
        except InsufficientPrivilege as error:
            if graph not in self._not_ended:
                self._log.warning("claim.expired", graph=graph, error=text_of(error).strip())
            self._not_ended.add(graph)

    async def listen(self) -> None:
        """Be present, and take over what other replicas announce, as soon as they do; sweeps find what is not heard.

        A replica that starts while this one is not present may take itself for the first, so there is no long pause.
        """
        tries = 0
        present: Fleet | None = self._fleet
        while not self._stop.requested:
            tries += 1
            present_since = math.inf
            with suppress(*Unreachable):
                present = present or Fleet(await open_session(self._place))
                async with closing(present.session) as session:
                    await present.join(self._stop)
                    await session.change(announcement.LISTEN)
                    present_since = time.monotonic()
                    await self._hear(present)
                    if self._stop.requested:
                        await present.leave(self._unfired_since())
            if time.monotonic() - present_since <= PRESENT_FOR.total_seconds():
                seed = f"{self._place.replica}/{tries}"
                await self._stop.wait(backoff(1, first=REJOIN_EVERY, longest=REJOIN_EVERY, seed=seed))
            present = None

    async def retain(self) -> None:
        """Remove threads and ticks that are older than their graph's `keep`, batch by batch."""
        # With a batch size each, for a thread that cannot be removed must keep no ticks.
        kept = [
            (entry, ((remove_old_ticks, BatchSize()), (remove_old_threads, BatchSize())))
            for entry in self._entries
            if entry.keep.threads is not None or entry.keep.ticks is not None
        ]
        while kept and not await self._stop.wait(
            backoff(1, first=RETAIN_EVERY, longest=RETAIN_EVERY, seed=self._place.replica)
        ):
            for entry, ways in kept:
                removed = [await self._remove_old(entry, remove, batch) for remove, batch in ways]
                threads, ticks = sum(one.threads for one in removed), sum(one.ticks for one in removed)
                if threads or ticks:
                    self._log.info("retention.swept", graph=entry.name, threads=threads, ticks=ticks)

    async def _remove_old(
        self, entry: Entry, remove: Callable[..., Awaitable[Removed]], batch: BatchSize
    ) -> Removed:
        """Remove batch by batch, for as long as there is more, and return how much that was."""
        # Less than the loan of a connection, which would end it and leave Postgres at work.
        within = self._place.answer_timeout * 0.9
        threads = ticks = 0
        more = True
        while more and not self._stop.requested:
            began = math.inf  # a pool that has no connection to lend says nothing of the batch
            try:
                async with self._pool.connection() as connection:
                    began = time.monotonic()
                    removed = await remove(connection, self._place.space, entry, batch, within)
            except Unreachable as error:
                ran_out = time.monotonic() - began >= within.total_seconds()
                more = ran_out and self._take_fewer(entry, batch, error)
                continue
            threads, ticks, more = threads + removed.threads, ticks + removed.ticks, removed.more
            batch.note(removed)
            # So that twice as many have time enough; else every second batch would be in vain.
            if more and time.monotonic() - began < within.total_seconds() / 4:
                batch.double()
        return Removed(threads, ticks)

    def _take_fewer(self, entry: Entry, batch: BatchSize, error: Exception) -> bool:
        """Take fewer at a time, if that is possible; else say so, once."""
        if batch.reduce():
            return True
        if not batch.stuck:
            batch.stuck = True
            self._log.warning("retention.stuck", graph=entry.name, error=text_of(error))
        return False

    async def _hear(self, present: Fleet) -> None:
        """Hear what is announced, and beat in between, until the stop or a failover.

        The beat also notices a link that has died without a word: nobody would be present any more, and nobody would know.
        """
        notifies = present.session.connection.notifies

        async def hear() -> None:
            beats = 0
            timeline = await present.beat(self._unfired_since())
            while beats == 0 or timeline is None or timeline >= self._clock.timeline:
                beats += 1
                seed = f"{self._place.replica}/{beats}"
                pause = backoff(1, first=BEAT_EVERY, longest=BEAT_EVERY, seed=seed)
                async for notice in notifies(timeout=pause.total_seconds()):
                    self._heed(notice.payload)
                timeline = await present.beat(self._unfired_since())

        hearing = asyncio.ensure_future(hear())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({hearing, stop}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
        finally:
            if self._stop.requested:
                # What is asked from here on, and may be asked already, holds no exit up where there is no answer.
                connection = present.session.connection
                asyncio.get_running_loop().call_later(LEAVE_WITHIN.total_seconds(), shut_down, connection)
            hearing.cancel()
            stop.cancel()
            await asyncio.wait({hearing, stop})

    def _heed(self, payload: str) -> None:
        told = announcement.announced(payload, self._place.space)
        if told is not None and told.handed_off is not None:
            self._take_over(told.handed_off)
        elif told is not None and told.displacing is not None:
            self._displace(told.displacing)

    def _unfired_since(self) -> datetime:
        """Return up to which instant everything that came due was fired here, and has its row where it must not be lost.

        By this replica's idea of the database's clock: the statement may reach the server late. A timer that is stopped, or
        that stood still, is behind.
        """
        fired = self._clock.now() - self._timer.overdue()
        return min(fired, self._unwritten_since() or fired)

    async def _measure(self) -> None:
        """Measure over a fresh connection, which meets the server that the address leads to now."""
        before, timeline = self._clock.skew(), self._clock.timeline
        try:
            async with closing(await open_session(self._place)) as session:
                await self._clock.measure(session.fetch)
        except Unreachable:
            return  # the last measurement is carried on
        if self._clock.timeline > timeline:
            await self._follow_failover(timeline)
        if abs(self._clock.skew() - before) > timedelta(milliseconds=20):
            self._timer.follow_clock()
        self._note_skew()

    async def _follow_failover(self, timeline: int) -> None:
        """Leave the old server: the pools' connections to it may be healthy still. Holds on it end by their own watch."""
        self._log.warning("database.failed_over", timeline=self._clock.timeline, old_timeline=timeline)
        self._graphs.renew_connections()
        await self._pool.drain()

    def _note_skew(self) -> None:
        """Warn when this host's clock crosses the limit, once per crossing."""
        skew = self._clock.skew()
        skewed = abs(skew) > self._skew_limit
        if skewed and not self._skewed:
            limit = milliseconds(self._skew_limit)
            self._log.warning("clock.skewed", ahead_ms=milliseconds(skew), limit_ms=limit)
        self._skewed = skewed

    def _log_abandoned(self, one: ledger.Abandoned) -> None:
        self._log.error(
            "tick.abandoned",
            graph=one.tick.graph,
            fire_time=instant_text(one.tick.fire_time),
            token=one.token,
            attempt=one.attempt,
            holder=one.replica,
            holder_since=instant_text(one.since),
        )


def _clocks() -> tuple[datetime, timedelta]:
    return datetime.now(UTC), timedelta(seconds=time.monotonic())  # noqa: TID251  # comparing clocks is the point
