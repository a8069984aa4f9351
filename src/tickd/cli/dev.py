"""`tickd dev`: try a schedule without any set-up."""

import os
from pathlib import Path
from typing import Annotated

import typer


MOST_REPLICAS = 26


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(dev)


def dev(
    schedule: Annotated[
        Path | None,
        typer.Argument(
            help="The schedule file; default: TICKD_SCHEDULE, or schedule.yaml.", show_default=False
        ),
    ] = None,
    *,
    replicas: Annotated[
        int, typer.Option("--replicas", "-n", min=1, max=MOST_REPLICAS, help="How many replicas to start.")
    ] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the replicas' JSON lines, and remarks on stderr.")
    ] = False,
) -> None:
    """Run several replicas of the schedule and a Postgres for them, in this terminal.

    Needs tickd's extra `embedded`. Ctrl-C stops everything, a second one at once.

    The Postgres keeps its data in .tickd/dev beside the schedule; for root, in /var/lib/tickd-dev.

    When it is new, the SQL in seed.sql beside the schedule fills it.
    """
    from tickd.dev import develop  # noqa: PLC0415  # psycopg takes a while to import, and --help should not
    from tickd.schedule_file import read  # noqa: PLC0415  # as above
    from tickd.settings import read_settings  # noqa: PLC0415  # as above

    path = read_settings(schedule=schedule).schedule
    read(path, os.environ)  # so that its faults are told once, and not by each replica
    raise typer.Exit(develop(path, replicas=replicas, as_json=as_json))
