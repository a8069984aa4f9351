"""The timer with APScheduler really running: every tick in time, none dropped, merged or repeated."""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest

from tickd.calendar import Instants, Interval, Series
from tickd.clock import DatabaseClock
from tickd.tick import Tick
from tickd.timer import Timer


LEAD = timedelta(milliseconds=50)
EVERY = timedelta(milliseconds=100)


class HostClock(DatabaseClock):
    """A database's clock that shows this host's time, off by as much as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.error = timedelta(0)

    def now(self) -> datetime:
        """Return the database's time."""
        return datetime.now(UTC)  # noqa: TID251  # the timer sleeps by the real clock

    def skew(self) -> timedelta:
        """Return the measured difference, which may be wrong."""
        return self.error


class Fired:
    """What the timer has called."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self.calls: list[tuple[datetime, list[Tick]]] = []
        self._news = asyncio.Event()

    def __call__(self, ticks: list[Tick]) -> None:
        """Note the call."""
        self.calls.append((self.clock.now(), ticks))
        self._news.set()

    @property
    def ticks(self) -> list[Tick]:
        """Return all ticks so far."""
        return [tick for _, ticks in self.calls for tick in ticks]

    async def wait_for(self, count: int) -> None:
        """Return when so many ticks have been fired."""
        async with asyncio.timeout(10):
            while len(self.ticks) < count:
                self._news.clear()
                await self._news.wait()


Start = Callable[..., tuple[Timer, Fired, HostClock]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a timer on some series; all are stopped in the end."""
    timers = []

    def start(
        series: Mapping[str, Series], *, error: timedelta = timedelta(0)
    ) -> tuple[Timer, Fired, HostClock]:
        clock = HostClock()
        clock.error = error
        fired = Fired(clock)
        timer = Timer(clock, lead=LEAD, fire=fired)
        timer.start(series, after=dict.fromkeys(series, clock.now()))
        timers.append(timer)
        return timer, fired, clock

    yield start
    for timer in timers:
        timer.stop()


def every(interval: timedelta = EVERY) -> Series:
    """Return a series of an interval."""
    return Series((Interval(interval),))


def once(instant: datetime) -> Series:
    """Return a series of one instant."""
    return Series((Instants((instant,)),))


def consecutive(instants: list[datetime], interval: timedelta = EVERY) -> bool:
    """Say whether each instant follows the one before by the interval."""
    return all(later - earlier == interval for earlier, later in itertools.pairwise(instants))


async def test_all_graphs_of_an_instant_are_fired_together_and_ahead_of_it(start: Start):
    """A connection can be open when the fire time comes."""
    _, fired, _ = start({"a": every(), "b": every()})

    await fired.wait_for(8)

    for called_at, ticks in fired.calls:
        assert [tick.graph for tick in ticks] == ["a", "b"]
        (instant,) = {tick.fire_time for tick in ticks}
        assert called_at >= instant - LEAD
    assert consecutive([ticks[0].fire_time for _, ticks in fired.calls])


async def test_a_loop_that_was_blocked_costs_no_tick(start: Start, caplog: pytest.LogCaptureFixture):
    """B8: APScheduler's own defaults would drop what is a second late, and merge the rest, without a word."""
    _, fired, _ = start({"a": every()})
    await fired.wait_for(1)

    threading.Event().wait(1.3)
    await fired.wait_for(14)

    instants = [tick.fire_time for tick in fired.ticks]
    assert consecutive(instants)
    assert max(len(ticks) for _, ticks in fired.calls) >= 12
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_stopped_timer_fires_nothing_more(start: Start):
    """A replica that drains must not begin anything."""
    timer, fired, _ = start({"a": every()})
    await fired.wait_for(2)

    timer.stop()
    timer.stop()
    count = len(fired.ticks)
    await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=0.35)

    assert len(fired.ticks) == count


async def test_a_wrong_clock_is_followed_when_it_has_been_measured(start: Start):
    """The timer sleeps by the host's clock; after a jump it would sleep an hour too long."""
    soon = datetime.now(UTC) + timedelta(milliseconds=300)  # noqa: TID251  # the timer sleeps by the real clock
    timer, fired, clock = start({"a": once(soon)}, error=timedelta(hours=1))
    await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=0.5)
    assert fired.ticks == []

    clock.error = timedelta(0)
    timer.follow_clock()
    await fired.wait_for(1)

    assert fired.ticks == [Tick("a", soon)]


async def test_a_timer_that_is_overdue_says_by_how_much(start: Start):
    """Alive and not firing is what a health check has to find."""
    timer, fired, _ = start({"a": every()})
    await fired.wait_for(1)
    assert timer.overdue() < timedelta(milliseconds=50)

    threading.Event().wait(0.4)

    assert timer.overdue() > timedelta(milliseconds=200)


async def test_a_calendar_that_has_come_to_its_end_is_no_trouble(start: Start):
    """The last of a list of instants has passed; the process goes on."""
    timer, fired, _ = start({"a": once(datetime.now(UTC) + timedelta(milliseconds=80))})  # noqa: TID251  # as above
    await fired.wait_for(1)

    timer.follow_clock()

    assert timer.overdue() == timedelta(0)
    assert len(fired.ticks) == 1


async def test_ten_thousand_graphs_of_one_instant_are_one_call(start: Start):
    """One entry in APScheduler, whatever the schedule's size: with one per graph it would hold the loop for long."""
    soon = datetime.now(UTC) + timedelta(milliseconds=400)  # noqa: TID251  # as above
    _, fired, _ = start({f"graph{n:05}": once(soon) for n in range(10_000)})

    await fired.wait_for(10_000)

    assert len(fired.calls) == 1
