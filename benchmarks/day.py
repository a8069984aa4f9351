"""The day of workload H: cron lines in their zones, and the 24 hours whose fire times everybody computes.

The peers compute it on a Python of their own, so nothing here needs more than the standard library.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any


EXPRESSIONS = (
    "*/5 * * * *",
    "0 9 * * mon-fri",
    "30 2 1 * *",
    "0 */2 * * *",
    "15 10,12 * * 1,5",
)
ZONES = ("Europe/Oslo", "America/New_York", "Asia/Kolkata", "UTC")
# A day with a change of the clocks in it, in one of the zones. A fire time at its begin is before it, one at its end within.
BEGIN = datetime(2026, 3, 28, 12, tzinfo=UTC)
END = BEGIN + timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the schedule: a cron line and the zone whose clocks it means."""

    cron: str
    zone: str


def entries(number: int) -> list[Entry]:
    """Return so many entries; after twenty, they come again."""
    return [Entry(EXPRESSIONS[n % len(EXPRESSIONS)], ZONES[n % len(ZONES)]) for n in range(number)]


def measured(
    number: int, prepare: Callable[[Entry], Any], fire_times: Callable[[Any], Iterator[datetime]]
) -> dict[str, Any]:
    """Compute the day of so many entries, and return its processor time and the fire times of every kind of entry.

    `prepare` makes what an application keeps of an entry, and is not measured; `fire_times` goes on from BEGIN for ever.
    """
    kept = [prepare(entry) for entry in entries(number)]
    began = time.process_time()
    found = [within(fire_times(one)) for one in kept]
    spent = time.process_time() - began
    return {
        "graphs": number,
        "processor_s": spent,
        "ticks": sum(map(len, found)),
        "fire_times": [[instant.timestamp() for instant in one] for one in found[: kinds()]],
    }


def within(fire_times: Iterator[datetime]) -> list[datetime]:
    """Return those of the day."""
    found = []
    for instant in fire_times:
        if instant > END:
            break
        found.append(instant)
    return found


def kinds() -> int:
    """Return how many entries differ from each other."""
    return len(EXPRESSIONS) * len(ZONES)


def differing(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Return how many fire times of twenty entries are in `ours` only, and in `theirs` only."""
    pairs = [(set(one), set(other)) for one, other in zip(ours, theirs, strict=True)]
    return sum(len(one - other) for one, other in pairs), sum(len(other - one) for one, other in pairs)
