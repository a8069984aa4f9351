"""The graph thread: the second thread, with the event loop on which graphs run and the pool their checkpoints go through.

A node that blocks its loop stops neither the timer nor a hold's watch, which are on the main loop. It stops the other
graphs of this replica, and the main loop sees that: the loop does not come round (`GraphThread.answer`).
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from langgraph import pregel
from psycopg.rows import dict_row

from tickd.dsn import Dsn
from tickd.errors import Unusable
from tickd.fence import FencedSaver
from tickd.graphs import LoadedGraph, Reference, cause, hold_open, is_made, load_graph, resolve_all
from tickd.group_commit import GroupCommit
from tickd.pool import Pool
from tickd.runs import Run, RunOrder, current_run


# A connection that was in use so lately is lent without a round trip.
TRUSTED_FOR = timedelta(seconds=2)
CLOSE_SECONDS = 5
# Where LangGraph's own coroutines are written.
PREGEL = str(Path(pregel.__file__).parent)
# For the thread to end once everything is closed, or a last chance for a loop that is blocked.
JOIN_SECONDS = 1

T = TypeVar("T")
P = ParamSpec("P")
# Told of a graph, and of what its owner has to know.
Warn = Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The bounds of the checkpoint pool."""

    minimum: int = 1
    maximum: int = 6
    timeout: timedelta = timedelta(seconds=30)
    check_within: timedelta = timedelta(seconds=5)


class _NodeThreads(ThreadPoolExecutor):
    """The graph loop's default executor: knows which run each of its threads works for."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        # asyncio submits in the context of the task that asked, so the variable names that task's run.
        run = current_run.get()
        if run is not None:
            run.add_thread(future)
        return future


class _GraphLoop(asyncio.SelectorEventLoop):
    """The event loop of the graphs, on which savers need no thread.

    What a saver sends to a thread is done on the spot. It turns values into bytes and back, in calls that do not let go
    of the interpreter while they last, so a thread frees the loop of nothing; and a thread that takes work over and hands
    it back, six times a run, is a fifth of what a small run costs. It is done without a turn of the loop as well, so
    saves reach the group commit in the order in which LangGraph makes them.
    """

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        if executor is not None or not _is_savers(func):
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # it is for whoever awaits the future
            future.set_exception(error)
        return future


def _is_savers(fn: Callable[..., Any]) -> bool:
    """Say whether this is a method of a saver as `asyncio.to_thread` submits it: behind `Context.run`."""
    return (
        isinstance(fn, partial)
        and bool(fn.args)
        and isinstance(getattr(fn.args[0], "__self__", None), FencedSaver)
    )


def _named_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
    """Make a task that carries its graph's name, so that a blocked loop can say who blocks it, and that its run knows of."""
    run = current_run.get()
    if run is not None and kwargs.get("name") is None:
        kwargs["name"] = run.order.tick.graph
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **kwargs)
    if run is not None and _is_langgraphs(coroutine):
        run.add_node(task)
    return task


def _is_langgraphs(coroutine: Any) -> bool:
    """Say whether LangGraph runs a node by this, or a save; what a node starts by itself may go on for ever."""
    code = getattr(coroutine, "cr_code", None)
    return code is not None and code.co_filename.startswith(PREGEL)


class GraphThread:
    """The second thread: an event loop, the checkpoint pool, the loaded graphs, and the runs at work."""

    def __init__(
        self, dsn: Dsn, *, replica: str, size: PoolSize, through_pooler: bool, max_running: int
    ) -> None:
        self._dsn = dsn
        self._replica = replica
        self._size = size
        self._through_pooler = through_pooler
        self._loop = _GraphLoop()
        # A run may have several sync nodes at work in one super-step.
        self._loop.set_default_executor(
            _NodeThreads(max_workers=4 * max_running + 4, thread_name_prefix="tickd-node")
        )
        self._loop.set_task_factory(_named_task)
        self._thread = threading.Thread(target=self._run_loop, name="tickd-graphs", daemon=True)
        self._closing = asyncio.Event()
        self._keepers: set[asyncio.Task[None]] = set()
        self._pool: Pool | None = None
        self._group_commit: GroupCommit | None = None
        self._renewal: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the thread and open the pool; connections come as they are needed."""
        self._thread.start()
        await self._on_graph_loop(self._open())

    async def load(
        self, references: Sequence[Reference], directory: Path, warn: Warn
    ) -> dict[str, LoadedGraph]:
        """Load every graph, on the loop where it will run; raises Unusable that names all that cannot be loaded.

        `warn` is told later, on the caller's loop, of each graph whose factory's clients broke down or could not be closed.
        """
        main = asyncio.get_running_loop()

        def tell(graph: str, warning: str) -> None:
            main.call_soon_threadsafe(warn, graph, warning)

        return await self._on_graph_loop(self._load(references, directory, tell))

    def run(self, order: RunOrder, *, in_doubt: Callable[[], bool]) -> Run:
        """Start a run, up to where `Run.begin` lets its graph begin, and return its handle at once.

        `in_doubt` says whether there is unread news about its hold.
        """
        main = asyncio.get_running_loop()
        run = Run(order, main.create_future(), main, self._loop, in_doubt)
        self._loop.call_soon_threadsafe(self._begin, run)
        return run

    async def close(self) -> None:
        """Close the pool and what the graphs' factories hold open, and end the thread.

        Raises TimeoutError that names the graphs whose factories do not let go.
        """
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._on_graph_loop(self._close())
        except TimeoutError:
            raise TimeoutError(f"not closed within {CLOSE_SECONDS} s: {self._still_open()}") from None
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            # Not without limit: a loop that a factory's exit blocks does not hear of the stop.
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()

    def _still_open(self) -> str:
        """Say what has not been closed: the graph that blocks the others, or all that are open."""
        held = {keeper.get_name() for keeper in tuple(self._keepers)}
        blocking = held & {self.current_graph()}
        return ", ".join(sorted(blocking or held)) or "the checkpoint pool"

    def renew_connections(self) -> None:
        """Replace the pool's connections, each when it is idle: the database is another server now."""
        assert self._pool is not None  # noqa: S101  # called after start()
        self._renewal = asyncio.run_coroutine_threadsafe(self._pool.drain(), self._loop)

    async def answer(self) -> None:
        """Return when the graph loop has come round: at once, unless a graph blocks it."""
        await self._on_graph_loop(_nothing())

    def current_graph(self) -> str | None:
        """Return the graph whose task is on the graph loop at this moment, seen from another thread."""
        task = asyncio.tasks._current_tasks.get(self._loop)  # type: ignore[attr-defined]  # noqa: SLF001  # current_task() refuses to be asked from outside
        return None if task is None else task.get_name()

    def _run_loop(self) -> None:
        """Run the graph loop until it is stopped."""
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # These two, and no other, leave the loop as well as the task of the node that raised them. The task has
                # ended with it, and the other runs must not end with the loop.
                continue

    def _begin(self, run: Run) -> None:
        assert self._pool is not None  # noqa: S101  # runs are started after start()
        assert self._group_commit is not None  # noqa: S101  # with the pool
        work = run.work(self._pool, self._group_commit)
        task = contextvars.copy_context().run(self._loop.create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        self._pool = Pool(
            "tickd-checkpoints",
            self._connection_parameters,
            minimum=self._size.minimum,
            maximum=self._size.maximum,
            patience=self._size.timeout,
            check_within=self._size.check_within,
            trusted_for=TRUSTED_FOR,
        )
        await self._pool.open()
        self._group_commit = GroupCommit(self._pool)

    async def _connection_parameters(self) -> dict[str, Any]:
        return {
            **await self._dsn.connection_parameters(),
            "application_name": f"tickd/{self._replica}",
            "autocommit": True,
            "row_factory": dict_row,
            # A transaction-mode pooler may hand the next statement to a server that never saw it prepared.
            "prepare_threshold": None if self._through_pooler else 0,
        }

    async def _load(
        self, references: Sequence[Reference], directory: Path, warn: Warn
    ) -> dict[str, LoadedGraph]:
        found = resolve_all(references, directory)
        loaded: dict[str, LoadedGraph] = {}
        faults: list[str] = []
        for reference in references:
            try:
                if is_made(found[reference.name]):
                    # Nothing is held open, and a keeper for each of ten thousand graphs would be 20 MB.
                    loaded[reference.name] = await load_graph(reference, directory, AsyncExitStack())
                else:
                    loaded[reference.name] = await self._kept(reference, directory, warn)
            except Unusable as fault:
                faults.append(str(fault))
        if faults:
            self._closing.set()
            raise Unusable("\n".join(faults))
        return loaded

    async def _kept(self, reference: Reference, directory: Path, warn: Warn) -> LoadedGraph:
        """Load a graph in a task of its own, which stays with what its factory opens."""
        opening: asyncio.Future[LoadedGraph] = self._loop.create_future()
        keeper = self._loop.create_task(self._keep(reference, directory, opening, warn), name=reference.name)
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return await opening

    async def _keep(
        self,
        reference: Reference,
        directory: Path,
        opening: asyncio.Future[LoadedGraph],
        warn: Warn,
    ) -> None:
        """Hold open what a factory opened, and tell if that ends before the close or cannot be closed."""
        try:
            await hold_open(reference, directory, opening, self._closing)
        except BaseException as error:  # noqa: BLE001  # nobody else would hear of it, and the other graphs go on
            early = "broke down and was closed; restart this replica, or its runs may fail"
            what = "could not be closed" if self._closing.is_set() else early
            warn(reference.name, f"what its factory held open {what}: {cause(error)}")

    async def _close(self) -> None:
        self._closing.set()
        # The pool first, because a factory may never let go.
        if self._pool is not None:
            await self._pool.close()
        if self._keepers:
            await asyncio.wait(self._keepers)

    async def _on_graph_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


async def _nothing() -> None:
    return None
