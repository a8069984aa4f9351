"""Procrastinate: one periodic task per schedule, and a worker in every replica."""

import asyncio
import signal
from functools import partial
from typing import Any

import procrastinate

from benchmarks.contenders.peer import INSERT, cron_fields
from benchmarks.plan import Plan, Witness, read_plan, ready, replica_name


def app_of(plan: Plan, replica: str) -> procrastinate.App:
    """Return the app with all schedules."""
    connector = procrastinate.PsycopgConnector(conninfo=plan.dsn, min_size=4, max_size=plan.pool_size)
    # A worker that starts runs what was due in the last ten minutes, by default: here, every schedule once, at one time.
    app = procrastinate.App(connector=connector, periodic_defaults={"max_delay": 10})
    witness = Witness(plan.home, replica)

    async def task(timestamp: int, name: str) -> None:
        witness.started(name, timestamp)
        await connector.execute_query_async(INSERT, name=name, fire_time=timestamp)
        await asyncio.sleep(plan.seconds)

    for number, name in enumerate(plan.names()):
        registered: Any = app.task(name=name)(partial(task, name=name))
        # croniter, which it uses, has the seconds as the sixth field.
        second, *rest = cron_fields(plan, number)
        app.periodic(cron=" ".join([*rest, second]))(registered)
    return app


async def main() -> None:
    """Run a worker until SIGTERM."""
    plan = read_plan()
    app = app_of(plan, replica_name())
    async with app.open_async():
        if replica_name() == "set_up":
            await app.schema_manager.apply_schema_async()
            await app.connector.execute_query_async(
                "CREATE TABLE witness (name text, fire_time double precision)"
            )
            return
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=plan.width, install_signal_handlers=False, name=replica_name())
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.cancel)
        ready(plan)
        await asyncio.wait({worker})


if __name__ == "__main__":
    asyncio.run(main())
