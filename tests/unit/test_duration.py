"""Lengths of time as people write them."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickd.duration import duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
        ("1.5h", timedelta(minutes=90)),
        ("0s", timedelta(0)),
        (" 30 s ", timedelta(seconds=30)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, duration: timedelta):
    """These are the documented forms."""
    assert parse_duration(text) == duration


@pytest.mark.parametrize(
    "text",
    ["", "30", "s", "-1s", "1 week", "1h30m", "1e3s", "\u0661s", "30S", "1.s", ".5s", "9999999999s", "inf s"],
)
def test_what_is_not_a_duration_is_refused_with_an_example(text: str):
    """A bare number could mean seconds or milliseconds; a guess would be wrong for somebody."""
    with pytest.raises(ValueError, match=r"is not a duration such as 500ms, 30s, 10m, 2h or 1d"):
        parse_duration(text)


def test_the_longest_text_is_a_duration():
    """Python's own OverflowError would come out as a traceback."""
    assert parse_duration("999999999.999999d") <= timedelta.max


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(days=2), "2d"),
        (timedelta(hours=36), "36h"),
        (timedelta(minutes=90), "90m"),
        (timedelta(seconds=90), "90s"),
        (timedelta(milliseconds=1500), "1500ms"),
        (timedelta(milliseconds=1_234_567), "1234567ms"),
        (timedelta(seconds=1, microseconds=20), "1000.020ms"),
        (timedelta(0), "0ms"),
    ],
)
def test_a_duration_is_written_in_the_largest_unit_that_divides_it(duration: timedelta, text: str):
    """People read it in messages, beside what they wrote themselves."""
    assert duration_text(duration) == text


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=11)))
def test_a_written_duration_is_read_back(duration: timedelta):
    """What a message shows may be pasted into the schedule."""
    assert parse_duration(duration_text(duration)) == duration
