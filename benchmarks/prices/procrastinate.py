"""What the pieces of Procrastinate cost: what its worker asks of its job manager for one tick."""

import asyncio
from itertools import count
from typing import Any

import procrastinate
from procrastinate.jobs import Status

from benchmarks.contenders.peer import CREATE, INSERT
from benchmarks.plan import read_plan
from benchmarks.price import TRY_HELD, TRY_RUN_UNLOCK, TRY_UNLOCK, Piece, priced, rounds_asked_for, tell


class Worker:
    """Defers, fetches and finishes jobs as a worker does, one at a time."""

    def __init__(self, app: procrastinate.App, number: int) -> None:
        self._app = app
        self._manager = app.job_manager
        self._number = number
        self._instants = count(1)

    async def defer(self, instant: int | None = None) -> None:
        """Defer a tick: of a new instant, or of one that may be there."""
        instant = instant or next(self._instants)
        task = self._app.configure_task("task", task_kwargs={"timestamp": instant})
        await self._manager.defer_periodic_job(job=task.job, periodic_id="", defer_timestamp=instant)

    async def empty(self) -> None:
        """Forget the jobs that were only deferred, so that none of them is fetched."""
        await self._app.connector.execute_query_async("DELETE FROM procrastinate_jobs")

    async def run(self) -> None:
        """Defer a tick, fetch its job, run it, and finish it."""
        await self.defer()
        job: Any = await self._manager.fetch_job(None, self._number)
        await self._app.connector.execute_query_async(INSERT, name="task", fire_time=0)
        await self._manager.finish_job(job, Status.SUCCEEDED, delete_job=False)


async def main() -> dict[str, Any]:
    """Measure it on its own schema, with a connector as a replica has one."""
    plan = read_plan()
    connector = procrastinate.PsycopgConnector(conninfo=plan.dsn, min_size=4, max_size=plan.pool_size)
    app = procrastinate.App(connector=connector)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await connector.execute_query_async(CREATE)
        worker = Worker(app, await app.job_manager.register_worker())
        pieces = [
            Piece("defer a tick", worker.defer, TRY_UNLOCK),
            Piece("defer a tick that another replica has deferred", lambda: worker.defer(1), TRY_HELD),
        ]
        once = await priced(rounds_asked_for(), pieces)
        await worker.empty()
        runs = await priced(
            rounds_asked_for(), [Piece("defer, fetch, run, finish", worker.run, TRY_RUN_UNLOCK)]
        )
    return {**once, **{name: once[name] | runs[name] for name in ("cost_ms", "floors")}}


if __name__ == "__main__":
    tell(asyncio.run(main()))
