"""The first floor: connect, try the lock, run, unlock, close, for each fire time; no identity, no ledger, no watch."""

import asyncio
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

from benchmarks.contenders.floor import TRY, UNLOCK, fire, lock_key, run_graph, set_up
from benchmarks.plan import Plan, replica_name


_rooms: list[asyncio.Semaphore] = []


async def tick(plan: Plan, pool: AsyncConnectionPool[Any], name: str, instant: int) -> None:
    """Run one fire time if its lock is free; a refused connection is a fire time that this replica misses."""
    if not _rooms:
        _rooms.append(asyncio.Semaphore(plan.width))
    async with _rooms[0]:
        try:
            connection = await psycopg.AsyncConnection.connect(plan.dsn, autocommit=True)
        except psycopg.OperationalError:
            return
        try:
            row = await (await connection.execute(TRY, lock_key(name))).fetchone()
            if row is not None and row[0]:
                try:
                    await run_graph(plan, pool, name, instant)
                finally:
                    await connection.execute(UNLOCK, lock_key(name))
        finally:
            await connection.close()


if __name__ == "__main__":
    asyncio.run(set_up() if replica_name() == "set_up" else fire(tick))
