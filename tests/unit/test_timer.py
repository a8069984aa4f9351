"""The calendar behind the timer: every fire time of every graph handed over once, in order, however late APScheduler asks."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickd.calendar import Instants, Interval, Series
from tickd.clock import DatabaseClock
from tickd.tick import Tick
from tickd.timer import _Calendar


TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEAD = timedelta(milliseconds=300)


class SkewedClock(DatabaseClock):
    """A clock whose difference to the host's is as the test says."""

    def __init__(self, skew: timedelta = timedelta(0)) -> None:
        super().__init__()
        self.difference = skew

    def skew(self) -> timedelta:
        """Return what was said."""
        return self.difference


class Asker:
    """Asks a calendar what APScheduler's one entry asks: `_get_run_times`, the executor, then the next wake-up."""

    def __init__(self, calendar: _Calendar) -> None:
        self.calendar = calendar
        self.next: datetime | None = None
        self.ticks: list[Tick] = []

    def begin(self) -> None:
        """Ask as APScheduler does of a new entry, and of a rescheduled one."""
        self.next = self.calendar.get_next_fire_time(None, TEN)

    def wake(self, now: datetime) -> None:
        """Look at the clock once: hand over all that is due by it."""
        wakes = []
        upcoming = self.next
        while upcoming is not None and upcoming <= now:
            wakes.append(upcoming)
            upcoming = self.calendar.get_next_fire_time(upcoming, now)
        if wakes:
            self.ticks += self.calendar.take(wakes)
            self.next = self.calendar.get_next_fire_time(wakes[-1], now)


def calendar_of(series: Mapping[str, Series], clock: DatabaseClock | None = None) -> _Calendar:
    """Return a calendar of these series, from ten o'clock on."""
    calendar = _Calendar(clock or SkewedClock(), LEAD)
    calendar.fill(series, dict.fromkeys(series, TEN))
    return calendar


def at(*seconds: int) -> Series:
    """Return a series of these seconds after ten."""
    return Series((Instants(tuple(TEN + n * SECOND for n in sorted(set(seconds)))),))


SERIES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 20), max_size=8).map(lambda s: at(*s)), min_size=1
)
# What may happen between two questions: time passes, the host's clock steps, the entry is rescheduled.
STEPS = st.lists(st.tuples(st.sampled_from(["wake", "step", "reschedule"]), st.integers(-4, 9)), max_size=20)


def merged(series: Mapping[str, Series]) -> list[Tick]:
    """Return what the calendar has to hand over, worked out the slow way."""
    pairs = [
        (instant, graph) for graph, one in series.items() for instant in one.between(TEN, TEN + 60 * SECOND)
    ]
    return [Tick(graph, instant) for instant, graph in sorted(pairs)]


@given(SERIES, STEPS)
def test_nothing_is_dropped_merged_or_repeated_whatever_the_clock_does(
    series: dict[str, Series], steps: list[tuple[str, int]]
):
    """I5: APScheduler's own ways of losing ticks are what the calendar is there to prevent."""
    clock = SkewedClock()
    asker = Asker(calendar_of(series, clock))
    asker.begin()
    now = TEN

    for what, seconds in steps:
        if what == "wake":
            now += seconds * SECOND
            asker.wake(now)
        elif what == "step":
            now += seconds * SECOND
            clock.difference += seconds * SECOND
        else:
            asker.begin()
        assert asker.ticks == merged(series)[: len(asker.ticks)]

    asker.begin()
    asker.wake(TEN + 60 * SECOND + clock.difference)
    assert asker.ticks == merged(series)


@given(SERIES)
def test_ticks_come_in_the_order_of_their_instants_one_wake_at_a_time(series: dict[str, Series]):
    """A timer in time wakes once per instant, and hands over all graphs due at it together."""
    calendar = calendar_of(series)
    asker = Asker(calendar)
    asker.begin()
    for instant in sorted({tick.fire_time for tick in merged(series)}):
        assert asker.next == instant - LEAD
        before = len(asker.ticks)
        asker.wake(instant - LEAD)
        assert {tick.fire_time for tick in asker.ticks[before:]} == {instant}

    assert asker.next is None
    assert asker.ticks == merged(series)


def test_a_question_that_is_asked_again_has_the_same_answer():
    """APScheduler asks when it adds the entry, when it wakes and when it goes to sleep again."""
    calendar = calendar_of({"a": at(1, 2), "b": at(2)})

    first = [calendar.get_next_fire_time(None, TEN) for _ in range(3)]
    second = [calendar.get_next_fire_time(first[0], TEN) for _ in range(3)]

    assert first == [TEN + SECOND - LEAD] * 3
    assert second == [TEN + 2 * SECOND - LEAD] * 3
    assert calendar.take([TEN + SECOND - LEAD]) == [Tick("a", TEN + SECOND)]


def test_the_wake_up_is_by_the_hosts_clock_and_ahead_of_the_fire_time():
    """APScheduler sleeps by a clock that is wrong; fire times are of the database's."""
    clock = SkewedClock(timedelta(seconds=7))
    calendar = calendar_of({"a": at(10)}, clock)

    assert calendar.get_next_fire_time(None, TEN) == TEN + 17 * SECOND - LEAD


def test_a_step_of_the_hosts_clock_moves_the_wake_up_and_nothing_else():
    """After the step the entry is rescheduled; the tick is the same tick."""
    clock = SkewedClock()
    asker = Asker(calendar_of({"a": at(10, 20)}, clock))
    asker.begin()
    clock.difference = timedelta(seconds=-30)
    asker.begin()

    assert asker.next == TEN - 20 * SECOND - LEAD
    asker.wake(TEN - 20 * SECOND)
    assert asker.ticks == [Tick("a", TEN + 10 * SECOND)]


@pytest.mark.parametrize("series", [{}, {"a": at()}, {"a": at(), "b": Series(())}])
def test_a_calendar_without_fire_times_never_wakes(series: dict[str, Series]):
    """All graphs may be disabled, or their last instant has passed."""
    assert calendar_of(series).get_next_fire_time(None, TEN) is None


def test_a_long_sleep_costs_as_much_as_the_ticks_that_passed():
    """A laptop that slept an hour wakes to 7200 ticks; each of them gets its line, and the loop is not held long."""
    calendar = calendar_of({name: Series((Interval(SECOND),)) for name in ("a", "b")})
    asker = Asker(calendar)
    asker.begin()

    asker.wake(TEN + 3600 * SECOND)

    assert len(asker.ticks) == 2 * 3600
    assert calendar._told.keys() == {TEN + 3600 * SECOND - LEAD, TEN + 3601 * SECOND - LEAD}
