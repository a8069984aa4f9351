"""Templates of a tick: `{graph}`, `{fire_time}` and the like in the texts of `input` and `thread`."""

import difflib
import string
from collections.abc import Mapping
from datetime import tzinfo
from typing import Any, Final

from tickd.tick import Tick, instant_text


NAMES: Final = ("graph", "fire_time", "fire_date", "local_time", "local_date")
LONGEST_SHOWN: Final = 64


def check(text: str) -> None:
    """Raise ValueError for a text that names something a tick does not have, or has a stray brace."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise ValueError("a brace without its partner; for a literal brace write {{ or }}") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion or name not in NAMES:
            raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name[:LONGEST_SHOWN], NAMES, n=1)
    hint = f"; did you mean {{{near[0]}}}?" if near else ""
    known = ", ".join(f"{{{each}}}" for each in NAMES)
    shown = f"{{{name}}}" if name.isidentifier() and len(name) <= LONGEST_SHOWN else "this brace"
    return f"{shown} is not one of {known}{hint} For a literal brace write {{{{ or }}}}"


def escape(text: str) -> str:
    """Return the text such that filling gives it back as it is."""
    return text.replace("{", "{{").replace("}", "}}")


def values(tick: Tick, zone: tzinfo) -> dict[str, str]:
    """Return what each name stands for in a tick; the local ones in the zone of its graph."""
    local = tick.fire_time.astimezone(zone)
    return {
        "graph": tick.graph,
        "fire_time": instant_text(tick.fire_time),
        "fire_date": instant_text(tick.fire_time)[:10],
        "local_time": local.isoformat(),
        "local_date": local.date().isoformat(),
    }


def fill(value: Any, names: Mapping[str, str]) -> Any:
    """Return a fresh copy of a value of mappings, lists and scalars, every text in it filled."""
    if isinstance(value, str):
        return value.format_map(names)
    if isinstance(value, Mapping):
        return {key: fill(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [fill(each, names) for each in value]
    return value
