"""`tickd fire` and `tickd resume-tick`: run a graph now, in this terminal, under the lock that the replicas take."""

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tickd.cli.arguments import Json, usual_schedule
from tickd.cli.output import print_json
from tickd.errors import Unusable
from tickd.tick import Outcome, Tick, instant_text, parse_instant


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

    async def story() -> int:
        from tickd.writer import sole_writer  # noqa: PLC0415  # langgraph takes a second to import

        async with _opened(entry, directory) as loaded:
            async with sole_writer(graph, thread_id=entry.thread_id, name=_name("fire")) as hold:
                given = value if value is not None or not hold else await _input(entry, loaded, hold.tick)
                end = await _invoke(entry, loaded, hold, given)
            return _tell(end, as_json=as_json)

    raise typer.Exit(asyncio.run(story()))


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

    async def story() -> int:
        from tickd.writer import continue_tick  # noqa: PLC0415  # as above

        async with _opened(entry, directory) as loaded:
            async with continue_tick(tick, name=_name("resume-tick")) as hold:
                end: _End | Unusable
                try:
                    given = await _answered(loaded, hold, answer) if hold else None
                except Unusable as refusal:
                    # Not the tick's failure: it waits as before.
                    hold.outcome, end = Outcome.INTERRUPTED, refusal
                else:
                    end = await _invoke(entry, loaded, hold, given)
            if isinstance(end, Unusable):
                raise end
            return _tell(end, as_json=as_json)

    raise typer.Exit(asyncio.run(story()))


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


@dataclass(frozen=True, slots=True)
class _End:
    """What became of it, to be told when it is recorded: a terminal that is gone is no failure of the tick."""

    facts: Mapping[str, Any]
    sentence: str
    code: int


async def _invoke(entry: Any, loaded: Any, hold: Any, given: Any) -> _End:
    """Run the graph under the hold; the code is 1 when it was refused, or took longer than its timeout."""
    facts: dict[str, Any] = {"graph": entry.name, "fire_time": instant_text(hold.tick.fire_time)}
    if not hold:
        holder = hold.holder.replica if hold.holder else None
        facts |= {"outcome": "skipped", "reason": hold.reason, "holder": holder}
        return _End(facts, _refusal(hold), 1)
    from tickd.log import plain  # noqa: PLC0415  # as above

    began = time.monotonic()
    waits_for: tuple[Any, ...] = ()
    limit = asyncio.timeout(entry.timeout and entry.timeout.total_seconds())
    try:
        async with limit:
            waits_for = await _run(entry, loaded, hold, given)
    except TimeoutError:
        if not limit.expired():
            raise
        hold.outcome = Outcome.TIMED_OUT
    if waits_for:
        hold.outcome = Outcome.INTERRUPTED
    took = round((time.monotonic() - began) * 1000, 1)
    thread_id = hold.config["configurable"]["thread_id"]
    facts |= {"outcome": hold.outcome.value, "thread_id": thread_id, "duration_ms": took}
    waits = ""
    if waits_for:
        facts["interrupts"] = plain(waits_for)
        waits = f" and waits for an answer: {facts['interrupts']}"
    sentence = f"{hold.tick} {hold.outcome.value} in {took:g} ms{waits}"
    return _End(facts, sentence, 1 if hold.outcome is Outcome.TIMED_OUT else 0)


async def _run(entry: Any, loaded: Any, hold: Any, given: Any) -> tuple[Any, ...]:
    """Run the graph to its real end, the threads of its sync nodes included, and return what it waits for."""
    from tickd.graphs import bind, invoke  # noqa: PLC0415  # as above

    graph, saver = bind(loaded.graph, hold.saver)
    threads = _NodeThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    _of_run.set(True)
    try:
        waits_for = await invoke(
            graph, given, _config(entry, hold), context=entry.context, durability=entry.durability
        )
    finally:
        # Cancelled, the graph is over at once, and a thread of it goes on: the hold has to outlast that.
        pending = map(asyncio.wrap_future, tuple(threads.of_run))
        await asyncio.gather(*pending, return_exceptions=True)
    if waits_for:
        saver.raise_lost()
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


def _tell(end: _End, *, as_json: bool) -> int:
    if as_json:
        print_json(end.facts)
    else:
        typer.echo(end.sentence)
    return end.code
