"""`tickd fire` and `tickd resume-tick`: run a graph now, in this terminal, under the lock that the replicas take."""

import asyncio
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tickd.cli.arguments import Json, usual_schedule
from tickd.cli.output import print_json
from tickd.errors import DatabaseUnusable, Unusable
from tickd.tick import Outcome, Tick, instant_text, parse_instant


FAILED = 1
FORCED = 130
# Whether a task works for the run.
_of_run: ContextVar[bool] = ContextVar("of_run", default=False)

Graph = Annotated[str, typer.Argument(help="The graph's name in the schedule.", show_default=False)]
FireTime = Annotated[str, typer.Argument(help="The tick's fire time, as the log has it.", show_default=False)]
Schedule = Annotated[
    Path,
    typer.Option(
        "--schedule",
        "-s",
        envvar="TICKD_SCHEDULE",
        help="The schedule file.",
        default_factory=usual_schedule,
        show_default="schedule.yaml",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(fire)
    app.command("resume-tick")(resume_tick)


def fire(
    graph: Graph,
    *,
    schedule: Schedule,
    given: Annotated[
        str | None, typer.Option("--input", "-i", help="The input, as JSON; default: the schedule's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a graph now, in the foreground, as a tick of its own; refused with the holder's name while it is held."""
    entry, directory = _entry(schedule, graph), schedule.absolute().parent
    value = None if given is None else _json(given, "--input")

    def hold() -> Any:
        from tickd.writer import sole_writer  # noqa: PLC0415  # langgraph takes a second to import

        return sole_writer(graph, thread_id=entry.thread_id, name=_name("fire"))

    async def what(loaded: Any, hold: Any) -> Any:
        return await _input(entry, loaded, hold.tick) if value is None else value

    raise typer.Exit(_told(_story(entry, directory, hold, what), as_json=as_json))


def resume_tick(
    graph: Graph,
    fire_time: FireTime,
    *,
    value: Annotated[str, typer.Option("--value", help="The answer to the interrupt, as JSON.")],
    schedule: Schedule,
    as_json: Json = False,
) -> None:
    """Answer a tick that waits on an interrupt, and run it to its end in the foreground, under the graph's lock."""
    entry, directory = _entry(schedule, graph), schedule.absolute().parent
    answer = _json(value, "--value")
    try:
        tick = Tick(graph, parse_instant(fire_time))
    except ValueError as error:
        raise Unusable(f"{error}") from None

    def hold() -> Any:
        from tickd.writer import continue_tick  # noqa: PLC0415  # as above

        return continue_tick(tick, name=_name("resume-tick"))

    async def what(loaded: Any, hold: Any) -> Any:
        try:
            return await _answered(loaded, hold, answer)
        except Unusable as refusal:
            hold.outcome = Outcome.INTERRUPTED  # not the tick's failure: it waits as before
            return refusal

    raise typer.Exit(_told(_story(entry, directory, hold, what), as_json=as_json))


@dataclass(frozen=True, slots=True)
class _End:
    """What became of it, to be told when it is recorded: a terminal that is gone is no failure of the tick."""

    facts: Mapping[str, Any]
    sentence: str
    code: int


def _told(story: Coroutine[Any, Any, _End], *, as_json: bool) -> int:
    """Run the story and print its end alone: what graphs, libraries and child processes print goes to stderr."""
    try:
        with _stdout_apart():
            end = asyncio.run(_until_told_to_stop(story))
    except asyncio.CancelledError:
        typer.echo("The run was stopped before it came to its end.", err=True)
        return FAILED
    if as_json:
        print_json(end.facts)
    elif end.sentence:
        typer.echo(end.sentence)
    return end.code


@contextmanager
def _stdout_apart() -> Iterator[None]:
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


async def _until_told_to_stop(story: Coroutine[Any, Any, _End]) -> _End:
    """Let the first signal end the story, which waits for threads; the second leaves at once, and takes them with it.

    Postgres frees the lock with the connection then. A process that let it go and lived on would be a second writer.
    """
    task = asyncio.ensure_future(story)

    def stop() -> None:
        if task.cancelling():
            os._exit(FORCED)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop)
    return await task


async def _story(
    entry: Any, directory: Path, make_hold: Callable[[], Any], what: Callable[[Any, Any], Awaitable[Any]]
) -> _End:
    """Load the graph, hold it, run it, and return what is to be told when the ledger has it."""
    from tickd.log import text_of  # noqa: PLC0415  # as above
    from tickd.writer import LockLost  # noqa: PLC0415  # as above

    facts: dict[str, Any] = {"graph": entry.name}
    try:
        async with _opened(entry, directory) as loaded, make_hold() as hold:
            end = await _under_hold(entry, loaded, hold, what, facts)
    except LockLost as error:
        return _End(facts | {"outcome": "lock_lost"}, f"{error}", FAILED)
    except (Unusable, DatabaseUnusable):
        raise
    except Exception as error:  # noqa: BLE001  # whatever the graph raises is how its tick ended
        traceback.print_exc()
        told = {"outcome": "failed", "error_type": type(error).__name__, "error": text_of(error)}
        return _End(facts | told, "", FAILED)
    if isinstance(end, Unusable):
        raise end
    return end


async def _under_hold(
    entry: Any, loaded: Any, hold: Any, what: Callable[[Any, Any], Awaitable[Any]], facts: dict[str, Any]
) -> _End | Unusable:
    """Run the graph if it is held, and note in `facts` what became of it; an answer that is refused is returned as it is."""
    facts["fire_time"] = instant_text(hold.tick.fire_time)
    if not hold:
        holder = hold.holder.replica if hold.holder else None
        facts |= {"outcome": "skipped", "reason": hold.reason, "holder": holder}
        return _End(facts, _refusal(hold), FAILED)
    given = await what(loaded, hold)
    return given if isinstance(given, Unusable) else await _invoke(entry, loaded, hold, given, facts)


async def _answered(loaded: Any, hold: Any, answer: Any) -> Any:
    """Return what the graph is given to go on with; raises Unusable when the answer is to nothing that it asks."""
    from langgraph.types import Command  # noqa: PLC0415  # as above

    from tickd.graphs import bind  # noqa: PLC0415  # as above

    graph, _ = bind(loaded.graph, hold.saver)
    asked = {question.id: question.value for question in (await graph.aget_state(hold.config)).interrupts}
    if isinstance(answer, dict) and answer and answer.keys() <= asked.keys():
        return Command(resume=answer)
    if len(asked) == 1:
        # By its id, for LangGraph may give a bare answer to a later question too, and takes no bare null.
        return Command(resume=dict.fromkeys(asked, answer))
    if asked:
        raise Unusable(
            f"{hold.tick} asks several things: give --value as an object with some of the keys of {asked}"
        )
    if answer is not None:
        raise Unusable(f"{hold.tick} stands at a breakpoint and asks nothing: go on with it by --value null")
    return None


@asynccontextmanager
async def _opened(entry: Any, directory: Path) -> AsyncIterator[Any]:
    """Load the graph before anything is held or admitted, for a typing error in it is no tick's outcome.

    What its factory opens is held open in a task apart from the run, as on a replica.
    """
    from tickd.graphs import Reference, cause, hold_open  # noqa: PLC0415  # as above

    opening: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    keeper = asyncio.ensure_future(hold_open(Reference.of(entry), directory, opening, closing))
    try:
        yield await asyncio.shield(opening)
    finally:
        closing.set()
        if not opening.done():
            keeper.cancel()
        (ended,) = await asyncio.gather(keeper, return_exceptions=True)
        if ended is not None:
            sys.stderr.write(
                f"what its factory held open broke down, or could not be closed: {cause(ended)}\n"
            )


async def _input(entry: Any, loaded: Any, tick: Tick) -> Any:
    """Return the input that the schedule gives the tick."""
    if loaded.make_input is None:
        return entry.input_for(tick) or {}
    made = loaded.make_input(tick)
    return await made if inspect.isawaitable(made) else made


async def _invoke(entry: Any, loaded: Any, hold: Any, given: Any, facts: dict[str, Any]) -> _End:
    """Run the graph under the hold, and note on it and in `facts` what became of it."""
    from tickd.log import plain  # noqa: PLC0415  # as above

    began = time.monotonic()
    waits_for = await _run(entry, loaded, hold, given)
    took = round((time.monotonic() - began) * 1000, 1)
    thread_id = hold.config["configurable"]["thread_id"]
    facts |= {"outcome": hold.outcome.value, "thread_id": thread_id, "duration_ms": took}
    waits = ""
    if waits_for:
        facts["interrupts"] = plain(waits_for)
        waits = f" and waits for an answer: {facts['interrupts']}"
    sentence = f"{hold.tick} {hold.outcome.value} in {took:g} ms{waits}"
    return _End(facts, sentence, 0 if hold.outcome in (Outcome.RAN, Outcome.INTERRUPTED) else FAILED)


async def _run(entry: Any, loaded: Any, hold: Any, given: Any) -> tuple[Any, ...]:
    """Run the graph to its real end, the threads of its sync nodes included, and return what it waits for.

    It is stopped at its timeout, as `hold.outcome` says then, and for a lost hold, which leaving that tells.
    """
    from tickd.graphs import bind, invoke  # noqa: PLC0415  # as above

    graph, saver = bind(loaded.graph, hold.saver)
    threads = _NodeThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    _of_run.set(True)
    run = asyncio.ensure_future(
        invoke(graph, given, _config(entry, hold), context=entry.context, durability=entry.durability)
    )
    lost = asyncio.ensure_future(hold.lost.wait())
    try:
        seconds = entry.timeout and entry.timeout.total_seconds()
        await asyncio.wait({run, lost}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopped = not run.done()
        if stopped and not lost.done():
            hold.outcome = Outcome.TIMED_OUT
    finally:
        run.cancel()
        lost.cancel()
        await asyncio.wait({run, lost})
        # Cancelled, the graph is over at once, and a thread of it goes on: the hold has to outlast that.
        pending = map(asyncio.wrap_future, tuple(threads.of_run))
        await asyncio.gather(*pending, return_exceptions=True)
    waits_for = () if stopped else run.result()
    if waits_for:
        saver.raise_lost()
        hold.outcome = Outcome.INTERRUPTED
    return waits_for


class _NodeThreads(ThreadPoolExecutor):
    """Knows which of its threads work for the run, and not for what a factory holds open."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="tickd-node")
        self.of_run: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        if _of_run.get():
            self.of_run.add(future)
            future.add_done_callback(self.of_run.discard)
        return future


def _config(entry: Any, hold: Any) -> dict[str, Any]:
    """Return the hold's config with the entry's own settings added."""
    config = dict(hold.config)
    config["configurable"] = {**entry.config.configurable, **config["configurable"]}
    config["metadata"] = {**entry.config.metadata, **config["metadata"]}
    config["tags"] = [*config["tags"], *entry.config.tags]
    if entry.config.recursion_limit is not None:
        config["recursion_limit"] = entry.config.recursion_limit
    return config


def _refusal(hold: Any) -> str:
    if hold.reason is None:
        return f"{hold.tick} was not run: it waits on no interrupt. `tickd why` says what became of it."
    if hold.holder is None:
        return f"{hold.tick.graph} was not run: {hold.reason}"
    since = f" since {instant_text(hold.holder.since)}" if hold.holder.since else ""
    return f"{hold.tick.graph} was not run: {hold.holder.replica} (backend {hold.holder.pid}) holds it{since}"


def _entry(schedule: Path, graph: str) -> Any:
    from tickd.schedule_file import read  # noqa: PLC0415  # as above

    entries = read(schedule, os.environ).entries
    if graph not in entries:
        raise Unusable(f"{schedule} has no graph {graph!r}; it has {', '.join(entries)}")
    return entries[graph]


def _json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unusable(f"{option} is not JSON: {error}") from None


def _name(command: str) -> str:
    return f"{command}-{os.getpid()}"
