"""The least that a session per run can cost: the bare loop, told beforehand which of its fire times are its own.

Each fire time is one fresh session of one replica. Nobody tries in vain, and there is no ledger, no token and no watch.
"""

import asyncio
import zlib
from typing import Any

from psycopg_pool import AsyncConnectionPool

from benchmarks.contenders import bare_loop
from benchmarks.contenders.floor import fire, set_up
from benchmarks.plan import Plan, replica_name


async def tick(plan: Plan, pool: AsyncConnectionPool[Any], name: str, instant: int) -> None:
    """Run a fire time if it is this replica's, which are called r1, r2 and so on."""
    if zlib.crc32(name.encode()) % plan.replicas + 1 == int(replica_name()[1:]):
        await bare_loop.tick(plan, pool, name, instant)


if __name__ == "__main__":
    asyncio.run(set_up() if replica_name() == "set_up" else fire(tick))
