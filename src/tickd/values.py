"""The kinds of values that the keys of a graph take: how each is read, and what an editor is told about it.

What is not built yet is known here and refused by name; the tables under "Built" are what a new feature flips.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from tickd import template
from tickd.calendar import zone
from tickd.cron import parse_cron
from tickd.duration import duration_text, parse_duration
from tickd.meaning import FLAGS
from tickd.tick import parse_instant


# Built: what may be written (True), and what is known but refused (False).
MODE: Final = {"skip": True, "claim": True, "enqueue": False}
MISSED: Final = {"skip": True, "latest": True, "all": True}
OVERLAP: Final = {"skip": True, "queue": True, "cancel": True}
AFTER_INTERRUPT: Final = {"skip": True, "run": True}
LOCK: Final = {"postgres": True, "redis": False, "etcd": False}
HOLD: Final = {"dedicated": True, "shared": True}
DURABILITY: Final = {"sync": True, "async": True, "exit": True}
LONGEST: Final = timedelta(days=36_500)
FIRST_YEAR: Final = 1970
LAST_YEAR: Final = 2999
ATTRIBUTE: Final = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
REFERENCE: Final = (
    rf"[^:#]*[^\s:#]\.json#\S+|[^:#]*[^\s:#]\.py:{ATTRIBUTE}|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:{ATTRIBUTE}"
)
FUNCTION: Final = rf"[^:#]*[^\s:#]\.py:{ATTRIBUTE}|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:{ATTRIBUTE}"
OWN_METADATA: Final = "tickd_"
OWN_CONFIGURABLE: Final = frozenset(
    {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map", "run_id"}
)


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a shape cannot be hashed
class Reads:
    """What a field's annotation says about its value: the function that reads it, and its shape in the JSON Schema."""

    read: Callable[[Any], Any]
    shape: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(self.shape)


def text(value: Any) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str):
        raise ValueError("a text was expected, not a list or a mapping")  # noqa: TRY004  # pydantic collects ValueErrors
    if not value.strip():
        raise ValueError("it is empty")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping as it is."""
    if not isinstance(value, dict):
        raise ValueError("a mapping was expected")  # noqa: TRY004  # as above
    return value


def duration(*, least: timedelta) -> Reads:
    """Return the kind of a length of time."""

    def read(value: Any) -> timedelta:
        found = parse_duration(text(value))
        if not least <= found <= LONGEST:
            limit = (
                f"shorter than {duration_text(least)}"
                if found < least
                else f"longer than {duration_text(LONGEST)}"
            )
            raise ValueError(f"{value!r} is {limit}")
        return found

    return Reads(read, {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(ms|s|m|h|d)\s*$|\$\{"})


def whole_number(*, least: int) -> Reads:
    """Return the kind of a whole number."""

    def read(value: Any) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text(value)) or int(value) < least:
            raise ValueError(f"{value!r} is not a whole number of at least {least}")
        return int(value)

    return Reads(
        read,
        {"anyOf": [{"type": "integer", "minimum": least}, {"type": "string", "pattern": r"^[0-9]+$|\$\{"}]},
    )


def choice(known: Mapping[str, bool]) -> Reads:
    """Return the kind of one word out of those that are built."""
    built = [each for each, is_built in known.items() if is_built]

    def read(value: Any) -> str:
        word = text(value)
        if word not in known:
            near = difflib.get_close_matches(word[:64], built, n=1)
            raise ValueError(
                f"{word!r} is not one of: {', '.join(built)}{f'; did you mean {near[0]!r}?' if near else ''}"
            )
        if not known[word]:
            raise ValueError(f"{word!r} is not built yet; what there is: {', '.join(built)}")
        return word

    return Reads(read, {"anyOf": [{"enum": built}, {"type": "string", "pattern": r"\$\{"}]})


def _flag(value: Any) -> bool:
    written = text(value)
    if written not in FLAGS:
        raise ValueError(f"{written!r} is neither true nor false")
    return FLAGS[written]


def _instant(value: Any) -> datetime:
    instant = parse_instant(text(value))
    if not FIRST_YEAR <= instant.year <= LAST_YEAR:
        raise ValueError(f"{value!r} is not within the years {FIRST_YEAR} to {LAST_YEAR}")
    return instant


def _reference(value: Any) -> str:
    found = text(value).strip()
    if re.fullmatch(REFERENCE, found):
        return found
    missing = " has no ':'" if ":" not in found and "#" not in found else " names no graph"
    raise ValueError(
        f"{found!r}{missing}: write ./file.py:attribute, package.module:attribute or langgraph.json#name"
    )


def _thread(value: Any) -> str:
    if isinstance(value, dict):
        raise ValueError("a text was expected: without quotes, YAML reads {graph} as a mapping")  # noqa: TRY004  # as above
    template.check(text(value))
    return text(value)


def _input(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and re.fullmatch(FUNCTION, value)):
        return value
    raise ValueError("a mapping was expected, or package.module:function that makes one from the tick")


def _metadata(value: Any) -> dict[str, Any]:
    own = next((key for key in mapping(value) if key.startswith(OWN_METADATA)), None)
    if own is not None:
        raise ValueError(f"{own!r}: names that begin with {OWN_METADATA} are written by tickd")
    return mapping(value)


def _configurable(value: Any) -> dict[str, Any]:
    own = next((key for key in mapping(value) if key in OWN_CONFIGURABLE), None)
    if own is not None:
        raise ValueError(
            f"{own!r} is set by tickd, tick by tick; the key 'thread' says which thread a tick runs on"
        )
    return mapping(value)


def one_or_more(value: Any) -> list[Any]:
    """Return one text as a list of one, a list as it is."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("the list is empty")
    return items


TEXT: Final = Reads(text, {"type": "string"})
FLAG: Final = Reads(_flag, {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": r"\$\{"}]})
CRON: Final = Reads(lambda value: parse_cron(text(value)), {"type": "string"})
INSTANT: Final = Reads(_instant, {"type": "string", "pattern": r"^\s*\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\$\{"})
ZONE: Final = Reads(lambda value: zone(text(value)), {"type": "string"})
GRAPH: Final = Reads(_reference, {"type": "string", "pattern": r"[:#]"})
THREAD: Final = Reads(_thread, {"type": "string"})
INPUT: Final = Reads(_input, {"anyOf": [{"type": "object"}, {"type": "string", "pattern": r":|\$\{"}]})
MAPPING: Final = Reads(mapping, {"type": "object"})
METADATA: Final = Reads(_metadata, {"type": "object"})
CONFIGURABLE: Final = Reads(_configurable, {"type": "object"})
