import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fire_times import first, following, instant, series
from tickd.calendar import EPOCH, Instants, Interval, Series, WallClock, clock_changes, zone
from tickd.cron import parse_cron


NEW_YORK, BERLIN, LORD_HOWE, CHATHAM, HAVANA = (
    "America/New_York",
    "Europe/Berlin",
    "Australia/Lord_Howe",
    "Pacific/Chatham",
    "America/Havana",
)


@pytest.mark.parametrize(
    ("expression", "where", "after", "expected"),
    [
        ("0 0 * * *", NEW_YORK, "2026-03-07T06:00Z", "03-08T05:00 03-09T04:00 03-10T04:00"),
        ("0 0 * * *", BERLIN, "2026-03-28T00:00Z", "03-28T23:00 03-29T22:00 03-30T22:00"),
        ("30 0 * * mon-fri", NEW_YORK, "2026-03-06T00:00Z", "03-06T05:30 03-09T04:30 03-10T04:30"),
        ("0 0 * * 1", NEW_YORK, "2026-03-01T06:00Z", "03-02T05:00 03-09T04:00 03-16T04:00"),
        ("0 0 * * *", NEW_YORK, "2026-03-08T12:00Z", "03-09T04:00 03-10T04:00"),
    ],
)
def test_midnight_ticks_survive_the_spring_change(expression, where, after, expected):
    """APScheduler loses the tick of the day after, though its hour is not in the gap."""
    assert first(series(expression, zone_name=where), after, len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "where", "after", "expected"),
    [
        ("0 2,3 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-08T07:00 03-09T06:00 03-09T07:00"),
        (
            "*/15 2-3 * * *",
            NEW_YORK,
            "2026-03-08T00:00Z",
            "03-08T07:00 03-08T07:15 03-08T07:30 03-08T07:45 03-09T06:00",
        ),
        ("30 2 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-08T07:00 03-09T06:30"),
        ("0 30 2 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-08T07:00 03-09T06:30"),
        ("10,20 30 2 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-08T07:00 03-09T06:30:10"),
        ("15 2,3 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-08T07:00 03-08T07:15 03-09T06:15"),
        ("*/30 * * * *", NEW_YORK, "2026-03-08T06:00Z", "03-08T06:30 03-08T07:00 03-08T07:30 03-08T08:00"),
        ("*/5 2 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-09T06:00 03-09T06:05"),
        ("*/30 30 2 * * *", NEW_YORK, "2026-03-08T00:00Z", "03-09T06:30 03-09T06:30:30"),
        ("0 0 * * *", HAVANA, "2026-03-07T06:00Z", "03-08T05:00 03-09T04:00"),
        ("15 2 * * *", LORD_HOWE, "2026-10-03T00:00Z", "10-03T15:30 10-04T15:15"),
        ("30 12 30 12 *", "Pacific/Apia", "2011-12-29", "2011-12-30T10:00 2012-12-29T22:30"),
    ],
)
def test_a_fixed_time_in_the_gap_fires_once_right_after_it(expression, where, after, expected):
    """Debian's rule: the work is done that day, and never twice at one instant; a gap can be a whole day long."""
    assert first(series(expression, zone_name=where), after, len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "where", "after", "expected"),
    [
        ("30 1 * * *", NEW_YORK, "2026-10-31T00:00Z", "10-31T05:30 11-01T05:30 11-02T06:30"),
        ("30 2 * * *", BERLIN, "2026-10-24T00:00Z", "10-24T00:30 10-25T00:30 10-26T01:30"),
        ("0 30 1 * * *", NEW_YORK, "2026-10-31T00:00Z", "10-31T05:30 11-01T05:30 11-02T06:30"),
        ("30 1 * * *", NEW_YORK, "2026-11-01T06:15Z", "11-02T06:30"),
        ("*/30 * * * *", NEW_YORK, "2026-11-01T04:30Z", "11-01T05:00 11-01T05:30 11-01T06:00 11-01T06:30 11-01T07:00"),
        ("5,35 * * * *", BERLIN, "2026-10-24T23:40Z", "10-25T00:05 10-25T00:35 10-25T01:05 10-25T01:35 10-25T02:05"),
        ("*/30 1 * * *", NEW_YORK, "2026-11-01T00:00Z", "11-01T05:00 11-01T05:30 11-01T06:00 11-01T06:30 11-02T06:00"),
        ("30 * * * *", LORD_HOWE, "2026-04-04T14:00Z", "04-04T14:30 04-04T15:00 04-04T16:00"),
        ("*/15 3 * * *", CHATHAM, "2026-04-04T13:00Z", "04-04T13:15 04-04T13:30 04-04T13:45 04-04T14:15 04-04T14:30 04-04T14:45 04-04T15:00 04-05T14:15"),
    ],
)  # fmt: skip
def test_the_repeated_hour_fires_a_fixed_time_once_and_a_wildcard_at_every_real_instant(
    expression, where, after, expected
):
    """A daily job must not run twice, and a half-hourly one must not stall for an hour."""
    assert first(series(expression, zone_name=where), after, len(expected.split())) == expected


def test_the_two_passes_of_an_hour_are_different_instants():
    """In local time they look alike; the identity of a tick is UTC."""
    passes = first(series("30 * * * *", zone_name=NEW_YORK), "2026-11-01T05:00Z", 2).split()
    assert passes == ["11-01T05:30", "11-01T06:30"]
    local = [instant(f"2026-{time}Z").astimezone(zone(NEW_YORK)).strftime("%H:%M") for time in passes]
    assert local == ["01:30", "01:30"]


def test_an_expression_that_only_ever_falls_into_the_gap_never_fires():
    """The second Sunday of March at 2 is skipped in New York each year; the search has to end all the same."""
    assert series("*/5 2 * 3 0#2", zone_name=NEW_YORK).after(instant("2026-01-01")) is None


def test_a_gap_that_swallows_a_year_is_stepped_over():
    """The tick after it is a year away, beyond two changes of the clocks."""
    found = series("*/30 2 8 3 *", zone_name=NEW_YORK)
    assert first(found, "2026-01-01", 2) == "2027-03-08T07:00 2027-03-08T07:30"


EXPRESSIONS = st.sampled_from(
    ["0 0 * * *", "30 1 * * *", "30 2 * * *", "*/15 2-3 * * *", "5,35 * * * *", "0 2,3 * * *", "*/7 * * * *", "45 */2 * * 0",
     "*/20 30 1,2 * * *", "0 0 L * *", "0 12 13 * 5", "59 23 * * mon-fri"]
)  # fmt: skip
ZONES = st.sampled_from(
    ["UTC", NEW_YORK, BERLIN, LORD_HOWE, CHATHAM, HAVANA, "Africa/Casablanca", "America/Nuuk"]
)
# Around both changes of the clocks, where whatever can go wrong does.
MOMENTS = st.one_of(
    *(
        st.datetimes(begin, begin + timedelta(days=4), timezones=st.just(UTC))
        for begin in (datetime(2026, 3, 7), datetime(2026, 3, 27), datetime(2026, 4, 3), datetime(2026, 10, 23), datetime(2026, 10, 30))  # noqa: DTZ001  # hypothesis adds the zone
    )
)  # fmt: skip
INTERVALS = st.timedeltas(timedelta(milliseconds=100), timedelta(days=400))


@st.composite
def calendars(draw: st.DrawFn) -> Series:
    """Any mixture of triggers."""
    where = zone(draw(ZONES))
    triggers: list[WallClock | Interval | Instants] = [
        WallClock(parse_cron(text), where) for text in draw(st.lists(EXPRESSIONS, max_size=3))
    ]
    triggers += [
        Interval(every, anchor) for every, anchor in draw(st.lists(st.tuples(INTERVALS, MOMENTS), max_size=1))
    ]
    triggers.append(Instants(tuple(sorted(set(draw(st.lists(MOMENTS, max_size=5)))))))
    return Series(tuple(triggers))


def _some(found: Series, after: datetime, count: int = 6) -> list[datetime]:
    return [time for time, _ in zip(following(found, after), range(count), strict=False)]


@given(calendars(), MOMENTS)
@settings(max_examples=60, deadline=None)
def test_fire_times_strictly_grow(found, after):
    """A tick that is handed out twice, or out of order, breaks everything above."""
    times = [after, *_some(found, after)]
    assert all(earlier < later for earlier, later in itertools.pairwise(times))


@given(calendars(), MOMENTS, st.data())
@settings(max_examples=60, deadline=None)
def test_asking_from_any_later_moment_gives_the_same_series(found, after, data):
    """Replicas start at different moments, and are restarted; their ticks must be the same all the same."""
    times = _some(found, after)
    if not times:
        return
    later = data.draw(
        st.datetimes(after.replace(tzinfo=None), times[-1].replace(tzinfo=None), timezones=st.just(UTC))
    )
    still = [time for time in times if time > later]
    assert _some(found, later)[: len(still)] == still


@given(st.lists(calendars(), min_size=1, max_size=3), MOMENTS)
@settings(max_examples=30, deadline=None)
def test_merged_triggers_are_their_union(parts, after):
    """No instant twice, none lost."""
    merged = Series(tuple(trigger for part in parts for trigger in part.triggers))
    separate = sorted({time for part in parts for time in _some(part, after)})
    assert _some(merged, after) == separate[:6]


@given(INTERVALS, MOMENTS, MOMENTS)
@settings(max_examples=60, deadline=None)
def test_an_interval_keeps_its_distance_from_the_anchor(every, anchor, after):
    """Every replica computes the same instants, before the anchor too; nothing hangs on when it was started."""
    time = Interval(every, anchor).after(after)
    assert time is not None
    assert after < time <= after + every
    assert (time - anchor) % every == timedelta(0)


def test_an_interval_knows_no_clock_changes():
    """A day of elapsed time is 24 hours, also on the night of the change."""
    times = _some(Series((Interval(timedelta(days=1)),)), instant("2026-03-06"), 4)
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {timedelta(days=1)}
    assert Interval(timedelta(seconds=30)).after(EPOCH) == EPOCH + timedelta(seconds=30)


def test_instants_fire_once_each_and_then_no_more():
    """A list ends; the timer has to hear that from None."""
    times = tuple(instant(f"2026-05-0{day}") for day in (1, 2, 3))
    assert first(Series((Instants(times),)), "2026-05-01", 5) == "05-02T00:00 05-03T00:00"


def test_no_trigger_means_no_fire_time():
    """min() of nothing would raise."""
    assert Series(()).after(EPOCH) is None


@pytest.mark.parametrize(
    "after",
    [
        datetime(9999, 12, 31, 23, 59, tzinfo=UTC),
        datetime(9960, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ],
)
@pytest.mark.parametrize("where", ["UTC", NEW_YORK, "Pacific/Kiritimati"])
def test_the_ends_of_the_calendar_raise_nothing(after, where):
    """An instant there has no local time in some zone; nobody needs one, but nobody needs a traceback either."""
    several = Series(
        (WallClock(parse_cron("30 2 29 2 *"), zone(where)), WallClock(parse_cron("* * * * *"), zone(where)))
    )
    several.after(after)
    Series((Interval(timedelta(days=4000)),)).after(after)


def test_between_is_closed_at_its_end():
    """`tickd next --until T` includes T; the sweep for missed ticks relies on the same."""
    found = series("0 * * * *")
    assert list(found.between(instant("2026-01-01T00:00Z"), instant("2026-01-01T02:00Z"))) == [
        instant("2026-01-01T01:00Z"),
        instant("2026-01-01T02:00Z"),
    ]


@pytest.mark.parametrize("name", ["Europe/Oslo", "UTC", " Europe/Oslo ", "Europe/Oslo\u00a0", "Etc/GMT-5"])
def test_a_zone_is_known_by_its_iana_name(name):
    """Spaces around it are no fault: they are invisible."""
    assert zone(name).key == name.strip()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Europe/Berln", "'Europe/Berln' is not an IANA time zone; did you mean 'Europe/Berlin'?"),
        ("utc", "'utc' is not an IANA time zone; did you mean 'UTC'?"),
        ("europe/oslo", "did you mean 'Europe/Oslo'?"),
        ("../etc/passwd", "'../etc/passwd' is not an IANA time zone, such as Europe/Oslo or UTC"),
        ("", "'' is not an IANA time zone, such as"),
        ("localtime", "'localtime' is not an IANA time zone"),
        ("right/Europe/Oslo", "'right/Europe/Oslo' is not an IANA time zone"),
        ("Europe/\0", "is not an IANA time zone"),
    ],
)
def test_any_other_zone_is_refused_with_the_nearest(name, message):
    """Neither a file of the host nor a guess: the name is one of the list."""
    with pytest.raises(ValueError, match="is not an IANA time zone") as refusal:
        zone(name)
    assert message in str(refusal.value)


def test_zones_are_those_of_the_package_not_of_the_host(monkeypatch):
    """A host with older rules would fire at other instants than its neighbours."""
    monkeypatch.setattr("zoneinfo.TZPATH", ())
    ZoneInfo.clear_cache()
    oslo = zone.__wrapped__("Europe/Oslo")  # as if for the first time
    assert instant("2026-05-04T07:00Z").astimezone(oslo).hour == 9


def test_changes_of_the_clocks_are_found_with_what_they_do():
    """`tickd next --explain` points each of them out."""
    changes = list(clock_changes(zone(NEW_YORK), instant("2026-01-01"), instant("2026-12-31")))
    assert [(change.instant, change.by) for change in changes] == [
        (instant("2026-03-08T07:00Z"), timedelta(hours=1)),
        (instant("2026-11-01T06:00Z"), timedelta(hours=-1)),
    ]
    assert f"{changes[0].wall_clock_after:%H:%M}" == "03:00"
    assert list(clock_changes(zone("UTC"), instant("2020-01-01"), instant("2030-01-01"))) == []
    half = list(clock_changes(zone(LORD_HOWE), instant("2026-01-01"), instant("2026-05-01")))
    assert [change.by for change in half] == [timedelta(minutes=-30)]
