"""`sole_writer` for code without an event loop: the async one, on a loop in a thread of its own.

The saver works from any thread: LangGraph's async saver hands a sync call over to the loop it was made on.

The thread enters and leaves the hold by itself. A Ctrl-C interrupts whoever waits for it, at any moment; the hold, which
another step of this thread would have to let go, is let go all the same.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager

from tickd import writer
from tickd.settings import Settings
from tickd.tick import Tick
from tickd.writer import LockLost, WriterHold


__all__ = ["LockLost", "WriterHold", "sole_writer"]


@contextmanager
def sole_writer(
    graph: str,
    *,
    thread_id: str | Callable[[Tick], str] | None = None,
    name: str = "sole_writer",
    settings: Settings | None = None,
) -> Iterator[WriterHold]:
    """Be the one writer of the graph for the length of the block, or learn at once who is; see `tickd.sole_writer`."""
    keeper = _Keeper(writer.sole_writer(graph, thread_id=thread_id, name=name, settings=settings))
    error: BaseException | None = None
    try:
        keeper.start()
        yield keeper.entered.result()
    except BaseException as raised:
        error = raised
        raise
    finally:
        keeper.leave(error)


class _Keeper(threading.Thread):
    """The thread that has the hold, from its first statement to its last."""

    def __init__(self, hold: AbstractAsyncContextManager[WriterHold]) -> None:
        super().__init__(name="tickd-sole-writer", daemon=True)
        self._hold = hold
        self.entered: Future[WriterHold] = Future()
        self._left: Future[BaseException | None] = Future()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take the hold, keep it until its block has been left, and let it go."""
        try:
            asyncio.run(self._keep())
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is for the thread that waits
            self._error = error
            if not self.entered.done():
                self.entered.set_exception(error)
        finally:
            self._ended.set()

    def leave(self, error: BaseException | None) -> None:
        """End the hold as its block ended, and raise what the hold makes of that, if it is something else."""
        self._left.set_result(error)
        try:
            self._ended.wait()  # not `join`, which cannot wait for a start that was interrupted
        finally:
            self._ended.wait()  # a Ctrl-C waits for the end of it, too; a second one does not
        if self._error is not None and self._error is not error:
            raise self._error

    async def _keep(self) -> None:
        async with self._hold as hold:
            self.entered.set_result(hold)
            error = await asyncio.wrap_future(self._left)
            if error is not None:
                raise error
