"""A replica that a test plays itself: the real runner on a real database, fired by hand, its graphs made by the test."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from psycopg_pool import AsyncConnectionPool

from tickd.clock import DatabaseClock
from tickd.continuation import Continuation
from tickd.graph_thread import GraphThread, PoolSize
from tickd.graphs import LoadedGraph
from tickd.lock import LockPlace, closing, open_session
from tickd.log import Log
from tickd.runner import Limits, Runner
from tickd.schedule import parse
from tickd.stop import Stop
from tickd.tick import Tick


NO_TIME = timedelta(0)


class State(TypedDict, total=False):
    """What the nodes leave behind."""

    done: Annotated[list[str], lambda old, new: old + new]
    answer: str


def graph_of(**nodes: Any) -> "StateGraph[Any]":
    """Return a graph that runs these nodes one after the other."""
    builder = StateGraph(State)
    before = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    builder.add_edge(before, END)
    return builder


def step(name: str) -> Any:
    """Return a node that notes that it ran."""

    async def node(_: State) -> State:
        return {"done": [name]}

    return node


class Gate:
    """A node stands here: the test waits until it has come, and lets it go on."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.open = threading.Event()
        self.left = threading.Event()
        self.error: BaseException | None = None
        self.config: RunnableConfig = {}

    def stand(self) -> None:
        """Come, wait until the gate is open, and leave."""
        self.came.set()
        try:
            assert self.open.wait(20), "nobody opened the gate"
            if self.error is not None:
                raise self.error
        finally:
            self.left.set()

    def sync_node(self, _: State, config: RunnableConfig) -> State:
        """Stand here in a thread, where no cancellation reaches it."""
        self.config = config
        self.stand()
        return {"done": ["sync"]}

    async def blocking_node(self, _: State) -> State:
        """Stand here on the graph loop itself."""
        self.stand()
        return {"done": ["blocking"]}

    async def node(self, _: State) -> State:
        """Stand here as a well-behaved node does, for ever."""
        self.came.set()
        await asyncio.Event().wait()
        return {}

    async def arrive(self) -> None:
        """Wait until the node has come."""
        assert await asyncio.to_thread(self.came.wait, 10), "the node has not come"


@asynccontextmanager
async def graph_thread(place: LockPlace) -> AsyncIterator[GraphThread]:
    """Start a graph thread with a pool of two connections, and close it in the end."""
    thread = GraphThread(
        place.dsn,
        replica=place.replica,
        size=PoolSize(1, 2, timedelta(milliseconds=400)),
        through_pooler=False,
        max_running=4,
    )
    await thread.start()
    try:
        yield thread
    finally:
        await thread.close()


@dataclass(slots=True)
class Played:
    """One replica."""

    runner: Runner
    continuation: Continuation
    clock: DatabaseClock
    stop: Stop
    pool: AsyncConnectionPool[Any]

    def due(self, graph: str, *, late: timedelta = NO_TIME, ahead: timedelta = NO_TIME) -> Tick:
        """Return a tick of the graph that is due now, or was or will be so long ago or from now."""
        return Tick(graph, self.clock.now() - late + ahead)


@asynccontextmanager
async def played(
    place: LockPlace,
    log: Log,
    graphs: Mapping[str, "StateGraph[Any]"],
    keys: Mapping[str, Any] | None = None,
    *,
    reachable: LockPlace | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Played]:
    """Play a replica with these graphs, all with the same further keys of the schedule.

    `place` is where it takes its locks; `reachable` leads to the same database where the place does not.
    """
    way = reachable or place
    text = json.dumps({"graphs": {name: {"graph": "x:y", "every": "1h", **(keys or {})} for name in graphs}})
    entries = parse(text, path="schedule.yaml", environment={}).entries
    loaded = {name: LoadedGraph(name, builder.compile(), None, ()) for name, builder in graphs.items()}
    clock, stop = DatabaseClock(), Stop()
    parameters = {**await way.dsn.connection_parameters(), "autocommit": True, "application_name": "pool"}
    async with (
        AsyncConnectionPool(kwargs=parameters, min_size=1, max_size=2, timeout=1, open=False) as pool,
        graph_thread(way) as thread,
    ):
        async with closing(await open_session(way)) as session:
            await clock.measure(session.fetch)
        runner = Runner(
            entries=entries,
            loaded=loaded,
            graphs=thread,
            place=place,
            pool=pool,
            clock=clock,
            stop=stop,
            log=log,
            limits=limits or Limits(max_running=4, lock_attempts=4, drain_timeout=timedelta(seconds=10)),
        )
        try:
            continuation = Continuation(runner, entries=entries, clock=clock, stop=stop)
            yield Played(runner, continuation, clock, stop, pool)
        finally:
            await runner.end()
