"""The calendar against three others: cronsim's own clock changes, croniter, and a walk through every minute."""

import bisect
import calendar as months
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import pytest
from croniter import croniter
from cronsim import CronSim

from tests.fire_times import series
from tickd.calendar import ClockChange, clock_changes, zone
from tickd.cron import parse_cron


# Twenty zones whose clocks change by a whole hour and not at midnight, or not at all: here all agree with cronsim.
PLAIN = (
    "UTC", "America/New_York", "America/Los_Angeles", "America/St_Johns", "America/Halifax", "America/Mexico_City",
    "America/Nuuk", "Europe/London", "Europe/Dublin", "Europe/Berlin", "Europe/Oslo", "Europe/Chisinau", "Africa/Casablanca",
    "Asia/Jerusalem", "Asia/Kolkata", "Asia/Gaza", "Australia/Adelaide", "Australia/Sydney", "Pacific/Auckland",
    "Pacific/Norfolk",
)  # fmt: skip
# Here cronsim differs, and the walk shows that it is wrong. At midnight: it hands out 00:00, which the clock skips, and
# then loses the first minutes after the gap. By half an hour, or at a quarter to: it steps over some of the times that
# come twice, or never leaves them.
MIDNIGHT = ("America/Havana", "America/Santiago", "Atlantic/Azores", "Asia/Beirut")
ODD = ("Australia/Lord_Howe", "Pacific/Chatham")

MINUTES = ("0", "30", "45", "5,35", "*/15")
HOURS = ("*", "*/2", "0", "1", "2", "3", "2,3", "1-3", "23")
DAYS = ("* * *", "* * 0")
GRID = (
    *(f"{minute} {hour} {days}" for minute, hour, days in itertools.product(MINUTES, HOURS, DAYS)),
    "* 1-3 * * *", "* * * * 0", "30 2 1-7 * 1", "0 0 L * *", "59 23 28-31 * *",
)  # fmt: skip
BEFORE, AFTER = timedelta(hours=7), timedelta(hours=26)
Window = tuple[datetime, datetime, ClockChange | None]


@lru_cache
def windows(name: str) -> tuple[Window, ...]:
    """Return the hours around each change of a zone's clocks in 2026; some quiet ones where there is none."""
    begin, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 12, 31, tzinfo=UTC)
    changes = list(clock_changes(zone(name), begin, end))
    if not changes:
        return ((begin, begin + AFTER, None),)
    return tuple((change.instant - BEFORE, change.instant + AFTER, change) for change in changes)


class Walk:
    """Every minute of a window with what the wall clock shows: the plainest way to say when a tick is due.

    An expression with a star fires in every minute whose wall clock matches. A fixed time fires in the first minute
    whose wall clock shows it, or, when none does, in the first that shows a later one.
    """

    def __init__(self, name: str, begin: datetime, end: datetime) -> None:
        where = zone(name)
        self._minutes: list[datetime] = []
        self._walls: dict[datetime, list[datetime]] = {}
        latest: list[datetime] = []
        minute = begin
        while minute <= end:
            wall = minute.astimezone(where).replace(tzinfo=None)
            self._minutes.append(minute)
            self._walls.setdefault(wall, []).append(minute)
            latest.append(max(wall, latest[-1]) if latest else wall)
            minute += timedelta(minutes=1)
        self._latest = latest

    def fire_times(self, expression: str) -> list[datetime]:
        """Return the fire times after the first minute."""
        rule = Rule(expression)
        if rule.fixed:
            found = {self._first(wall) for wall in self._wall_clocks() if rule.matches(wall)}
        else:
            found = {
                minute for wall, minutes in self._walls.items() if rule.matches(wall) for minute in minutes
            }
        return sorted(found - {self._minutes[0]})

    def _wall_clocks(self) -> Iterator[datetime]:
        """Yield every minute between the first and the last on the wall, also those that the clock skips."""
        wall = self._latest[0]
        while (wall := wall + timedelta(minutes=1)) <= self._latest[-1]:
            yield wall

    def _first(self, wall: datetime) -> datetime:
        return self._minutes[bisect.bisect_left(self._latest, wall)]


@lru_cache
def walk(name: str, begin: datetime, end: datetime) -> Walk:
    """Return the walk through a window, made once."""
    return Walk(name, begin, end)


class Rule:
    """Which wall clocks fit an expression of the grid: written afresh, with nothing of the engine in it."""

    def __init__(self, expression: str) -> None:
        minute, hour, day, _, weekday = expression.split()
        self.fixed = not (minute.startswith("*") or hour.startswith("*"))
        self._minutes, self._hours = numbers(minute, 0, 59), numbers(hour, 0, 23)
        self._last = day == "L"
        self._days = frozenset[int]() if self._last else numbers(day, 1, 31)
        self._weekdays = numbers(weekday, 0, 6)
        self._both = "*" in (day[0], weekday[0])

    def matches(self, wall: datetime) -> bool:
        """Whether the expression names this minute."""
        if wall.minute not in self._minutes or wall.hour not in self._hours:
            return False
        last = self._last and wall.day == months.monthrange(wall.year, wall.month)[1]
        on_day = last or wall.day in self._days
        on_weekday = wall.isoweekday() % 7 in self._weekdays
        return (on_day and on_weekday) if self._both else (on_day or on_weekday)


def numbers(field: str, lowest: int, highest: int) -> frozenset[int]:
    """Return the numbers of a field."""
    found: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        low, _, high = (str(lowest), "", str(highest)) if span == "*" else span.partition("-")
        found.update(range(int(low), int(high or low) + 1, int(step or 1)))
    return frozenset(found)


def theirs(found: "CronSim | croniter", until: datetime, most: int = 3000) -> list[datetime]:
    """Return what another library hands out, in UTC, up to an instant."""
    times = (time.astimezone(UTC) for time in itertools.islice(found, most))
    return list(itertools.takewhile(lambda time: time <= until, times))


@pytest.mark.parametrize("name", [*PLAIN, *MIDNIGHT, *ODD])
def test_every_expression_agrees_with_a_walk_through_every_minute(name):
    """The three rules, said in the plainest way there is, hold in every kind of zone on every night of a change."""
    for begin, end, _ in windows(name):
        for expression in GRID:
            found = list(series(expression, zone_name=name).between(begin, end))
            assert found == walk(name, begin, end).fire_times(expression), expression


@pytest.mark.parametrize("name", PLAIN)
def test_every_expression_agrees_with_cronsim(name):
    """Its own handling of clock changes is Debian's."""
    for begin, end, _ in windows(name):
        for expression in GRID:
            found = list(series(expression, zone_name=name).between(begin, end))
            assert found == theirs(CronSim(expression, begin.astimezone(zone(name))), end), expression


@pytest.mark.parametrize(
    ("name", "expression", "begin", "missing", "extra"),
    [
        ("America/Havana", "* 1 * * 0", "2026-03-08T04:00", "05:00", None),
        ("America/Havana", "0 */2 * * 0", "2026-03-08T04:00", None, "05:00"),
        ("Australia/Lord_Howe", "30 * * * *", "2026-04-04T14:00", "15:00", None),
        ("Pacific/Chatham", "* */2 * * *", "2026-09-26T13:00", "14:15", None),
    ],
)
def test_where_cronsim_differs_is_known(name, expression, begin, missing, extra):
    """When it is mended there, docs/schedule.md has a line too many."""
    after = datetime.fromisoformat(begin).replace(tzinfo=UTC)
    until = after + timedelta(hours=2)
    ours = set(series(expression, zone_name=name).between(after, until))
    other = set(theirs(CronSim(expression, after.astimezone(zone(name))), until))
    assert ours == set(walk(name, after, until).fire_times(expression))
    assert missing is None or missing in {f"{time:%H:%M}" for time in ours - other}
    assert extra is None or extra in {f"{time:%H:%M}" for time in other - ours}


def test_cronsim_treats_a_fixed_time_with_a_second_like_a_wildcard():
    """Here a zero in front changes nothing: the time in the gap still fires, once."""
    begin = datetime(2026, 3, 8, tzinfo=UTC)
    end = begin + timedelta(hours=12)
    where = zone("America/New_York")
    assert theirs(CronSim("0 30 2 * * *", begin.astimezone(where)), end) == []
    expected = theirs(CronSim("30 2 * * *", begin.astimezone(where)), end)
    assert list(series("0 30 2 * * *", zone_name="America/New_York").between(begin, end)) == expected != []


def test_cronsim_alone_never_leaves_an_hour_of_chatham():
    """The reason why clock changes are not left to it: a replica would fire one tick for ever."""
    begin = datetime(2026, 4, 4, 13, tzinfo=UTC)
    stuck = [
        time.astimezone(UTC)
        for time in itertools.islice(CronSim("*/15 3 * * *", begin.astimezone(zone("Pacific/Chatham"))), 50)
    ]
    assert len(set(stuck)) < 10


@pytest.mark.parametrize("name", PLAIN)
def test_croniter_differs_on_the_nights_of_the_change_and_nowhere_else(name):
    """It fires a fixed time in both passes, and any other expression once more where the clocks skip its time."""
    for begin, end, change in windows(name):
        for expression in GRID[::3]:
            ours = list(series(expression, zone_name=name).between(begin, end))
            other = theirs(croniter(expression, begin.astimezone(zone(name)), ret_type=datetime), end)
            assert sorted(set(other)) == other
            assert set(ours) <= set(other), expression
            for time in set(other) - set(ours):
                assert change is not None
                if change.by > timedelta(0):
                    assert (time, parse_cron(expression).fixed) == (change.instant, False)
                else:
                    assert change.instant <= time < change.instant - change.by
                    assert parse_cron(expression).fixed


def test_croniter_loses_minutes_of_chatham():
    """Its clocks go from 03:45 back to 02:45; the second quarter of an hour is as real as the first."""
    begin, end = datetime(2026, 4, 4, 13, 50, tzinfo=UTC), datetime(2026, 4, 4, 14, 20, tzinfo=UTC)
    other = theirs(croniter("* 2 * * *", begin.astimezone(zone("Pacific/Chatham")), ret_type=datetime), end)
    ours = list(series("* 2 * * *", zone_name="Pacific/Chatham").between(begin, end))
    assert other == []
    assert ours == walk("Pacific/Chatham", begin, end).fire_times("* 2 * * *")
    assert len(ours) == 15


@pytest.mark.parametrize("expression", ["0 9 */2 * 5", "0 9 13 * */2"])
def test_croniter_takes_either_day_where_debian_takes_both(expression):
    """A day field that starts with a star counts as no restriction, so the other one decides alone."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    ours = set(itertools.islice(series(expression).between(begin, begin + timedelta(days=60)), 100))
    other = set(theirs(croniter(expression, begin, ret_type=datetime), begin + timedelta(days=60)))
    assert ours < other
    assert ours == {time for time in other if Rule(expression).matches(time.replace(tzinfo=None))}


def test_two_replicas_agree_whenever_they_were_started():
    """Every zone and expression of the grid, asked along the way and asked afresh from each moment in between."""
    for name in (*PLAIN[1:4], *MIDNIGHT[:1], *ODD):
        for begin, end, _ in windows(name):
            for expression in GRID[::5]:
                found = series(expression, zone_name=name)
                times = list(found.between(begin, end))
                moment = begin
                while moment < end:
                    assert found.after(moment) == next(
                        (time for time in times if time > moment), found.after(end)
                    )
                    moment += timedelta(minutes=97)
