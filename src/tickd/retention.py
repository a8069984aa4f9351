"""Retention: threads and ticks that are older than their graph's `keep` are removed, and running ones never.

A thread's age counts from the last hold under which it was written. Its row in `tickd.threads` goes first, in the same
transaction: from then on the thread is none of tickd's, and no fence stands in the way of deleting its checkpoints.

How long that takes depends on how long the histories are, so a batch has a time limit, and is smaller after it ran out.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection

from tickd.entry import Entry


BATCH = 500
# Rows of ticks are also what keeps a late replica from running one again; they outlive every grace and catch-up.
LEAST_TICKS = timedelta(hours=1)

# Postgres itself ends what takes too long. A statement whose client has gone would run to its end all the same, for nothing,
# and keep the threads locked for so long.
LIMIT_STATEMENTS = "SELECT set_config('statement_timeout', %s, true)"
# All of these ask for statement_timestamp(). clock_timestamp() moves on while a statement runs, so against it Postgres
# compares every row of the graph, instead of stopping in the index where the old ones end.
FORGET_THREADS = """
DELETE FROM tickd.threads
WHERE thread_id IN (
    SELECT old.thread_id
    FROM tickd.threads AS old
    WHERE old.space = %(space)s AND old.graph = %(graph)s AND old.held_at < statement_timestamp() - %(keep)s::interval
      AND NOT EXISTS (
        SELECT FROM tickd.ticks AS t
        WHERE t.space = old.space AND t.graph = old.graph AND t.thread_id = old.thread_id
          AND (t.outcome IS NULL OR t.outcome IN ('handed_off', 'interrupted'))
      )
    ORDER BY old.held_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
RETURNING thread_id
"""
DELETE_CHECKPOINTS = (
    "DELETE FROM checkpoint_writes WHERE thread_id = ANY(%b)",
    "DELETE FROM checkpoint_blobs WHERE thread_id = ANY(%b)",
    "DELETE FROM checkpoints WHERE thread_id = ANY(%b)",
)
DELETE_TICKS = """
DELETE FROM tickd.ticks
WHERE (space, graph, fire_time) IN (
    SELECT space, graph, fire_time
    FROM tickd.ticks
    WHERE space = %(space)s AND graph = %(graph)s AND fire_time < statement_timestamp() - %(keep)s::interval
      AND outcome IS NOT NULL AND outcome NOT IN ('handed_off', 'interrupted')
    ORDER BY fire_time
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
"""
# What a tick did to the world outside is worth knowing for as long as the tick may be run again, so the tick goes first.
DELETE_EFFECTS = """
DELETE FROM tickd.effects
WHERE (space, key) IN (
    SELECT e.space, e.key
    FROM tickd.effects AS e
    WHERE e.space = %(space)s AND e.graph = %(graph)s AND e.fire_time < statement_timestamp() - %(keep)s::interval
      AND NOT EXISTS (
        SELECT FROM tickd.ticks AS t
        WHERE t.space = e.space AND t.graph = e.graph AND t.fire_time = e.fire_time
      )
    ORDER BY e.fire_time
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
"""


@dataclass(frozen=True, slots=True)
class Removed:
    """How much one pass removed; `more` says that a batch was full and another pass is worth while."""

    threads: int
    ticks: int
    more: bool


@dataclass(slots=True)
class BatchSize:
    """How many threads, ticks or effects of a graph are removed at a time; `stuck` when even one takes too long."""

    size: int = BATCH
    stuck: bool = False

    def halve(self) -> bool:
        """Take half as many from now on; False when one was too much already."""
        one_was_too_much = self.size == 1
        self.size = max(1, self.size // 2)
        return not one_was_too_much

    def double(self) -> None:
        """Take twice as many from now on, up to a whole batch."""
        self.size = min(BATCH, self.size * 2)
        self.stuck &= self.size < BATCH


async def remove_old(
    connection: AsyncConnection[Any], space: int, entry: Entry, *, batch: int, within: timedelta
) -> Removed:
    """Remove one batch each of the graph's old threads, of its old ticks and of the effects of ticks that are removed.

    Several replicas may do so at the same time. A statement that takes longer than `within` raises psycopg's QueryCanceled,
    and the threads, or the ticks with their effects, all stay.
    """
    threads = 0
    facts = {"space": space, "graph": entry.name, "batch": batch}
    if entry.keep.threads is not None:
        async with _limited(connection, within):
            cursor = await connection.execute(FORGET_THREADS, facts | {"keep": entry.keep.threads})
            forgotten = [row[0] for row in await cursor.fetchall()]
            for statement in DELETE_CHECKPOINTS:
                await connection.execute(statement, [forgotten])
        threads = len(forgotten)
    ticks = effects = 0
    if entry.keep.ticks is not None:
        keep = max(entry.keep.ticks, entry.catch_up + LEAST_TICKS)
        async with _limited(connection, within):
            ticks = (await connection.execute(DELETE_TICKS, facts | {"keep": keep})).rowcount
            effects = (await connection.execute(DELETE_EFFECTS, facts | {"keep": keep})).rowcount
    # A tick may have had any number of effects, so they need more passes than their ticks.
    return Removed(threads, ticks, more=max(threads, ticks, effects) >= batch)


@asynccontextmanager
async def _limited(connection: AsyncConnection[Any], within: timedelta) -> AsyncIterator[None]:
    """Run a transaction whose statements may each take so long."""
    async with connection.transaction():
        await connection.execute(LIMIT_STATEMENTS, [str(round(within.total_seconds() * 1000))])
        yield
