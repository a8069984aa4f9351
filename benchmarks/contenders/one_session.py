"""The second floor: the same loop, with all locks of a replica on one session that stays open."""

import asyncio
from functools import partial
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

from benchmarks.contenders.floor import TRY, UNLOCK, fire, lock_key, run_graph, set_up
from benchmarks.plan import Plan, read_plan, replica_name


async def tick(
    session: psycopg.AsyncConnection[Any], plan: Plan, pool: AsyncConnectionPool[Any], name: str, instant: int
) -> None:
    """Run one fire time if its lock is free."""
    row = await (await session.execute(TRY, lock_key(name))).fetchone()
    if row is not None and row[0]:
        try:
            await run_graph(plan, pool, name, instant)
        finally:
            await session.execute(UNLOCK, lock_key(name))


async def main() -> None:
    """Open the one session, and fire."""
    async with await psycopg.AsyncConnection.connect(read_plan().dsn, autocommit=True) as session:
        await fire(partial(tick, session))


if __name__ == "__main__":
    asyncio.run(set_up() if replica_name() == "set_up" else main())
