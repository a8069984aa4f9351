"""The stop event: one per process, and every wait listens to it."""

import asyncio
from datetime import timedelta


class Stop:
    """Set once, when the process is asked to stop; a wait on it ends early with True."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Say whether a stop has been asked for."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask for the stop."""
        self._event.set()

    async def wait(self, duration: timedelta | None = None) -> bool:
        """Wait for the stop, at most for the duration; True if it has been asked for."""
        if duration is not None and duration <= timedelta(0):
            return self.requested
        try:
            async with asyncio.timeout(duration.total_seconds() if duration is not None else None):
                return await self._event.wait()
        except TimeoutError:
            return self.requested
