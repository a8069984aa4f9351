"""Costs: what one connect, one try, one skip, one admission and one fenced checkpoint take, on an idle server.

Every measurement is beside the floor that it stands on: a bare round trip, a bare connect, the plain saver, and what the
loops do in the same place. Floors and peers are measured by programs of their own, on the same server.
"""

import asyncio
import tempfile
import uuid
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, TypedDict

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.contest import CONTENDERS
from benchmarks.growth import SPACE, migrate
from benchmarks.plan import Plan
from benchmarks.price import (
    CONNECT_TRY_HELD,
    CONNECT_TRY_RUN_UNLOCK,
    TRY_HELD,
    TRY_RUN_UNLOCK,
    TRY_UNLOCK,
    UNCOUNTED,
    Piece,
    priced,
)
from benchmarks.program import figures_of
from benchmarks.server import Database, Server
from tickd import admissions, ledger
from tickd.admissions import Admission
from tickd.dsn import parse_dsn
from tickd.fence import FencedSaver
from tickd.ledger import Finish
from tickd.lock import LockPlace, LockSession, open_session
from tickd.tick import Outcome, Tick


PRICED = ("tickd", "bare_loop", "one_session", "apscheduler4", "procrastinate", "dbos")
ROUND_TRIP = "a round trip (`SELECT 1`)"
CONNECT = "connect and close, bare"
PLAIN_RUN = "a checkpointed run, plain saver"
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


class Costs:
    """Measures each piece on one database that has tickd's tables."""

    def __init__(self, database: Database, rounds: int) -> None:
        self._rounds = rounds
        self._dsn = database.dsn
        self._place = LockPlace(parse_dsn(database.dsn, setting="DSN"), "costs", SPACE)
        self._numbers = count()
        self._threads = count()

    async def measure(self) -> dict[str, Any]:
        """Return the figures of every piece."""
        async with AsyncExitStack() as stack:
            self._session = await open_session(self._place)
            stack.push_async_callback(self._session.close)
            holder = await open_session(self._place)
            stack.push_async_callback(holder.close)
            self._pool = await stack.enter_async_context(self._new_pool())
            self._saver_pool = await stack.enter_async_context(
                self._new_pool(row_factory=dict_row, prepare_threshold=0)
            )
            _, granted = await admissions.hold_and_admit(holder, self._tick("held"), **self._thread("held"))
            assert isinstance(granted, Admission)  # noqa: S101  # nobody else is here
            self._token = granted.token
            names = [f"fenced/{number}" for number in range(self._rounds + UNCOUNTED)]
            await holder.change(FENCE, (SPACE, self._token, names))
            return await priced(self._rounds, self._pieces())

    def _pieces(self) -> list[Piece]:
        return [
            Piece(ROUND_TRIP, self._round_trip),
            Piece(CONNECT, self._connect),
            Piece("connect and close a lock session", self._open, CONNECT),
            Piece("the look: is one tick in the ledger?", self._look, ROUND_TRIP),
            Piece("an attempt that loses: the lock is held", self._lose, TRY_HELD),
            Piece("an attempt that skips: the tick has run", self._skip, TRY_UNLOCK),
            Piece("admission, record and unlock", self._admit, TRY_UNLOCK),
            Piece("admission, run, record and unlock", self._run_tick, TRY_RUN_UNLOCK),
            Piece("a skip from connect to close", self._whole_skip, CONNECT_TRY_HELD),
            Piece("a run from connect to close", self._whole_run, CONNECT_TRY_RUN_UNLOCK),
            Piece(PLAIN_RUN, self._plain_run),
            Piece("a checkpointed run, fenced saver", self._fenced_run, PLAIN_RUN),
        ]

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
        await admissions.hold_and_admit(self._session, self._tick("held"), **self._thread("other"))

    async def _skip(self) -> None:
        """Try a tick that has run; the first of the uncounted rounds runs it."""
        await self._run_once(Tick(GRAPH, FIRST - timedelta(days=1)))

    async def _whole_skip(self) -> None:
        session = await open_session(self._place)
        try:
            await admissions.hold_and_admit(session, self._tick("held"), **self._thread("other"))
            await session.holder("held")
        finally:
            await session.close()

    async def _admit(self) -> None:
        """Hold, admit, record and unlock: the three round trips of a tick that runs."""
        await self._run_once(self._tick())

    async def _run_tick(self) -> None:
        """Hold, admit, run the graph under the token, record and unlock: a tick on a session that is open."""
        await self._run_whole(self._session)

    async def _whole_run(self) -> None:
        session = await open_session(self._place)
        try:
            await self._run_whole(session)
        finally:
            await session.close()

    async def _run_whole(self, session: LockSession) -> None:
        tick = self._tick()
        _, granted = await admissions.hold_and_admit(session, tick, **self._thread(str(tick)))
        assert isinstance(granted, Admission)  # noqa: S101  # nobody else is here
        saver = FencedSaver(self._saver_pool, space=SPACE, graph=tick.graph, token=granted.token)
        await self._run(saver, str(tick))
        await ledger.record(session, tick, token=granted.token, finish=Finish(Outcome.RAN, 1))
        await session.unlock(tick.graph)

    async def _run_once(self, tick: Tick) -> None:
        held, granted = await admissions.hold_and_admit(self._session, tick, **self._thread(str(tick)))
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


def costs(server: Server, name: str, rounds: int) -> dict[str, Any]:
    """Measure every piece of a contender so many times on a new database; return the figures."""
    database = server.new_database()
    try:
        if name != "tickd":
            return _told(database, name, rounds)
        migrate(database)
        return asyncio.run(Costs(database, rounds).measure())
    finally:
        database.drop()


def _told(database: Database, name: str, rounds: int) -> dict[str, Any]:
    """Return what the program of a floor or a peer says of itself; it reads the plan, as a replica does."""
    with tempfile.TemporaryDirectory(prefix=f"bench-G-{name}-") as home:
        Plan(dsn=database.dsn, home=home, graphs=1, every=1).write()
        return figures_of(
            f"benchmarks.prices.{name}",
            str(rounds),
            peer=CONTENDERS[name].peer,
            extra={"BENCHMARK_HOME": home, "BENCHMARK_REPLICA": "r1"},
        )
