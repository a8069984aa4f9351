"""Decisions that need no clock: lateness, order, back-off, and when a hold is trusted no longer."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tickd.errors import Unusable
from tickd.policy import TrustWindows, backoff, in_own_order, lateness
from tickd.tick import Tick


TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LENGTHS = st.timedeltas(min_value=timedelta(0), max_value=timedelta(hours=1))
WINDOWS = st.builds(
    TrustWindows, LENGTHS, LENGTHS, LENGTHS, LENGTHS, LENGTHS, st.integers(1, 10), st.just(timedelta(days=1))
)
GRAPHS = st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True)


def test_a_client_gives_up_before_the_server_does_by_default():
    """I4: a holder that lost its lock stops before the server can have given the lock to another."""
    windows = TrustWindows()

    windows.check()

    assert (windows.client, windows.server) == (17 * SECOND, 24 * SECOND)


@given(WINDOWS)
def test_windows_are_refused_exactly_when_the_client_is_not_the_first_to_give_up(windows: TrustWindows):
    """Two writers at once is what a wrong pair of windows allows, so equality is refused too."""
    client = windows.probe_interval + windows.probe_timeout + windows.stop_allowance
    if client < windows.server_idle + windows.server_count * windows.server_interval:
        windows.check()
    else:
        with pytest.raises(Unusable):
            windows.check()


@given(WINDOWS)
def test_a_statement_that_keeps_the_probe_waiting_does_not_make_the_client_the_last_to_give_up(
    windows: TrustWindows,
):
    """A shared session's admission may be under way when the link dies; and no probe has less time than before."""
    assume(windows.client < windows.server)

    assert windows.probe_interval + windows.answer + windows.stop_allowance <= windows.server
    assert windows.answer >= windows.probe_timeout


def test_refused_windows_come_with_their_arithmetic():
    """Six numbers are involved, and the reader has to see which one to change."""
    windows = replace(TrustWindows(), probe_interval=30 * SECOND, lease=100 * SECOND)

    with pytest.raises(Unusable) as refused:
        windows.check()

    assert (
        "probe interval 30 s + probe time-out 4 s + stop allowance 10 s = 44 s, and the server frees the lock after "
        "keepalive idle 9 s + 3 x 5 s = 24 s"
    ) in str(refused.value)


@pytest.mark.parametrize("lease", [12 * SECOND, 13 * SECOND, 17 * SECOND])
def test_a_lease_that_ends_before_its_holder_has_stopped_is_refused(lease: timedelta):
    """Another replica would take the tick over under a run that is still being ended, or that missed two renewals."""
    with pytest.raises(Unusable, match=r"TICKD_LEASE .* is too short.*3 x 3 s \+ 4 s = 13 s.*17 s"):
        replace(TrustWindows(), lease=lease).check()


def test_a_lease_has_to_outlast_three_renewals():
    """One lost answer must not cost a run its tick."""
    windows = replace(TrustWindows(), stop_allowance=SECOND)

    with pytest.raises(Unusable, match="TICKD_LEASE"):
        replace(windows, lease=12 * SECOND).check()
    replace(windows, lease=13 * SECOND).check()


@given(st.integers(-100, 100), st.integers(0, 50))
def test_lateness_counts_from_the_instant_a_tick_may_start(late: int, delay: int):
    """Jitter puts the start off on purpose: that is not lateness."""
    tick = Tick("a", TEN)

    assert lateness(tick, delay=delay * SECOND, now=TEN + (late + delay) * SECOND) == late * SECOND


@given(GRAPHS, st.text())
def test_a_replica_goes_through_all_ticks_in_an_order_of_its_own(graphs: list[str], replica: str):
    """Nothing is lost by the ordering, and it is the same each time this replica is asked."""
    ticks = [Tick(graph, TEN) for graph in graphs]

    ordered = in_own_order(ticks, replica)

    assert sorted(ordered) == sorted(ticks)
    assert in_own_order(ticks[::-1], replica) == ordered


def test_replicas_begin_with_different_graphs():
    """If all began with the same graph, one would win it and the others would have lost their time."""
    ticks = [Tick(f"graph{n}", TEN) for n in range(10)]

    firsts = {in_own_order(ticks, f"replica{n}")[0].graph for n in range(20)}

    assert len(firsts) > 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), unique=True))
def test_ticks_that_were_due_earlier_come_first(pairs: list[tuple[str, int]]):
    """After a pause several ticks of one graph are due together; they keep their order."""
    ordered = in_own_order([Tick(graph, TEN + n * SECOND) for graph, n in pairs], "a")

    assert [tick.fire_time for tick in ordered] == sorted(tick.fire_time for tick in ordered)


@given(st.integers(1, 10_000), st.text(), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_pause_is_between_half_of_its_full_length_and_the_whole(
    attempt: int, seed: str, first: int, factor: int
):
    """Never zero, or a dead database is stormed; never above the longest, or its return is missed."""
    shortest, longest = timedelta(microseconds=first), timedelta(microseconds=first * factor)

    pause = backoff(attempt, first=shortest, longest=longest, seed=seed)

    full = min(longest, shortest * 2 ** min(attempt - 1, 30))
    # A timedelta rounds to a microsecond.
    assert full / 2 - timedelta(microseconds=1) <= pause <= full


def test_pauses_double_up_to_the_longest():
    """A server that restarts is met after a moment; one that is gone for an hour is not asked each moment."""
    pauses = [backoff(n, first=SECOND, longest=8 * SECOND, seed="a") for n in range(1, 8)]

    for full, pause in zip((1, 2, 4, 8, 8, 8, 8), pauses, strict=True):
        assert full * SECOND / 2 <= pause <= full * SECOND


def test_the_first_pause_may_be_as_long_as_a_day():
    """The doubling must not run out of what a timedelta can hold."""
    day = timedelta(days=1)

    assert backoff(100, first=day, longest=2 * day, seed="a") <= 2 * day


def test_replicas_pause_for_different_times():
    """Replicas that lost the database together must not come back together."""
    assert len({backoff(3, first=SECOND, longest=60 * SECOND, seed=f"r{n}") for n in range(20)}) == 20
