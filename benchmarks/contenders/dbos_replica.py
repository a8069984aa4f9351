"""DBOS: one schedule per graph in its database, every replica an executor of its queue."""

import signal
import threading
import time
from datetime import datetime
from typing import Any

import psycopg_pool
from dbos import DBOS, DBOSConfig

from benchmarks.contenders.peer import CREATE, INSERT, cron_fields
from benchmarks.plan import Witness, read_plan, ready, replica_name


QUEUE = "ticks"
PLAN = read_plan()
WITNESS = Witness(PLAN.home, replica_name())
POOL = psycopg_pool.ConnectionPool(
    PLAN.dsn, min_size=1, max_size=PLAN.pool_size, open=False, kwargs={"autocommit": True}
)


@DBOS.workflow()  # type: ignore[untyped-decorator]  # peers are not installed where types are checked
def task(scheduled: datetime, context: Any) -> None:
    """Bear witness, insert, and work for as long as the plan says."""
    WITNESS.started(context, scheduled.timestamp())
    with POOL.connection() as connection:
        connection.execute(INSERT, {"name": context, "fire_time": scheduled.timestamp()})
    time.sleep(PLAN.seconds)


def set_up() -> None:
    """Make the queue and the schedules."""
    with POOL.connection() as connection:
        connection.execute(CREATE)
    # Its default is to ask once a second; who wants his tasks on time asks more often, and who has none due does not.
    asked = 1.0 if PLAN.resting == PLAN.graphs else 0.1
    DBOS.register_queue(QUEUE, worker_concurrency=PLAN.width, polling_interval_sec=asked)
    DBOS.apply_schedules(
        [
            {
                "schedule_name": name,
                "workflow_fn": task,
                "schedule": " ".join(cron_fields(PLAN, number)),
                "context": name,
                "queue_name": QUEUE,
            }
            for number, name in enumerate(PLAN.names())
        ]
    )


def await_schedules(stop: threading.Event) -> None:
    """Wait until each schedule has its thread: before that it does not fire."""
    while threading.active_count() < PLAN.graphs and not stop.wait(0.1):
        pass


def main() -> None:
    """Launch an executor, and stop on SIGTERM."""
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": PLAN.dsn,
        "executor_id": replica_name(),
        "application_version": "1",
        "log_level": "WARNING",
    }
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    POOL.open()
    DBOS(config=config)
    DBOS.launch()
    if replica_name() == "set_up":
        set_up()
    else:
        await_schedules(stop)
        ready(PLAN)
        stop.wait()
    DBOS.destroy()


if __name__ == "__main__":
    main()
