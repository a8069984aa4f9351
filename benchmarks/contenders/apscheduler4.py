"""APScheduler 4 with its Postgres store and event broker: every replica a scheduler and a worker."""

import asyncio
from datetime import UTC, datetime

from apscheduler import AsyncScheduler, CoalescePolicy, ConflictPolicy, current_job
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore
from apscheduler.eventbrokers.psycopg import PsycopgEventBroker
from apscheduler.triggers.interval import IntervalTrigger
from psycopg_pool import AsyncConnectionPool
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.contenders.peer import CREATE, INSERT
from benchmarks.plan import Plan, Witness, read_plan, ready, replica_name, stop_event


PLAN = read_plan()
WITNESS = Witness(PLAN.home, replica_name())
POOL = AsyncConnectionPool(
    PLAN.dsn, min_size=1, max_size=PLAN.pool_size, open=False, kwargs={"autocommit": True}
)


async def task(name: str) -> None:
    """Bear witness, and insert."""
    fire_time = current_job.get().scheduled_fire_time.timestamp()
    WITNESS.started(name, fire_time)
    async with POOL.connection() as connection:
        await connection.execute(INSERT, {"name": name, "fire_time": fire_time})


def trigger_of(plan: Plan, number: int) -> IntervalTrigger:
    """Return a trigger with the same instants in every replica."""
    now = int(datetime.now(UTC).timestamp())
    start = now - now % plan.every + plan.phase(number)
    return IntervalTrigger(seconds=plan.every, start_time=datetime.fromtimestamp(start, UTC))


async def main() -> None:
    """Add the schedules, or run until SIGTERM."""
    engine = create_async_engine(
        PLAN.dsn.replace("postgresql://", "postgresql+psycopg://"), pool_size=PLAN.pool_size
    )
    scheduler = AsyncScheduler(
        SQLAlchemyDataStore(engine),
        PsycopgEventBroker(PLAN.dsn),
        max_concurrent_jobs=PLAN.width,
        identity=replica_name(),
    )
    async with POOL, scheduler:
        if replica_name() == "set_up":
            async with POOL.connection() as connection:
                await connection.execute(CREATE)
            for number, name in enumerate(PLAN.names()):
                await scheduler.add_schedule(
                    task,
                    trigger_of(PLAN, number),
                    id=name,
                    args=[name],
                    coalesce=CoalescePolicy.all,
                    misfire_grace_time=None,
                    conflict_policy=ConflictPolicy.do_nothing,
                )
            return
        stop = stop_event()
        await scheduler.start_in_background()
        ready(PLAN)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
