"""`tickd check`, `tickd schema` and `tickd init`: the schedule file before anything runs; `tickd next` is in `upcoming`."""

import contextlib
import importlib.resources
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import typer

from tickd.cli import upcoming
from tickd.cli.arguments import DEFAULT_SCHEDULE, Json, ScheduleFile
from tickd.cli.output import print_json
from tickd.errors import Unusable
from tickd.schedule import Fault, Schedule, ScheduleError
from tickd.schedule_file import read


UNUSABLE = 2

AlwaysJson = Annotated[bool, typer.Option("--json", help="The same: a JSON Schema is JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(check)
    app.command("next")(upcoming.upcoming)
    app.command()(schema)
    app.command()(init)


def check(file: ScheduleFile = DEFAULT_SCHEDULE, *, as_json: Json = False) -> None:
    """Say everything that is wrong with a schedule, each with file, line and column.

    The graphs are imported too. Exit code 2 when a replica would not start with the file.
    """
    try:
        schedule = _checked(file)
    except Unusable as error:
        if not as_json:
            raise
        faults = error.faults if isinstance(error, ScheduleError) else ()
        print_json(
            {"event": "schedule.rejected", "file": str(file), "error": str(error), "faults": _facts(faults)}
        )
        raise typer.Exit(UNUSABLE) from None
    warnings = [*schedule.warnings, *_over(schedule, datetime.now(UTC))]  # noqa: TID251  # the shell reads the clock
    if as_json:
        print_json(
            {
                "event": "schedule.loaded",
                "file": str(file),
                "graphs": len(schedule.entries),
                "warnings": _facts(warnings),
            }
        )
        return
    for warning in warnings:
        typer.echo(f"{warning.file}:{warning.line}:{warning.column}: warning: {warning.message}")
    count = len(schedule.entries)
    typer.echo(f"{file}: {count} {'graph' if count == 1 else 'graphs'}, nothing wrong")


def _checked(file: Path) -> Schedule:
    """Read the schedule and import its graphs; raises one ScheduleError for the faults of both."""
    faults: tuple[Fault, ...] = ()
    try:
        schedule = read(file, os.environ)
    except ScheduleError as error:
        schedule, faults = error.readable, error.faults
    faults = (*faults, *_unimportable(schedule, file))
    if faults:
        raise ScheduleError(tuple(sorted(faults, key=lambda fault: (fault.line, fault.column))), schedule)
    return schedule


def _unimportable(schedule: Schedule, file: Path) -> Iterator[Fault]:
    from tickd.graphs import resolve, resolve_function  # noqa: PLC0415  # langgraph takes a second to import

    directory = file.resolve().parent
    for name, entry in schedule.entries.items():
        if not (entry.graph and entry.enabled):
            continue
        try:
            # What a module prints while it is imported is no part of our output.
            with contextlib.redirect_stdout(sys.stderr):
                resolve(name, entry.graph, directory)
                if isinstance(entry.input, str):
                    resolve_function(name, entry.input, directory)
        except Unusable as error:
            yield schedule.fault(name, str(error).removeprefix(f"graph {name}: "))


def _over(schedule: Schedule, now: datetime) -> Iterator[Fault]:
    for name, entry in schedule.entries.items():
        if entry.enabled and entry.series.after(now) is None:
            yield schedule.fault(name, "its last fire time is over: it does not fire any more")


def _facts(faults: tuple[Fault, ...] | list[Fault]) -> list[dict[str, Any]]:
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
