"""Group commit: what the runs of one replica save at one time goes to Postgres as one statement.

A small run saves its state some six times, and what a save costs is mostly what any statement costs: in the client, in
the server, at the commit. So while saves are under way others gather behind them, and then go out together, each under
its own hold. Nobody waits for a group to fill, and a save that finds nothing under way goes alone.

A group takes nobody down with it and waits for nobody. It locks each thread's row as the guard does, but passes over a
row that somebody else has locked and one that is under another hold. A save that was passed over goes alone after all,
and so does each save of a group that failed: there it waits, or is refused, as if there were no groups. All that a saver
writes may be written twice, so an answer that got lost does no harm.
"""

import asyncio
import contextvars
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, LiteralString

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import AsyncCursor
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout


# What takes longer than this keeps nobody behind it any more.
OVERDUE = timedelta(milliseconds=20)
# What one statement carries at most: it holds the graph loop up while it is put together.
MOST_SAVES = 50
# The bytes from which a save gains nothing by company, and would only hold it up.
LARGE = 64 * 1024

# A row's hold is named as the row passes, see `tickd.fence`.
# The look for a thread's row stands in a LATERAL of its own, whose FOR SHARE keeps the planner from turning it round:
# of a table that is still small it would read all, and keep that plan.
# The arrays stand in sub-selects, which hide their lengths from the planner: it would plan each group anew for them. They
# are sent as bytes (`%(...)b`): as text, psycopg would look for the quotes in every one of their values.
_SAVE: LiteralString = """
WITH held AS MATERIALIZED (
    SELECT given.n, given.hold, given.thread_id
    FROM unnest((SELECT %(thread_id)b::text[]), (SELECT %(hold)b::text[])) WITH ORDINALITY AS given (thread_id, hold, n)
    CROSS JOIN LATERAL (
        SELECT
        FROM tickd.threads AS t
        WHERE t.thread_id = given.thread_id AND concat_ws('/', t.space, t.graph, t.token) = given.hold
        FOR SHARE SKIP LOCKED
    ) AS present
), blobs AS (
    INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
    SELECT NAMED, checkpoint_ns, channel, version, type, blob
    FROM unnest((SELECT %(blob_n)b::int[]), (SELECT %(blob_ns)b::text[]), (SELECT %(blob_channel)b::text[]),
                (SELECT %(blob_version)b::text[]), (SELECT %(blob_type)b::text[]), (SELECT %(blob)b::bytea[]))
      AS given (n, checkpoint_ns, channel, version, type, blob)
    JOIN held USING (n)
    ON CONFLICT (thread_id, checkpoint_ns, channel, version) DO NOTHING
), writes AS (
    INSERT INTO checkpoint_writes
        (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
    SELECT NAMED, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob
    FROM unnest((SELECT %(write_n)b::int[]), (SELECT %(write_ns)b::text[]), (SELECT %(write_checkpoint)b::text[]),
                (SELECT %(write_task)b::text[]), (SELECT %(write_path)b::text[]), (SELECT %(write_idx)b::int[]),
                (SELECT %(write_channel)b::text[]), (SELECT %(write_type)b::text[]), (SELECT %(write)b::bytea[]))
      AS given (n, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
    JOIN held USING (n)
    ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx) DO NOTHING
), checkpoints AS (
    INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
    SELECT NAMED, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint::jsonb, metadata::jsonb
    FROM unnest((SELECT %(checkpoint_n)b::int[]), (SELECT %(checkpoint_ns)b::text[]), (SELECT %(checkpoint_id)b::text[]),
                (SELECT %(checkpoint_parent)b::text[]), (SELECT %(checkpoint)b::text[]), (SELECT %(metadata)b::text[]))
      AS given (n, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
    JOIN held USING (n)
    ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id)
    DO UPDATE SET checkpoint = EXCLUDED.checkpoint, metadata = EXCLUDED.metadata
)
SELECT n FROM held
"""
SAVE: LiteralString = _SAVE.replace(
    "NAMED", "CASE WHEN set_config('tickd.token', held.hold, true) IS NOT NULL THEN held.thread_id END"
)
# The statements of the saver that go together, and the arrays for what they say behind the thread.
BLOBS = ("blob_n", "blob_ns", "blob_channel", "blob_version", "blob_type", "blob")
WRITES = (
    "write_n", "write_ns", "write_checkpoint", "write_task", "write_path", "write_idx", "write_channel", "write_type", "write",
)  # fmt: skip
CHECKPOINTS = (
    "checkpoint_n", "checkpoint_ns", "checkpoint_id", "checkpoint_parent", "checkpoint", "metadata",
)  # fmt: skip
TOGETHER: Mapping[str, Sequence[str]] = {
    AsyncPostgresSaver.UPSERT_CHECKPOINT_BLOBS_SQL: BLOBS,
    AsyncPostgresSaver.INSERT_CHECKPOINT_WRITES_SQL: WRITES,
    AsyncPostgresSaver.UPSERT_CHECKPOINTS_SQL: CHECKPOINTS,
}
# A row, and the names of the arrays that its values go to; the first is for the number of its save's hold.
Row = tuple[Sequence[str], list[Any]]


class Save:
    """What one call of a saver sends: kept, in the place of a cursor, until it is known how it goes out."""

    def __init__(self, hold: str) -> None:
        self.hold = hold
        self.statements: list[tuple[Any, list[Any], bool]] = []

    async def execute(self, query: Any, params: Any) -> None:
        """Keep a statement."""
        self.statements.append((query, [params], False))

    async def executemany(self, query: Any, params_seq: Iterable[Any]) -> None:
        """Keep a statement that is sent once for each of the parameters."""
        self.statements.append((query, list(params_seq), True))

    @property
    def is_input(self) -> bool:
        """Say whether this is the checkpoint of an input, before any step."""
        return any(
            query == AsyncPostgresSaver.UPSERT_CHECKPOINTS_SQL and params[0][-1].obj.get("source") == "input"
            for query, params, _ in self.statements
        )

    @property
    def is_writes(self) -> bool:
        """Say whether this is what a task wrote, in a step that may not be over; not an error or an interrupt."""
        return all(
            query == AsyncPostgresSaver.INSERT_CHECKPOINT_WRITES_SQL for query, _, _ in self.statements
        )

    def add(self, later: "Save") -> None:
        """Take in what another save of the same hold sends after this."""
        self.statements += later.statements

    async def send_on(self, cursor: AsyncCursor[Any]) -> None:
        """Send what was kept, as it came."""
        for query, params, many in self.statements:
            if many:
                await cursor.executemany(query, params)
            else:
                await cursor.execute(query, params[0])

    def gather(self) -> "Gathered | None":
        """Return the rows, to wait for a group; None when they cannot, or need not, go together with others."""
        found: list[Row] = []
        threads: set[str] = set()
        size = 0
        for query, params, _ in self.statements:
            arrays = TOGETHER.get(query) if isinstance(query, str) else None
            if arrays is None:
                return None
            for thread_id, *values in params:
                if len(values) != len(arrays) - 1:
                    return None
                if arrays is CHECKPOINTS:
                    values[-2:] = (json.dumps(value.obj) for value in values[-2:])
                threads.add(thread_id)
                size += sum(len(value) for value in values if isinstance(value, str | bytes))
                found.append((arrays, values))
        if len(threads) != 1 or size >= LARGE:
            return None
        return Gathered((threads.pop(), self.hold), found, asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A save that waits for its group: its thread and hold, its rows, and whether they were written there."""

    key: tuple[str, str]
    rows: list[Row]
    written: asyncio.Future[bool]


class GroupCommit:
    """The saves of one replica, those under way and those that gather behind them; for one event loop."""

    def __init__(self, pool: AsyncConnectionPool[Any]) -> None:
        self._pool = pool
        self._under_way: set[asyncio.TimerHandle] = set()
        self._gathering: deque[Gathered] = deque()
        self._groups: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()

    async def save(self, save: Save, alone: Callable[[], Awaitable[object]]) -> None:
        """Return when all of it is written: together with others, or by `alone`, which may raise what it likes.

        Raises PoolTimeout when a group got no connection. Cancelled before it is sent, nothing is written; cancelled
        later, it returns when its rows are there or will never be, for none may come after its run has ended. Cancelled
        again, it returns at once: the link may be dead, and the statement names the hold for which it may still be written.
        """
        if self._under_way or self._gathering:
            gathered = save.gather()
            if gathered is None:
                await alone()
                return
            if await self._together(gathered):
                return
        arrive = self._set_out()
        try:
            await alone()
        finally:
            arrive()

    async def _together(self, one: Gathered) -> bool:
        self._gathering.append(one)
        try:
            await asyncio.wait({one.written})
        except asyncio.CancelledError:
            if one in self._gathering:
                self._gathering.remove(one)
            else:
                # Cancelled once more, this leaves it, and takes nobody's answer along, as the end of a `gather` would.
                await asyncio.wait({one.written})
            raise
        return one.written.result()

    def _set_out(self) -> Callable[[], None]:
        """Keep others waiting from now on, until what is returned is called or this is overdue."""

        def arrive() -> None:
            handle.cancel()
            if handle in self._under_way:
                self._under_way.remove(handle)
                self._send_next()

        handle = asyncio.get_running_loop().call_later(OVERDUE.total_seconds(), lambda: arrive())  # noqa: PLW0108  # it names what is not there yet
        self._under_way.add(handle)
        return arrive

    def _send_next(self) -> None:
        """Send those who have gathered, when nothing is under way any more."""
        if self._under_way or not self._gathering:
            return
        group = [self._gathering.popleft() for _ in range(min(MOST_SAVES, len(self._gathering)))]
        if len(group) == 1:
            group[0].written.set_result(False)
            return
        # Not as a part of the run whose save happens to have made room.
        sending = self._send(group, self._set_out())
        task = asyncio.get_running_loop().create_task(sending, context=self._context.copy())
        self._groups.add(task)
        task.add_done_callback(partial(self._sent, group))

    async def _send(self, group: list[Gathered], arrive: Callable[[], None]) -> None:
        try:
            written = await self._write(group)
        except PoolTimeout as error:
            for one in group:
                one.written.set_exception(error)
        except Exception:  # noqa: BLE001  # whosever it is will meet it alone
            for one in group:
                one.written.set_result(False)
        else:
            for one in group:
                one.written.set_result(one.key in written)
        finally:
            arrive()

    def _sent(self, group: list[Gathered], task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        for one in group:
            one.written.cancel()  # does nothing, unless the task was cancelled, maybe before it began

    async def _write(self, group: list[Gathered]) -> set[tuple[str, str]]:
        """Write a group, and return the threads and holds whose rows are there now."""
        numbers: dict[tuple[str, str], int] = {}
        arrays: dict[str, list[Any]] = {name: [] for name in (*BLOBS, *WRITES, *CHECKPOINTS)}
        for one in group:
            number = numbers.setdefault(one.key, len(numbers) + 1)
            for names, values in one.rows:
                for name, value in zip(names, (number, *values), strict=True):
                    arrays[name].append(value)
        threads, holds = map(list, zip(*numbers, strict=True))
        async with self._pool.connection() as connection, connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(SAVE, {"thread_id": threads, "hold": holds, **arrays})
            present = {number for (number,) in await cursor.fetchall()}
        return {key for key, number in numbers.items() if number in present}
