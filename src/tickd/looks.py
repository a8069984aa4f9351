"""The cheap look into the ledger, through the pool, before anything is opened for a tick."""

import time
from itertools import islice
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tickd import ledger
from tickd.ledger import Admitted
from tickd.tick import Tick
from tickd.turns import SharedTry


# A look that is no older than this is as good as a new one: the attempt itself decides.
FRESH_SECONDS = 0.01
# Looks take at most one part in so many of the time. With hundreds of ticks in one, each costs more than the attempts it
# saves when it follows the last one at once.
ONE_IN = 10
# A look is about the ticks whose turn is next. To ask for thousands takes longer than to try those few.
MOST = 100


class Looks:
    """Knows which of the ticks that wait here run or have ended on some replica; one query asks for all of them."""

    def __init__(self, pool: AsyncConnectionPool[Any], space: int) -> None:
        self._pool = pool
        self._space = space
        self._asking = SharedTry()
        self._waiting: dict[Tick, Admitted | None] = {}
        self._looked_at: dict[Tick, float] = {}
        self._fresh_for = FRESH_SECONDS

    def remember(self, tick: Tick) -> None:
        """Let the tick be asked for whenever another one is."""
        self._waiting[tick] = None

    def forget(self, tick: Tick) -> None:
        """Ask for the tick no more: it runs here, or it has come to its end."""
        self._waiting.pop(tick, None)
        self._looked_at.pop(tick, None)

    def without_row(self) -> list[Tick]:
        """Return the ticks that wait here and are not known to be in the ledger."""
        return [tick for tick, found in self._waiting.items() if found is None]

    async def admitted(self, tick: Tick) -> Admitted | None:
        """Return which replica runs the tick or has run it, if any; a look that fails has failed for all who wait."""
        async with self._asking.turn():
            seen = time.monotonic() - self._looked_at.get(tick, 0.0)
            if self._waiting.get(tick) is None and seen > self._fresh_for:
                await self._look(tick)
        return self._waiting.get(tick)

    async def _look(self, tick: Tick) -> None:
        """Ask for this tick and for those that have waited longest, unless they are known to be in the ledger."""
        open_ticks = (one for one, found in self._waiting.items() if found is None)
        asked = {tick, *islice(open_ticks, MOST)}
        now = time.monotonic()
        async with self._pool.connection() as connection:
            found = await ledger.admitted(connection, self._space, asked)
        self._fresh_for = max(FRESH_SECONDS, ONE_IN * (time.monotonic() - now))
        for one in asked & self._waiting.keys():
            self._waiting[one] = found.get(one)
            self._looked_at[one] = now
