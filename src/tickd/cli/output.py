"""What commands print for programs: one JSON object a line."""

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    sys.stdout.write(json.dumps(facts, allow_nan=False) + "\n")
