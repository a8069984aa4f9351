"""Fire times: which instants a graph's cron expressions, interval or list of instants name.

Everything here is a pure function of its arguments: a series can be asked from any instant and gives the same answer on
every replica. Wall-clock times become instants by three rules, those of Debian's cron:

- a fixed time inside the gap of a spring night fires once, at the first instant after the gap;
- a fixed time inside the repeated hour of an autumn night fires once, in the first pass;
- an expression with `*` in second, minute or hour fires at every instant whose wall clock matches: nothing in
  the gap, and both passes of the repeated hour.

The zones are those of the tzdata package, never the host's, whose release another replica may not have.
"""

import bisect
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib import resources
from zoneinfo import ZoneInfo

from tickd.cron import Cron


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
# Nothing that fires at all waits longer: 29 February on a given weekday, over 2100, waits 40 years.
HORIZON = timedelta(days=50 * 366)


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Return the names of all zones of the tzdata package."""
    return frozenset((resources.files("tzdata") / "zones").read_text(encoding="utf-8").split())


@lru_cache(maxsize=1024)
def zone(name: str) -> ZoneInfo:
    """Return a zone by its IANA name, spaces around it trimmed; ValueError for any other name."""
    name = name.strip()
    if name not in zone_names():
        near = difflib.get_close_matches(
            name[:64].casefold(), [each.casefold() for each in zone_names()], n=1
        )
        meant = next((each for each in sorted(zone_names()) if near and each.casefold() == near[0]), None)
        hint = f"; did you mean {meant!r}?" if meant else ", such as Europe/Oslo or UTC"
        raise ValueError(f"{name!r} is not an IANA time zone{hint}")
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, key=name)


@dataclass(frozen=True, slots=True)
class WallClock:
    """The times of a cron expression in a zone."""

    cron: Cron
    zone: ZoneInfo

    def after(self, instant: datetime) -> datetime | None:
        """Return the first fire time strictly after an instant."""
        if self.cron.fixed:
            return self._fixed_after(instant)
        return self._real_after(instant)

    def _fixed_after(self, instant: datetime) -> datetime | None:
        # Reading the wall clock forwards never goes back in time (`_first_instant` never falls as the wall clock
        # grows), so from the wall clock of `instant` on, the first that lands later is the answer; inside a repeated
        # hour or right after a gap, several land earlier or on `instant` itself.
        wall: datetime | None = instant.astimezone(self.zone).replace(tzinfo=None)
        while wall is not None and (wall := self.cron.next_wall_clock(wall)) is not None:
            fire_time = _first_instant(wall, self.zone)
            if fire_time > instant:
                return fire_time
        return None

    def _real_after(self, instant: datetime) -> datetime | None:
        # Between two changes of the clocks, wall clock and instant differ by a constant: search span by span.
        span, offset = instant, _offset(instant, self.zone)
        wall = (span + offset).replace(tzinfo=None)
        while span < instant + HORIZON:
            found = self.cron.next_wall_clock(wall)
            if found is None:
                return None
            fire_time = found.replace(tzinfo=UTC) - offset
            change = _first_change(self.zone, after=span, until=fire_time)
            if change is None:
                return fire_time
            span, offset = change, _offset(change, self.zone)
            wall = (change + offset).replace(tzinfo=None) - SECOND  # the change itself may be a fire time
        return None


@dataclass(frozen=True, slots=True)
class Interval:
    """Every so much elapsed time, counted from an anchor in both directions; no zone, no clock changes."""

    every: timedelta
    anchor: datetime = EPOCH

    def after(self, instant: datetime) -> datetime | None:
        """Return the first fire time strictly after an instant."""
        return self.anchor + ((instant - self.anchor) // self.every + 1) * self.every


@dataclass(frozen=True, slots=True)
class Instants:
    """A list of instants, in order."""

    times: tuple[datetime, ...]

    def after(self, instant: datetime) -> datetime | None:
        """Return the first fire time strictly after an instant."""
        index = bisect.bisect_right(self.times, instant)
        return self.times[index] if index < len(self.times) else None


@dataclass(frozen=True, slots=True)
class Series:
    """All fire times of a graph: its triggers merged, no instant twice."""

    triggers: tuple[WallClock | Interval | Instants, ...]

    def after(self, instant: datetime) -> datetime | None:
        """Return the first fire time strictly after an aware instant, in UTC; None when there is none (in 50 years)."""
        try:
            times = [trigger.after(instant) for trigger in self.triggers]
        except OverflowError:  # past the year 9999
            return None
        return min((time for time in times if time is not None), default=None)

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """Yield the fire times later than `after` and no later than `until`."""
        fire_time = self.after(after)
        while fire_time is not None and fire_time <= until:
            yield fire_time
            fire_time = self.after(fire_time)


@dataclass(frozen=True, slots=True)
class ClockChange:
    """An instant at which a zone's clocks go forward (skipping wall-clock times) or back (repeating them)."""

    instant: datetime
    zone: ZoneInfo

    @property
    def by(self) -> timedelta:
        """How far forward; negative for back."""
        return _offset(self.instant, self.zone) - _offset(self.instant - SECOND, self.zone)

    @property
    def wall_clock_after(self) -> datetime:
        """What the clock shows from this instant on; without the change it would show `by` less."""
        return self.instant.astimezone(self.zone).replace(tzinfo=None)


def clock_changes(zone: ZoneInfo, after: datetime, until: datetime) -> Iterator[ClockChange]:
    """Yield the changes of a zone's clocks later than `after` and no later than `until`."""
    for year in range(after.year, until.year + 1):
        yield from (ClockChange(each, zone) for each in _changes_of_year(zone, year) if after < each <= until)


def _first_change(zone: ZoneInfo, *, after: datetime, until: datetime) -> datetime | None:
    return next((change.instant for change in clock_changes(zone, after, until)), None)


def _first_instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return the first instant at which the wall clock shows a time, or, where it skips it, the end of the gap."""
    instant = wall.replace(tzinfo=zone).astimezone(UTC)
    if instant.astimezone(zone).replace(tzinfo=None) == wall:
        return instant
    # In a gap, fold=0 reads the clock of before, which lands after the gap by as much as the time lies inside it;
    # the longest gap skipped a whole day.
    return _first_change(zone, after=instant - DAY, until=instant) or instant


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    return offset if offset is not None else timedelta(0)


@lru_cache(maxsize=8192)
def _changes_of_year(zone: ZoneInfo, year: int) -> tuple[datetime, ...]:
    """Return the instants of a UTC year at which the zone's offset to UTC changes."""
    changes = []
    low = datetime(year, 1, 1, tzinfo=UTC) - SECOND
    end = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    while low < end:
        high = min(low + DAY, end)
        if _offset(low, zone) != _offset(high, zone):
            changes.append(_change_between(low, high, zone))
        low = high
    return tuple(changes)


def _change_between(low: datetime, high: datetime, zone: ZoneInfo) -> datetime:
    before = _offset(low, zone)
    while high - low > SECOND:
        middle = low + (high - low) // 2 // SECOND * SECOND
        low, high = (middle, high) if _offset(middle, zone) == before else (low, middle)
    return high
