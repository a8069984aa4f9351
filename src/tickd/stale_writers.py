"""Stale writers: sessions of the past that keep an admission from a thread's row, and how they are ended.

A write of checkpoints holds its thread's row (`tickd.fence`) until it commits, and an admission that moves the thread waits
for it. A process that was stopped, or cut off, between the statements of a checkpoint never commits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, LiteralString, TypeVar

from psycopg import Error


T = TypeVar("T")
Ask = Callable[[LiteralString, Sequence[Any]], Awaitable[Any]]

# What an admission waits before it ends the sessions in its way: long enough for a write that is merely under way.
PATIENCE = timedelta(seconds=1)
# Of those in the way, only who reads a thread's row FOR SHARE. An operator or a retention that changes rows is not a
# writer of checkpoints, and has a stronger lock on the table as well.
END_STALE_WRITERS = """
SELECT pg_terminate_backend(blocking.pid)
FROM unnest(pg_blocking_pids(%s)) AS blocking (pid)
WHERE (
    SELECT array_agg(l.mode)
    FROM pg_locks AS l
    WHERE l.pid = blocking.pid AND l.relation = to_regclass('tickd.threads')
) = '{RowShareLock}'
"""


class StaleWriters:
    """Ends the sessions of stale writers that keep one backend, `waiting`, from a thread's row.

    A process that was stopped, or cut off, between the statements of a checkpoint leaves its transaction open, and no
    time-out of Postgres 16 or earlier ends one that is in the middle of a pipeline. A session that this role may not
    signal stays, and the admission ends by a time-out of its own.

    Many admissions may wait on one backend, and a server that is slow has no connection to spare for each of them: there
    is one for all. `ask` asks a statement over a connection of its own, within a time limit.
    """

    def __init__(self, waiting: int, ask: Ask) -> None:
        self._waiting = waiting
        self._ask = ask
        self._impatient = 0
        self._ending: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def past(self, admission: Coroutine[Any, Any, T]) -> T:
        """Await an admission, and end who has been in its way for longer than the patience."""
        task = asyncio.ensure_future(admission)
        try:
            if not (await asyncio.wait({task}, timeout=PATIENCE.total_seconds()))[0]:
                with self._being_ended():
                    await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    @contextmanager
    def _being_ended(self) -> Iterator[None]:
        self._impatient += 1
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        try:
            yield
        finally:
            self._impatient -= 1
            if not self._impatient:
                # Not awaited: a graph that is held is to start, and the connection may take seconds to give up.
                self._ending.cancel()
                self._ending = None

    async def _end(self) -> None:
        async with self._one_at_a_time:  # the task before this one may still be closing its connection
            while True:
                # The admission itself will tell that the database is not well.
                with suppress(Error, TimeoutError, OSError):
                    await self._ask(END_STALE_WRITERS, [self._waiting])
                await asyncio.sleep(PATIENCE.total_seconds())  # noqa: TID251  # it is cancelled when nobody waits
