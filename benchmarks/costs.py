"""Costs: what one connect, one try, one skip, one admission and one fenced checkpoint take, on an idle server.

Every measurement is beside the floor that it stands on: a bare round trip, a bare connect, the plain saver.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, TypedDict

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.growth import SPACE, migrate
from benchmarks.quantiles import spread
from benchmarks.server import Database, Server
from tickd import ledger
from tickd.dsn import parse_dsn
from tickd.fence import FencedSaver
from tickd.ledger import Admission, Finish
from tickd.lock import LockPlace, open_session
from tickd.tick import Outcome, Tick


UNCOUNTED = 5
FENCE = """
INSERT INTO tickd.threads (thread_id, space, graph, token)
SELECT thread_id, %s, 'held', %s FROM unnest(%s::text[]) AS made (thread_id)
"""
GRAPH = "costs"
FIRST = datetime(2026, 5, 4, 10, tzinfo=UTC)


class State(TypedDict, total=False):
    """What the node leaves behind."""

    note: str


async def note(state: State) -> dict[str, Any]:  # noqa: ARG001  # LangGraph's signature
    """Change the state."""
    return {"note": "done"}


BUILDER = StateGraph(State).add_node(note).add_edge(START, "note").add_edge("note", END)


async def timed(rounds: int, call: Callable[[], Awaitable[Any]]) -> dict[str, float | None]:
    """Return the spread of a call's duration, in milliseconds, after a few that do not count."""
    took = []
    for number in range(rounds + UNCOUNTED):
        began = time.perf_counter()
        await call()
        if number >= UNCOUNTED:
            took.append((time.perf_counter() - began) * 1000)
    return spread(took)


class Costs:
    """Measures each piece on one database that has tickd's tables."""

    def __init__(self, database: Database, rounds: int) -> None:
        self._rounds = rounds
        self._dsn = database.dsn
        self._place = LockPlace(parse_dsn(database.dsn, setting="DSN"), "costs", SPACE)
        self._numbers = count()
        self._threads = count()

    async def measure(self) -> dict[str, dict[str, float | None]]:
        """Return the spread of every piece, in milliseconds."""
        async with AsyncExitStack() as stack:
            self._session = await open_session(self._place)
            stack.push_async_callback(self._session.close)
            holder = await open_session(self._place)
            stack.push_async_callback(holder.close)
            self._pool = await stack.enter_async_context(self._new_pool())
            self._saver_pool = await stack.enter_async_context(
                self._new_pool(row_factory=dict_row, prepare_threshold=0)
            )
            _, granted = await ledger.hold_and_admit(holder, self._tick("held"), **self._thread("held"))
            assert isinstance(granted, Admission)  # noqa: S101  # nobody else is here
            self._token = granted.token
            names = [f"fenced/{number}" for number in range(self._rounds + UNCOUNTED)]
            await holder.change(FENCE, (SPACE, self._token, names))
            pieces = {
                "a round trip (`SELECT 1`)": self._round_trip,
                "connect and close, bare": self._connect,
                "connect and close a lock session": self._open,
                "the look: is one tick in the ledger?": self._look,
                "an attempt that loses: the lock is held": self._lose,
                "an attempt that skips: the tick has run": self._skip,
                "admission, record and unlock": self._admit,
                "a skip from connect to close": self._whole_skip,
                "a checkpointed run, plain saver": self._plain_run,
                "a checkpointed run, fenced saver": self._fenced_run,
            }
            return {name: await timed(self._rounds, call) for name, call in pieces.items()}

    def _new_pool(self, **parameters: Any) -> AsyncConnectionPool[Any]:
        """Return a pool as a replica has one for the ledger, and one with a saver's parameters for checkpoints."""
        return AsyncConnectionPool(
            self._dsn,
            kwargs={"autocommit": True, **parameters},
            min_size=1,
            max_size=4,
            check=AsyncConnectionPool.check_connection,
            open=False,
        )

    def _tick(self, graph: str = GRAPH) -> Tick:
        return Tick(graph, FIRST + timedelta(seconds=next(self._numbers)))

    def _thread(self, name: str) -> dict[str, Any]:
        return {"thread_id": name, "run_id": uuid.UUID(int=1), "heed_interrupt": False}

    async def _round_trip(self) -> None:
        await self._session.fetch("SELECT 1")

    async def _connect(self) -> None:
        await (await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)).close()

    async def _open(self) -> None:
        await (await open_session(self._place)).close()

    async def _look(self) -> None:
        async with self._pool.connection() as connection:
            await ledger.admitted(connection, SPACE, [Tick("held", FIRST)])

    async def _lose(self) -> None:
        await ledger.hold_and_admit(self._session, self._tick("held"), **self._thread("other"))

    async def _skip(self) -> None:
        """Try a tick that has run; the first of the uncounted rounds runs it."""
        await self._run_once(Tick(GRAPH, FIRST - timedelta(days=1)))

    async def _whole_skip(self) -> None:
        session = await open_session(self._place)
        try:
            await ledger.hold_and_admit(session, self._tick("held"), **self._thread("other"))
            await session.holder("held")
        finally:
            await session.close()

    async def _admit(self) -> None:
        """Hold, admit, record and unlock: the three round trips of a tick that runs."""
        await self._run_once(self._tick())

    async def _run_once(self, tick: Tick) -> None:
        held, granted = await ledger.hold_and_admit(self._session, tick, **self._thread(str(tick)))
        if held:
            assert isinstance(granted, Admission)  # noqa: S101  # nobody else is here
            await ledger.record(self._session, tick, token=granted.token, finish=Finish(Outcome.RAN, 1))
            await self._session.unlock(tick.graph)

    async def _plain_run(self) -> None:
        await self._run(AsyncPostgresSaver(self._saver_pool), f"plain/{next(self._numbers)}")

    async def _fenced_run(self) -> None:
        """Run on the next of the threads that are under the one hold of the graph `held`."""
        saver = FencedSaver(self._saver_pool, space=SPACE, graph="held", token=self._token)
        await self._run(saver, f"fenced/{next(self._threads)}")

    async def _run(self, saver: AsyncPostgresSaver, thread_id: str) -> None:
        config: Any = {"configurable": {"thread_id": thread_id}}
        await BUILDER.compile(checkpointer=saver).ainvoke({}, config, durability="sync")


def costs(server: Server, rounds: int) -> dict[str, Any]:
    """Measure every piece so many times on a new database; return the figures."""
    database = server.new_database()
    try:
        migrate(database)
        return {"rounds": rounds, "cost_ms": asyncio.run(Costs(database, rounds).measure())}
    finally:
        database.drop()
