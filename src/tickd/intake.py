"""The intake: due ticks of claim mode become rows of the ledger, all that wait in one statement.

A row is what must not be lost, so it does not wait for a place to run or for a lock session: it goes through the pool,
at once, and a hundred graphs that are due at the same instant are one round trip. Where that fails, it has failed for all
that wait: what cannot be reached takes seconds to fail, and the ticks of one graph would try it one after the other.
"""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

from tickd import claim
from tickd.claim import Due, Enqueued
from tickd.stop import Stop
from tickd.tick import Tick


# How long a row is waited for after a stop. A tick that comes due then has it in a moment, unless the ledger is away.
LAST_TRY = timedelta(seconds=2)


class Intake:
    """Enqueues ticks; those that come while a statement is under way share the next one."""

    def __init__(self, pool: AsyncConnectionPool[Any], space: int, stop: Stop) -> None:
        self._pool = pool
        self._space = space
        self._stop = stop
        self._writing = asyncio.Lock()
        self._waiting: dict[Tick, tuple[Due, asyncio.Future[Enqueued]]] = {}

    async def put(self, due: Due) -> Enqueued:
        """Return what the ledger says of the tick, now that it has a row; raises what the pool and Postgres raise.

        And TimeoutError, for one that has none soon after a stop.
        """
        answer: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()
        self._waiting[due.tick] = (due, answer)
        try:
            async with self._stop.limit(rest=LAST_TRY), self._writing:
                while not answer.done():
                    await self._write(self._next())
            return answer.result()
        except TimeoutError as error:
            if self._stop.requested:
                raise TimeoutError("the ledger gave no answer before the stop") from error
            raise
        finally:
            self._waiting.pop(due.tick, None)

    def _next(self) -> dict[Tick, tuple[Due, asyncio.Future[Enqueued]]]:
        """Return the earliest waiting tick of each graph: a graph's backlog is counted anew for each of its ticks."""
        earliest: dict[str, Tick] = {}
        for tick in sorted(self._waiting, reverse=True):
            earliest[tick.graph] = tick
        return {tick: self._waiting[tick] for tick in earliest.values()}

    async def _write(self, waiting: dict[Tick, tuple[Due, asyncio.Future[Enqueued]]]) -> None:
        try:
            async with self._pool.connection() as connection:
                found = await claim.enqueue(connection, self._space, [due for due, _ in waiting.values()])
        except Exception as error:
            # What is wrong with one statement's ticks is no news of the others'.
            failed = self._waiting if isinstance(error, psycopg.OperationalError | OSError) else waiting
            for _, answer in failed.values():
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # retrieved, for the one who waits may have been cancelled
            raise
        for enqueued in found:
            _, answer = waiting[enqueued.tick]
            self._waiting.pop(enqueued.tick, None)
            if not answer.done():
                answer.set_result(enqueued)
