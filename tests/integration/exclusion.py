"""What every way of excluding each other has to pass, and the oracles that tell when one does not.

A mode is how replicas contend for a graph: a function from a lock place and a graph to an attempt, which is true for
the one that may write. `MODES` are tickd's own; a mutation is the same with a mistake in it.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from tickd import admissions, claim
from tickd.admissions import Refusal
from tickd.claim import Due
from tickd.lock import Hold, LockPlace, open_session, sole_writer
from tickd.shared import SharedHolds
from tickd.tick import Tick, run_id


GRAPH = "restock_plan"
TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
LEASE = timedelta(minutes=1)

Attempt = AbstractAsyncContextManager[Hold[Any]]
Mode = Callable[[LockPlace, str], Attempt]

_seconds = itertools.count()


def fresh_tick(graph: str) -> Tick:
    """Return a tick of the graph that nobody has seen yet."""
    return Tick(graph, TEN + timedelta(seconds=next(_seconds)))


def bare(place: LockPlace, graph: str) -> Attempt:
    """Contend for the lock and nothing else."""
    return sole_writer(graph, place)


def skip(place: LockPlace, graph: str) -> Attempt:
    """Contend as skip mode does, each time for a tick of its own."""
    return admit(place, fresh_tick(graph))


def admit(place: LockPlace, tick: Tick) -> Attempt:
    """Contend as skip mode does for this tick."""
    attempt = partial(admissions.hold_and_admit, tick=tick, thread_id=str(tick), run_id=run_id(tick))
    return sole_writer(tick.graph, place, attempt=attempt)


@asynccontextmanager
async def claiming(place: LockPlace, graph: str) -> AsyncIterator[Hold[Any]]:
    """Contend as claim mode does: enqueue a tick, then claim whichever is the first."""
    tick = fresh_tick(graph)
    session = await open_session(place)
    due = Due(tick, str(tick), run_id(tick), 10_000, "backlog_full")
    await claim.enqueue(session.connection, place.space, [due])
    attempt = partial(claim.claim, graph=graph, lease=LEASE)
    async with sole_writer(graph, place, attempt=attempt, session=session) as hold:
        yield hold


@asynccontextmanager
async def sharing(place: LockPlace, graph: str) -> AsyncIterator[Hold[Any]]:
    """Contend as skip mode does with `hold: shared`: on a session that another graph of the replica is held on as well."""
    holds = SharedHolds(place, lambda: 0)
    tick, other = fresh_tick(graph), fresh_tick(f"beside {place.replica}")
    try:
        session = await holds.session()
        beside = partial(admissions.hold_and_admit, tick=other, thread_id=str(other), run_id=run_id(other))
        attempt = partial(admissions.hold_and_admit, tick=tick, thread_id=str(tick), run_id=run_id(tick))
        async with (
            sole_writer(other.graph, place, attempt=beside, session=session),
            sole_writer(graph, place, attempt=attempt, session=session) as hold,
        ):
            yield hold
    finally:
        await holds.end()


@asynccontextmanager
async def apart(place: LockPlace, graph: str) -> AsyncIterator[Hold[Any]]:
    """Contend as skip mode does in a herd: the lock on a session of its own, the row over the one that holds share."""
    holds = SharedHolds(place, lambda: 0)
    tick = fresh_tick(graph)
    try:
        session = await open_session(place)
        session.ledger = await holds.session()
        attempt = partial(admissions.hold_and_admit, tick=tick, thread_id=str(tick), run_id=run_id(tick))
        async with sole_writer(graph, place, attempt=attempt, session=session) as hold:
            yield hold
    finally:
        await holds.end()


MODES: dict[str, Mode] = {
    "bare": bare,
    "skip": skip,
    "claim": claiming,
    "shared": sharing,
    "apart": apart,
}


@dataclass(slots=True)
class Race:
    """What happened when replicas contended for one tick: who ran, who was refused while another ran, who overlapped."""

    ran: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    running: int = 0
    overlaps: int = 0
    _refusal: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def run(self, replica: str) -> AsyncIterator[None]:
        """Be a run: noted, and noted as an overlap when another is still going on."""
        self.ran.append(replica)
        self.overlaps += self.running > 0
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def refuse(self, replica: str) -> None:
        """Note an attempt that was not granted; one that hears of it only when nobody runs any more has waited.

        It may hear of it before the winner hears of its grant, whose commit takes longer.
        """
        if self.running or not self.ran:
            self.refused.append(replica)
        self._refusal.set()

    async def await_refusal(self, seconds: float) -> None:
        """Keep the run going until somebody has been refused, but no longer than that."""
        try:
            async with asyncio.timeout(seconds):
                await self._refusal.wait()
        except TimeoutError:
            return

    @property
    def clean(self) -> bool:
        """Say whether one replica ran the tick and the other was told so at once."""
        return (len(self.ran), len(self.refused), self.overlaps) == (1, 1, 0)


async def race(mode: Mode, one: LockPlace, other: LockPlace, *, patience: float = 5) -> Race:
    """Let two replicas contend for one tick at the same time, and the winner run until the loser has been refused."""
    result = Race()
    barrier = asyncio.Barrier(2)

    async def replica(place: LockPlace) -> None:
        await barrier.wait()
        async with mode(place, GRAPH) as hold:
            if not won(hold):
                result.refuse(place.replica)
                return
            async with result.run(place.replica):
                await result.await_refusal(patience)

    async with asyncio.TaskGroup() as group:
        group.create_task(replica(one))
        group.create_task(replica(other))
    return result


async def late(mode: Mode, one: LockPlace, other: LockPlace) -> Race:
    """Let one replica run the tick to its end, and the other, whose clock is behind, contend for it after that."""
    result = Race()
    for place in (one, other):
        async with mode(place, GRAPH) as hold:
            if won(hold):
                async with result.run(place.replica):
                    pass
    return result


async def lost_updates(mode: Mode, places: Sequence[LockPlace], *, rounds: int = 3) -> int:
    """Let all contenders read, pause and write one unguarded integer, each `rounds` times; return what went missing."""
    counter = 0

    async def contender(place: LockPlace) -> None:
        nonlocal counter
        written = 0
        while written < rounds:
            async with mode(place, GRAPH) as hold:
                if won(hold):
                    read = counter
                    await pause()
                    counter = read + 1
                    written += 1

    async with asyncio.TaskGroup() as group:
        for place in places:
            group.create_task(contender(place))
    return len(places) * rounds - counter


def won(hold: Hold[Any]) -> bool:
    """Say whether an attempt may write: it has the lock, and the ledger wants the tick run."""
    return bool(hold) and not isinstance(hold.granted, Refusal)


async def pause() -> None:
    """Let everybody else go on for a moment, as any run does."""
    await asyncio.get_running_loop().run_in_executor(None, os.getpid)
