"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def usual_schedule() -> Path:
    """Return the schedule file where the command line names none."""
    from tickd import settings  # noqa: PLC0415  # pydantic takes a while to import, and --help should not

    return settings.usual_schedule()


ScheduleFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        envvar="TICKD_SCHEDULE",
        help="The schedule file.",
        default_factory=usual_schedule,
        show_default="schedule.yaml",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
