"""A replica in the test's own process: all its parts on a real database, without the timer, the sweeps and the signals."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tests.replicas import ROOT
from tickd.backlog import Backlog
from tickd.clock import DatabaseClock
from tickd.entry import Entry
from tickd.fleet import Fleet
from tickd.graph_thread import GraphThread, PoolSize
from tickd.graphs import Reference
from tickd.lock import LockPlace, closing, open_session
from tickd.log import Log
from tickd.runner import Limits, Runner
from tickd.schedule import parse
from tickd.stop import Stop
from tickd.tick import Tick


SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Inside:
    """The parts of one replica; a test fires its ticks itself."""

    entries: Mapping[str, Entry]
    runner: Runner
    backlog: Backlog
    clock: DatabaseClock
    stop: Stop
    pool: AsyncConnectionPool[Any]

    def tick(self, graph: str, *, seconds_ago: float = 0) -> Tick:
        """Return a tick of the graph that has just come due, or some time ago; its fire time is a whole second."""
        fire_time = self.clock.now() - timedelta(seconds=seconds_ago)
        return Tick(graph, fire_time.replace(microsecond=0))


def entries_of(graphs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Entry]:
    """Return the entries of a schedule with these graphs."""
    return parse(json.dumps({"graphs": graphs}), path="schedule.yaml", environment={}).entries


@asynccontextmanager
async def replica_inside(
    place: LockPlace,
    graphs: Mapping[str, Mapping[str, Any]],
    log: Log,
    *,
    max_running: int = 50,
    drain_timeout: timedelta = 5 * SECOND,
) -> AsyncIterator[Inside]:
    """Put a replica together as the daemon does."""
    entries, clock, stop = entries_of(graphs), DatabaseClock(), Stop()
    parameters = {**await place.dsn.connection_parameters(), "autocommit": True}
    thread = GraphThread(
        place.dsn, replica=place.replica, size=PoolSize(), through_pooler=False, max_running=max_running
    )
    async with (
        AsyncConnectionPool(kwargs=parameters, min_size=1, max_size=2, open=False) as pool,
        closing(await open_session(place)) as session,
    ):
        await clock.measure(session.fetch)
        await Fleet(session).register({name: entry.calendar for name, entry in entries.items()})
        await thread.start()
        try:
            references = [Reference(name, entry.graph) for name, entry in entries.items()]

            def warn(graph: str, warning: str) -> None:
                log.warning("schedule.warning", graph=graph, warning=warning)

            runner = Runner(
                entries=entries,
                loaded=await thread.load(references, ROOT, warn),
                graphs=thread,
                place=place,
                pool=pool,
                clock=clock,
                stop=stop,
                log=log,
                limits=Limits(max_running, 8, drain_timeout),
            )
            backlog = Backlog(runner, entries=entries, pool=pool, place=place, clock=clock, stop=stop)
            try:
                yield Inside(entries, runner, backlog, clock, stop, pool)
            finally:
                await runner.end()
        finally:
            await thread.close()
