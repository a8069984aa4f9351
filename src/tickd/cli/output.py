"""What commands print: one JSON object a line for programs, tables for people."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


STYLES = {
    "ran": "green",
    "failed": "red",
    "timed_out": "red",
    "lock_lost": "red",
    "abandoned": "red",
    "missed": "yellow",
}


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    sys.stdout.write(json.dumps(facts, allow_nan=False) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the columns of the rows for people; the outcome has the colour of its log line."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        style = STYLES.get(str(row.get("outcome") or row.get("state")), "")
        table.add_row(
            *("" if row.get(column) is None else str(row[column]) for column in columns), style=style
        )
    Console().print(table)
