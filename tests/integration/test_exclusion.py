"""The conformance suite: whatever mode a graph runs in, one replica at a time may write."""

import asyncio

import pytest

from tests.integration.conftest import Places
from tests.integration.exclusion import GRAPH, MODES, Mode, admit, fresh_tick, late, lost_updates, race
from tests.onlooker import Onlooker


pytestmark = pytest.mark.migrated


@pytest.fixture(params=list(MODES.values()), ids=list(MODES))
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each way of contending for a graph."""
    mode: Mode = request.param
    return mode


async def test_a_second_attempt_is_refused_and_names_the_holder(mode: Mode, places: Places):
    """One writer, and the other knows which."""
    async with mode(places("a"), GRAPH) as first, mode(places("b"), GRAPH) as second:
        assert (bool(first), bool(second)) == (True, False)
        assert second.holder is not None
        assert second.holder.replica == "a"


async def test_an_attempt_of_the_same_replica_is_refused_too(mode: Mode, places: Places):
    """C7: in one session a second try would succeed, and one unlock would not free it."""
    async with mode(places("a"), GRAPH), mode(places("a"), GRAPH) as second:
        assert not second


async def test_two_graphs_never_block_each_other(mode: Mode, places: Places):
    """A slow graph is nobody else's business."""
    async with mode(places("a"), GRAPH) as first, mode(places("b"), "pack_audit") as second:
        assert first
        assert second


async def test_a_graph_is_free_right_after_its_release(mode: Mode, places: Places):
    """A fresh tick right after runs, here and elsewhere."""
    for replica in ("a", "a", "b"):
        async with mode(places(replica), GRAPH) as hold:
            assert hold


async def test_a_holder_whose_session_is_ended_holds_nothing(mode: Mode, places: Places, onlooker: Onlooker):
    """An administrator ends it, or its process is killed: the next attempt gets the lock at once."""
    async with mode(places("a"), GRAPH):
        onlooker.terminate(onlooker.locks()[0][0])
        await onlooker.until(lambda: not onlooker.locks())
        async with mode(places("b"), GRAPH) as next_one:
            assert next_one


async def test_a_holder_that_raises_holds_nothing(mode: Mode, places: Places, onlooker: Onlooker):
    """A graph that fails must not keep its graph."""
    with pytest.raises(RuntimeError):
        async with mode(places("a"), GRAPH):
            raise RuntimeError("supplier feed down")

    assert onlooker.locks() == []
    async with mode(places("b"), GRAPH) as next_one:
        assert next_one


async def test_no_update_is_lost_among_eight_contenders(mode: Mode, places: Places, onlooker: Onlooker):
    """Any overlap shows as a wrong total; and nobody ever waits for the lock in the server."""
    waited = []
    done = asyncio.Event()

    async def look_on() -> None:
        while not done.is_set():
            waited.append(await asyncio.to_thread(onlooker.waiters))

    looking = asyncio.create_task(look_on())
    lost = await lost_updates(mode, [places(f"r{n}") for n in range(8)])
    done.set()
    await looking

    assert lost == 0
    assert set(waited) == {0}
    assert onlooker.locks() == []


async def test_of_two_replicas_at_a_barrier_one_runs_and_the_other_is_told_at_once(
    mode: Mode, places: Places
):
    """The loser goes on to its next tick; it does not wait for the winner."""
    assert (await race(mode, places("a"), places("b"))).clean


async def test_a_tick_that_has_run_does_not_run_again(places: Places):
    """I2: the lock is free by then, and only the ledger's row says that the tick has run."""
    tick = fresh_tick(GRAPH)

    result = await late(lambda place, _: admit(place, tick), places("a"), places("b"))

    assert result.ran == ["a"]
