"""Retention: threads and ticks that are older than their graph's `keep` are removed, and running ones never.

A thread's age counts from the last hold under which it was written. Its row in `tickd.threads` goes first, in the same
transaction: from then on the thread is none of tickd's, and no fence stands in the way of deleting its checkpoints.

How long that takes depends on how long the histories are, so a batch has a time limit, and is smaller after it ran out.
Where even one thread is too much it goes piece by piece, each a transaction of its own, and its row goes last: until then
it may be held again, and is whole for whoever reads it. Its newest checkpoints are the last to go, all in one piece, and
what they refer to goes after them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from psycopg import AsyncConnection

from tickd.entry import Entry


BATCH = 500
# Of one thread's rows, in one piece. A checkpoint with a DeltaChannel needs up to 5,000 before it, and so many stay.
PIECE = 10_000
# Rows of ticks are also what keeps a late replica from running one again; they outlive every grace and catch-up.
LEAST_TICKS = timedelta(hours=1)

# Postgres itself ends what takes too long. A statement whose client has gone would run to its end all the same, for nothing,
# and keep the threads locked for so long.
LIMIT_STATEMENTS = "SELECT set_config('statement_timeout', %s, true)"
# All of these ask for statement_timestamp(). clock_timestamp() moves on while a statement runs, so against it Postgres
# compares every row of the graph, instead of stopping in the index where the old ones end.
OLD_THREADS = """
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
"""
FORGET_THREADS = f"""
DELETE FROM tickd.threads
WHERE thread_id IN (
    SELECT old.thread_id {OLD_THREADS}
)
RETURNING thread_id
"""  # noqa: S608  # both are constants
DELETE_CHECKPOINTS = (
    "DELETE FROM checkpoint_writes WHERE thread_id = ANY(%b)",
    "DELETE FROM checkpoint_blobs WHERE thread_id = ANY(%b)",
    "DELETE FROM checkpoints WHERE thread_id = ANY(%b)",
)
# The guard lets through what names the thread's hold, and that cannot change while its row is locked.
TAKE_OLDEST = f"""
SELECT oldest.thread_id, set_config('tickd.token', concat_ws('/', oldest.space, oldest.graph, oldest.token), true)
FROM (
    SELECT old.* {OLD_THREADS}
) AS oldest
"""  # noqa: S608  # as above
FORGET_THREAD = "DELETE FROM tickd.threads WHERE thread_id = %(thread)s"
# Each finds its rows at one end of an index, so that it takes as long for the first piece as for the last.
DELETE_PIECE = (
    """
DELETE FROM checkpoints
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM checkpoints
    WHERE thread_id = %(thread)s AND checkpoint_ns > ''
    ORDER BY checkpoint_ns, checkpoint_id
    LIMIT %(piece)s
))
""",
    """
DELETE FROM checkpoints
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM checkpoints
    WHERE thread_id = %(thread)s AND checkpoint_ns = ''
    ORDER BY checkpoint_id
    LIMIT CASE
        WHEN EXISTS (
            SELECT FROM checkpoints WHERE thread_id = %(thread)s AND checkpoint_ns = '' OFFSET 2 * %(piece)s
        )
        THEN %(piece)s
        ELSE 2 * %(piece)s
    END
))
""",
    """
DELETE FROM checkpoint_writes
WHERE ctid = ANY (ARRAY(SELECT ctid FROM checkpoint_writes WHERE thread_id = %(thread)s LIMIT %(piece)s))
""",
    """
DELETE FROM checkpoint_blobs
WHERE ctid = ANY (ARRAY(SELECT ctid FROM checkpoint_blobs WHERE thread_id = %(thread)s LIMIT %(piece)s))
""",
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
    """How much one pass removed; `more` says that a batch was full, or a piece was, and another pass is worth while."""

    threads: int = 0
    ticks: int = 0
    more: bool = False


@dataclass(slots=True)
class BatchSize:
    """How much of a graph is removed at a time; `stuck` when even the least takes too long.

    `size` is how many threads, ticks or effects; `piece` how many rows of the oldest thread, where one is too much.
    """

    size: int = BATCH
    piece: int | None = None
    stuck: bool = False

    def reduce(self) -> bool:
        """Take less from now on; False when it was the least already."""
        if self.size > 1:
            self.size //= 2
        elif self.piece is None:
            self.piece = PIECE
        elif self.piece > 1:
            self.piece //= 10  # what does not help by a tenth is not a matter of the number
        else:
            return False
        return True

    def double(self) -> None:
        """Take twice as much from now on, up to a whole batch, or a whole piece."""
        if self.piece is not None:
            self.piece = min(PIECE, self.piece * 2)
            return
        self.size = min(BATCH, self.size * 2)
        self.stuck &= self.size < BATCH

    def note(self, removed: Removed) -> None:
        """Take whole threads again once one has gone piece by piece."""
        if removed.threads:
            self.piece = None


async def remove_old_ticks(
    connection: AsyncConnection[Any], space: int, entry: Entry, batch: BatchSize, within: timedelta
) -> Removed:
    """Remove one batch each of the graph's old ticks and of the effects of ticks that are removed.

    Several replicas may do so at the same time. A statement that takes longer than `within` raises psycopg's QueryCanceled,
    and all of them stay.
    """
    if entry.keep.ticks is None:
        return Removed()
    keep = max(entry.keep.ticks, entry.catch_up + LEAST_TICKS)
    facts = {"space": space, "graph": entry.name, "batch": batch.size, "keep": keep}
    async with _limited(connection, within):
        ticks = (await connection.execute(DELETE_TICKS, facts)).rowcount
        effects = (await connection.execute(DELETE_EFFECTS, facts)).rowcount
    # A tick may have had any number of effects, so they need more passes than their ticks.
    return Removed(ticks=ticks, more=max(ticks, effects) >= batch.size)


async def remove_old_threads(
    connection: AsyncConnection[Any], space: int, entry: Entry, batch: BatchSize, within: timedelta
) -> Removed:
    """Remove one batch of the graph's old threads, or a piece of the oldest one, as `remove_old_ticks` does with ticks."""
    if entry.keep.threads is None:
        return Removed()
    facts = {"space": space, "graph": entry.name, "batch": batch.size, "keep": entry.keep.threads}
    async with _limited(connection, within):
        if batch.piece is not None:
            return await _remove_piece(connection, facts | {"piece": batch.piece})
        cursor = await connection.execute(FORGET_THREADS, facts)
        forgotten = [row[0] for row in await cursor.fetchall()]
        for statement in DELETE_CHECKPOINTS:
            await connection.execute(statement, [forgotten])
    return Removed(len(forgotten), more=len(forgotten) >= batch.size)


async def _remove_piece(connection: AsyncConnection[Any], facts: dict[str, Any]) -> Removed:
    oldest = await (await connection.execute(TAKE_OLDEST, facts)).fetchone()
    if oldest is None:
        return Removed()
    facts["thread"] = oldest[0]
    for statement in DELETE_PIECE:
        if (await connection.execute(statement, facts)).rowcount:
            return Removed(more=True)
    await connection.execute(FORGET_THREAD, facts)
    return Removed(1, more=True)


@asynccontextmanager
async def _limited(connection: AsyncConnection[Any], within: timedelta) -> AsyncIterator[None]:
    """Run a transaction whose statements may each take so long."""
    async with connection.transaction():
        await connection.execute(LIMIT_STATEMENTS, [str(round(within.total_seconds() * 1000))])
        yield
