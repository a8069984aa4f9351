"""`tickd check`, `tickd schema` and `tickd init`: the schedule file before anything runs; `tickd next` is in `upcoming`."""

import asyncio
import contextlib
import importlib.resources
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import typer

from tickd.cli import upcoming
from tickd.cli.arguments import Json, ScheduleFile
from tickd.cli.output import print_json
from tickd.errors import Unusable
from tickd.schedule import Entry, Fault, Schedule, ScheduleError
from tickd.schedule_file import read


UNUSABLE = 2

AlwaysJson = Annotated[bool, typer.Option("--json", help="The same: a JSON Schema is JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(check)
    app.command("next")(upcoming.upcoming)
    app.command()(schema)
    app.command()(init)


def check(file: ScheduleFile, *, as_json: Json = False) -> None:
    """Say everything that is wrong with a schedule, each with file, line and column.

    Its graphs are loaded too, as a replica would load them. Exit code 2 when a replica would not start with the file.
    """
    try:
        schedule, warnings = _checked(file)
    except Unusable as error:
        if not as_json:
            raise
        faults = error.faults if isinstance(error, ScheduleError) else ()
        print_json(
            {"event": "schedule.rejected", "file": str(file), "error": str(error), "faults": _facts(faults)}
        )
        raise typer.Exit(UNUSABLE) from None
    count = len(schedule.entries)
    if as_json:
        print_json(
            {"event": "schedule.loaded", "file": str(file), "graphs": count, "warnings": _facts(warnings)}
        )
        return
    for warning in warnings:
        typer.echo(f"{warning.file}:{warning.line}:{warning.column}: warning: {warning.message}")
    typer.echo(f"{file}: {count} {'graph' if count == 1 else 'graphs'}, nothing wrong")


def _checked(file: Path) -> tuple[Schedule, list[Fault]]:
    """Read the schedule and load its graphs; raises one ScheduleError for the faults of both."""
    faults: list[Fault] = []
    try:
        schedule = read(file, os.environ)
    except ScheduleError as error:
        schedule = error.readable
        faults += error.faults
    warnings = [*schedule.warnings, *_over(schedule, datetime.now(UTC))]  # noqa: TID251  # the shell reads the clock
    if _to_load(schedule):
        # What a module prints while it is imported is no part of our output.
        with contextlib.redirect_stdout(sys.stderr):
            asyncio.run(_load_graphs(schedule, file.resolve().parent, faults, warnings))
    if faults:
        raise ScheduleError(tuple(sorted(faults, key=_in_order)), schedule)
    return schedule, sorted(warnings, key=_in_order)


def _to_load(schedule: Schedule) -> list[Entry]:
    return [entry for entry in schedule.entries.values() if entry.graph and entry.enabled]


async def _load_graphs(
    schedule: Schedule, directory: Path, faults: list[Fault], warnings: list[Fault]
) -> None:
    for entry in _to_load(schedule):
        # In a task of its own: a factory may cancel the one in which it was entered.
        loading = asyncio.ensure_future(_warnings_of(entry, directory))
        await asyncio.wait({loading})
        if loading.cancelled():
            faults.append(schedule.fault(entry.name, "its factory raised CancelledError"))
        elif isinstance(error := loading.exception(), Unusable):
            faults.append(schedule.fault(entry.name, str(error).removeprefix(f"graph {entry.name}: ")))
        else:
            warnings += [schedule.fault(entry.name, warning) for warning in loading.result()]


async def _warnings_of(entry: Entry, directory: Path) -> Sequence[str]:
    """Load a graph and close what its factory opened; return what is to be said of it, or raise Unusable."""
    from tickd.graphs import Reference, cause, load_graph  # noqa: PLC0415  # langgraph takes a second to import

    warnings: list[str] = []
    try:
        async with contextlib.AsyncExitStack() as stack:
            warnings += (await load_graph(Reference.of(entry), directory, stack)).warnings
    except Unusable:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, it came from the factory, and the graph is there
        warnings.append(f"what its factory held open could not be closed: {cause(error)}")
    return warnings


def _in_order(fault: Fault) -> tuple[int, int]:
    return fault.line, fault.column


def _over(schedule: Schedule, now: datetime) -> Iterator[Fault]:
    for name, entry in schedule.entries.items():
        if entry.enabled and entry.series.after(now) is None:
            yield schedule.fault(name, "its last fire time is over: it does not fire any more")


def _facts(faults: Iterable[Fault]) -> list[dict[str, Any]]:
    return [
        {"file": each.file, "line": each.line, "column": each.column, "message": each.message}
        for each in faults
    ]


def schema(*, as_json: AlwaysJson = False) -> None:  # noqa: ARG001  # every command has --json
    """Print the JSON Schema of the schedule file, for editors.

    With the YAML language server, the first line of a schedule names the file that this was saved to:
    # yaml-language-server: $schema=schedule.schema.json
    """
    sys.stdout.write(schema_text())


def schema_text() -> str:
    """Return the JSON Schema as it is printed and checked in."""
    from tickd.schema import json_schema  # noqa: PLC0415  # only two commands need it

    return json.dumps(json_schema(), indent=2) + "\n"


def init(
    directory: Annotated[Path, typer.Argument(help="Where to; it is made when it is not there.")] = Path(),
    *,
    as_json: Json = False,
) -> None:
    """Write a schedule and a graph to start from, which `tickd dev` runs as they are.

    Nothing is overwritten.
    """
    starter = importlib.resources.files("tickd") / "starter"
    texts = {path: found.read_text(encoding="utf-8") for path, found in _files_of(starter, Path())}
    texts[Path("schedule.schema.json")] = schema_text()
    present = [str(directory / path) for path in texts if (directory / path).exists()]
    if present:
        raise Unusable(
            f"{', '.join(present)}: there already, and `tickd init` overwrites nothing; name another directory"
        )
    for path, text in texts.items():
        _write(directory / path, text)
    if as_json:
        print_json({"written": [str(directory / path) for path in texts]})
        return
    typer.echo("\n".join(str(directory / path) for path in texts))
    typer.echo(f"Written. Try: tickd dev {directory / 'schedule.yaml'}")


def _files_of(found: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for each in sorted(found.iterdir(), key=lambda each: each.name):
        if each.is_dir() and each.name != "__pycache__":
            yield from _files_of(each, path / each.name)
        elif each.is_file():
            yield path / each.name, each


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Unusable(f"{path}: cannot be written: {error.strerror}") from None
