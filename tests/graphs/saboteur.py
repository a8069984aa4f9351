"""A graph whose module breaks a part of the replica that imports it, once that is at work: SABOTAGE says which."""

import os
import time
from typing import Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from psycopg import AsyncConnection

from tests.graphs.witnessed import quick
from tickd import ledger
from tickd.tick import Tick


SWEEPS_BEFORE = 2
ALARMS_BEFORE = 4
SECONDS_WITHOUT_ALARM = 4


def fail_in_the_third_sweep() -> None:
    """Let the sweep meet an error that nobody has foreseen."""
    waiting = ledger.waiting
    sweeps: list[int] = []

    async def fail(connection: AsyncConnection[Any], space: int) -> list[Tick]:
        sweeps.append(space)
        if len(sweeps) > SWEEPS_BEFORE:
            raise LookupError("a fault of tickd's own")
        return await waiting(connection, space)

    ledger.waiting = fail


def lose_alarms() -> None:
    """Let the timer go to sleep without an alarm, as APScheduler does when an error passes through it."""
    sleep = AsyncIOScheduler._start_timer
    sleeps: list[float] = []

    def start_timer(self: Any, wait_seconds: Any) -> None:
        sleeps.append(time.monotonic())
        lost = sleeps[ALARMS_BEFORE:] and sleeps[-1] - sleeps[ALARMS_BEFORE] < SECONDS_WITHOUT_ALARM
        sleep(self, None if lost else wait_seconds)

    AsyncIOScheduler._start_timer = start_timer


if os.environ["SABOTAGE"] == "sweep":
    fail_in_the_third_sweep()
else:
    lose_alarms()

graph = quick
