"""`tickd doctor`: look at everything that a replica depends on, and change nothing."""

import asyncio
import os

import typer

from tickd.cli.arguments import Json, ScheduleFile
from tickd.cli.output import print_json
from tickd.errors import DatabaseUnusable, Unusable


MARKS = {"good": "ok  ", "doubtful": "warn", "bad": "BAD "}
STYLES = {"good": typer.colors.GREEN, "doubtful": typer.colors.YELLOW, "bad": typer.colors.RED}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    schedule: ScheduleFile,
    *,
    as_json: Json = False,
) -> None:
    """Look at settings, schedule, database, clocks and limits, and say what does not fit; exit 1 if a replica could not run."""
    import psycopg  # noqa: PLC0415  # langgraph and psycopg take a while to import, and --help should not

    from tickd.doctor import Finding, Health, examine, out_of_reach  # noqa: PLC0415  # as above
    from tickd.lock import LockPlace  # noqa: PLC0415  # as above
    from tickd.schedule_file import read  # noqa: PLC0415  # as above
    from tickd.settings import read_settings, unknown_variables  # noqa: PLC0415  # as above

    settings = read_settings()
    place = LockPlace(
        settings.lock_database(),
        settings.replica,
        settings.lock_space,
        settings.connect_timeout,
        windows=settings.windows(),
    )
    findings = [Finding("settings", Health.DOUBTFUL, sentence) for sentence in unknown_variables(os.environ)]
    graphs = 0
    try:
        entries = read(schedule, os.environ).entries
        graphs = len(entries)
        findings.append(Finding("schedule", Health.GOOD, f"{schedule}: {graphs} graphs"))
    except Unusable as error:
        findings.append(Finding("schedule", Health.BAD, str(error)))
    try:
        findings += asyncio.run(examine(settings, place, graphs=graphs))
    except (psycopg.OperationalError, TimeoutError, OSError, DatabaseUnusable) as error:
        findings.append(out_of_reach(place, error))
    for finding in findings:
        if as_json:
            print_json({"subject": finding.subject, "health": finding.health, "sentence": finding.sentence})
        else:
            mark = typer.style(MARKS[finding.health], fg=STYLES[finding.health])
            typer.echo(f"{mark}  {finding.subject:<12} {finding.sentence}")
    raise typer.Exit(1 if any(finding.health is Health.BAD for finding in findings) else 0)
