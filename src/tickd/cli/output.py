"""What commands print: one JSON object a line for programs, tables for people."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tickd.console import plain


STYLES = {
    "ran": "green",
    "failed": "red",
    "timed_out": "red",
    "lock_lost": "red",
    "abandoned": "red",
    "missed": "yellow",
}
# More than all columns together need.
WIDEST = 10_000


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    sys.stdout.write(json.dumps(facts, allow_nan=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the columns of the rows for people: instants to the second, and the outcome's colour of the log."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), no_wrap=True)
    for row in rows:
        style = STYLES.get(str(row.get("outcome") or row.get("state")), "")
        table.add_row(*(Text(plain(_short(row.get(column)))) for column in columns), style=style)
    console = Console()
    # A terminal folds a line that is too long for it. Rich would cut names short, and leave out the last columns.
    console.width = max(
        console.width, console.measure(table, options=console.options.update(width=WIDEST)).maximum
    )
    console.print(table)


def _short(value: Any) -> str:
    """Return the value as a cell: an instant as `2026-05-04 10:00:00`, in UTC as everywhere."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z", str(value))
    return "" if value is None else f"{match[1]} {match[2]}" if match else str(value)
