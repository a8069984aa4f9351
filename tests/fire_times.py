"""Fire times for tests: a series from an expression and a zone, and its first instants as short texts."""

import itertools
from collections.abc import Iterator
from datetime import datetime

from tickd.calendar import Series, WallClock, zone
from tickd.cron import parse_cron
from tickd.tick import instant_text, parse_instant


def instant(text: str) -> datetime:
    """Return the instant of `2026-03-08` or `2026-03-08T07:00Z`."""
    return parse_instant(text if "T" in text else f"{text}T00:00Z")


def series(*expressions: str, zone_name: str = "UTC") -> Series:
    """Return the merged series of cron expressions in one zone."""
    return Series(tuple(WallClock(parse_cron(expression), zone(zone_name)) for expression in expressions))


def following(found: Series, after: datetime) -> Iterator[datetime]:
    """Yield the fire times strictly after an instant, for ever."""
    fire_time = found.after(after)
    while fire_time is not None:
        yield fire_time
        fire_time = found.after(fire_time)


def first(found: Series, after: str, count: int) -> str:
    """Return the first fire times after an instant, in UTC, as `01-04T09:00 01-11T09:00`; the year is named unless 2026."""
    times = itertools.islice(following(found, instant(after)), count)
    return " ".join(
        instant_text(time).removeprefix("2026-").removesuffix("Z").removesuffix(":00") for time in times
    )
