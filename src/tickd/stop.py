"""The stop event: one per process, and every wait listens to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta


class Stop:
    """Set once, when the process is asked to stop; every wait on it, and every block it limits, ends early then."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._limits: set[asyncio.Timeout] = set()

    @property
    def requested(self) -> bool:
        """Say whether a stop has been asked for."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for the stop."""
        self._event.set()
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now)

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
    async def limit(self, duration: timedelta) -> AsyncIterator[None]:
        """Let the block wait for other things for at most the duration; it ends with TimeoutError, at a stop as well."""
        async with asyncio.timeout(0 if self.requested else duration.total_seconds()) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)
