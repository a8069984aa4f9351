"""The runner: one tick, from fire to log line.

`run_tick` is the story of a tick that this replica fired in skip mode; everything it calls returns facts, and the stories
of ticks that were handed off (`continuation`) or are claimed (`backlog`) share its parts. Each tick that is fired ends with
exactly one terminal line, and so does each run that is taken over.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tickd import admissions, announcement, ledger
from tickd.admissions import Admission
from tickd.attempts import Attempts
from tickd.clock import DatabaseClock
from tickd.ends import End, Ran, end_of_run, error_end, lost, milliseconds, skipped, skipped_by
from tickd.graph_thread import GraphThread
from tickd.graphs import LoadedGraph
from tickd.ledger import Finish
from tickd.lock import (
    PROBE,
    Attempt,
    Hold,
    LockPlace,
    LockSession,
    Loss,
    Probe,
    open_session,
    sole_writer,
)
from tickd.log import Log, text_of
from tickd.looks import Looks
from tickd.occupancy import Occupancy
from tickd.places import Places, Room
from tickd.policy import backoff
from tickd.runs import EndKind
from tickd.schedule import Entry
from tickd.shared import SharedHolds
from tickd.stop import Stop
from tickd.supervision import Supervision, keep_hold, order_of, write_end
from tickd.tick import Outcome, SkipReason, Tick, instant_text


T = TypeVar("T")

# How far ahead of the fire time a tick is fired and its lock connection opened.
LEAD = timedelta(milliseconds=300)
# A tick that is at most this late has not been waited for by anybody: looking into the ledger first would only cost.
FRESH = timedelta(milliseconds=50)
# With less time than this left, a new session is not warmed up before its tick is due.
WARM_AHEAD = timedelta(milliseconds=50)
# How long before it is due a tick is tried and admitted: its row has to be on the disk before its graph may begin, and
# that takes longer than everything else that is left to do. Then its thread is read.
ADMIT_AHEAD = timedelta(milliseconds=10)
FIRST_PAUSE = timedelta(milliseconds=100)
LONGEST_PAUSE = timedelta(seconds=5)

# A server that has become read-only is as good as away: it was demoted, and the address will lead to another one. So is
# one that ends sessions for a role's time-outs, in a class of errors by which Postgres means anything else.
Unreachable = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
    PoolTimeout,
    TimeoutError,
    OSError,
)


LEVELS = {
    Outcome.MISSED: "warning",
    Outcome.FAILED: "error",
    Outcome.TIMED_OUT: "error",
    Outcome.LOCK_LOST: "error",
    Outcome.ERROR: "error",
}


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
        self._shared = SharedHolds(place, lambda: clock.timeline)
        self._looks = Looks(pool, place.space)
        self._pool = pool
        self._clock = clock
        self._stop = stop
        self._log = log
        self._limits = limits
        self._places = Places(
            graphs, stop, max_running=limits.max_running, lock_attempts=limits.lock_attempts
        )
        self.occupancy = Occupancy(clock)
        self._attempts = Attempts(pool, place.space, occupancy=self.occupancy, clock=clock, stop=stop)
        self._reachable = True
        self.drain_ran_out = False

    @property
    def running(self) -> int:
        """Return how many ticks this replica runs or is about to run at this moment."""
        return len(self.occupancy)

    @property
    def unwritten_since(self) -> datetime | None:
        """Return when the earliest tick came due that waits here and has no row yet."""
        waiting = self._looks.without_row()
        return min(
            (tick.fire_time + self._entries[tick.graph].start_delay(tick) for tick in waiting), default=None
        )

    async def run_tick(self, tick: Tick) -> None:
        """Take one fired tick of a graph in skip mode to its terminal line."""
        await self.conclude(tick, self._end_of(self._entries[tick.graph], tick))

    async def conclude(self, tick: Tick, story: Awaitable[End | None]) -> End | None:
        """Await a tick's story, log its end and return it; never raises, for one tick must not end the others."""
        end = await end_of_story(story)
        if end is not None:
            self.log_end(tick, end)
        return end

    async def _end_of(self, entry: Entry, tick: Tick) -> End:
        due = tick.fire_time + entry.start_delay(tick)
        if await self._clock.stopped_before(due - LEAD, self._stop):
            return skipped(SkipReason.DRAINING)
        self._looks.remember(tick)
        try:
            return await self._end_with_room(entry, tick, due)
        finally:
            self._looks.forget(tick)
            self._attempts.unanswered.pop(tick, None)

    async def _end_with_room(self, entry: Entry, tick: Tick, due: datetime) -> End:
        async with self.room(due + entry.grace) as room:
            if room.reason == "draining":
                return skipped(SkipReason.DRAINING)
            if room.reason is not None:
                return await self._came_too_late(entry, tick, due, room.reason)
            return self._unless_unanswered(tick, await self._end_in_room(entry, tick, due, room))

    async def _end_in_room(self, entry: Entry, tick: Tick, due: datetime, room: Room) -> End:
        """Attempt on a spare session or on a fresh one; a late tick may turn out to need neither.

        A session that dies before it has come to anything is followed by another one within the grace: a restart of the
        server ends those of all replicas at once, and there would be nobody to run the tick.
        """
        tries = 0
        while True:
            if self._clock.now() - due > FRESH:
                early_end = await self._end_before_attempt(entry, tick, due)
                if early_end is not None:
                    return early_end
            spare = self._places.take_spare() if entry.hold == "dedicated" else None
            session = spare or await self.open_in_time(entry, tick, due + entry.grace)
            if isinstance(session, End):
                return await self._unless_elsewhere(tick, session)
            try:
                return await self._end_on_session(entry, tick, due, room, session)
            except Unreachable as error:
                if spare is None:
                    tries += 1
                    early_end = await self._pause(tick, due + entry.grace, tries, error)
                    if early_end is not None:
                        return await self._unless_elsewhere(tick, early_end)

    async def _unless_elsewhere(self, tick: Tick, end: End) -> End:
        """Return the skip of a tick that another replica has, in the place of an error."""
        return (end.outcome is Outcome.ERROR and await self._elsewhere(tick)) or end

    def _unless_unanswered(self, tick: Tick, end: End) -> End:
        """Return the error of a tick that may have been admitted here in vain, in the place of an end that names nobody else."""
        error = self._attempts.unanswered.get(tick)
        untried = end.outcome in (Outcome.MISSED, Outcome.SKIPPED)
        if (
            error is None
            or not untried
            or end.fields.get("holder", self._place.replica) != self._place.replica
        ):
            return end
        return error_end(error, reason="no_answer")

    async def _end_on_session(
        self, entry: Entry, tick: Tick, due: datetime, room: Room, session: LockSession
    ) -> End:
        """Wait until the tick is due, and attempt; the session goes to another tick when this one needs none."""
        with session.lent():
            try:
                await self._make_ready(session, tick, due)
                early_end = await self._end_before_attempt(entry, tick, due)
            except BaseException:
                await session.close()
                raise
            if early_end is not None:
                if not self._places.spare(session):
                    await session.close()
                return early_end
            attempt = partial(self._attempts.at_due, entry=entry, tick=tick, due=due)
            return await self.run_if_held(entry, tick, session, attempt, room)

    async def _make_ready(self, session: LockSession, tick: Tick, due: datetime) -> None:
        """Let a new backend learn the admission if there is time before the tick; else leave that to one that knows it.

        Of a herd each learns more than it is worth: what many admit together over one session costs the server less.
        """
        if session.shared or session.warm:
            return
        if due - self._clock.now() > WARM_AHEAD and not self._places.crowded:
            await admissions.warm(session, tick)
            session.warm = True
        else:
            with suppress(*Unreachable):
                session.ledger = await self._shared.session()

    async def run_if_held(
        self,
        entry: Entry,
        tick: Tick,
        session: LockSession,
        attempt: Attempt[Any],
        room: Room,
    ) -> End:
        """Try to hold the graph; run the tick if it was granted, else say who has it.

        Raises only what became of the try: from the admission on, whatever happens is the tick's end.
        """
        with self.occupancy.take(tick.graph) as running:
            running.take(tick)
            async with sole_writer(
                tick.graph, self._place, attempt=attempt, session=session, spare=self._places.spare
            ) as hold:
                if not isinstance(hold.granted, Admission):
                    room.leave_attempt()
                    return skipped_by(hold)
                room.settle(session)
                self._looks.forget(tick)
                end = await end_of_story(self._run_and_record(entry, tick, hold.session, hold.granted))
        await self.after_hold(tick, hold, end)
        return end

    async def after_hold(self, tick: Tick, hold: Hold[Any], end: End) -> None:
        """Say that an unlock was refused; wake the other replicas for a tick that was handed off, now its lock is free."""
        if hold.unlocked is False:
            self._log.warning("lock.unlock_failed", graph=tick.graph, fire_time=instant_text(tick.fire_time))
        if end.outcome is Outcome.HANDED_OFF:
            try:
                async with self._pool.connection() as connection:
                    await announcement.announce(connection, self._place.space, tick, "handed_off")
            except Exception as error:  # noqa: BLE001  # their sweeps find the tick all the same, and its line is to come
                self.note_unreachable(error)

    async def _end_before_attempt(self, entry: Entry, tick: Tick, due: datetime) -> End | None:
        """Wait until the tick is all but due; return its end if it needs no attempt any more."""
        if await self._clock.stopped_before(due - ADMIT_AHEAD, self._stop):
            return skipped(SkipReason.DRAINING)
        late = self._clock.now() - due
        if late > entry.grace:
            return await self._came_too_late(entry, tick, due, "late")
        if late > FRESH and (elsewhere := await self._elsewhere(tick)) is not None:
            return elsewhere
        if entry.overlap == "cancel":
            # Where nobody can say whether the tick would be admitted, nothing makes room for it.
            with suppress(*Unreachable):
                refusal = await self._attempts.make_room(entry, tick, due + entry.grace)
                if refusal is not None:
                    return skipped(refusal)
        return self.skipped_by_itself(tick.graph)

    def skipped_by_itself(self, graph: str, reason: SkipReason = SkipReason.LOCK_HELD) -> End | None:
        """Return the skip of a graph that this replica itself is at; None when it is not."""
        running = self.occupancy.of(graph)
        if running is None:
            return None
        return skipped(reason, holder=self._place.replica, holder_since=instant_text(running.since))

    async def _came_too_late(self, entry: Entry, tick: Tick, due: datetime, reason: str) -> End:
        """Return the end of a tick past its grace: another replica has it, or it is missed."""
        elsewhere = await self._elsewhere(tick)
        if elsewhere is not None:
            return elsewhere
        late = self._clock.now() - due
        fields = {"reason": reason, "late_ms": milliseconds(late), "grace_ms": milliseconds(entry.grace)}
        return End(Outcome.MISSED, fields)

    async def _elsewhere(self, tick: Tick) -> End | None:
        """Return the skip of a tick that another replica runs or has run; None also when the look fails.

        Whatever becomes of that run, nobody is admitted to this tick again: it is continued where it is handed off.
        """
        try:
            found = await self._looks.admitted(tick)
        except Unreachable:
            return None
        if found is None:
            return None
        if not found.ended and found.replica == self._place.replica and tick in self._attempts.unanswered:
            return None  # admitted here without an answer, and not begun
        if found.ended:
            return skipped(SkipReason.ALREADY_RAN, holder=found.replica)
        since = found.since and instant_text(found.since)
        return skipped(SkipReason.LOCK_HELD, holder=found.replica, holder_since=since)

    def room(self, until: datetime) -> AbstractAsyncContextManager[Room]:
        """Wait for places to attempt and run a tick, until the instant."""
        return self._places.take(until - self._clock.now())

    async def open_session(self, entry: Entry) -> LockSession:
        """Open a lock session of the tick's own, or return the one that this replica's holds share."""
        return await (open_session(self._place) if entry.hold == "dedicated" else self._shared.session())

    async def open_in_time(self, entry: Entry, tick: Tick, until: datetime) -> LockSession | End:
        """Open the tick's lock session, again and again within its grace; tick.error when there is none to be had."""
        tries = 0
        while True:
            tries += 1
            try:
                session = await self.open_session(entry)
            except Unreachable as error:
                self.note_unreachable(error)
                await self._shared.give_way()
                end = await self._pause(tick, until, tries, error, reason="db_connect")
                if end is not None:
                    return end
            else:
                self.note_reachable()
                return session

    async def _pause(
        self, tick: Tick, until: datetime, tries: int, error: BaseException, **fields: Any
    ) -> End | None:
        """Wait before the database is tried again; return the tick's end when there is no time for that, or a stop."""
        seed = f"{self._place.replica}/{tick}"
        pause = backoff(tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seed=seed)
        if self._clock.now() + pause > until:
            return error_end(error, **fields, tries=tries)
        return skipped(SkipReason.DRAINING) if await self._stop.wait(pause) else None

    async def _run_and_record(
        self, entry: Entry, tick: Tick, session: LockSession, admission: Admission
    ) -> End:
        """Run the admitted tick under the hold, again where its retries allow, and record how it ended while holding."""
        failures = 0
        while True:
            ran = await self.run(entry, tick, session, admission)
            failures += 1
            pause = self._retry_pause(entry, tick, ran, failures)
            if pause is None:
                return await self.record(tick, session, admission, ran)
            self.log_retry(tick, ran.end, pause)
            loss = await keep_hold(
                session, pause, stop=self._stop, newest_timeline=lambda: self._clock.timeline
            )
            if loss is not None:
                return await self.record(tick, session, admission, replace(ran, end=lost(loss, ran.end)))
            if self._stop.requested:
                return await self.record(tick, session, admission, ran.handed_off())
            admission = replace(admission, attempt=admission.attempt + 1, last_holder=None)

    def _retry_pause(self, entry: Entry, tick: Tick, ran: Ran, failures: int) -> timedelta | None:
        """Return the pause before the tick is run again within this hold; None past the next fire time."""
        pause = None if ran.stopping.draining else ran.retry_pause(entry, tick, failures)
        following = entry.series.after(tick.fire_time)
        if pause is None or (following is not None and self._clock.now() + pause >= following):
            return None
        return pause

    async def run(
        self,
        entry: Entry,
        tick: Tick,
        session: LockSession,
        admission: Admission,
        probe: Probe = (PROBE, ()),
    ) -> Ran:
        """Run one attempt of the tick under the hold, to its real end.

        What the tick's thread has is read in the moments before it is due; the graph itself begins when it is.
        """
        facts: dict[str, Any] = {"token": admission.token, "attempt": admission.attempt}
        began = time.monotonic()
        order = order_of(entry, tick, admission, self._loaded[tick.graph], self._place)
        run = self._graphs.run(order, in_doubt=session.in_doubt)

        async def begin() -> None:
            nonlocal began
            await self._attempts.come_due(tick.fire_time + entry.start_delay(tick))
            facts["late_ms"] = self._note_started(tick, admission)
            began = time.monotonic()
            if self._stop.requested:
                # The stop has cut the wait short, and the tick may not be due: told afterwards, a node could run before.
                run.drain("shutdown")
            run.begin()

        supervision = Supervision(
            run,
            session,
            stop=self._stop,
            timeout=entry.timeout,
            drain_timeout=self._limits.drain_timeout,
            newest_timeline=lambda: self._clock.timeline,
            probe=probe,
            displaced=self.occupancy.displaced(tick.graph),
            waiting_for_threads=partial(self._note_waiting, tick),
        )
        stopping, ended = await supervision.see_to_its_end(begin())
        self.drain_ran_out |= stopping.draining and ended.kind is EndKind.CANCELLED
        facts["duration_ms"] = round((time.monotonic() - began) * 1000, 1)
        return Ran(end_of_run(ended, stopping, entry.timeout, facts), stopping, ended)

    async def record(self, tick: Tick, session: LockSession, admission: Admission, ran: Ran) -> End:
        """Write the end into the ledger under the hold; a hold that is gone turns the end into tick.lock_lost."""
        end = ran.end
        finish = ran.finish(admission.attempt, self._place.dsn.redact)
        if end.outcome is not Outcome.LOCK_LOST:
            write = partial(ledger.record, session, tick, token=admission.token, finish=finish)
            loss = await self.write_end(tick, session, write)
            end = end if loss is None else lost(loss, end)
        if end.outcome is Outcome.LOCK_LOST and end.fields["cause"] != "row_locked":
            await self._record_without_hold(tick, admission, replace(finish, outcome=end.outcome))
        if ran.stopping.gave_up:
            # A thread that cannot be stopped still writes. Only the end of the process ends it, and until then the hold
            # stays: the daemon leaves in a moment, and the line has to be out before.
            self.log_end(tick, end)
            await asyncio.get_running_loop().create_future()
        return end

    async def write_end(
        self, tick: Tick, session: LockSession, write: Callable[[], Awaitable[bool]]
    ) -> Loss | None:
        """Write a run's end under its hold, which may have to wait; return why it is not there, or None."""
        try:
            return await write_end(
                session, tick, write, stop=self._stop, newest_timeline=lambda: self._clock.timeline
            )
        except Unreachable as failure:
            return Loss("session_ended", str(failure).strip())

    async def _record_without_hold(self, tick: Tick, admission: Admission, finish: Finish) -> None:
        try:
            async with self._pool.connection() as connection:
                token = admission.token
                await ledger.record_without_hold(
                    connection, self._place.space, tick, token=token, finish=finish
                )
        except Unreachable as failure:
            # The row stays without an outcome, and a sweep will find it abandoned: that is the truth then.
            self.note_unreachable(failure)

    async def end(self) -> None:
        """Close what outlives single ticks."""
        await self._shared.end()

    def log_end(self, tick: Tick, end: End) -> None:
        """Write the terminal line."""
        level = LEVELS.get(end.outcome, "info")
        fire_time = instant_text(tick.fire_time)
        getattr(self._log, level)(f"tick.{end.outcome}", graph=tick.graph, fire_time=fire_time, **end.fields)

    def log_retry(self, tick: Tick, end: End, pause: timedelta) -> None:
        """Say that a failed attempt is not the tick's end."""
        fire_time = instant_text(tick.fire_time)
        retry = {"failed_as": end.outcome.value, "retry_in_ms": milliseconds(pause)}
        self._log.warning("tick.retrying", graph=tick.graph, fire_time=fire_time, **end.fields, **retry)

    def _note_started(self, tick: Tick, admission: Admission) -> float:
        """Say that the tick's graph begins, and return how late that is, in milliseconds."""
        late_ms = milliseconds(self._clock.now() - tick.fire_time)
        resumed: dict[str, Any] = {"resumed": True} if admission.attempt > 1 else {}
        if admission.last_holder is not None:
            resumed["last_holder"] = admission.last_holder
        self._log.info(
            "tick.started",
            graph=tick.graph,
            fire_time=instant_text(tick.fire_time),
            thread_id=admission.thread_id,
            late_ms=late_ms,
            token=admission.token,
            attempt=admission.attempt,
            **resumed,
        )
        return late_ms

    def _note_waiting(self, tick: Tick, threads: int) -> None:
        fire_time = instant_text(tick.fire_time)
        self._log.warning(
            "tick.waiting", graph=tick.graph, fire_time=fire_time, reason="sync_node", threads=threads
        )

    def note_unreachable(self, error: BaseException) -> None:
        """Say once that the database cannot be reached, or that it refuses what is asked of it, and then where that was."""
        if self._reachable:
            self._reachable = False
            facts: dict[str, Any] = {"error_type": type(error).__name__, "error": text_of(error).strip()}
            if not isinstance(error, Unreachable):
                facts["exc_info"] = error
            self._log.error("database.unreachable", **facts)

    def note_reachable(self) -> None:
        """Say once that it can be reached again."""
        if not self._reachable:
            self._reachable = True
            self._log.info("database.reachable")


async def end_of_story(story: Awaitable[T]) -> T | End:
    """Await a story and return its end, or that of a tick whose story cannot be told to the end."""
    try:
        return await story
    except Unreachable as error:
        return error_end(error)
    except Exception as error:  # noqa: BLE001  # a fault of tickd itself is this tick's outcome, with its traceback
        return error_end(error, exc_info=error)
