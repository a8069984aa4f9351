"""Triggers: what computes the fire times of the floors and of the peers, each called as its owner calls it.

    python -m benchmarks.triggers NAME ENTRIES

prints the figures of one of them as JSON, on a Python that has it installed.
"""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from benchmarks.day import BEGIN, Entry, measured


SECOND = timedelta(seconds=1)


def apscheduler3(number: int) -> dict[str, Any]:
    """Ask APScheduler 3's trigger for the fire time after the last one, as its schedulers do."""
    from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415  # of two versions that exclude each other

    def prepare(entry: Entry) -> CronTrigger:
        return CronTrigger.from_crontab(entry.cron, timezone=ZoneInfo(entry.zone))

    def fire_times(trigger: CronTrigger) -> Iterator[datetime]:
        last, now = None, BEGIN + SECOND
        while True:
            last = now = trigger.get_next_fire_time(last, now)
            yield last

    return measured(number, prepare, fire_times)


def apscheduler4(number: int) -> dict[str, Any]:
    """Let APScheduler 4's trigger go on from one fire time to the next."""
    from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415  # likewise

    def prepare(entry: Entry) -> Any:
        return CronTrigger.from_crontab(entry.cron, start_time=BEGIN + SECOND, timezone=entry.zone)

    def fire_times(trigger: Any) -> Iterator[datetime]:
        while True:
            yield trigger.next()

    return measured(number, prepare, fire_times)


def procrastinate(number: int) -> dict[str, Any]:
    """Let croniter go on from one fire time to the next in seconds since 1970, without a zone: it knows none."""
    from croniter import croniter  # noqa: PLC0415  # only the peers have it

    def prepare(entry: Entry) -> Any:
        return croniter(entry.cron)

    def fire_times(iterator: Any) -> Iterator[datetime]:
        iterator.set_current(start_time=BEGIN.timestamp())
        while True:
            yield datetime.fromtimestamp(round(iterator.get_next(ret_type=float)), UTC)

    return measured(number, prepare, fire_times)


def dbos(number: int) -> dict[str, Any]:
    """Let croniter go on from one fire time to the next as datetimes of the entry's zone."""
    from croniter import croniter  # noqa: PLC0415  # only the peers have it

    def prepare(entry: Entry) -> Any:
        return croniter(entry.cron, BEGIN.astimezone(ZoneInfo(entry.zone)), second_at_beginning=True)

    def fire_times(iterator: Any) -> Iterator[datetime]:
        while True:
            yield iterator.get_next(datetime)

    return measured(number, prepare, fire_times)


TRIGGERS: dict[str, Callable[[int], dict[str, Any]]] = {
    one.__name__: one for one in (apscheduler3, apscheduler4, procrastinate, dbos)
}


if __name__ == "__main__":
    print(json.dumps(TRIGGERS[sys.argv[1]](int(sys.argv[2]))))
