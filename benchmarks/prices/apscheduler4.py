"""What the pieces of APScheduler 4 cost: what its scheduler asks of its Postgres store for one tick."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from apscheduler import AsyncScheduler, ConflictPolicy, Job, JobOutcome, JobResult, Schedule, ScheduleResult
from apscheduler.datastores.sqlalchemy import SQLAlchemyDataStore
from apscheduler.eventbrokers.psycopg import PsycopgEventBroker
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.contenders.peer import CREATE, INSERT
from benchmarks.plan import read_plan
from benchmarks.price import TRY_HELD, TRY_RUN_UNLOCK, TRY_UNLOCK, Piece, priced, rounds_asked_for, tell


LEASE = timedelta(seconds=30)
PAST = datetime(2026, 5, 4, 10, tzinfo=UTC)
NAME = "r1"


async def task() -> None:
    """Stand for a function; nobody calls it here."""


class Store:
    """Takes the steps of a tick on the data store, as the scheduler takes them, one tick at a time."""

    def __init__(self, store: SQLAlchemyDataStore, session: "psycopg.AsyncConnection[Any]") -> None:
        self._store = store
        self._session = session

    async def attempt(self) -> list[Any]:
        """Acquire the schedules that are due."""
        found: list[Any] = await self._store.acquire_schedules(NAME, LEASE, 100)
        return found

    async def admit(self) -> None:
        """Acquire the schedule that is due, add its job, and release it, due again."""
        (schedule,) = await self.attempt()
        await self._store.add_job(
            Job(
                task_id=schedule.task_id,
                schedule_id=schedule.id,
                scheduled_fire_time=PAST,
                executor=schedule.job_executor,
            )
        )
        result = ScheduleResult(
            schedule_id=schedule.id,
            task_id=schedule.task_id,
            trigger=schedule.trigger,
            last_fire_time=PAST,
            next_fire_time=PAST,
        )
        await self._store.release_schedules(NAME, [result])

    async def run(self) -> None:
        """Admit a tick, acquire its job, run it, and release it."""
        await self.admit()
        began = datetime.now(UTC)
        (job,) = await self._store.acquire_jobs(NAME, LEASE, 1)
        await self._session.execute(INSERT, {"name": "task", "fire_time": 0})
        await self._store.release_job(
            NAME, job, JobResult.from_job(job, JobOutcome.success, started_at=began)
        )

    async def empty(self) -> None:
        """Forget the jobs that were only admitted, so that none of them is acquired."""
        await self._session.execute("DELETE FROM jobs")


async def add_schedule(scheduler: AsyncScheduler) -> None:
    """Add a schedule that is due, whatever the clock says."""
    configured = await scheduler.configure_task(task, max_running_jobs=None)
    schedule = Schedule(
        id="due",
        task_id=configured.id,
        trigger=IntervalTrigger(seconds=1, start_time=PAST),
        next_fire_time=PAST,
        job_executor=configured.job_executor,
    )
    await scheduler.data_store.add_schedule(schedule, ConflictPolicy.exception)


async def main() -> dict[str, Any]:
    """Measure it on its own schema, with the engine and the broker that a replica has."""
    plan = read_plan()
    engine = create_async_engine(
        plan.dsn.replace("postgresql://", "postgresql+psycopg://"), pool_size=plan.pool_size
    )
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            AsyncScheduler(SQLAlchemyDataStore(engine), PsycopgEventBroker(plan.dsn), identity=NAME)
        )
        session = await stack.enter_async_context(
            await psycopg.AsyncConnection.connect(plan.dsn, autocommit=True)
        )
        await session.execute(CREATE)
        store, rounds = Store(scheduler.data_store, session), rounds_asked_for()
        figures = await priced(rounds, [Piece("acquire schedules, none is due", store.attempt, TRY_HELD)])
        await add_schedule(scheduler)
        admit = Piece("acquire a schedule, add its job, release it", store.admit, TRY_UNLOCK)
        admitted = await priced(rounds, [admit])
        await store.empty()
        runs = await priced(
            rounds, [Piece("the same; acquire the job, run it, release it", store.run, TRY_RUN_UNLOCK)]
        )
    return figures | {name: figures[name] | admitted[name] | runs[name] for name in ("cost_ms", "floors")}


if __name__ == "__main__":
    tell(asyncio.run(main()))
