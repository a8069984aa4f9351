"""The supervision of one run: what is started, and what presses it until it has really ended."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from math import inf
from typing import Any

from tickd import ledger
from tickd.admissions import Admission
from tickd.ends import Stopping
from tickd.graphs import LoadedGraph
from tickd.lock import LockPlace, LockSession, Loss, Probe
from tickd.runs import EndKind, Run, RunEnd, RunOrder
from tickd.schedule import Entry
from tickd.shared import FAILS_FOR_ONE
from tickd.stop import Stop
from tickd.tick import Tick, instant_text, run_id


# A node may swallow a cancellation, so a run is asked again until it has ended.
CANCEL_AGAIN = 1.0
# How long a hold is kept for a run's end to be written, while another session has its row locked.
ROW_PATIENCE = timedelta(seconds=60)
LOOK_AT_ROW = timedelta(milliseconds=500)


def order_of(
    entry: Entry, tick: Tick, admission: Admission, loaded: LoadedGraph, place: LockPlace
) -> RunOrder:
    """Return everything that LangGraph is told of this attempt; nodes and traces find their tick in the metadata."""
    identity = run_id(tick)
    config: dict[str, Any] = {
        "configurable": {
            **entry.config.configurable,
            "thread_id": admission.thread_id,
            "run_id": str(identity),
        },
        "run_id": identity,
        "run_name": tick.graph,
        "tags": ["tickd", *entry.config.tags],
        "metadata": {
            **entry.config.metadata,
            "tickd_graph": tick.graph,
            "tickd_fire_time": instant_text(tick.fire_time),
            "tickd_attempt": admission.attempt,
            "tickd_replica": place.replica,
            "tickd_token": admission.token,
        },
    }
    if entry.config.recursion_limit is not None:
        config["recursion_limit"] = entry.config.recursion_limit
    return RunOrder(
        loaded=loaded,
        tick=tick,
        thread_id=admission.thread_id,
        run_id=identity,
        space=place.space,
        token=admission.token,
        # LangGraph takes None for "continue", and an empty mapping for a start without input.
        input={} if entry.input is None else entry.input_for(tick),
        context=entry.context,
        config=config,
        durability=entry.durability,
        resume=admission.attempt > 1,
    )


async def keep_hold(
    session: LockSession, pause: timedelta, *, stop: Stop, newest_timeline: Callable[[], int]
) -> Loss | None:
    """Wait out a pause between two attempts without a run; return how the hold was lost, if it was, or None."""
    watch = asyncio.ensure_future(session.watch(newest_timeline))
    waiting = asyncio.ensure_future(stop.wait(pause))
    try:
        await asyncio.wait({watch, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return watch.result() if watch.done() else None
    finally:
        watch.cancel()
        waiting.cancel()
        await asyncio.wait({watch, waiting})


async def write_end(
    session: LockSession,
    tick: Tick,
    write: Callable[[], Awaitable[bool]],
    *,
    stop: Stop,
    newest_timeline: Callable[[], int],
) -> Loss | None:
    """Write a run's end into its row under the hold; return why it is not there, or None. Errors are those of `write`.

    A row that another session has locked is waited for under the watch, until the patience is over or a stop is asked for:
    the lock is still held, and whoever got it would find a tick without an end. It is looked at and not written to, for a
    statement that waits for it keeps all others of a shared session waiting.
    """
    patient_until = time.monotonic() + ROW_PATIENCE.total_seconds()
    while True:
        try:
            return None if await write() else Loss("superseded", "the ledger has a newer token for this tick")
        except FAILS_FOR_ONE as failure:
            error = str(failure).strip()
        locked = True
        while locked:
            if stop.requested or time.monotonic() > patient_until:
                return Loss("row_locked", f"another session has the tick's row locked: {error}")
            loss = await keep_hold(session, LOOK_AT_ROW, stop=stop, newest_timeline=newest_timeline)
            if loss is not None:
                return loss
            locked = await ledger.is_locked(session, tick)


class Supervision:
    """Watches one run, its hold, its time-out and the stop event, and acts on each until the run has really ended."""

    def __init__(  # noqa: PLR0913  # everything that may press a run
        self,
        run: Run,
        session: LockSession,
        *,
        stop: Stop,
        timeout: timedelta | None,
        drain_timeout: timedelta,
        newest_timeline: Callable[[], int],
        probe: Probe,
        displaced: asyncio.Event,
        waiting_for_threads: Callable[[int], None],
    ) -> None:
        self._run = run
        self._session = session
        self._drain_timeout = drain_timeout.total_seconds()
        # Told once, with their number, when a cancelled run goes on in threads of sync nodes.
        self._waiting_for_threads: Callable[[int], None] | None = waiting_for_threads
        self._watch = asyncio.ensure_future(session.watch(newest_timeline, probe))
        # Set when a newer tick of the graph is to run instead (overlap: cancel).
        self._displaced = asyncio.ensure_future(displaced.wait())
        self._stop = asyncio.ensure_future(stop.wait())
        self._timeout_at = inf if timeout is None else time.monotonic() + timeout.total_seconds()
        self._give_up_at = inf
        self._stopping = Stopping()

    async def see_to_its_end(self, begin: Awaitable[None] | None = None) -> tuple[Stopping, RunEnd]:
        """Return what pressed the run and how it ended.

        `begin` is awaited first, for a run that has yet to be told that it may. Cancelled from outside, or at a fault of its own, it cancels the run and still waits for its end: the hold has to
        outlast the run, however often somebody asks again.
        """
        try:
            if begin is not None:
                await begin
            return await self._follow()
        except BaseException:
            self._run.cut_off("its supervision ended")
            while not self._run.ended.done():
                self._run.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({self._run.ended}, timeout=CANCEL_AGAIN)
            raise
        finally:
            listening = {self._watch, self._stop, self._displaced}
            for task in listening:
                task.cancel()
            await asyncio.wait(listening)

    async def _follow(self) -> tuple[Stopping, RunEnd]:
        ended = self._run.ended
        while not ended.done():
            listening = (self._watch, self._stop, self._displaced)
            waiting = {ended, *(task for task in listening if not task.done())}
            moment = min(self._stopping.cancel_at, self._timeout_at, self._give_up_at)
            patience = None if moment == inf else max(0.0, moment - time.monotonic())
            await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                break
            if time.monotonic() >= self._give_up_at:
                self._stopping.gave_up = True
                return self._stopping, RunEnd(EndKind.CANCELLED, 0)
            self._press()
        if self._watch.done() and self._stopping.loss is None:
            # The run's end and the loss came together: the end must not hide the loss.
            self._stopping.loss = self._watch.result()
        return self._stopping, ended.result()

    def _press(self) -> None:
        """Do what the moment asks for: drain or cancel a run that has to stop."""
        now, stopping = time.monotonic(), self._stopping
        if self._watch.done() and stopping.loss is None:
            self._lose(self._watch.result(), now)
        if self._stop.done() and not stopping.draining:
            stopping.draining = True
            self._run.drain("shutdown")
            stopping.cancel_by(now + self._drain_timeout)
            allowance = self._session.place.windows.stop_allowance.total_seconds()
            self._give_up_at = now + self._drain_timeout + allowance
        if self._displaced.done() and not stopping.displaced:
            stopping.displaced = True
            self._run.drain("a newer tick takes its place")
            stopping.cancel_by(now + self._drain_timeout)
        if now >= self._timeout_at:
            self._timeout_at = inf
            stopping.timed_out = True
            stopping.cancel_by(now)
        if now >= stopping.cancel_at:
            self._cancel(now)

    def _lose(self, loss: Loss, now: float) -> None:
        """Stop a run whose hold is gone: no checkpoint from now on, no further node, and an end within the allowance.

        At once, whatever the cause: a server that was only slow to answer frees the lock as soon as it reads that this
        side has given the session up.
        """
        self._stopping.loss = loss
        self._run.cut_off("the lock was lost")
        self._stopping.cancel_by(now)

    def _cancel(self, now: float) -> None:
        again = self._stopping.cancelled
        self._run.cancel()
        self._stopping.cancelled = True
        self._stopping.cancel_at = now + CANCEL_AGAIN
        if again and self._run.threads and self._waiting_for_threads is not None:
            self._waiting_for_threads(self._run.threads)
            self._waiting_for_threads = None
