import re
import time
from datetime import datetime

import pytest

from tests.fire_times import first, series
from tickd.cron import NICKNAMES, parse_cron


def _after_new_year(expression: str, expected: str) -> bool:
    return first(series(expression), "2026-01-01", len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 9 * * 0", "01-04T09:00 01-11T09:00 01-18T09:00"),
        ("0 9 * * 7", "01-04T09:00 01-11T09:00 01-18T09:00"),
        ("30 7 * * 4", "01-01T07:30 01-08T07:30 01-15T07:30"),
        ("0 9 * * 1-5", "01-01T09:00 01-02T09:00 01-05T09:00 01-06T09:00"),
        ("0 9 * * 5-7", "01-02T09:00 01-03T09:00 01-04T09:00 01-09T09:00"),
        ("0 9 * * */2", "01-01T09:00 01-03T09:00 01-04T09:00 01-06T09:00"),
        ("15 10,12 * * 1,7", "01-04T10:15 01-04T12:15 01-05T10:15 01-05T12:15"),
        ("0 9 * * sun-thu", "01-01T09:00 01-04T09:00 01-05T09:00 01-06T09:00"),
        ("0 9 * * SUN,Mon", "01-04T09:00 01-05T09:00 01-11T09:00"),
    ],
)
def test_weekdays_are_crontabs_own(expression, expected):
    """0 and 7 are Sunday: APScheduler's reading moves every line that is pasted from a crontab by a day."""
    assert _after_new_year(expression, expected)


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 9 * * mon#2", "2026-01-01", "01-12T09:00 02-09T09:00 03-09T09:00"),
        ("0 9 * * mon-fri/2", "2026-01-01", "01-02T09:00 01-05T09:00 01-07T09:00 01-09T09:00"),
        ("0 9 1 jan-dec/2 *", "2026-01-02", "03-01T09:00 05-01T09:00 07-01T09:00"),
        ("0 9 * * 5L", "2026-01-01", "01-30T09:00 02-27T09:00 03-27T09:00"),
        ("0 9 L * *", "2026-01-01", "01-31T09:00 02-28T09:00 03-31T09:00"),
        ("0 9 LW * *", "2026-01-01", "01-30T09:00 02-27T09:00 03-31T09:00"),
        ("30 59 23 31 12 *", "2026-01-01", "12-31T23:59:30 2027-12-31T23:59:30"),
        ("*/20 * * * * *", "2026-01-01", "01-01T00:00:20 01-01T00:00:40 01-01T00:01 01-01T00:01:20"),
        ("5/20 * * * *", "2026-01-01", "01-01T00:05 01-01T00:25 01-01T00:45 01-01T01:05"),
    ],
)
def test_a_suffix_is_honoured(expression, after, expected):
    """APScheduler drops what stands behind a name, and runs the second Monday's job every Monday."""
    assert first(series(expression), after, len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 9 13 * 5", "2026-01-01", "01-02T09:00 01-09T09:00 01-13T09:00 01-16T09:00 01-23T09:00 01-30T09:00"),
        ("0 0 1,15 * 1", "2026-05-01T00:30Z", "05-04T00:00 05-11T00:00 05-15T00:00 05-18T00:00 05-25T00:00 06-01T00:00"),
        ("0 9 1-7 * 1", "2026-05-01", "05-01T09:00 05-02T09:00 05-03T09:00 05-04T09:00 05-05T09:00 05-06T09:00 05-07T09:00 05-11T09:00"),
        ("0 9 */2 * 5", "2026-01-01", "01-09T09:00 01-23T09:00 02-13T09:00 02-27T09:00"),
        ("0 0 30 2 1", "2026-01-01", "02-02T00:00 02-09T00:00"),
    ],
)  # fmt: skip
def test_day_of_month_or_day_of_week(expression, after, expected):
    """crontab(5): either is enough, unless one of them starts with a star."""
    assert first(series(expression), after, len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("*/45 * * * *", "2026-01-01", "01-01T00:45 01-01T01:00 01-01T01:45"),
        ("*/7 * * * *", "2026-01-01T00:50Z", "01-01T00:56 01-01T01:00 01-01T01:07"),
        ("0 */5 * * *", "2026-01-01T16:00Z", "01-01T20:00 01-02T00:00 01-02T05:00"),
    ],
)
def test_a_step_that_does_not_divide_begins_again_at_the_top(expression, after, expected):
    """Every cron does this, and nobody expects it; so it also comes with a doubt, below."""
    assert first(series(expression), after, len(expected.split())) == expected


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 0 29 2 *", "2026-01-01", "2028-02-29T00:00 2032-02-29T00:00"),
        ("0 0 29 2 *", "2096-03-01", "2104-02-29T00:00"),
        ("0 0 29 2 */7", "2088-03-01", "2128-02-29T00:00"),
        ("0 9 31 * *", "2026-01-01", "01-31T09:00 03-31T09:00 05-31T09:00 07-31T09:00"),
    ],
)
def test_rare_days_are_found(expression, after, expected):
    """The longest wait there is, 29 February on one weekday over 2100, is forty years."""
    assert first(series(expression), after, len(expected.split())) == expected


@pytest.mark.parametrize(("nickname", "meaning"), NICKNAMES.items())
def test_a_nickname_is_its_expression(nickname, meaning):
    """They are what people write instead of a line that they would have to look up."""
    assert parse_cron(nickname).fields == parse_cron(meaning).fields
    assert parse_cron(nickname.upper()).fields == parse_cron(meaning).fields


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("@reboot", "@reboot means nothing on several replicas: use a time, or `tickd fire` when you deploy"),
        ("@every 5m", "'@every 5m' is not cron: use the key 'every', for instance every: 5m"),
        ("@fortnightly", "'@fortnightly' is not one of @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly"),
        ("* * * *", "'* * * *' has 4 fields; cron has 5 (minute hour day-of-month month day-of-week), or 6 with seconds first"),
        ("0 0 12 ? * MON 2026", "has 7 fields; cron has 5 (minute hour day-of-month month day-of-week), or 6 with seconds first, without a command"),
        ("", "'' has 0 fields"),
        ("0 5 * * * root", "day-of-week: 'root' is not understood"),
        ("*/5 * * * * /bin/true", "day-of-week: '/bin/true' is not understood"),
        ("CRON_TZ=Europe/Oslo 0 9 * * *", "'cron_tz=europe/oslo' is a line of its own in a crontab; here the zone is the key 'timezone'"),
        ("0 9 lastday * *", "day-of-month: 'lastday' is not understood; 1-31 are; the last day of the month is L in day-of-month"),
        ("0 9 * * lastfri", "the last Friday is 5L in day-of-week"),
        ("0 9 L/2 * *", "day-of-month: 'l/2' is not understood"),
        ("0 9 LW/2 * *", "day-of-month: 'lw/2' is not understood"),
        ("0 9 15W * *", "day-of-month: '15w' is not understood; 1-31 are; of Quartz's W only LW, the last weekday, is known"),
        ("0 9 * * friL", "day-of-week: 'fril' is not understood"),
        ("0 9 * * mon#6", "day-of-week: 'mon#6' is not understood"),
        ("0 9 * * mon#2/2", "day-of-week: 'mon#2/2' is not understood"),
        ("0 9 ? * 1", "day-of-month: '?' is not understood; ? is Quartz's: write *"),
        ("H 9 * * *", "minute: 'h' is not understood; 0-59 are; a random or hashed minute differs between replicas: use the key 'jitter'"),
        ("0~30 9 * * *", "minute: '0~30' is not understood; a random or hashed minute"),
        ("0 9 * * fri-sun", "day-of-week: 'fri-sun' runs backwards; Sunday is 0 and 7: write 5-7"),
        ("0 9 * * sat-mon", "day-of-week: 'sat-mon' runs backwards; write 6-7,0-1"),
        ("0 22-6 * * *", "hour: '22-6' runs backwards; write 22-23,0-6"),
        ("0 5-4 * * *", "hour: '5-4' runs backwards; write 5-23,0-4"),
        ("*/0 * * * *", "minute: '*/0' steps by 0: a step is 1 or more"),
        ("60 * * * *", "minute: '60' is out of range; 0-59 is the range"),
        ("0 24 * * *", "hour: '24' is out of range; 0-23 is the range"),
        ("0 0 0 * *", "day-of-month: '0' is out of range; 1-31 is the range"),
        ("0 0 * 13 *", "month: '13' is out of range; 1-12 is the range"),
        ("0 0 * * 8", "day-of-week: '8' is out of range; 0-7 is the range"),
        ("0 0 * monday *", "month: 'monday' is not understood; 1-12 or jan-dec are"),
        ("1,,2 * * * *", "minute: '' is not understood"),
        ("1- * * * *", "minute: '1-' is not understood"),
        ("5-1-2 * * * *", "minute: '5-1-2' is not understood"),
        ("*/5/2 * * * *", "minute: '*/5/2' is not understood"),
        ("-5 * * * *", "minute: '-5' is not understood"),
        ("*/5\u00a0* * * *", "holds the character U+00A0: type the expression afresh, in plain ASCII"),
        ("0 9 * * fr\u0131", "holds the character U+0131"),
        ("1" * 5000 + " * * * *", "minute: '1111111111"),
        ("*/" + "9" * 5000 + " * * * *", "is not understood"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_dialect_is_refused_by_field_and_text(expression, message):
    """A suffix that is let through and dropped runs far too often; a refusal says what to write instead."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_cron(expression)


@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 30,31 2 */2"])
def test_a_day_that_no_month_has_never_fires(expression):
    """It would be accepted, and then nothing, for ever."""
    begin = time.perf_counter()
    with pytest.raises(ValueError, match="never fires: no month of it has such a day"):
        parse_cron(expression)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    ("expression", "doubt"),
    [
        ("*/45 * * * *", "minute '*/45': 45 does not divide the field evenly, it fires at 0, 45 and begins again; for even gaps use 'every'"),
        ("*/7 * * * *", "minute '*/7': 7 does not divide"),
        ("7/25 * * * *", "it fires at 7, 32, 57 and begins again"),
        ("0 */5 * * *", "hour '*/5': 5 does not divide the field evenly, it fires at 0, 5, 10, 15, 20 and begins again"),
        ("0 0-23/5 * * *", "hour '0-23/5': 5 does not divide"),
        ("0 9 * * */2", "day-of-week '*/2': 2 does not divide the field evenly, it fires at 0, 2, 4, 6 and begins again"),
        ("0 9 */2 * *", "day-of-month '*/2': 2 does not divide"),
        ("0 9 1 */5 *", "month '*/5': 5 does not divide the field evenly, it fires at 1, 6, 11 and begins again"),
        ("*/90 * * * *", "minute '*/90': the step is as long as the field, so it fires at 0 only"),
        ("0 */24 * * *", "hour '*/24': the step is as long as the field, so it fires at 0 only"),
        ("* 9 * * *", "minute is * and hour is 9: it fires every minute of that hour; write 0 for once"),
        ("* 30 9 * * *", "second is * and minute is not: it fires 60 times in each such minute; write 0 for once"),
        ("0 9 13 * 5", "day-of-month '13' and day-of-week '5': as in every cron, a day matches when either does, not both"),
        ("0 9 1-7 * 1", "for the first Monday of a month write mon#1"),
        ("0 9 1-31/2 * */7", "one starts with *, so, as in Debian's cron, a day must match both"),
    ],
)  # fmt: skip
def test_what_a_person_probably_did_not_mean_is_said(expression, doubt):
    """Each of these is legal, and a surprise."""
    assert any(doubt in each for each in parse_cron(expression).doubts())


@pytest.mark.parametrize(
    "expression",
    ["*/5 * * * *", "0 */6 * * *", "0 9 * * mon-fri/2", "1-59/7 * * * *", "* * * * *", "* 9-17 * * *", "* * * * * *", "@weekly",
     "0 9 L * *", "0 9 * * mon#1", "5/20 * * * *", "0 0 1 */3 *", "*/1 * * * *"],
)  # fmt: skip
def test_what_is_usual_raises_no_doubt(expression):
    """A warning that always comes is not read."""
    assert list(parse_cron(expression).doubts()) == []


def test_an_expression_says_itself_in_words():
    """`tickd next --explain` shows it; the words are cronsim's."""
    assert parse_cron("0 9 * * mon-fri").in_words() == "At 09:00 on Monday through Friday"
    assert parse_cron("*/10 * * * * *").in_words() == "Every 10th second of every minute"
    assert parse_cron("@hourly").in_words() == "At the start of every hour"


def test_asking_does_not_move_the_expression():
    """It is cached, shared by graphs, and asked by a reload in another thread; the engine below it is a cursor."""
    cron = parse_cron("0 9 * * *")
    assert cron is parse_cron("0 9 * * *")
    before = cron.engine.dt
    assert cron.next_wall_clock(datetime(2030, 1, 1)) == datetime(2030, 1, 1, 9)  # noqa: DTZ001  # a wall clock
    assert cron.engine.dt == before


def test_the_last_year_there_is_ends_the_series():
    """Looking on from there leaves the calendar of datetime."""
    assert parse_cron("0 0 29 2 *").next_wall_clock(datetime(9999, 12, 31)) is None  # noqa: DTZ001  # a wall clock
