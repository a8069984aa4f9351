"""Fire times that nobody fired, and failed ticks: what is made up for, what is told, and when it is tried again."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickd.calendar import Interval, Series
from tickd.entry import Entry, Retries
from tickd.policy import Unfired, fires_after, retry_pause, unfired
from tickd.schedule import parse
from tickd.tick import Tick


NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
EVERY_5_S = Series((Interval(5 * SECOND),))
TWICE = Retries.model_validate({"attempts": "2", "backoff": "4s", "max_backoff": "1h"})


def at(*seconds: float) -> tuple[datetime, ...]:
    """Return the instants so many seconds after noon."""
    return tuple(NOON + second * SECOND for second in seconds)


def two(first: float, last: float) -> tuple[datetime, datetime]:
    """Return two instants, so many seconds after noon."""
    return NOON + first * SECOND, NOON + last * SECOND


def found(
    missed: str, *, since: float = 0, until: float = 20, catch_up: timedelta = HOUR, most: int = 1000
) -> Unfired:
    """Return what becomes of ticks every five seconds, between so many seconds after noon."""
    first, last = two(since, until)
    return unfired(EVERY_5_S.after, since=first, until=last, missed=missed, catch_up=catch_up, most=most)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("all", Unfired(run=at(5, 10, 15, 20))),
        ("latest", Unfired(run=at(20), coalesced=at(5, 10, 15))),
        ("skip", Unfired(missed=at(5, 10, 15, 20))),
    ],
)
def test_each_policy_says_what_becomes_of_every_fire_time(missed: str, expected: Unfired):
    """The three words of the schedule, with their exact meaning."""
    assert found(missed) == expected


def test_the_time_begins_after_its_first_instant_and_includes_its_last():
    """The last word of the old fleet and the first tick of the new one meet here: neither twice nor not at all."""
    assert found("all", since=5, until=10).run == at(10)
    assert found("all", since=10, until=15).run == at(15)
    assert found("all", since=5.001, until=9.999) == Unfired()


def test_nothing_happened_in_no_time():
    """A restart between two fire times has nothing to account for."""
    assert found("all", since=1, until=4) == Unfired()
    assert found("all", since=20, until=0) == Unfired()


def test_a_series_that_has_ended_has_missed_nothing():
    """`at: [...]` runs out, and `after` then says None."""
    assert (
        unfired(lambda _: None, since=NOON, until=NOON + HOUR, missed="all", catch_up=HOUR, most=9)
        == Unfired()
    )


@pytest.mark.parametrize("missed", ["all", "latest", "skip"])
def test_what_is_older_than_the_window_is_one_stretch(missed: str):
    """Two weeks of five-second ticks would be 241,920 rows, or runs."""
    outcome = found(missed, until=14 * 86_400, catch_up=10 * SECOND)

    assert outcome.before == two(5, 14 * 86_400 - 5)
    assert {*outcome.run, *outcome.coalesced, *outcome.missed} == set(at(14 * 86_400 - 5, 14 * 86_400))


def test_no_more_than_the_newest_are_kept():
    """What matters after a long absence is the present; the oldest are told of together."""
    assert found("all", until=30, most=2) == Unfired(run=at(25, 30), before=two(5, 25))
    assert found("latest", until=30, most=1) == Unfired(run=at(30), before=two(5, 30))


def test_a_long_absence_is_looked_at_from_its_end():
    """One million ticks to walk through are seconds in which a starting replica answers nobody."""
    asked = []

    def after(instant: datetime) -> datetime | None:
        asked.append(instant)
        return EVERY_5_S.after(instant)

    since, until = two(0, 60 * 86_400)
    outcome = unfired(after, since=since, until=until, missed="all", catch_up=timedelta(days=60), most=1000)

    assert outcome.run == tuple(until - count * 5 * SECOND for count in reversed(range(1000)))
    assert outcome.before == (NOON + 5 * SECOND, outcome.run[0])
    assert len(asked) < 10_000


def test_a_window_without_a_fire_time_leaves_the_whole_stretch():
    """The stretch then ends with the absence itself."""
    assert found("all", until=13, catch_up=2 * SECOND) == Unfired(before=two(5, 13))


def test_a_window_longer_than_the_absence_leaves_nothing_out():
    """`before` would tell of fire times that the fleet had fired."""
    assert found("all", since=7, until=20, catch_up=HOUR) == Unfired(run=at(10, 15, 20))


@dataclass(frozen=True)
class Drawn:
    """An irregular calendar and an absence in it."""

    calendar: tuple[datetime, ...]
    since: datetime
    until: datetime
    catch_up: timedelta
    most: int

    def fates(self, missed: str) -> Unfired:
        """Return what becomes of its fire times."""
        return unfired(
            lambda instant: min((each for each in self.calendar if each > instant), default=None),
            since=self.since,
            until=self.until,
            missed=missed,
            catch_up=self.catch_up,
            most=self.most,
        )


@st.composite
def absences(draw: st.DrawFn) -> Drawn:
    """Draw one, sometimes so long ago or so full that not everything is looked at one by one."""
    calendar = sorted(draw(st.sets(st.integers(-50, 250), max_size=60)))
    since, until = at(*sorted((draw(st.integers(-60, 260)), draw(st.integers(-60, 260)))))
    return Drawn(at(*calendar), since, until, draw(st.integers(1, 200)) * SECOND, draw(st.integers(1, 20)))


@given(absences(), st.sampled_from(["skip", "latest", "all"]))
def test_nothing_is_lost_and_nothing_is_doubled(absence: Drawn, missed: str):
    """I5: every fire time of the absence has exactly one fate, and no other fire time has any."""
    fates = absence.fates(missed)

    one_by_one = [*fates.coalesced, *fates.missed, *fates.run]
    stretch = []
    if fates.before is not None:
        first, end = fates.before
        stretch = [i for i in absence.calendar if first <= i < end or (not one_by_one and first <= i <= end)]
        assert first in stretch
    assert stretch + one_by_one == [i for i in absence.calendar if absence.since < i <= absence.until]
    assert len(one_by_one) <= absence.most
    assert all(absence.until - instant < absence.catch_up for instant in one_by_one)


@given(absences())
def test_only_the_policy_decides_what_runs(absence: Drawn):
    """`skip` runs nothing, `latest` the newest, `all` everything that is kept; what is kept does not hang on it."""
    every, latest, none = (absence.fates(missed) for missed in ("all", "latest", "skip"))

    assert every.run == latest.coalesced + latest.run == none.missed
    assert latest.run == every.run[-1:]
    assert every.before == latest.before == none.before


def entry(**keys: str) -> Entry:
    """Return the entry of a graph that fires every ten seconds."""
    graph = {"graph": "a.py:b", "every": "10s", **keys}
    return parse(json.dumps({"graphs": {"letters": graph}}), path="s", environment={}).entries["letters"]


@pytest.mark.parametrize(
    ("keys", "since", "alive_at", "expected"),
    [
        ({}, -60, None, 0),
        # The graph is new, or its calendar was edited a moment ago, by this very replica's clock or not.
        ({"mode": "claim"}, -1, -4, -1),
        ({"mode": "claim"}, 3, -4, 0),
        # It is paused: its ticks are fired, and skipped.
        ({}, None, None, 0),
        # The others have come this far for sure; in skip mode what they had not done yet is lost with them.
        ({"mode": "claim"}, -60, -4, -4),
        ({}, -60, -4, 0),
        ({"mode": "claim"}, -60, 2, 0),
    ],
)
def test_a_replica_begins_where_it_can_miss_nothing(
    keys: dict[str, str], since: float | None, alive_at: float | None, expected: float
):
    """Each fire time is fired by somebody: by those who were there, or by whoever comes then."""
    since_at, alive = (None if each is None else at(each)[0] for each in (since, alive_at))

    assert fires_after(entry(**keys), now=NOON, since=since_at, alive_at=alive) == at(expected)[0]


def test_a_replica_begins_with_the_tick_whose_start_was_put_off():
    """With `jitter: 10m`, a deployment in these ten minutes would lose the nightly tick: the old fleet stops, the new is late."""
    put_off = entry(jitter="10s")
    delay = put_off.start_delay(Tick("letters", NOON))
    assert delay > SECOND

    after = fires_after(put_off, now=NOON + delay / 2, since=at(-60)[0], alive_at=None)

    assert put_off.series.after(after) == NOON
    after = fires_after(put_off, now=NOON + delay, since=at(-60)[0], alive_at=None)
    assert put_off.series.after(after) == NOON + 10 * SECOND


def test_a_graph_without_retries_has_failed_for_good():
    """Trying again is a promise about side effects that only the schedule's author can make."""
    assert retry_pause(None, failures=1, names={"RuntimeError"}, seed="s") is None


def test_so_many_attempts_more_are_made():
    """`attempts: 2` is two more after the first, three runs in all."""
    pauses = [
        retry_pause(TWICE, failures=failures, names={"RuntimeError"}, seed="s") for failures in (1, 2, 3)
    ]

    assert [pause is not None for pause in pauses] == [True, True, False]


@pytest.mark.parametrize(
    ("on", "names", "retried"),
    [
        ((), {"RuntimeError"}, True),
        (("ConnectionError",), {"ConnectionResetError", "ConnectionError", "OSError"}, True),
        (("ConnectionError",), {"ValueError", "Exception"}, False),
        (("timed_out",), {"timed_out"}, True),
        (("timed_out", "ValueError"), {"failed", "ValueError"}, True),
    ],
)
def test_on_names_the_errors_that_pass(on: tuple[str, ...], names: set[str], *, retried: bool):
    """A bug does not go away by trying again; a supplier that was down may."""
    pause = retry_pause(only_for(on), failures=1, names=names, seed="s")

    assert (pause is not None) is retried


def only_for(on: tuple[str, ...]) -> Retries:
    """Return retries for these errors only."""
    return TWICE.model_copy(update={"on": on})


@given(
    st.integers(1, 60), st.text(), st.timedeltas(timedelta(0), HOUR), st.timedeltas(timedelta(0), 24 * HOUR)
)
def test_a_pause_doubles_up_to_its_longest_and_is_the_same_on_every_replica(
    failures: int, seed: str, first: timedelta, longest: timedelta
):
    """Whoever works it out, before or after a crash, comes to the same instant; half of it at most is jitter."""
    retries = Retries.model_construct(attempts=60, backoff=first, max_backoff=longest, on=())

    pause = retry_pause(retries, failures=failures, names=set(), seed=seed)

    full = min(longest, first * 2 ** min(failures - 1, 30))
    assert pause is not None
    assert full / 2 - timedelta(microseconds=1) <= pause <= full
    assert pause == retry_pause(retries, failures=failures, names={"other"}, seed=seed)


def test_ticks_that_failed_together_are_not_tried_again_together():
    """The same supplier came back for all of them: the seed spreads the stampede."""
    pauses = {retry_pause(TWICE, failures=1, names=set(), seed=f"graph_{n}/x") for n in range(20)}

    assert len(pauses) == 20
