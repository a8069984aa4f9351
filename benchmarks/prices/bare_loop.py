"""What the pieces of the bare loop cost: everything it does is between a connect and a close."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

import psycopg

from benchmarks.contenders import bare_loop
from benchmarks.contenders.floor import TRY, UNLOCK, checkpoint_pool, lock_key, set_up
from benchmarks.plan import Plan, read_plan
from benchmarks.price import (
    CONNECT_TRY_HELD,
    CONNECT_TRY_RUN_UNLOCK,
    CONNECT_TRY_UNLOCK,
    Piece,
    priced,
    rounds_asked_for,
    tell,
)


async def try_and_unlock(plan: Plan) -> None:
    """Take a lock and let go of it, as the loop does around a run."""
    connection = await psycopg.AsyncConnection.connect(plan.dsn, autocommit=True)
    await (await connection.execute(TRY, lock_key("free"))).fetchone()
    await connection.execute(UNLOCK, lock_key("free"))
    await connection.close()


async def main() -> dict[str, Any]:
    """Measure the loop's own function: on a lock that another session holds, and on one that is free."""
    await set_up()
    plan, instants = read_plan(), count(1)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(checkpoint_pool(plan))
        holder = await stack.enter_async_context(
            await psycopg.AsyncConnection.connect(plan.dsn, autocommit=True)
        )
        await holder.execute(TRY, lock_key("held"))
        pieces = [
            Piece(CONNECT_TRY_HELD, lambda: bare_loop.tick(plan, pool, "held", next(instants))),
            Piece(CONNECT_TRY_UNLOCK, partial(try_and_unlock, plan)),
            Piece(CONNECT_TRY_RUN_UNLOCK, lambda: bare_loop.tick(plan, pool, "free", next(instants))),
        ]
        return await priced(rounds_asked_for(), pieces)


if __name__ == "__main__":
    tell(asyncio.run(main()))
