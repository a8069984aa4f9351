import itertools
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fire_times import following, instant
from tickd.schedule import Entry, parse
from tickd.tick import Tick


TICK = Tick("restock_plan", instant("2026-05-04T22:30Z"))


def _entry(lines: str, name: str = "restock_plan") -> Entry:
    text = f"graphs:\n  {name}: {{graph: 'a:b', {lines}}}\n"
    return parse(text, path="s.yaml", environment={}).entries[name]


@pytest.mark.parametrize(
    ("written", "thread"),
    [
        ("every: 1s", "restock_plan/2026-05-04T22:30:00Z"),
        ("every: 1s, thread: per_tick", "restock_plan/2026-05-04T22:30:00Z"),
        ("every: 1s, thread: per_graph", "restock_plan"),
        ("every: 1s, thread: '{graph}/{fire_date}'", "restock_plan/2026-05-04"),
        ("every: 1s, timezone: Europe/Oslo, thread: '{graph}/{local_date}'", "restock_plan/2026-05-05"),
        ("every: 1s, thread: '{{{graph}}}'", "{restock_plan}"),
        ("every: 1s, thread: fixed", "fixed"),
    ],
)
def test_the_thread_of_a_tick_is_its_own_unless_the_schedule_says_otherwise(written, thread):
    """State must not pile up from tick to tick by accident."""
    assert _entry(written).thread_id(TICK) == thread


def test_the_templates_of_an_input_are_filled_at_every_depth_and_nothing_else_is_touched():
    """A graph is told which tick it is for; its numbers stay numbers."""
    entry = _entry(
        "every: 1s, timezone: Europe/Oslo, input: {when: ['{fire_time}', {local: '{local_time}'}], of: '{graph}', n: 1, "
        "off: false, none: null, json: '{{\"a\": 1}}', day: '{fire_date}/{local_date}', '{graph}': key}"
    )
    assert entry.input_for(TICK) == {
        "when": ["2026-05-04T22:30:00Z", {"local": "2026-05-05T00:30:00+02:00"}],
        "of": "restock_plan",
        "n": 1,
        "off": False,
        "none": None,
        "json": '{"a": 1}',
        "day": "2026-05-04/2026-05-05",
        "{graph}": "key",
    }


def test_each_tick_gets_an_input_of_its_own():
    """A graph that changes its input in place must not change that of the next tick."""
    entry = _entry("every: 1s, input: {list: [1]}")
    entry.input_for(TICK)["list"].append(2)
    assert entry.input_for(TICK) == {"list": [1]}


def test_a_function_that_makes_the_input_is_handed_on_by_name():
    """Whoever loads the graph also loads it."""
    assert _entry("every: 1s, input: 'pkg.mod:make'").input_for(TICK) == "pkg.mod:make"
    assert _entry("every: 1s, input: './make.py:make'").input_for(TICK) == "./make.py:make"
    assert _entry("every: 1s").input_for(TICK) is None


def test_a_delay_is_the_same_on_every_replica_and_differs_from_tick_to_tick():
    """Jitter spreads the herd; it never makes two replicas disagree on when a tick may start."""
    entry = _entry("every: 10m, jitter: 5m")
    ticks = [
        Tick("restock_plan", time) for time in itertools.islice(following(entry.series, TICK.fire_time), 50)
    ]
    delays = [entry.start_delay(tick) for tick in ticks]
    assert delays == [_entry("every: 10m, jitter: 5m").start_delay(tick) for tick in ticks]
    assert len(set(delays)) == 50
    assert entry.start_delay(TICK) == timedelta(
        seconds=297, microseconds=624366
    )  # in every process, in every release
    assert max(delays) < timedelta(minutes=5)
    assert max(delays) - min(delays) > timedelta(minutes=3)
    other = _entry("every: 10m, jitter: 5m", name="pack_audit")
    assert [other.start_delay(Tick("pack_audit", tick.fire_time)) for tick in ticks] != delays


def test_a_delay_without_jitter_is_none_at_all():
    """Asking for the next fire time of each tick would cost more than the tick."""
    assert _entry("every: 10m").start_delay(TICK) == timedelta(0)


@given(
    st.sampled_from(["every: 7s", "cron: '*/7 * * * *'", "cron: '59 23 * * mon-fri'", "at: [2026-05-05T00:00:00Z, 2026-05-05T00:00:01Z]"]),
    st.sampled_from(["1ms", "6s", "7s", "1h", "100d"]),
    st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_delay_never_reaches_the_next_fire_time(trigger, jitter, skip):
    """Ticks of a graph start in the order of their fire times, however large the jitter."""
    entry = _entry(f"{trigger}, jitter: {jitter}")
    times = list(itertools.islice(following(entry.series, TICK.fire_time), skip, skip + 2))
    if times:
        delay = entry.start_delay(Tick("restock_plan", times[0]))
        assert timedelta(0) <= delay < timedelta(days=100)
        assert len(times) == 1 or times[0] + delay < times[1]


@given(
    st.sampled_from(["every: 7s", "every: 300ms", "cron: '*/7 * * * *'", "cron: '59 23 * * mon-fri'", "at: [2026-05-05T00:00:00Z, 2026-05-05T00:00:01Z]"]),
    st.sampled_from(["0s", "1ms", "6s", "7s", "1h", "100d"]),
    st.timedeltas(timedelta(0), timedelta(days=2)),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_fire_time_belongs_to_whoever_is_there_when_its_tick_may_start(trigger, jitter, later):
    """Two fleets that meet at an instant share the fire times out between them, put off or not."""
    entry, instant = _entry(f"{trigger}, jitter: {jitter}"), TICK.fire_time + later

    until = entry.started_by(instant)

    around = [
        *itertools.islice(entry.series.between(instant - timedelta(minutes=9), instant), 2000),
        *itertools.islice(following(entry.series, instant), 2),
    ]
    started = [time for time in around if time + entry.start_delay(Tick("restock_plan", time)) <= instant]
    assert [time for time in around if time <= until] == started
    assert until == instant or jitter != "0s"


def test_the_mark_of_a_calendar_changes_with_the_fire_times_and_with_nothing_else():
    """An edited expression must not be taken for ticks that were missed."""
    same = [
        _entry(each).calendar
        for each in ("cron: '0 9 * * *'", "cron: ['0 9 * * *'], timeout: 1m", "cron: 0 9 * * *, jitter: 1m")
    ]
    assert len(set(same)) == 1
    others = (
        "cron: '0 8 * * *'", "cron: '0 9 * * *', timezone: Europe/Oslo", "every: 1h", "every: 1h, anchor: 2026-01-01T00:01:00Z",
        "at: 2026-01-01T00:01:00Z",
    )  # fmt: skip
    assert len({*same, *(_entry(each).calendar for each in others)}) == 1 + len(others)


def test_an_entry_cannot_be_changed():
    """It is shared by everything that runs the graph."""
    with pytest.raises(ValueError, match="frozen"):
        _entry("every: 1s").timeout = timedelta(1)  # type: ignore[misc]
