"""`tickd run` and `tickd migrate`: one replica, and the tables that replicas share."""

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tickd import collector
from tickd.cli.output import print_json
from tickd.errors import DatabaseUnusable, Unusable


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(run)
    app.command()(migrate)


def run(
    schedule: Annotated[
        Path | None,
        typer.Argument(
            help="The schedule file; default: TICKD_SCHEDULE, or schedule.yaml.", show_default=False
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Log JSON lines even on a terminal.")] = False,
) -> None:
    """Run one replica of the schedule until it is stopped.

    Start as many as you like, all with the same schedule and the same TICKD_DATABASE_URL: for each tick one of them
    runs the graph, and the others skip and say why.
    """
    from tickd import log as logs  # noqa: PLC0415  # langgraph takes a second to import, and --help should not
    from tickd.daemon import Daemon  # noqa: PLC0415  # as above
    from tickd.schedule_file import read  # noqa: PLC0415  # as above
    from tickd.settings import read_settings, unknown_variables  # noqa: PLC0415  # as above

    collector.relax()
    settings = read_settings(schedule=schedule, log_format="json" if as_json else None)
    log = logs.configure(
        replica=settings.replica,
        log_format=settings.log_format,
        level=settings.log_level,
        secrets=settings.secrets(),
    )
    for sentence in unknown_variables(os.environ):
        log.warning("settings.warning", warning=sentence)
    try:
        code = asyncio.run(Daemon(settings, read(settings.schedule, os.environ), log).serve())
    except Unusable as error:
        log.error("schedule.rejected", error=str(error), exit_code=2)  # noqa: TRY400  # the sentence is the whole news
        raise
    except DatabaseUnusable as error:
        log.error("daemon.failed", error_type="DatabaseUnusable", error=str(error), exit_code=3)  # noqa: TRY400  # as above
        raise
    # The interpreter's last collection would look at every object of every library once more, which takes a third of a
    # second for nothing: they all go with the process, and an orchestrator is waiting for it to end.
    collector.freeze()
    raise typer.Exit(code)


def migrate(
    *,
    remove_guard: Annotated[
        bool,
        typer.Option(
            "--remove-guard",
            help="Take away the triggers that refuse writes without a hold; `tickd migrate` brings them back.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Create or update the tables of tickd and of the LangGraph checkpointer, and the guard on the latter.

    Every replica does this at its start, so you need it only where the daemon's role may not create tables.
    """
    from tickd.lock import LockPlace  # noqa: PLC0415  # see run
    from tickd.migrations import migrate_at, remove_guard_at  # noqa: PLC0415  # see run
    from tickd.settings import read_settings  # noqa: PLC0415  # see run

    settings = read_settings()
    place = LockPlace(
        settings.lock_database(), settings.replica, settings.lock_space, settings.connect_timeout
    )
    if remove_guard:
        removed = asyncio.run(remove_guard_at(place))
        facts: dict[str, Any] = {"changed": removed, "guard": False}
        sentence = "The guard is removed." if removed else "There was no guard."
    else:
        deadline = time.monotonic() + settings.database_deadline.total_seconds()
        before, after = asyncio.run(migrate_at(place, deadline=deadline))
        facts = {
            "changed": before != after,
            "ledger": after.ledger,
            "saver": after.saver,
            "guard": after.guard,
        }
        sentence = (
            f"{'Migrated' if before != after else 'Nothing to do'}: ledger version {after.ledger}, "
            f"checkpointer version {after.saver}, guard installed."
        )
    if as_json:
        print_json(facts)
    else:
        typer.echo(sentence)
