"""A fenced thread as a test sees it: a migrated database with the guard, admissions by hand, and all rows of a thread."""

import operator
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, LiteralString, TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import START, StateGraph
from psycopg import AsyncConnection
from psycopg.rows import dict_row, tuple_row
from psycopg_pool import AsyncConnectionPool

from tickd.fence import FencedSaver
from tickd.guard import install_guard
from tickd.migrations import migrate
from tickd.stale_writers import Ask
from tickd.stop import Stop


SPACE = 7301
GRAPH = "restock"
THREAD = "restock/long-lived"

# As the ledger's admissions do it.
ADMIT = """
WITH next AS (
    INSERT INTO tickd.graphs (space, graph, key, token)
    VALUES (%(space)s, %(graph)s, 0, %(token)s)
    ON CONFLICT (space, graph) DO UPDATE SET token = EXCLUDED.token
)
INSERT INTO tickd.threads (thread_id, space, graph, token)
VALUES (%(thread)s, %(space)s, %(graph)s, %(token)s)
ON CONFLICT (thread_id) DO UPDATE SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token
"""
ROWS = """
SELECT 'checkpoint', checkpoint_ns, checkpoint_id, '' FROM checkpoints WHERE thread_id = %(thread)s
UNION ALL
SELECT 'blob', checkpoint_ns, channel, version FROM checkpoint_blobs WHERE thread_id = %(thread)s
UNION ALL
SELECT 'write', checkpoint_ns, checkpoint_id, task_id || '/' || idx || '/' || channel
FROM checkpoint_writes WHERE thread_id = %(thread)s
ORDER BY 1, 2, 3, 4
"""

# What is saved is parked in its midst, its threads' rows locked, by a trigger that waits for an advisory lock.
GATE = """
CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(4711);
    RETURN NEW;
END $$;
CREATE TRIGGER zz_gate BEFORE INSERT ON checkpoints FOR EACH ROW EXECUTE FUNCTION wait_at_gate();
SELECT pg_advisory_lock(4711)
"""
PARKED = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"


class State(TypedDict, total=False):
    """A list of what each node has left, so that each checkpoint has a row in each of the saver's tables."""

    seen: Annotated[list[str], operator.add]


def graph(steps: int = 2) -> Any:
    """Return the builder of a chain of nodes."""
    builder = StateGraph(State)
    for i in range(steps):
        builder.add_node(f"n{i}", lambda _, i=i: {"seen": [f"n{i}"]})
        builder.add_edge(f"n{i - 1}" if i else START, f"n{i}")
    return builder


def config(thread: str = THREAD, **metadata: Any) -> Any:
    """Return the config of a run on a thread."""
    return {"configurable": {"thread_id": thread}, "metadata": metadata}


async def connect(dsn: str) -> AsyncConnection[Any]:
    """Open an autocommit connection whose rows are tuples."""
    return await AsyncConnection.connect(dsn, autocommit=True)


def asking(dsn: str) -> Ask:
    """Return what asks each statement over a connection of its own."""

    async def ask(statement: LiteralString, values: Sequence[Any]) -> None:
        async with await connect(dsn) as connection:
            await connection.execute(statement, values)

    return ask


async def prepare(dsn: str) -> None:
    """Migrate the database and install the guard."""
    async with await connect(dsn) as connection:
        await migrate(connection, stop=Stop(), deadline=time.monotonic() + 20)
        await install_guard(connection)


async def admit(
    connection: AsyncConnection[Any],
    token: int,
    *,
    thread: str = THREAD,
    graph: str = GRAPH,
    space: int = SPACE,
) -> None:
    """Move a thread to a hold."""
    parameters = {"thread": thread, "space": space, "graph": graph, "token": token}
    await connection.execute(ADMIT, parameters)


@asynccontextmanager
async def open_pool(dsn: str, **parameters: Any) -> AsyncIterator[AsyncConnectionPool[Any]]:
    """Open a pool as a replica has it."""
    kwargs = {"autocommit": True, "row_factory": dict_row, "prepare_threshold": 0, **parameters}
    async with AsyncConnectionPool(dsn, kwargs=kwargs, min_size=1, max_size=4, open=False) as pool:
        yield pool


def saver(
    pool: AsyncConnectionPool[Any], token: int, *, graph: str = GRAPH, space: int = SPACE
) -> FencedSaver:
    """Make the saver of a hold."""
    return FencedSaver(pool, space=space, graph=graph, token=token)


async def run(
    saver: AsyncPostgresSaver,
    thread: str = THREAD,
    *,
    steps: int = 2,
    durability: Any = "sync",
    **metadata: Any,
) -> Any:
    """Run a chain of nodes on a thread."""
    compiled = graph(steps).compile(checkpointer=saver)
    return await compiled.ainvoke({"seen": ["input"]}, config(thread, **metadata), durability=durability)


async def rows(connection: AsyncConnection[Any], thread: str = THREAD) -> list[tuple[str, ...]]:
    """Return the keys of all rows that the saver's tables have of a thread."""
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(ROWS, {"thread": thread})
        return await cursor.fetchall()
