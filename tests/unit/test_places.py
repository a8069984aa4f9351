"""Places: how long a run that has begun keeps its place to attempt."""

from dataclasses import dataclass

import pytest

from tickd import places
from tickd.places import SETTLED_AFTER, SHORT, Pace


@dataclass
class Clock:
    """A clock that stands still until it is told."""

    now: float = 1000.0

    def monotonic(self) -> float:
        """Return the seconds on it."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that places look at."""
    clock = Clock()
    monkeypatch.setattr(places, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_a_run_keeps_its_place_for_longer_where_short_ones_take_longer():
    """Or a busy machine would be given more sessions than it has places."""
    pace = Pace()
    for _ in range(50):
        pace.note(0.3)

    assert pace.settled_after == pytest.approx(0.6)


@pytest.mark.usefixtures("clock")
def test_quick_runs_take_nothing_from_the_time_for_which_a_place_is_kept():
    """It is kept for a run whose end is near, and not for one that works for minutes."""
    pace = Pace()
    assert pace.settled_after == SETTLED_AFTER
    pace.note(0.001)

    assert pace.settled_after == SETTLED_AFTER


@pytest.mark.usefixtures("clock")
def test_no_run_keeps_its_place_for_longer_than_a_short_one_takes():
    """A thousand long ones have to start within their grace."""
    pace = Pace()
    for _ in range(50):
        pace.note(0.9)
        pace.note(30.0)

    assert pace.settled_after == SHORT


def test_what_was_noted_long_ago_says_nothing_of_now(clock: Clock):
    """The herd is over, and what comes now may be long."""
    pace = Pace()
    pace.note(0.9)
    clock.now += 2 * SHORT
    assert pace.settled_after == SETTLED_AFTER

    pace.note(0.2)

    assert pace.settled_after == pytest.approx(0.4)
