"""What both floors share: their clock, their pool, and a checkpointed run of the graph."""

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.graphs import graph
from benchmarks.plan import Plan, next_second, read_plan, ready, stop_event


TRY = "SELECT pg_try_advisory_lock(%s, %s)"
UNLOCK = "SELECT pg_advisory_unlock(%s, %s)"


def lock_key(name: str) -> tuple[int, int]:
    """Return the two numbers of a graph's lock."""
    return 7301, zlib.crc32(name.encode()) - 2**31


def checkpoint_pool(plan: Plan) -> AsyncConnectionPool[Any]:
    """Return a pool as tickd makes it for its savers, not open yet."""
    return AsyncConnectionPool(
        plan.dsn,
        kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": 0},
        min_size=1,
        max_size=plan.pool_size,
        timeout=60,
        check=AsyncConnectionPool.check_connection,
        open=False,
    )


async def run_graph(plan: Plan, pool: AsyncConnectionPool[Any], name: str, instant: int) -> None:
    """Run the graph once on a thread of its own, with a saver of its own, as tickd does."""
    fire_time = datetime.fromtimestamp(instant, UTC).isoformat()
    config: Any = {
        "configurable": {"thread_id": f"{name}/{fire_time}"},
        "metadata": {"tickd_graph": name, "tickd_fire_time": fire_time},
    }
    durability: Any = plan.durability
    await graph.copy({"checkpointer": AsyncPostgresSaver(pool)}).ainvoke({}, config, durability=durability)


async def set_up() -> None:
    """Make the saver's tables, once and for all replicas."""
    async with AsyncPostgresSaver.from_conn_string(read_plan().dsn) as saver:
        await saver.setup()


async def fire(tick: Callable[[Plan, AsyncConnectionPool[Any], str, int], Coroutine[Any, Any, None]]) -> None:
    """Call `tick` for each fire time of the plan until SIGTERM."""
    plan = read_plan()
    stop = stop_event()
    async with checkpoint_pool(plan) as pool, asyncio.TaskGroup() as group:
        ready(plan)
        instant = next_second()
        while not stop.is_set():
            due = plan.due(instant)
            await asyncio.sleep(instant - time.time())
            for name in due:
                group.create_task(tick(plan, pool, name, instant))
            instant += 1
