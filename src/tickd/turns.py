"""Turns: one at a time, and whoever is in a hurry goes first, within limits; or one for all who wait, where it fails.

Many holds share one session, and a tick that waits to be admitted waits for its start, while one that is to be recorded
has ended. In the order of asking, every start of a herd would wait for the ends of those before it. But where commits
are slow there is always a next one in a hurry, and whoever is patient is not to wait for ever.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


# How many of those in a hurry go before one who is not.
HURRIED_IN_A_ROW = 8


class Turns:
    """A lock with two queues."""

    def __init__(self) -> None:
        self._taken = False
        self._passed_over = 0
        self._hurried: deque[asyncio.Future[None]] = deque()
        self._patient: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self, *, hurried: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of the block."""
        if self._taken:
            await self._wait(self._hurried if hurried else self._patient)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, queue: deque[asyncio.Future[None]]) -> None:
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            with suppress(ValueError):
                queue.remove(turn)
            if not turn.cancelled():
                self._pass_on()  # it had come in the same moment
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next in line; it stays taken in between, so that nobody slips in."""
        patient_first = self._passed_over >= HURRIED_IN_A_ROW
        for queue in (self._patient, self._hurried) if patient_first else (self._hurried, self._patient):
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    passes_over = queue is self._hurried and self._patient
                    self._passed_over = self._passed_over + 1 if passes_over else 0
                    turn.set_result(None)
                    return
        self._taken = False


class SharedTry:
    """A lock for what all who wait would try in turn: where it fails, it has failed for those who waited meanwhile.

    What cannot be reached takes seconds to fail, and a hundred that try it one after the other take minutes.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._failures = 0
        self._error: Exception | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Have the lock for the length of the block, which may raise; raises what the block of another has raised meanwhile."""
        seen = self._failures
        async with self._lock:
            if self._failures > seen and self._error is not None:
                raise self._error
            try:
                yield
            except Exception as error:
                self._failures += 1
                self._error = error
                raise
