"""What a replica does beside its ticks, one task at a time."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, cast

import pytest

from tests.onlooker import Onlooker
from tickd import upkeep
from tickd.fleet import Fleet
from tickd.lock import LockPlace, open_session
from tickd.stop import Stop
from tickd.upkeep import Upkeep


pytestmark = pytest.mark.migrated

HOUR = timedelta(hours=1)
LISTENING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%%'"
PRESENT = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' AND granted"
)


@pytest.fixture
async def listening(place: LockPlace, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """A replica that listens, and that would wait for an hour where it waits at all."""
    monkeypatch.setattr(upkeep, "SWEEP_EVERY", HOUR)
    monkeypatch.setattr(upkeep, "LISTEN_AGAIN", HOUR)
    stop = Stop()
    fleet = Fleet(await open_session(place))
    assert await fleet.arrive(stop)
    await fleet.settle()
    nothing = dict.fromkeys(
        ("pool", "graphs", "clock", "timer", "take_over", "work_off", "displace", "unwritten_since", "log")
    )
    kept = Upkeep(**cast("Any", nothing), place=place, skew_limit=HOUR, fleet=fleet, entries=(), stop=stop)
    task = asyncio.create_task(kept.listen())
    yield task
    stop.request()
    await task


@pytest.mark.usefixtures("listening")
async def test_a_session_that_ends_is_replaced_at_once(onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch):
    """Until then a replica that starts would take itself for the first, and account for what this one fires."""
    monkeypatch.setattr(upkeep, "PRESENT_FOR", timedelta(0))
    ((before,),) = await onlooker.until(lambda: onlooker.rows(LISTENING))

    onlooker.terminate(before)

    ((after,),) = await onlooker.until(lambda: [row for row in onlooker.rows(LISTENING) if row != (before,)])
    assert onlooker.rows(PRESENT) == [(after,)]


async def test_sessions_that_end_one_after_the_other_are_not(
    listening: asyncio.Task[None], onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """A server that ends each session as it comes would be asked a hundred times a second."""
    monkeypatch.setattr(upkeep, "PRESENT_FOR", HOUR)
    waits: asyncio.Queue[timedelta | None] = asyncio.Queue()
    plain_wait = Stop.wait

    async def wait(stop: Stop, duration: timedelta | None = None) -> bool:
        waits.put_nowait(duration)
        return await plain_wait(stop, duration)

    monkeypatch.setattr(Stop, "wait", wait)
    ((before,),) = await onlooker.until(lambda: onlooker.rows(LISTENING))

    onlooker.terminate(before)

    while (pause := await asyncio.wait_for(waits.get(), 10)) is None:
        pass  # it listens to the stop as well
    assert pause >= HOUR / 2
    assert not listening.done()
