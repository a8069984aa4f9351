"""The collector: how seldom it works, and what it leaves alone."""

import gc
from collections.abc import Iterator

import pytest

from tickd import collector


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Each test finds and leaves the thresholds as they were, and nothing frozen."""
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_the_young_are_looked_at_more_seldom_and_the_old_sooner():
    """A run's state that survived must not wait for ten rounds of twenty thousand."""
    gc.set_threshold(700, 10, 10)

    collector.relax()

    assert gc.get_threshold() == (collector.YOUNG, collector.ROUNDS, collector.ROUNDS)


@pytest.mark.parametrize("theirs", [(0, 10, 10), (100_000, 2, 2)])
def test_who_has_asked_for_less_has_their_way(theirs: tuple[int, int, int]):
    """Zero is how one turns the collector off."""
    gc.set_threshold(*theirs)

    collector.relax()

    assert gc.get_threshold() == theirs


def test_what_is_frozen_is_no_longer_looked_at():
    """Only what comes later is."""
    old = [object()]

    collector.freeze()
    young = [object()]

    looked_at = {id(one) for one in gc.get_objects()}
    assert id(young) in looked_at
    assert id(old) not in looked_at
