"""APScheduler 4 with its Postgres store and event broker: every replica a scheduler and a worker."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from apscheduler import AsyncScheduler, CoalescePolicy, ConflictPolicy, TaskDefaults, current_job
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore
from apscheduler.eventbrokers.psycopg import PsycopgEventBroker
from apscheduler.triggers.interval import IntervalTrigger
from psycopg_pool import AsyncConnectionPool
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.contenders.peer import CREATE, INSERT
from benchmarks.plan import Plan, Witness, read_plan, ready, replica_name, stop_event


# Schedules can only be added one by one, which takes some milliseconds each.
STREAMS = 6
SECONDS_PER_SCHEDULE = 0.01
PLAN = read_plan()
WITNESS = Witness(PLAN.home, replica_name())
POOL = AsyncConnectionPool(
    PLAN.dsn, min_size=1, max_size=PLAN.pool_size, open=False, kwargs={"autocommit": True}
)


async def task(name: str) -> None:
    """Bear witness, insert, and work for as long as the plan says."""
    fire_time = current_job.get().scheduled_fire_time.timestamp()
    WITNESS.started(name, fire_time)
    async with POOL.connection() as connection:
        await connection.execute(INSERT, {"name": name, "fire_time": fire_time})
    await asyncio.sleep(PLAN.seconds)


def trigger_of(plan: Plan, number: int, begin: int) -> IntervalTrigger:
    """Return a trigger with the instants of a schedule that are not before `begin`."""
    period = plan.period(number)
    start = begin + (plan.phase(number) - begin) % period
    return IntervalTrigger(seconds=period, start_time=datetime.fromtimestamp(start, UTC))


async def set_up(scheduler: AsyncScheduler) -> None:
    """Add the schedules, and return shortly before the first may be due: what was due before would have to be caught up on."""
    async with POOL.connection() as connection:
        await connection.execute(CREATE)
    begin = int(time.time() + 3 + PLAN.graphs * SECONDS_PER_SCHEDULE)
    schedules = enumerate(PLAN.names())
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(add(scheduler, schedules, begin))
    await asyncio.sleep(max(0.0, begin - 3 - time.time()))


async def add(scheduler: AsyncScheduler, schedules: Iterator[tuple[int, str]], begin: int) -> None:
    """Add one schedule after another, of those that no other stream has taken."""
    for number, name in schedules:
        await scheduler.add_schedule(
            task,
            trigger_of(PLAN, number, begin),
            id=name,
            args=[name],
            coalesce=CoalescePolicy.all,
            misfire_grace_time=None,
            conflict_policy=ConflictPolicy.do_nothing,
        )


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
        # By default one task runs once at a time, in all replicas together, and every schedule has the same one here.
        task_defaults=TaskDefaults(max_running_jobs=None),
    )
    async with POOL, scheduler:
        if replica_name() == "set_up":
            await set_up(scheduler)
            return
        stop = stop_event()
        await scheduler.start_in_background()
        ready(PLAN)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
