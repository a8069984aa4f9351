"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


ScheduleFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", envvar="TICKD_SCHEDULE", help="The schedule file.", show_default="schedule.yaml"
    ),
]
DEFAULT_SCHEDULE = Path("schedule.yaml")
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
