"""The command line: commands to calls, errors to exit codes.

0 done; 1 failed at run time; 2 the command line, the settings or the schedule is unusable; 3 the database was not
usable; 130 the second Ctrl-C.
"""

import sys

import typer

from tickd.cli import dev, doctor, foreground, operate, replica, schedule
from tickd.errors import DatabaseUnusable, Unusable


app = typer.Typer(
    name="tickd",
    help="Run scheduled LangGraph graphs on N replicas: one writer per graph, one run per tick.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

replica.register(app)
dev.register(app)
schedule.register(app)
operate.register(app)
foreground.register(app)
doctor.register(app)


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        app()
    except Unusable as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except DatabaseUnusable as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(3)
