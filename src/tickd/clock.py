"""The database's clock, as this process sees it: what is due is decided by it, on every replica alike.

Replicas' own clocks differ and jump. Each replica measures the database's clock once in a while and carries it on with
its monotonic clock in between, so that a step of the host's clock moves nothing.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

from tickd.stop import Stop


# The first eight digits of a WAL file's name are the timeline, which a promotion to primary makes grow.
READ_CLOCK = """
SELECT clock_timestamp(), ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
"""
SAMPLES = 3


class DatabaseClock:
    """An estimate of the database's clock; `measure` it before use and again every minute or so."""

    def __init__(self) -> None:
        self._instant = datetime.fromtimestamp(0, UTC)
        self._monotonic = 0.0
        self.timeline = 0

    def now(self) -> datetime:
        """Return the database's present instant, by the last measurement."""
        return self._instant + timedelta(seconds=time.monotonic() - self._monotonic)

    def skew(self) -> timedelta:
        """Return how far this host's clock is ahead of the database's (negative: behind)."""
        return datetime.now(UTC) - self.now()  # noqa: TID251  # comparing the two clocks is this module's work

    async def stopped_before(self, moment: datetime, stop: Stop) -> bool:
        """Wait until this clock shows the moment; True when a stop was asked for before."""
        while (ahead := moment - self.now()) > timedelta(0):
            if await stop.wait(ahead):
                return True
        return stop.requested

    async def measure(self, fetch: Callable[[LiteralString], Awaitable[Any]]) -> None:
        """Ask the database a few times and keep the quickest answer, taken for the middle of its round trip.

        `fetch` returns a statement's first row. The server's timeline comes with it: `timeline` is the newest that was ever seen, and a lock taken on an older
        one is on a server that is the primary no more.
        """
        quickest = float("inf")
        for _ in range(SAMPLES):
            sent = time.monotonic()
            row = await fetch(READ_CLOCK)
            took = time.monotonic() - sent
            if took < quickest:
                quickest = took
                instant, timeline = row
                self._instant, self._monotonic = instant.astimezone(UTC), sent + took / 2
                self.timeline = max(self.timeline, timeline)
