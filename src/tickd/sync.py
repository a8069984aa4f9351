"""`sole_writer` for code without an event loop: the async one, on a loop in a thread of its own.

The saver works from any thread: LangGraph's async saver hands a sync call over to the loop it was made on.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

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
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tickd-sole-writer", daemon=True)
    thread.start()
    hold = writer.sole_writer(graph, thread_id=thread_id, name=name, settings=settings)

    def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        entered = on_loop(hold.__aenter__())
        try:
            yield entered
        except BaseException as error:
            if not on_loop(hold.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            on_loop(hold.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
