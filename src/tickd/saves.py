"""Saves: what one run saves, and when it goes out.

LangGraph lets the next step wait for a step's checkpoint. It lets nothing wait for the input's checkpoint, nor for what a
single task wrote, and nearly always the checkpoint that takes them in follows in the same turn of the loop. So these two
are kept for it, for `TURNS` at most, and all of it is one transaction with one commit: a small run has two in the place of
five. It is turns and not time, because a checkpoint may wait for what was written after all (that of a `DeltaChannel`
does), and a loop that has nothing else to do comes round in microseconds.

The saves of a run go out one after the other, in the order in which LangGraph makes them: a step's checkpoint builds upon
the input's. Where an input's could not be written nothing comes after it, and the run has failed, for LangGraph takes it
for written. What is kept is written before anything is read, and when its run ends, unless that is cancelled. Each save is
sent by a task of its own. LangGraph abandons the tasks in which it saves when it is cancelled in the wrong moment, and
what they had sent would be written after the end of the run.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from tickd.fence import FencedSaver
from tickd.group_commit import GroupCommit, Save
from tickd.pool import shut_down


# What is kept is sent by itself when nothing has come for it in so many turns of the loop.
TURNS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What goes out as one transaction, with whatever is added to it until it is sent; and whether it is written."""

    save: Save
    written: asyncio.Future[None]

    def tell(self, sending: asyncio.Task[None]) -> None:
        """Let whoever waits for it know what became of it."""
        if sending.cancelled():
            self.written.cancel()
        elif (error := sending.exception()) is not None:
            self.written.set_exception(error)
            self.written.exception()  # maybe nobody waits for it
        else:
            self.written.set_result(None)


@dataclass(slots=True)
class Outbox:
    """What is kept of one run's saves and what is under way, the last of it, and how an input failed.

    A clone of the saver (`with_allowlist`), which LangGraph may give a subgraph, has the same one: it is the same run.
    """

    kept: Outgoing | None = None
    last: asyncio.Task[None] | None = None
    sending: set[asyncio.Task[None]] = field(default_factory=set)
    failed: Exception | None = None
    ended: bool = False
    link: AsyncConnection[Any] | None = None


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
        self._box = Outbox()

    @asynccontextmanager
    async def to_the_end(self) -> AsyncIterator[None]:
        """Write what is kept when the block ends, and raise what became of it; when it is cancelled, write nothing more."""
        try:
            try:
                yield
            except Exception:
                with suppress(Exception):
                    await self._all_written()
                raise
            await self._all_written()
        finally:
            await self._end()

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[Any]:
        # What the saver opens a pipeline for are its writes; what it reads needs a cursor.
        if pipeline:
            save = Save(self.hold)
            yield save
            await self._save(save)
        else:
            await self._all_written()
            async with super()._cursor() as cursor:
                yield cursor

    async def _save(self, save: Save) -> None:
        """Send a checkpoint with what is kept, and wait for it; keep all else, and wait for it unless it is an input."""
        if self._box.ended:
            raise RuntimeError("this comes after the end of its run, and was not saved")
        waits = save.is_input or save.is_writes
        outgoing = self._box.kept
        if outgoing is not None:
            outgoing.save.add(save)
        else:
            outgoing = Outgoing(save, asyncio.get_running_loop().create_future())
            if waits:
                self._box.kept = outgoing
                self._come_round(outgoing, TURNS + 1)
        if not waits:
            self._send(outgoing)
        if not save.is_input:
            await asyncio.shield(outgoing.written)

    def _come_round(self, kept: Outgoing, turns: int) -> None:
        """Send what nothing has come for in so many turns."""
        if self._box.kept is kept and turns:
            asyncio.get_running_loop().call_soon(self._come_round, kept, turns - 1)
        elif self._box.kept is kept:
            self._send(kept)

    def _send(self, outgoing: Outgoing) -> None:
        # Not when the task begins: whoever comes before that would send what is kept once more.
        self._box.kept = None
        sending = asyncio.get_running_loop().create_task(self._write(outgoing.save, self._box.last))
        self._box.last = sending
        self._box.sending.add(sending)
        sending.add_done_callback(self._box.sending.discard)
        sending.add_done_callback(outgoing.tell)

    async def _write(self, save: Save, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        if self._box.failed is not None:
            raise self._box.failed
        try:
            await self._group_commit.save(save, partial(self._save_alone, save))
        except Exception as error:
            if save.is_input:
                self._box.failed = error
            raise

    async def _all_written(self) -> None:
        """Send what is kept and wait for all that was sent; raises what became of an input: nobody else waited for it."""
        if self._box.kept is not None:
            self._send(self._box.kept)
        if self._box.last is not None:
            await asyncio.wait({self._box.last})
        if self._box.failed is not None:
            raise self._box.failed

    async def _end(self) -> None:
        """Let nothing be written from now on, and return when nothing is under way any more."""
        self._box.ended = True
        if self._box.kept is not None:
            self._box.kept.written.cancel()
            self._box.kept = None
        cancellation: asyncio.CancelledError | None = None
        while self._box.sending:
            for task in self._box.sending:
                task.cancel()
            try:
                await asyncio.wait(self._box.sending)
            except asyncio.CancelledError as error:
                cancellation = error
                # Cancelled, psycopg waits for the server once more. That has had its time, and the link may be dead.
                if self._box.link is not None:
                    shut_down(self._box.link)
        if cancellation is not None:
            raise cancellation

    async def _save_alone(self, save: Save) -> None:
        try:
            async with super()._cursor(pipeline=True) as cursor:
                self._box.link = cursor.connection
                await save.send_on(cursor)
        finally:
            self._box.link = None
