"""What the pieces of DBOS cost: a workflow with an identity, and whoever comes with the same one later."""

from collections.abc import Callable
from itertools import count
from typing import Any

import psycopg_pool
from dbos import DBOS, DBOSConfig, SetWorkflowID

from benchmarks.contenders.peer import CREATE, INSERT
from benchmarks.plan import read_plan
from benchmarks.price import TRY_HELD, TRY_RUN_UNLOCK, TRY_UNLOCK, Laps, figures, rounds_asked_for, tell


PLAN = read_plan()
POOL = psycopg_pool.ConnectionPool(
    PLAN.dsn, min_size=1, max_size=PLAN.pool_size, open=False, kwargs={"autocommit": True}
)
NUMBERS = count(1)
QUEUE = "nobody_listens"


@DBOS.workflow()  # type: ignore[untyped-decorator]  # peers are not installed where types are checked
def task() -> None:
    """Insert."""
    with POOL.connection() as connection:
        connection.execute(INSERT, {"name": "task", "fire_time": 0})


def run(name: str | None = None) -> None:
    """Start a workflow by its id, and wait for its end; by an id that has run, there is no second run."""
    with SetWorkflowID(name or f"run-{next(NUMBERS)}"):
        handle = DBOS.start_workflow(task)
    handle.get_result()


def enqueue() -> None:
    """Enqueue a workflow by its id, as a schedule does."""
    with SetWorkflowID(f"queued-{next(NUMBERS)}"):
        DBOS.enqueue_workflow(QUEUE, task)


PIECES: dict[str, tuple[Callable[[], Any], str]] = {
    "ask for a workflow that is there": (lambda: DBOS.get_workflow_status("run"), TRY_HELD),
    "start a workflow that has run": (lambda: run("run"), TRY_UNLOCK),
    "enqueue a workflow": (enqueue, TRY_UNLOCK),
    "start a workflow, run it, wait for its end": (run, TRY_RUN_UNLOCK),
}


def measured(rounds: int) -> dict[str, Any]:
    """Measure one piece after another."""
    cost_ms = {}
    for name, (call, _) in PIECES.items():
        laps = Laps(rounds)
        for _ in laps:
            call()
        cost_ms[name] = laps.spread()
    return figures(rounds, cost_ms, {name: floor for name, (_, floor) in PIECES.items()})


def main() -> None:
    """Measure it on its own schema, in a process that takes nothing from a queue."""
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": PLAN.dsn,
        "executor_id": "r1",
        "application_version": "1",
        "log_level": "WARNING",
    }
    POOL.open()
    DBOS(config=config)
    DBOS.listen_queues([])
    DBOS.launch()
    DBOS.register_queue(QUEUE)
    with POOL.connection() as connection:
        connection.execute(CREATE)
    run("run")
    told = measured(rounds_asked_for())
    DBOS.destroy()
    tell(told)


if __name__ == "__main__":
    main()
