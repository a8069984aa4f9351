"""DBOS: one schedule per graph in its database, every replica an executor of its queue."""

import signal
import threading
from datetime import datetime
from typing import Any

import psycopg_pool
from dbos import DBOS, DBOSConfig

from benchmarks.contenders.peer import CREATE, INSERT, cron_fields
from benchmarks.plan import Witness, read_plan, ready, replica_name


PLAN = read_plan()
WITNESS = Witness(PLAN.home, replica_name())
POOL = psycopg_pool.ConnectionPool(
    PLAN.dsn, min_size=1, max_size=PLAN.pool_size, open=False, kwargs={"autocommit": True}
)


@DBOS.workflow()  # type: ignore[untyped-decorator]  # peers are not installed where types are checked
def task(scheduled: datetime, context: Any) -> None:
    """Bear witness, and insert."""
    WITNESS.started(context, scheduled.timestamp())
    with POOL.connection() as connection:
        connection.execute(INSERT, {"name": context, "fire_time": scheduled.timestamp()})


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
        with POOL.connection() as connection:
            connection.execute(CREATE)
        DBOS.apply_schedules(
            [
                {
                    "schedule_name": name,
                    "workflow_fn": task,
                    "schedule": " ".join(cron_fields(PLAN, number)),
                    "context": name,
                }
                for number, name in enumerate(PLAN.names())
            ]
        )
    else:
        ready(PLAN)
        stop.wait()
    DBOS.destroy()


if __name__ == "__main__":
    main()
