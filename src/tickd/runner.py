"""The runner: one tick, from fire to log line.

`run_tick` is the story; everything it calls returns facts. It ends each tick that this replica fired with exactly one
terminal line.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tickd import ledger
from tickd.clock import DatabaseClock
from tickd.ends import End, Stopping, end_of_run, error_end, lost, milliseconds, skipped
from tickd.graphs import LoadedGraph
from tickd.ledger import Admission, Finish, Refusal, Unfinished
from tickd.lock import Hold, LockPlace, LockSession, Loss, open_session, sole_writer
from tickd.log import Log, text_of
from tickd.looks import Looks
from tickd.policy import backoff
from tickd.runs import GraphThread, Run, RunEnd, RunOrder
from tickd.schedule import Entry
from tickd.stop import Stop
from tickd.tick import Outcome, SkipReason, Tick, instant_text, run_id


# How far ahead of the fire time a tick is fired and its lock connection opened.
LEAD = timedelta(milliseconds=300)
# A tick that is at most this late has not been waited for by anybody: looking into the ledger first would only cost.
FRESH = timedelta(milliseconds=50)
FIRST_PAUSE = timedelta(milliseconds=100)
LONGEST_PAUSE = timedelta(seconds=5)
# A lock that is held while no tick of its graph runs is about to be freed, most often by a replica that came late.
PASSING_HOLD_TRIES = 3
PASSING_HOLD_PAUSE = timedelta(milliseconds=15)
CANCEL_AGAIN = 1.0

Unreachable = (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica allows itself."""

    max_running: int
    lock_attempts: int
    drain_timeout: timedelta


class Runner:
    """Runs ticks of one schedule on one replica."""

    def __init__(  # noqa: PLR0913  # it is wired once, by the daemon, from parts that have nothing else in common
        self,
        *,
        entries: Mapping[str, Entry],
        loaded: Mapping[str, LoadedGraph],
        graphs: GraphThread,
        place: LockPlace,
        pool: AsyncConnectionPool[Any],
        clock: DatabaseClock,
        stop: Stop,
        log: Log,
        limits: Limits,
    ) -> None:
        self._entries = entries
        self._loaded = loaded
        self._graphs = graphs
        self._place = place
        self._looks = Looks(pool, place.space)
        self._pool = pool
        self._clock = clock
        self._stop = stop
        self._log = log
        self._limits = limits
        self._run_room = asyncio.Semaphore(limits.max_running)
        self._attempt_room = asyncio.Semaphore(limits.lock_attempts)
        self._running: dict[str, datetime] = {}
        self._reachable = True

    @property
    def running(self) -> int:
        """Return how many ticks this replica runs or is about to run at this moment."""
        return len(self._running)

    async def run_tick(self, tick: Tick) -> None:
        """Take one tick from its fire to its terminal line; never raises, for one tick must not end the others."""
        entry = self._entries[tick.graph]
        try:
            end = await self._end_of(entry, tick)
        except Unreachable as error:
            end = error_end(error)
        except Exception as error:  # noqa: BLE001  # a fault of tickd itself is this tick's outcome, with its traceback
            end = error_end(error, exc_info=error)
        level = {
            Outcome.MISSED: "warning",
            Outcome.FAILED: "error",
            Outcome.TIMED_OUT: "error",
            Outcome.LOCK_LOST: "error",
            Outcome.ERROR: "error",
        }.get(end.outcome, "info")
        getattr(self._log, level)(
            f"tick.{end.outcome}", graph=tick.graph, fire_time=instant_text(tick.fire_time), **end.fields
        )

    async def _end_of(self, entry: Entry, tick: Tick) -> End:
        delay = entry.start_delay(tick)
        due = tick.fire_time + delay
        if await self._stopped_before(due - LEAD):
            return skipped(SkipReason.DRAINING)
        async with AsyncExitStack() as rooms:
            attempting = await self._find_room(rooms, due + entry.grace)
            if attempting is None:
                return await self._came_too_late(entry, tick, due)
            session = await self._open_in_time(tick, due + entry.grace)
            if isinstance(session, End):
                return session
            return await self._try(entry, tick, due, session, attempting)

    async def _try(
        self, entry: Entry, tick: Tick, due: datetime, session: LockSession, attempting: AsyncExitStack
    ) -> End:
        """Wait until the tick is due, try to hold its graph, and run it if that succeeds."""
        try:
            early_end = await self._end_before_attempt(entry, tick, due)
        except BaseException:
            await session.close()
            raise
        if early_end is not None:
            await session.close()
            return early_end
        self._running[tick.graph] = self._clock.now()
        try:
            attempt = partial(self._attempt, entry=entry, tick=tick)
            async with sole_writer(tick.graph, self._place, attempt=attempt, session=session) as hold:
                await attempting.aclose()
                if not isinstance(hold.granted, Admission):
                    return self._skipped_by(hold)
                end = await self._run(entry, tick, hold, hold.granted)
        finally:
            del self._running[tick.graph]
        if hold.unlocked is False:
            self._log.warning("lock.unlock_failed", graph=tick.graph, fire_time=instant_text(tick.fire_time))
        return end

    async def _end_before_attempt(self, entry: Entry, tick: Tick, due: datetime) -> End | None:
        """Wait until the tick is due; return its end if it needs no attempt any more."""
        if await self._stopped_before(due):
            return skipped(SkipReason.DRAINING)
        late = self._clock.now() - due
        if late > entry.grace:
            return await self._came_too_late(entry, tick, due)
        if late > FRESH and (replica := await self._looks.ended_by(tick)) is not None:
            return skipped(SkipReason.ALREADY_RAN, holder=replica)
        if tick.graph in self._running:
            return skipped(
                SkipReason.LOCK_HELD,
                holder=self._place.replica,
                holder_since=instant_text(self._running[tick.graph]),
            )
        return None

    async def _came_too_late(self, entry: Entry, tick: Tick, due: datetime) -> End:
        """Return the end of a tick past its grace: another replica ran it, or it is missed."""
        try:
            replica = await self._looks.ended_by(tick)
        except Unreachable:
            replica = None
        if replica is not None:
            return skipped(SkipReason.ALREADY_RAN, holder=replica)
        late = self._clock.now() - due
        return End(Outcome.MISSED, {"late_ms": milliseconds(late), "grace_ms": milliseconds(entry.grace)})

    async def _find_room(self, rooms: AsyncExitStack, until: datetime) -> AsyncExitStack | None:
        """Take a place to run and a place to attempt; None when there is none within the time.

        The place to attempt is returned, to be given up as soon as the attempt is over. Both are served in the order of
        asking, which is this replica's own.
        """
        try:
            async with asyncio.timeout((until - self._clock.now()).total_seconds()):
                await rooms.enter_async_context(self._run_room)
                attempting = await rooms.enter_async_context(AsyncExitStack())
                await attempting.enter_async_context(self._attempt_room)
        except TimeoutError:
            return None
        return attempting

    async def _open_in_time(self, tick: Tick, until: datetime) -> LockSession | End:
        """Open the tick's lock connection, again and again within its grace; tick.error when there is none to be had."""
        tries = 0
        while True:
            tries += 1
            try:
                session = await open_session(self._place)
            except Unreachable as error:
                self._note_unreachable(error)
                pause = backoff(
                    tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seed=f"{self._place.replica}/{tick}"
                )
                if self._clock.now() + pause > until:
                    return error_end(error, reason="db_connect", tries=tries)
                if await self._stop.wait(pause):
                    return skipped(SkipReason.DRAINING)
            else:
                self._note_reachable()
                return session

    async def _attempt(
        self, session: LockSession, *, entry: Entry, tick: Tick
    ) -> tuple[bool, Admission | Refusal | Unfinished | None]:
        """Try and admit in one statement; try again where the lock is held by somebody who is about to let go."""
        for tries in range(1, PASSING_HOLD_TRIES + 1):
            held, granted = await ledger.hold_and_admit(
                session, tick, thread_id=entry.thread_id(tick), run_id=run_id(tick)
            )
            if held or granted is not None:
                return held, granted
            running = await ledger.unfinished(session, tick.graph)
            if running is not None or tries == PASSING_HOLD_TRIES:
                return False, running
            await self._stop.wait(PASSING_HOLD_PAUSE * tries)
        raise AssertionError("the last try returns")

    def _skipped_by(self, hold: Hold[Any]) -> End:
        if isinstance(hold.granted, Refusal):
            return skipped(
                SkipReason.ALREADY_RAN, **({"holder": hold.granted.replica} if hold.granted.replica else {})
            )
        running = hold.granted
        holder = hold.holder.replica if hold.holder else (running.replica if running else None)
        if holder is None:
            # Freed between the try and the look-up: the fact that it was held is all there is.
            return skipped(SkipReason.LOCK_HELD)
        since = (
            running.since if running and running.replica == holder else (hold.holder and hold.holder.since)
        )
        return skipped(
            SkipReason.LOCK_HELD, holder=holder, holder_since=instant_text(since) if since else None
        )

    async def _run(self, entry: Entry, tick: Tick, hold: Hold[Any], admission: Admission) -> End:
        """Run the admitted tick under the hold, and record how it ended while still holding."""
        order = self._order(entry, tick, admission)
        facts: dict[str, Any] = {"token": admission.token, "attempt": admission.attempt}
        late_ms = milliseconds(self._clock.now() - tick.fire_time)
        self._log.info(
            "tick.started",
            graph=tick.graph,
            fire_time=instant_text(tick.fire_time),
            thread_id=order.thread_id,
            late_ms=late_ms,
            **facts,
        )
        started = time.monotonic()
        run = self._graphs.run(order)
        stopping, ended = await self._see_to_its_end(run, entry, hold.session)
        facts |= {"duration_ms": round((time.monotonic() - started) * 1000, 1), "late_ms": late_ms}
        end = end_of_run(ended, stopping, entry.timeout, facts)
        return await self._record(tick, hold.session, admission, end, ended)

    def _order(self, entry: Entry, tick: Tick, admission: Admission) -> RunOrder:
        thread_id = entry.thread_id(tick)
        identity = run_id(tick)
        metadata = {
            **entry.config.metadata,
            "tickd_graph": tick.graph,
            "tickd_fire_time": instant_text(tick.fire_time),
            "tickd_attempt": admission.attempt,
            "tickd_replica": self._place.replica,
            "tickd_token": admission.token,
        }
        config: dict[str, Any] = {
            "configurable": {**entry.config.configurable, "thread_id": thread_id, "run_id": str(identity)},
            "run_id": identity,
            "run_name": tick.graph,
            "tags": ["tickd", *entry.config.tags],
            "metadata": metadata,
        }
        if entry.config.recursion_limit is not None:
            config["recursion_limit"] = entry.config.recursion_limit
        return RunOrder(
            loaded=self._loaded[tick.graph],
            tick=tick,
            thread_id=thread_id,
            run_id=identity,
            token=admission.token,
            # LangGraph takes None for "continue", and an empty mapping for a start without input.
            input={} if entry.input is None else entry.input_for(tick),
            context=entry.context,
            config=config,
            durability=entry.durability,
            resume=admission.attempt > 1,
        )

    async def _see_to_its_end(self, run: Run, entry: Entry, session: LockSession) -> tuple[Stopping, RunEnd]:
        """Wait for the run's real end; meanwhile watch the hold, the time-out and the stop event, and act on each."""
        stopping = Stopping()
        watch = asyncio.ensure_future(session.watch())
        stop = asyncio.ensure_future(self._stop.wait())
        timeout_at = None if entry.timeout is None else time.monotonic() + entry.timeout.total_seconds()
        try:
            while not run.ended.done():
                waiting = {run.ended, *(task for task in (watch, stop) if not task.done())}
                moments = [
                    m
                    for m in (stopping.cancel_at, None if stopping.timed_out else timeout_at)
                    if m is not None
                ]
                patience = max(0.0, min(moments) - time.monotonic()) if moments else None
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not run.ended.done():
                    self._press(run, stopping, watch, stop, timeout_at)
        finally:
            watch.cancel()
            stop.cancel()
            await asyncio.wait({watch, stop})
        if stopping.loss is None and not watch.cancelled() and watch.exception() is None:
            stopping.loss = watch.result()
        return stopping, run.ended.result()

    def _press(
        self,
        run: Run,
        stopping: Stopping,
        watch: asyncio.Future[Loss],
        stop: asyncio.Future[bool],
        timeout_at: float | None,
    ) -> None:
        """Do what the moment asks for: drain or cancel a run that has to stop."""
        now = time.monotonic()
        if watch.done() and stopping.loss is None:
            stopping.loss = watch.result()
            run.drain("lock lost")
            # A session that has ended has freed the lock already; a silent one is still being given its time.
            patience = (
                timedelta(0)
                if stopping.loss.cause == "session_ended"
                else self._place.windows.stop_allowance / 2
            )
            stopping.cancel_by(now + patience.total_seconds())
        if stop.done() and not stopping.draining:
            stopping.draining = True
            stopping.cancel_by(now + self._limits.drain_timeout.total_seconds())
        if timeout_at is not None and now >= timeout_at and not stopping.timed_out:
            stopping.timed_out = True
            stopping.cancel_by(now)
        if stopping.cancel_at is not None and now >= stopping.cancel_at:
            run.cancel()
            # A node may swallow a cancellation; it is asked again until the run has really ended.
            stopping.cancel_at = now + CANCEL_AGAIN

    async def _record(
        self, tick: Tick, session: LockSession, admission: Admission, end: End, ended: RunEnd
    ) -> End:
        """Write the end into the ledger under the hold; a hold that is gone turns the end into tick.lock_lost."""
        error_type, error = (
            (type(ended.error).__name__, text_of(ended.error)) if ended.error else (None, None)
        )
        finish = Finish(end.outcome, error_type, error)
        if end.outcome is not Outcome.LOCK_LOST:
            try:
                if await ledger.record(session, tick, token=admission.token, finish=finish):
                    return end
                end = lost(Loss("superseded", "the ledger has a newer token for this tick"), end)
            except Unreachable as failure:
                end = lost(Loss("session_ended", str(failure).strip()), end)
        await self._record_without_hold(tick, admission, replace(finish, outcome=end.outcome))
        return end

    async def _record_without_hold(self, tick: Tick, admission: Admission, finish: Finish) -> None:
        try:
            async with self._pool.connection() as connection:
                await ledger.record_without_hold(
                    connection, self._place.space, tick, token=admission.token, finish=finish
                )
        except Unreachable as error:
            # The row stays without an outcome, and a sweep will find it abandoned: that is the truth then.
            self._note_unreachable(error)

    async def _stopped_before(self, moment: datetime) -> bool:
        """Wait until the database's clock shows the moment; True when a stop was asked for before."""
        while (ahead := moment - self._clock.now()) > timedelta(0):
            if await self._stop.wait(ahead):
                return True
        return self._stop.requested

    def _note_unreachable(self, error: BaseException) -> None:
        if self._reachable:
            self._reachable = False
            self._log.error(
                "database.unreachable", error_type=type(error).__name__, error=text_of(error).strip()
            )

    def _note_reachable(self) -> None:
        if not self._reachable:
            self._reachable = True
            self._log.info("database.reachable")
