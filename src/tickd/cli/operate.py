"""`tickd status`, `backlog`, `history`, `why`, `pause`, `resume`: what an operator asks and orders."""

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer

from tickd.cli.output import print_json, print_table
from tickd.errors import DatabaseUnusable, Unusable
from tickd.tick import Tick, instant_text, parse_instant


T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Graph = Annotated[str, typer.Argument(help="The graph's name in the schedule.", show_default=False)]
FireTime = Annotated[
    str, typer.Argument(help="The tick's fire time, such as 2026-05-04T10:00:00Z.", show_default=False)
]
# What each outcome and skip reason means for somebody who asks why; `tickd why` prints it.
MEANINGS = {
    None: "it runs, or waits to be claimed",
    "ran": "the graph finished",
    "failed": "the graph raised",
    "timed_out": "it ran past its timeout and was stopped",
    "interrupted": "the graph waits for an answer; `tickd resume-tick` gives it",
    "lock_lost": "its replica lost the lock in mid-run, and the run was stopped",
    "handed_off": "its replica was stopped, and another one is to go on with it",
    "abandoned": "it was admitted, and its replica died before it came to an end",
    "missed": "no replica was up when it was due",
    "skipped": "it was not run",
}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, backlog, history, why, pause, resume):
        app.command()(command)


def status(*, as_json: Json = False) -> None:
    """Show each graph: its newest run, who had it, and how many of its ticks are open."""
    rows = _ask(lambda operation: operation.status())
    columns = ("graph", "fire_time", "outcome", "replica", "admitted_at", "open", "paused_at")
    _print(rows, columns, as_json=as_json, empty="No replica has had a graph in this lock space yet.")


def backlog(
    *,
    graph: Annotated[str | None, typer.Option("--graph", "-g", help="Only this graph.")] = None,
    as_json: Json = False,
) -> None:
    """Show every tick that has not come to its end: what it waits for, since when, which attempt, who had it last."""
    rows = _ask(lambda operation: operation.backlog(graph))
    columns = ("graph", "fire_time", "state", "attempt", "replica", "admitted_at", "ready_at", "error_type")
    _print(rows, columns, as_json=as_json, empty="Nothing waits.")


def history(
    graph: Graph,
    *,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="How many ticks, the newest first.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Show a graph's newest ticks and what became of them."""
    rows = _ask(lambda operation: operation.history(graph, count=count))
    columns = (
        "fire_time",
        "outcome",
        "attempt",
        "replica",
        "admitted_at",
        "finished_at",
        "token",
        "error_type",
    )
    _print(rows, columns, as_json=as_json, empty=f"No tick of {graph} is in the ledger.")


def why(graph: Graph, fire_time: FireTime, *, as_json: Json = False) -> None:
    """Say what became of one tick, and why."""
    tick = Tick(graph, _instant(fire_time))
    row = _ask(lambda operation: operation.tick(tick))
    if row is None:
        typer.echo(
            f"{tick} is not in the ledger: it was never admitted. Either it is no fire time of the graph (`tickd next`), "
            "or each replica that fired it has a line that says why it did not run it, or no replica was up.",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
        print_json(_plain(row))
        return
    typer.echo(f"{tick}: {row['outcome'] or 'open'}: {MEANINGS.get(row['outcome'], row['outcome'])}.")
    for name, value in _plain(row).items():
        if value is not None and name not in ("graph", "fire_time", "outcome"):
            typer.echo(f"  {name:<12} {value}")


def pause(graph: Graph, *, as_json: Json = False) -> None:
    """Let no replica run the graph until it is resumed; a run that is under way goes on to its end."""
    since = _ask(lambda operation: _known(operation, graph, operation.pause))
    _print_fact({"graph": graph, "paused_at": since}, f"{graph} is paused since {since}.", as_json=as_json)


def resume(graph: Graph, *, as_json: Json = False) -> None:
    """Let the graph run again, from its next fire time; what fell into the pause is not made up for."""
    since = _ask(lambda operation: _known(operation, graph, operation.resume))
    _print_fact(
        {"graph": graph, "fires_since": since}, f"{graph} fires again since {since}.", as_json=as_json
    )


async def _known(operation: Any, graph: str, order: Callable[[str], Awaitable[datetime | None]]) -> str:
    instant = await order(graph)
    if instant is None:
        near = difflib.get_close_matches(graph, await operation.graphs(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise Unusable(f"no replica has ever had a graph called {graph!r} in this lock space{hint}")
    return instant_text(instant)


def _instant(text: str) -> datetime:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise Unusable(f"{error}") from None


def _ask(question: Callable[[Any], Awaitable[T]]) -> T:
    """Connect, ask, and close; whatever keeps the ledger from answering is one sentence."""
    import psycopg  # noqa: PLC0415  # it takes a while to import, and --help should not

    from tickd.operation import Operation  # noqa: PLC0415  # as above
    from tickd.settings import read_settings  # noqa: PLC0415  # as above

    settings = read_settings()
    dsn = settings.database()

    async def ask() -> T:
        async with asyncio.timeout(settings.connect_timeout.total_seconds()):
            parameters = await dsn.connection_parameters()
            connection = await psycopg.AsyncConnection.connect(**parameters, autocommit=True)
        async with connection:
            return await question(Operation(connection, settings.lock_space))

    try:
        return asyncio.run(ask())
    except (
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.InvalidSchemaName,
    ):
        raise DatabaseUnusable(
            f"{dsn.describe()} has no tables of tickd yet, or older ones: start a replica, or run `tickd migrate`"
        ) from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"{dsn.describe()} cannot be asked: {error.diag.message_primary}; GRANT this role USAGE on the schema tickd, and "
            "SELECT on its tables (and UPDATE on tickd.graphs, to pause and resume)"
        ) from None
    except (psycopg.DataError, UnicodeEncodeError) as error:
        raise Unusable(f"Postgres cannot have a graph, or a number, like that: {error}") from None
    except (psycopg.Error, TimeoutError, OSError) as error:
        reason = dsn.redact(str(error)).strip() or type(error).__name__
        raise DatabaseUnusable(f"{dsn.describe()} cannot be asked: {reason}") from None


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: instant_text(value)
        if isinstance(value, datetime)
        else value
        if isinstance(value, int | str | None)
        else str(value)
        for key, value in row.items()
    }


def _print(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool, empty: str) -> None:
    if as_json:
        for row in rows:
            print_json(_plain(row))
    elif rows:
        print_table(columns, [_plain(row) for row in rows])
    else:
        typer.echo(empty)


def _print_fact(facts: Mapping[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        typer.echo(sentence)
