"""Places: how many ticks this replica attempts and runs at a time, and the lock sessions that pass from one to the next.

Ticks wait for a place in the order of asking, which is this replica's own. A place to attempt is given up when the
attempt has lost; when it has won, only with the end of its run or a moment later, so that hundreds of short runs that are
due together do not open hundreds of sessions, and long ones do not keep others from starting.

A session whose try has lost holds nothing and may try the next tick that waits; one that has held is closed after its
run, so no two runs ever share a session.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from tickd.graph_thread import GraphThread
from tickd.lock import LockSession
from tickd.stop import Stop


# How long a run that has begun keeps its place to attempt, at least; most ticks of a herd are short.
SETTLED_AFTER = 0.25
# A run that takes no longer than this, in seconds, is a short one on a busy machine.
SHORT = 1.0
# A graph loop that has come round so lately is not asked again.
LATELY = 0.02


class Pace:
    """How long the short runs of this moment take.

    Where a machine has more to do than it can, they take longer than it is meant for a run to keep its place. More sessions
    would be opened then, and it would have still more to do.
    """

    def __init__(self) -> None:
        self._average = 0.0
        self._noted_at = -SHORT

    def note(self, seconds: float) -> None:
        """Take a run that has ended into account."""
        if seconds <= SHORT:
            before = self._average if self._is_of_now else seconds
            self._average = before + (seconds - before) / 8
            self._noted_at = time.monotonic()

    @property
    def settled_after(self) -> float:
        """Return the seconds for which a run keeps its place to attempt."""
        return max(SETTLED_AFTER, min(SHORT, 2 * self._average)) if self._is_of_now else SETTLED_AFTER

    @property
    def _is_of_now(self) -> bool:
        return time.monotonic() - self._noted_at <= SHORT


class Room:
    """What one tick was given: places to attempt and run, or nothing and the reason (`late`, `no_room`, ...)."""

    def __init__(self, pace: Pace, reason: str | None = None) -> None:
        self.reason = reason
        self._pace = pace
        self._settled_at: float | None = None
        self._run: asyncio.Semaphore | None = None
        self._attempt: asyncio.Semaphore | None = None

    async def enter(self, runs: asyncio.Semaphore, attempts: asyncio.Semaphore) -> None:
        """Wait for a place of each kind; `leave` gives back what was given by then."""
        await runs.acquire()
        self._run = runs
        await attempts.acquire()
        self._attempt = attempts

    def leave_attempt(self) -> None:
        """Give up the place to attempt; does nothing the second time."""
        if self._attempt is not None:
            self._attempt.release()
            self._attempt = None

    def leave(self) -> None:
        """Give up both places."""
        if self._settled_at is not None:
            self._pace.note(time.monotonic() - self._settled_at)
        self.leave_attempt()
        if self._run is not None:
            self._run.release()
            self._run = None

    def settle(self, session: LockSession) -> None:
        """Give up the place to attempt in a moment, for the attempt has won; at once if its run keeps no session open."""
        if session.shared:
            self.leave_attempt()
        else:
            self._settled_at = time.monotonic()
            asyncio.get_running_loop().call_later(self._pace.settled_after, self.leave_attempt)


class Places:
    """The places of one replica, and its spare sessions."""

    def __init__(self, graphs: GraphThread, stop: Stop, *, max_running: int, lock_attempts: int) -> None:
        self._graphs = graphs
        self._stop = stop
        self._runs = asyncio.Semaphore(max_running)
        self._attempts = asyncio.Semaphore(lock_attempts)
        self._pace = Pace()
        self._waiting = 0
        self._spare: list[LockSession] = []
        self._answer: asyncio.Future[None] | None = None
        self._answered_at = 0.0

    @asynccontextmanager
    async def take(self, patience: timedelta) -> AsyncIterator[Room]:
        """Wait for a place to run and one to attempt, on a graph loop that answers; yield them, or the reason why not.

        A graph that blocks the graph loop keeps this replica from holding other graphs that it could not start, and
        leaves them to the others.
        """
        if patience <= timedelta(0):
            yield Room(self._pace, "late")
            return
        room = Room(self._pace)
        try:
            yield Room(self._pace, reason) if (reason := await self._enter(room, patience)) else room
        finally:
            room.leave()

    @property
    def crowded(self) -> bool:
        """Say whether ticks wait for a place."""
        return self._waiting > 0

    async def _enter(self, room: Room, patience: timedelta) -> str | None:
        """Wait for the room's places; return why there are none in time."""
        reason = "no_room"
        self._waiting += 1
        try:
            async with self._stop.limit(patience):
                await room.enter(self._runs, self._attempts)
                reason = "loop_blocked"
                await self._answered()
        except TimeoutError:
            room.leave()
            return "draining" if self._stop.requested else reason
        finally:
            self._waiting -= 1
            if not self._waiting:
                await self._close_spare()
        return None

    async def _answered(self) -> None:
        """Return when the graph loop has come round, if it has not done so lately; a herd asks often, and shares answers."""
        if time.monotonic() - self._answered_at < LATELY:
            return
        if self._answer is None or self._answer.done():
            self._answer = asyncio.ensure_future(self._graphs.answer())
        await asyncio.shield(self._answer)
        self._answered_at = time.monotonic()

    def spare(self, session: LockSession) -> bool:
        """Take over a session that holds nothing, if another tick waits for one; False when it is to be closed."""
        if session.shared:
            return True  # it stays where it is
        if not self._waiting or session.connection.closed:
            return False
        self._spare.append(session)
        return True

    def take_spare(self) -> LockSession | None:
        """Return a session whose try has lost, if there is one; it may have died since."""
        return self._spare.pop() if self._spare else None

    async def _close_spare(self) -> None:
        while self._spare:
            await self._spare.pop().close()
