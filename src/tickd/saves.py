"""Saves: what one run saves, and when it goes out.

LangGraph lets the next step wait for a step's checkpoint. It lets nothing wait for the input's checkpoint, nor for what a
single task wrote, and nearly always the checkpoint that takes them in follows in the same turn of the loop. So these two
are kept for it, for `TURNS` at most, and all of it is one transaction with one commit: a small run has two in the place of
five. It is turns and not time, because a checkpoint may wait for what was written after all (that of a `DeltaChannel`
does), and a loop that has nothing else to do comes round in microseconds.

The order in which LangGraph saves is kept, and a save comes after what was sent before it: a step's checkpoint builds upon
the input's. What is kept is written before anything is read, and when its run ends, unless that is cancelled.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg_pool import AsyncConnectionPool

from tickd.fence import FencedSaver
from tickd.group_commit import GroupCommit, Save


# What is kept is sent by itself when nothing has come for it in so many turns of the loop.
TURNS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What nobody waits for, to go out with what somebody does; and whether it is written."""

    save: Save
    written: asyncio.Future[None]


class GroupedSaver(FencedSaver):
    """The fenced saver of one run, whose saves go out together with each other and with those of other runs."""

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        group_commit: GroupCommit,
        *,
        space: int,
        graph: str,
        token: int,
    ) -> None:
        super().__init__(pool, space=space, graph=graph, token=token)
        self._group_commit = group_commit
        self._kept: Kept | None = None
        self._late: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def to_the_end(self) -> AsyncIterator[None]:
        """Write what is kept when the block ends, and raise what became of it; when it is cancelled, write nothing more."""
        try:
            try:
                yield
            except Exception:
                with suppress(Exception):
                    await self._write_kept()
                raise
            await self._write_kept()
        finally:
            await self._forget_kept()

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[Any]:
        # What the saver opens a pipeline for are its writes; what it reads needs a cursor.
        if pipeline:
            save = Save(self.hold)
            yield save
            await self._save(save)
        else:
            await self._write_kept()
            async with super()._cursor() as cursor:
                yield cursor

    async def _save(self, save: Save) -> None:
        await self._late_is_written()
        waits = save.is_input or save.is_writes
        kept = self._kept
        if kept is not None:
            kept.save.add(save)
        elif waits:
            kept = self._kept = self._keep(save)
        if kept is None:
            await self._send(save)
        elif not waits:
            self._kept = None
            await self._send_kept(kept)
        elif not save.is_input:
            await asyncio.shield(kept.written)

    def _keep(self, save: Save) -> Kept:
        loop = asyncio.get_running_loop()
        kept = Kept(save, loop.create_future())
        loop.call_soon(self._come_round, kept, TURNS)
        return kept

    def _come_round(self, kept: Kept, turns: int) -> None:
        """Send what nothing has come for in so many turns."""
        if self._kept is kept and turns:
            asyncio.get_running_loop().call_soon(self._come_round, kept, turns - 1)
        elif self._kept is kept:
            self._send_late(kept)

    def _send_late(self, kept: Kept) -> None:
        """Send what is kept in a task of its own; there is one at a time, for nothing is kept until the last is written."""
        # Not when the task begins: whoever comes before that would send it once more.
        self._kept = None
        self._late = asyncio.get_running_loop().create_task(self._send_kept(kept))
        self._late.add_done_callback(lambda _: kept.written.cancel())  # if it was cancelled before it began

    async def _late_is_written(self) -> None:
        """Wait for what was sent late; raises what became of it, to whoever comes: maybe nobody waited for it."""
        if (late := self._late) is not None:
            await asyncio.wait({late})
            late.result()

    async def _write_kept(self) -> None:
        # As a late one, whose end the next save awaits: the next checkpoint builds upon it.
        if self._kept is not None:
            self._send_late(self._kept)
        await self._late_is_written()

    async def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept.written.cancel()
            self._kept = None
        if self._late is not None:
            self._late.cancel()
            await asyncio.gather(self._late, return_exceptions=True)

    async def _send_kept(self, kept: Kept) -> None:
        try:
            await self._send(kept.save)
        except asyncio.CancelledError:
            kept.written.cancel()
            raise
        except Exception as error:
            kept.written.set_exception(error)
            kept.written.exception()  # whoever does not wait for it is told by the next save
            raise
        kept.written.set_result(None)

    async def _send(self, save: Save) -> None:
        await self._group_commit.save(save, partial(self._save_alone, save))

    async def _save_alone(self, save: Save) -> None:
        async with super()._cursor(pipeline=True) as cursor:
            await save.send_on(cursor)
