"""A length of time as people write it: `500ms`, `30s`, `10m`, `2h`, `1d`."""

import re
from datetime import timedelta


UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
FORMS = "500ms, 30s, 10m, 2h or 1d"


def parse_duration(text: str) -> timedelta:
    """Return the duration that the text names; a bare number has no unit and raises ValueError like any other text."""
    # Nine digits of days are the most that a timedelta holds.
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|s|m|h|d)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as {FORMS}")
    return float(match[1]) * UNITS[match[2]]


def duration_text(duration: timedelta) -> str:
    """Return the duration in the largest unit that divides it."""
    for unit in ("d", "h", "m", "s"):
        if duration >= UNITS[unit] and duration % UNITS[unit] == timedelta(0):
            return f"{duration // UNITS[unit]}{unit}"
    whole, rest = divmod(duration, UNITS["ms"])
    return f"{whole}.{rest.microseconds:03}ms" if rest else f"{whole}ms"
