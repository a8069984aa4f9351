"""The stop event: one per process, and every wait listens to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from math import inf


class Stop:
    """Set once, when the process is asked to stop; every wait on it, and every block it limits, ends early then."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._limits: dict[asyncio.Timeout, float] = {}

    @property
    def requested(self) -> bool:
        """Say whether a stop has been asked for."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for the stop."""
        self._event.set()
        now = asyncio.get_running_loop().time()
        for limit, rest in self._limits.items():
            if not limit.expired():
                limit.reschedule(min(limit.when() or inf, now + rest))

    async def wait(self, duration: timedelta | None = None) -> bool:
        """Wait for the stop, at most for the duration; True if it has been asked for."""
        if duration is not None and duration <= timedelta(0):
            return self.requested
        try:
            async with asyncio.timeout(duration.total_seconds() if duration is not None else None):
                return await self._event.wait()
        except TimeoutError:
            return self.requested

    @asynccontextmanager
    async def limit(
        self, duration: timedelta | None = None, *, rest: timedelta = timedelta(0)
    ) -> AsyncIterator[None]:
        """Let the block wait for other things for at most the duration, and no longer than `rest` after a stop.

        It ends with TimeoutError then.
        """
        seconds = None if duration is None else duration.total_seconds()
        if self.requested:
            seconds = rest.total_seconds() if seconds is None else min(seconds, rest.total_seconds())
        async with asyncio.timeout(seconds) as limit:
            self._limits[limit] = rest.total_seconds()
            try:
                yield
            finally:
                del self._limits[limit]
