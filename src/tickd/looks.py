"""The cheap look into the ledger, through the pool, before anything is opened for a tick."""

import asyncio
from typing import Any

from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tickd import ledger
from tickd.tick import Tick


class Looks:
    """Asks which ticks have ended already; ticks that ask while a query is under way share the next one."""

    def __init__(self, pool: AsyncConnectionPool[Any], space: int) -> None:
        self._pool = pool
        self._space = space
        self._asking = asyncio.Lock()
        self._waiting: dict[Tick, asyncio.Future[str | None]] = {}

    async def ended_by(self, tick: Tick) -> str | None:
        """Return the replica that has run the tick already, if any has."""
        answer = self._waiting.setdefault(tick, asyncio.get_running_loop().create_future())
        async with self._asking:
            if not answer.done():
                asked, self._waiting = self._waiting, {}
                await self._ask(asked)
        return answer.result()

    async def _ask(self, asked: dict[Tick, asyncio.Future[str | None]]) -> None:
        try:
            async with self._pool.connection() as connection:
                found = await ledger.admitted(connection, self._space, asked)
        except BaseException as error:
            for answer in asked.values():
                answer.set_exception(
                    error if isinstance(error, Exception) else PoolTimeout("the look was cut off")
                )
                answer.exception()
            raise
        for tick, answer in asked.items():
            answer.set_result(found.get(tick))
