"""Runs: a graph at work on the graph thread, and the handle by which the main loop steers it.

Graphs run on an event loop of their own in a second thread, with the pool their checkpoints go through. A node that
blocks its loop therefore stops neither the timer nor a hold's watch; it stops the other graphs of this replica, and the
main loop sees that (`GraphThread.lag`).

A run has ended when its coroutine *and* every thread that it started for a sync node have ended: a cancelled `ainvoke`
returns at once while such a thread goes on writing, and the hold has to outlast it.
"""

import asyncio
import contextvars
import inspect
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.errors import GraphDrained
from langgraph.runtime import RunControl
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tickd.dsn import Dsn
from tickd.fence import FencedSaver
from tickd.graphs import LoadedGraph, Reference, bind, load_all
from tickd.group_commit import GroupCommit, Save
from tickd.pool import Pool
from tickd.saves import GroupedSaver
from tickd.tick import Tick


# A connection that was in use so lately is lent without a round trip.
TRUSTED_FOR = timedelta(seconds=2)

T = TypeVar("T")
P = ParamSpec("P")


class EndKind(StrEnum):
    """How a run came to its end."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    DRAINED = "drained"
    CANCELLED = "cancelled"
    RAISED = "raised"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What became of a run: how it ended, how many super-steps it took, and what goes with that kind of end."""

    kind: EndKind
    steps: int
    error: BaseException | None = None
    interrupts: tuple[Any, ...] = ()
    next_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOrder:
    """What to run: everything that LangGraph is told about one attempt of one tick."""

    loaded: LoadedGraph
    tick: Tick
    thread_id: str
    run_id: uuid.UUID
    space: int
    token: int
    input: Any
    context: Any
    config: Mapping[str, Any]
    durability: Literal["sync", "async", "exit"] | None
    resume: bool


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The bounds of the checkpoint pool."""

    minimum: int = 1
    maximum: int = 6
    timeout: timedelta = timedelta(seconds=30)
    check_within: timedelta = timedelta(seconds=5)


_current_run: contextvars.ContextVar["Run | None"] = contextvars.ContextVar("tickd_run", default=None)


# How long the graph loop waits at a time for the main loop to read what the lock session was sent.
LOOK_AGAIN = 0.001


class _Control(RunControl):
    """LangGraph asks it before each super-step whether to drain; while the hold is in doubt, the answer waits."""

    __slots__ = ("_settle",)

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    @property
    def drain_requested(self) -> bool:
        self._settle()
        return super().drain_requested


@dataclass(slots=True, eq=False)
class Run:
    """One run, as the main loop sees it; `drain` and `cancel` may be called at any time and any number of times.

    Until `begin` it goes no further than to what its thread has: no code of the graph runs, and nothing is written.
    """

    order: RunOrder
    ended: asyncio.Future[RunEnd]
    _main: asyncio.AbstractEventLoop
    _graphs: asyncio.AbstractEventLoop
    _in_doubt: Callable[[], bool]
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _control: RunControl = field(init=False)
    _told: threading.Event = field(default_factory=threading.Event)
    _task: asyncio.Task[None] | None = None
    _cancelled: bool = False
    cut_off_by: str | None = None
    _threads: set[Future[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._control = _Control(self.settle)

    @property
    def threads(self) -> int:
        """Return how many threads of sync nodes are at work for this run."""
        return sum(not thread.done() for thread in tuple(self._threads))

    def begin(self) -> None:
        """Let the graph itself begin."""
        self._graphs.call_soon_threadsafe(self._begun.set)

    async def begun(self) -> None:
        """Wait until the graph may begin; on the graph loop."""
        await self._begun.wait()

    def drain(self, reason: str) -> None:
        """Ask the graph to stop at its next super-step, with its checkpoint kept."""
        self._control.request_drain(reason)

    def cut_off(self, reason: str) -> None:
        """Let no checkpoint of this run through any more, and no further node start; in force when it returns."""
        self.cut_off_by = reason
        self._told.set()
        self._control.request_drain(reason)

    def settle(self) -> None:
        """Return when the hold is out of doubt: the main loop has read what its session was sent, or has cut the run off.

        A process that stood still comes back in the middle of a node, and this thread may come round before the one that
        hears of the loss. The wait is for a loop that no graph can block, so it is over within a few milliseconds.
        """
        while self._in_doubt() and not self._told.wait(LOOK_AGAIN):
            pass

    def cancel(self) -> None:
        """Cancel the graph where it stands."""
        self._graphs.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _work(self, pool: AsyncConnectionPool[Any], group_commit: GroupCommit) -> None:
        """Run on the graph loop, to the real end, and report to the main loop."""
        _current_run.set(self)
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101  # this is one
        self._task.set_name(self.order.tick.graph)
        try:
            if self._cancelled:
                raise asyncio.CancelledError  # noqa: TRY301  # cancelled before it began
            end = await self._invoke(pool, group_commit)
        except asyncio.CancelledError as error:
            # The task ends here. A CancelledError that nobody asked for is the graph's own failure.
            end = RunEnd(EndKind.CANCELLED, 0) if self._cancelled else RunEnd(EndKind.RAISED, 0, error=error)
        except BaseException as error:  # noqa: BLE001  # a graph may raise anything, and it is the tick's outcome
            end = RunEnd(EndKind.RAISED, 0, error=error)
        while pending := [thread for thread in tuple(self._threads) if not thread.done()]:
            # Cancelled again while a thread is still writing: the run has not ended before the thread has. What it raises
            # after all is nobody's news.
            ended = asyncio.gather(*map(asyncio.wrap_future, pending), return_exceptions=True)
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ended)
        self._main.call_soon_threadsafe(_resolve, self.ended, end)

    async def _invoke(self, pool: AsyncConnectionPool[Any], group_commit: GroupCommit) -> RunEnd:
        order = self.order
        graph, saver = bind(order.loaded.graph, RunSaver(pool, group_commit, self))
        async with saver.to_the_end():
            return await self._outcome(graph, saver)

    async def _outcome(self, graph: Any, saver: "RunSaver") -> RunEnd:
        order = self.order
        config: Any = order.config
        given = None
        if not (order.resume and await _continues(saver, config, order.run_id)):
            given = await self._input()
        try:
            result = await graph.ainvoke(
                given, config, context=order.context, durability=order.durability, control=self._control
            )
        except GraphDrained:
            return RunEnd(EndKind.DRAINED, saver.steps, next_nodes=await _next_nodes(graph, config))
        if isinstance(result, dict) and result.get("__interrupt__"):
            return RunEnd(
                EndKind.INTERRUPTED, saver.steps, interrupts=tuple(i.value for i in result["__interrupt__"])
            )
        if graph.interrupt_before_nodes or graph.interrupt_after_nodes:
            # A breakpoint set at compile time ends the run like success, and only the state tells.
            state = await graph.aget_state(config)
            if state.next:
                return RunEnd(
                    EndKind.INTERRUPTED,
                    saver.steps,
                    interrupts=tuple(f"before {node}" for node in state.next),
                )
        return RunEnd(EndKind.FINISHED, saver.steps)

    async def _input(self) -> Any:
        if self.order.loaded.make_input is None:
            return self.order.input
        await self.begun()
        made = self.order.loaded.make_input(self.order.tick)
        return await made if inspect.isawaitable(made) else made


def _resolve(future: asyncio.Future[RunEnd], end: RunEnd) -> None:
    if not future.done():
        future.set_result(end)


async def _continues(saver: AsyncPostgresSaver, config: Any, run_id: uuid.UUID) -> bool:
    """Say whether the thread's newest checkpoint is of this very run, so that None continues it."""
    found = await saver.aget_tuple(config)
    return found is not None and str(found.metadata.get("run_id")) == str(run_id)


async def _next_nodes(graph: Any, config: Any) -> tuple[str, ...]:
    """Return what the next attempt begins with; nothing when the database cannot say, for the run has drained all the same."""
    try:
        return tuple((await graph.aget_state(config)).next)
    except (psycopg.Error, PoolTimeout):
        return ()


class CutOff(Exception):
    """A checkpoint was not written, because the run's hold is gone."""


class RunSaver(GroupedSaver):
    """The saver of one run: writes under the run's hold, and nothing once the run is cut off."""

    def __init__(self, pool: AsyncConnectionPool[Any], group_commit: GroupCommit, run: "Run") -> None:
        order = run.order
        super().__init__(pool, group_commit, space=order.space, graph=order.tick.graph, token=order.token)
        self._run = run

    async def aget_tuple(self, config: Any) -> Any:
        """Read a checkpoint, which LangGraph does before anything of the graph; what is read ahead of time is kept until then."""
        found = await super().aget_tuple(config)
        await self._run.begun()
        return found

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[Any]:
        if pipeline:
            self._refuse_when_cut_off()
        async with super()._cursor(pipeline=pipeline) as cursor:
            yield cursor

    async def _save_alone(self, save: Save) -> None:
        self._refuse_when_cut_off()  # maybe while it waited for others
        await super()._save_alone(save)

    def _refuse_when_cut_off(self) -> None:
        self._run.settle()
        if self._run.cut_off_by is not None:
            raise CutOff(self._run.cut_off_by)


class _NodeThreads(ThreadPoolExecutor):
    """The graph loop's default executor: knows which run each of its threads works for."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        # asyncio submits in the context of the task that asked, so the variable names that task's run.
        run = _current_run.get()
        if run is not None:
            run._threads.add(future)  # noqa: SLF001  # the run's own executor
            future.add_done_callback(run._threads.discard)  # noqa: SLF001  # as above
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
    """Make a task that carries its graph's name, so that a blocked loop can say who blocks it."""
    run = _current_run.get()
    if run is not None and kwargs.get("name") is None:
        kwargs["name"] = run.order.tick.graph
    return asyncio.Task(coroutine, loop=loop, **kwargs)


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
        self._keepers: list[asyncio.Task[None]] = []
        self._pool: Pool | None = None
        self._group_commit: GroupCommit | None = None
        self._renewal: Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the thread and open the pool; connections come as they are needed."""
        self._thread.start()
        await self._on_graph_loop(self._open())

    async def load(self, references: Sequence[Reference], directory: Path) -> dict[str, LoadedGraph]:
        """Load every graph, on the loop where it will run; raises Unusable that names all that cannot be loaded."""
        return await self._on_graph_loop(self._load(references, directory))

    def run(self, order: RunOrder, *, in_doubt: Callable[[], bool]) -> Run:
        """Start a run, up to where `Run.begin` lets its graph begin, and return its handle at once.

        `in_doubt` says whether there is unread news about its hold.
        """
        main = asyncio.get_running_loop()
        run = Run(order, main.create_future(), main, self._loop, in_doubt)
        self._loop.call_soon_threadsafe(self._begin, run)
        return run

    async def close(self) -> None:
        """Close the pool and what the graphs' factories hold open, and end the thread."""
        try:
            await self._on_graph_loop(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()

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
        work = run._work(self._pool, self._group_commit)  # noqa: SLF001  # its own loop
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

    async def _load(self, references: Sequence[Reference], directory: Path) -> dict[str, LoadedGraph]:
        loaded: asyncio.Future[dict[str, LoadedGraph]] = self._loop.create_future()
        self._keepers.append(self._loop.create_task(self._keep(references, directory, loaded)))
        return await loaded

    async def _keep(
        self,
        references: Sequence[Reference],
        directory: Path,
        loaded: asyncio.Future[dict[str, LoadedGraph]],
    ) -> None:
        """Hold open what factories opened until the close: the task that entered an anyio scope has to leave it."""
        async with AsyncExitStack() as stack:
            try:
                loaded.set_result(await load_all(references, directory, stack))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is for whoever waits for the graphs
                loaded.set_exception(error)
                return
            await self._closing.wait()

    async def _close(self) -> None:
        self._closing.set()
        try:
            await asyncio.gather(*self._keepers)
        finally:
            if self._pool is not None:
                await self._pool.close()

    async def _on_graph_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


async def _nothing() -> None:
    return None
