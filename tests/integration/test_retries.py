"""Retries in skip mode: within the hold, and never past it."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.inside import Inside, replica_inside
from tests.ledger_rows import FALLIBLE, state_of, ticks
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.witness import Witness
from tickd.ends import milliseconds
from tickd.lock import LockPlace
from tickd.log import Log
from tickd.policy import retry_pause


pytestmark = pytest.mark.migrated

GRAPH = "letters"
Start = Callable[..., AbstractAsyncContextManager[Inside]]


@pytest.fixture
def start(place: LockPlace, log: Log, witness: Witness) -> Start:  # noqa: ARG001  # the graphs bear witness
    """Put replica a together, with a graph in skip mode that has these retries and this input."""

    def start(retries: dict[str, Any], *, every: str | None = None, **given: Any) -> Any:
        when = {"every": every} if every else {"at": "2999-01-01T00:00:00Z"}
        entry = {"graph": f"{FALLIBLE}:letters", "retries": retries, "input": {"log": [], **given}, **when}
        return replica_inside(place, {GRAPH: entry}, log)

    return start


def told(book: Logbook, *fields: str) -> list[tuple[Any, ...]]:
    """Return the event of every line, and these fields of it."""
    return [
        (line["event"].removeprefix("tick."), *(line.get(field) for field in fields)) for line in book.lines
    ]


async def test_a_failed_tick_is_tried_again_within_its_hold(
    start: Start, book: Logbook, witness: Witness, onlooker: Onlooker
):
    """Between the attempts nobody else gets the graph, and finished nodes are not run again."""
    retries = {"attempts": 2, "backoff": "300ms"}
    async with start(retries, fail="b", fails=2) as replica:
        tick = replica.tick(GRAPH)
        running = asyncio.create_task(replica.runner.run_tick(tick))
        await book.wait_for("tick.retrying")
        assert len(onlooker.locks()) == 1
        await running

    assert told(book, "attempt", "token") == [
        ("started", 1, 1),
        ("retrying", 1, 1),
        ("started", 2, 1),
        ("retrying", 2, 1),
        ("started", 3, 1),
        ("ran", 3, 1),
    ]
    assert [(node.node, node.attempt) for node in witness.nodes()] == [("a", 1), ("b", 1), ("b", 2), ("b", 3)]
    assert state_of(witness, str(tick))["log"] == ["a", "b"]
    assert [(row.outcome, row.attempt) for row in ticks(witness)] == [("ran", 3)]


async def test_the_pause_hangs_on_the_tick_and_not_on_the_replica(start: Start, book: Logbook):
    """Deterministic jitter: before and after a crash, here and elsewhere, it comes to the same number."""
    async with start({"attempts": 1, "backoff": "80ms"}, fail="a", fails=1) as replica:
        tick = replica.tick(GRAPH)
        await replica.runner.run_tick(tick)
        retries = replica.entries[GRAPH].retries

    (line,) = book.find("tick.retrying")
    pause = retry_pause(retries, failures=1, names={"RuntimeError"}, seed=str(tick))
    assert pause is not None
    assert line["retry_in_ms"] == milliseconds(pause)


async def test_a_pause_that_reaches_the_next_fire_time_is_not_waited_for(
    start: Start, book: Logbook, witness: Witness
):
    """The graph is the next tick's by then; a hold that waits would make it skip."""
    async with start({"attempts": 9, "backoff": "10m"}, every="2s", fail="a", fails=9) as replica:
        await replica.runner.run_tick(replica.tick(GRAPH))

    assert told(book) == [("started",), ("failed",)]
    assert [(row.outcome, row.attempt) for row in ticks(witness)] == [("failed", 1)]


async def test_a_hold_that_is_lost_in_the_pause_is_not_run_on(
    start: Start, book: Logbook, witness: Witness, onlooker: Onlooker
):
    """I4: nobody looks at a hold while nothing runs, unless somebody is told to."""
    async with start({"attempts": 9, "backoff": "10m"}, fail="a", fails=9) as replica:
        running = asyncio.create_task(replica.runner.run_tick(replica.tick(GRAPH)))
        await book.wait_for("tick.retrying")
        onlooker.terminate(onlooker.locks()[0][0])
        await asyncio.wait_for(running, 10)

    assert told(book, "cause", "error_type") == [
        ("started", None, None),
        ("retrying", None, "RuntimeError"),
        ("lock_lost", "session_ended", "RuntimeError"),
    ]
    assert [row.outcome for row in ticks(witness)] == ["lock_lost"]
    assert len(witness.nodes()) == 1


async def test_a_stop_in_the_pause_hands_the_tick_off(start: Start, book: Logbook, witness: Witness):
    """A deploy costs a tick none of the attempts that it has left."""
    async with start({"attempts": 9, "backoff": "10m"}, fail="a", fails=1) as replica:
        tick = replica.tick(GRAPH)
        running = asyncio.create_task(replica.runner.run_tick(tick))
        await book.wait_for("tick.retrying")
        replica.stop.request()
        await asyncio.wait_for(running, 10)
    assert [row.outcome for row in ticks(witness)] == ["handed_off"]

    async with start({"attempts": 9, "backoff": "10m"}, fail="a", fails=1) as replica:
        await replica.backlog.take_over(tick)

    assert told(book, "attempt")[-2:] == [("started", 2), ("ran", 2)]
    assert [row.outcome for row in ticks(witness)] == ["ran"]


async def test_a_failure_while_the_replica_stops_is_not_tried_again(
    start: Start, book: Logbook, witness: Witness
):
    """The drain has its limit, and a second attempt would begin in it."""
    async with start({"attempts": 9, "backoff": "0s"}, seconds=0.5, fail="a", fails=9) as replica:
        running = asyncio.create_task(replica.runner.run_tick(replica.tick(GRAPH)))
        await asyncio.to_thread(witness.wait_for_node, "a")
        replica.stop.request()
        await asyncio.wait_for(running, 10)

    assert told(book) == [("started",), ("failed",)]
