"""Runs: a graph at work on the graph thread, and the handle by which the main loop steers it.

A run has ended when its coroutine *and* every node have ended, in a thread or in a task of LangGraph's: a cancelled
`invoke` returns at once while a thread goes on writing, and when it is cancelled again while a node of several still
cleans up. The hold has to outlast them.
"""

import asyncio
import contextvars
import inspect
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.errors import GraphDrained
from langgraph.runtime import RunControl
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tickd.graphs import LoadedGraph, bind, invoke
from tickd.group_commit import GroupCommit, Save
from tickd.saves import GroupedSaver
from tickd.tick import Tick


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


# Which run a task or a thread of the graph thread works for.
current_run: contextvars.ContextVar["Run | None"] = contextvars.ContextVar("tickd_run", default=None)


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
    _nodes: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._control = _Control(self.settle)

    @property
    def threads(self) -> int:
        """Return how many threads of sync nodes are at work for this run."""
        return sum(not thread.done() for thread in tuple(self._threads))

    def add_thread(self, thread: Future[Any]) -> None:
        """Note a thread that works for a sync node of this run; it belongs to the run until it has ended."""
        self._threads.add(thread)
        thread.add_done_callback(self._threads.discard)

    def add_node(self, node: asyncio.Task[Any]) -> None:
        """Note a task that LangGraph started for this run, beside the run's own; it belongs to the run until it has ended."""
        self._nodes.add(node)
        node.add_done_callback(self._nodes.discard)

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
        if self._cancelled:
            # LangGraph hands on the first request, and no other.
            for node in tuple(self._nodes):
                node.cancel()
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def work(self, pool: AsyncConnectionPool[Any], group_commit: GroupCommit) -> None:
        """Run on the graph loop, to the real end, and report to the main loop."""
        current_run.set(self)
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
        while pending := self._at_work():
            # Cancelled again while a node is still at work: the run has not ended before the node has. What it raises after
            # all is nobody's news.
            ended = asyncio.gather(*pending, return_exceptions=True)
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ended)
        self._main.call_soon_threadsafe(_resolve, self.ended, end)

    def _at_work(self) -> list[asyncio.Future[Any]]:
        threads = [asyncio.wrap_future(thread) for thread in tuple(self._threads) if not thread.done()]
        # LangGraph has waited for its own, unless it was cancelled.
        return [*threads, *(self._nodes if self._cancelled else ())]

    async def _invoke(self, pool: AsyncConnectionPool[Any], group_commit: GroupCommit) -> RunEnd:
        order = self.order
        graph, saver = bind(order.loaded.graph, RunSaver(pool, group_commit, self))
        async with saver.to_the_end():
            end = await self._outcome(graph, saver)
            if end.kind is not EndKind.FINISHED:
                # Whoever goes on with it needs all of its state. Of a run that finished, a node may have known to do without.
                saver.raise_lost()
            return end

    async def _outcome(self, graph: Any, saver: "RunSaver") -> RunEnd:
        order = self.order
        config: Any = order.config
        given = None
        if not (order.resume and await _continues(saver, config, order.run_id)):
            given = await self._input()
        try:
            waits_for = await invoke(
                graph,
                given,
                config,
                context=order.context,
                durability=order.durability,
                control=self._control,
            )
        except GraphDrained:
            return RunEnd(EndKind.DRAINED, saver.steps, next_nodes=await _next_nodes(graph, config))
        if waits_for:
            return RunEnd(EndKind.INTERRUPTED, saver.steps, interrupts=waits_for)
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
