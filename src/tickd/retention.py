"""Retention: threads and ticks that are older than their graph's `keep` are removed, and running ones never.

A thread's age counts from the last hold under which it was written. Its row in `tickd.threads` goes first, in the same
transaction: from then on the thread is none of tickd's, and no fence stands in the way of deleting its checkpoints.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection

from tickd.entry import Entry


BATCH = 500
# Rows of ticks are also what keeps a late replica from running one again; they outlive every grace and catch-up.
LEAST_TICKS = timedelta(hours=1)

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
# What a tick did to the world outside is worth knowing for as long as the tick may be run again.
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

    @property
    def more(self) -> bool:
        """Say whether there is likely more to remove."""
        return self.threads >= BATCH or self.ticks >= BATCH


async def remove_old(connection: AsyncConnection[Any], space: int, entry: Entry) -> Removed:
    """Remove one batch of the graph's old threads and ticks; several replicas may do so at the same time."""
    threads = 0
    facts = {"space": space, "graph": entry.name, "batch": BATCH}
    if entry.keep.threads is not None:
        async with connection.transaction():
            cursor = await connection.execute(FORGET_THREADS, facts | {"keep": entry.keep.threads})
            forgotten = [row[0] for row in await cursor.fetchall()]
            for statement in DELETE_CHECKPOINTS:
                await connection.execute(statement, [forgotten])
        threads = len(forgotten)
    ticks = 0
    if entry.keep.ticks is not None:
        keep = max(entry.keep.ticks, entry.catch_up + LEAST_TICKS)
        ticks = (await connection.execute(DELETE_TICKS, facts | {"keep": keep})).rowcount
        await connection.execute(DELETE_EFFECTS, facts | {"keep": keep})
    return Removed(threads, ticks)
