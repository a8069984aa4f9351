"""What the pieces of the one-session loop cost: all of them on a session that is open."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

import psycopg

from benchmarks.contenders import one_session
from benchmarks.contenders.floor import TRY, UNLOCK, checkpoint_pool, lock_key, set_up
from benchmarks.plan import read_plan
from benchmarks.price import TRY_HELD, TRY_RUN_UNLOCK, TRY_UNLOCK, Piece, priced, rounds_asked_for, tell


async def try_and_unlock(session: psycopg.AsyncConnection[Any]) -> None:
    """Take a lock and let go of it, as the loop does around a run."""
    await (await session.execute(TRY, lock_key("free"))).fetchone()
    await session.execute(UNLOCK, lock_key("free"))


async def main() -> dict[str, Any]:
    """Measure the loop's own function: on a lock that another session holds, and on one that is free."""
    await set_up()
    plan, instants = read_plan(), count(1)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(checkpoint_pool(plan))
        session, holder = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(plan.dsn, autocommit=True))
            for _ in range(2)
        ]
        await holder.execute(TRY, lock_key("held"))
        pieces = [
            Piece(TRY_HELD, lambda: one_session.tick(session, plan, pool, "held", next(instants))),
            Piece(TRY_UNLOCK, partial(try_and_unlock, session)),
            Piece(TRY_RUN_UNLOCK, lambda: one_session.tick(session, plan, pool, "free", next(instants))),
        ]
        return await priced(rounds_asked_for(), pieces)


if __name__ == "__main__":
    tell(asyncio.run(main()))
