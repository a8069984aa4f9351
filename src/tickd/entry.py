"""One graph of a schedule: its keys, what each may hold, and what follows from them for a tick.

The keys are a pydantic model whose fields take the texts of the YAML file, each with a validator that says what was
expected. What is not built yet is refused by name; the tables under "Built" are what a new feature flips.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator

from tickd import template
from tickd.calendar import EPOCH, Instants, Interval, Series, WallClock, zone
from tickd.cron import Cron, parse_cron
from tickd.document import Place
from tickd.duration import duration_text, parse_duration
from tickd.tick import Tick, instant_text, parse_instant


# Built: what may be written (True) and what is known but refused by name (False).
MODE: Final = {"skip": True, "claim": True, "enqueue": False}
MISSED: Final = {"skip": True, "latest": True, "all": True}
OVERLAP: Final = {"skip": True, "queue": True, "cancel": True}
AFTER_INTERRUPT: Final = {"skip": True, "run": True}
LOCK: Final = {"postgres": True, "redis": False, "etcd": False}
HOLD: Final = {"dedicated": True, "shared": False}
DURABILITY: Final = {"sync": True, "async": True, "exit": True}

MILLISECOND: Final = timedelta(milliseconds=1)
SECOND: Final = timedelta(seconds=1)
DEFAULT_GRACE: Final = 30 * SECOND
SHORTEST_EVERY: Final = timedelta(milliseconds=100)
LONGEST: Final = timedelta(days=36_500)
FIRST_YEAR: Final = 1970
LAST_YEAR: Final = 2999
REFERENCE: Final = re.compile(
    r"\S.*\.json#\S+"  # a graph of a langgraph.json
    r"|[^\s:#]+(?:\.[^\s:#]+)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"  # package.module:attr, or a path without spaces
    r"|\S[^:#]*\.py:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"  # ./a path/file.py:attr
)
RESERVED_CONFIGURABLE: Final = frozenset(
    {"thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint_map", "run_id"}
)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text was expected, not a list or a mapping")  # noqa: TRY004 - pydantic collects ValueErrors
    if not value.strip():
        raise ValueError("is empty")
    return value


def _duration(*, least: timedelta) -> PlainValidator:
    def read(value: Any) -> timedelta:
        duration = parse_duration(_text(value))
        if not least <= duration <= LONGEST:
            raise ValueError(f"{value!r} is too {'short' if duration < least else 'long'}")
        return duration

    return PlainValidator(read)


def _whole_number(*, least: int) -> PlainValidator:
    def read(value: Any) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", _text(value)) or int(value) < least:
            raise ValueError(f"{value!r} is not a whole number of at least {least}")
        return int(value)

    return PlainValidator(read)


def _choice(known: Mapping[str, bool]) -> PlainValidator:
    built = ", ".join(each for each, is_built in known.items() if is_built)

    def read(value: Any) -> str:
        if _text(value) not in known:
            raise ValueError(f"{value!r} is not one of: {built}")
        if not known[value]:
            raise ValueError(f"{value!r} is not built yet; what there is: {built}")
        return str(value)

    return PlainValidator(read)


def _flag(value: Any) -> bool:
    if value not in ("true", "false"):
        raise ValueError(
            f"{value!r} is neither true nor false" if isinstance(value, str) else "true or false was expected"
        )
    return bool(value == "true")


def _listed(value: Any) -> list[Any]:
    """Take one text for a list of one."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise ValueError("the list is empty")
    return items


OneOrMore = BeforeValidator(_listed)
Text = Annotated[str, PlainValidator(_text)]


def _cron(value: Any) -> Cron:
    return parse_cron(_text(value))


def _zone(value: Any) -> ZoneInfo:
    return zone(_text(value))


def _instant(value: Any) -> datetime:
    text = _text(value)
    instant = parse_instant(text)
    if not FIRST_YEAR <= instant.year <= LAST_YEAR:
        raise ValueError(f"{text!r} is out of range")
    return instant


def _reference(value: Any) -> str:
    text = _text(value).strip()
    if not REFERENCE.fullmatch(text):
        raise ValueError(
            f"{text!r} names no graph: write ./file.py:attribute, package.module:attribute or langgraph.json#name"
        )
    return text


def _thread(value: Any) -> str:
    if isinstance(value, dict):
        raise ValueError("a text was expected: YAML reads {graph} without quotes as a mapping")  # noqa: TRY004 - as above
    text = _text(value)
    template.check(text)
    return text


def _input(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, str) and re.fullmatch(r"(?:[^\s:]+):[A-Za-z_]\w*", value):
        return value
    raise ValueError("a mapping was expected, or module:function that makes one from the tick")


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping was expected")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _metadata(value: Any) -> dict[str, Any]:
    own = next((key for key in _mapping(value) if key.startswith("tickd_")), None)
    if own is not None:
        raise ValueError(f"{own!r}: names that begin with tickd_ are written by tickd")
    return _mapping(value)


def _configurable(value: Any) -> dict[str, Any]:
    own = next((key for key in _mapping(value) if key in RESERVED_CONFIGURABLE), None)
    if own is not None:
        raise ValueError(
            f"{own!r} is set by tickd, tick by tick; the key 'thread' says which thread a tick runs on"
        )
    return _mapping(value)


def _keep(value: Any) -> Any:
    return {"threads": value, "ticks": value} if isinstance(value, str) else value


class Keys(BaseModel):
    """A mapping of the file: nothing but the keys named here, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class RunConfig(Keys):
    """LangGraph's own run configuration."""

    recursion_limit: Annotated[int | None, _whole_number(least=1)] = None
    tags: Annotated[tuple[Text, ...], OneOrMore] = ()
    metadata: Annotated[dict[str, Any], PlainValidator(_metadata)] = {}
    configurable: Annotated[dict[str, Any], PlainValidator(_configurable)] = {}


class Retries(Keys):
    """How often a failed tick is tried again, and after what wait."""

    attempts: Annotated[int, _whole_number(least=1)]
    backoff: Annotated[timedelta, _duration(least=timedelta(0))] = timedelta(seconds=1)
    max_backoff: Annotated[timedelta, _duration(least=timedelta(0))] = timedelta(minutes=5)
    on: Annotated[tuple[Text, ...], OneOrMore] = ()


class Keep(Keys):
    """How long the threads and the ticks of a graph are kept; None is for ever."""

    threads: Annotated[timedelta | None, _duration(least=SECOND)] = None
    ticks: Annotated[timedelta | None, _duration(least=SECOND)] = None


class GraphKeys(Keys):
    """The keys that a graph may have in the file."""

    graph: Annotated[str, PlainValidator(_reference)] = ""
    cron: Annotated[tuple[Annotated[Cron, PlainValidator(_cron)], ...], OneOrMore] = ()
    every: Annotated[timedelta | None, _duration(least=SHORTEST_EVERY)] = None
    anchor: Annotated[datetime, PlainValidator(_instant)] = EPOCH
    at: Annotated[tuple[Annotated[datetime, PlainValidator(_instant)], ...], OneOrMore] = ()
    timezone: Annotated[ZoneInfo, PlainValidator(_zone)] = zone("UTC")
    jitter: Annotated[timedelta, _duration(least=timedelta(0))] = timedelta(0)
    enabled: Annotated[bool, PlainValidator(_flag)] = True
    input: Annotated[Any, PlainValidator(_input)] = None
    context: Annotated[dict[str, Any] | None, PlainValidator(_mapping)] = None
    config: RunConfig = RunConfig()
    thread: Annotated[str, PlainValidator(_thread)] = "per_tick"
    durability: Annotated[Literal["sync", "async", "exit"] | None, _choice(DURABILITY)] = None
    timeout: Annotated[timedelta | None, _duration(least=MILLISECOND)] = None
    grace: Annotated[timedelta, _duration(least=MILLISECOND)] = DEFAULT_GRACE
    retries: Retries | None = None
    mode: Annotated[Literal["skip", "claim", "enqueue"], _choice(MODE)] = "skip"
    missed: Annotated[Literal["skip", "latest", "all"], _choice(MISSED)] = "skip"
    catch_up: Annotated[timedelta, _duration(least=SECOND)] = timedelta(hours=1)
    max_backlog: Annotated[int, _whole_number(least=1)] = 1000
    overlap: Annotated[Literal["skip", "queue", "cancel"], _choice(OVERLAP)] = "skip"
    after_interrupt: Annotated[Literal["skip", "run"], _choice(AFTER_INTERRUPT)] = "skip"
    lock: Annotated[Literal["postgres", "redis", "etcd"], _choice(LOCK)] = "postgres"
    hold: Annotated[Literal["dedicated", "shared"], _choice(HOLD)] = "dedicated"
    keep: Annotated[Keep, BeforeValidator(_keep)] = Keep()


def default_grace(keys: GraphKeys) -> timedelta:
    """Return the grace of a graph that names none: 30 seconds, or less for one that surely fires more often."""
    gaps = [DEFAULT_GRACE, keys.every or DEFAULT_GRACE]
    gaps += [later - earlier for earlier, later in itertools.pairwise(sorted(set(keys.at)))]
    for cron in keys.cron:
        gaps += [(later - earlier) * SECOND for earlier, later in itertools.pairwise(cron.seconds)]
    return min(gaps)


class Entry(GraphKeys):
    """A graph of the schedule, under its name; `place` is where the file says what graph it is."""

    name: str
    place: Place

    @cached_property
    def series(self) -> Series:
        """The graph's fire times."""
        triggers: list[WallClock | Interval | Instants] = [
            WallClock(cron, self.timezone) for cron in self.cron
        ]
        if self.every is not None:
            triggers.append(Interval(self.every, self.anchor))
        if self.at:
            triggers.append(Instants(tuple(sorted(set(self.at)))))
        return Series(tuple(triggers))

    @cached_property
    def calendar(self) -> str:
        """What the fire times hang on, as a text that differs when they may: the mark of an edited calendar."""
        cron = [each.text for each in self.cron]
        at = [instant_text(each) for each in self.at]
        every = None if self.every is None else (duration_text(self.every), instant_text(self.anchor))
        return repr((cron, self.timezone.key if cron else None, every, at))

    def thread_id(self, tick: Tick) -> str:
        """Return the thread of a tick: `{graph}/{fire_time}` unless the entry says otherwise."""
        if self.thread == "per_tick":
            return str(tick)
        if self.thread == "per_graph":
            return self.name
        return self.thread.format_map(template.values(tick, self.timezone))

    def input_for(self, tick: Tick) -> Any:
        """Return the input of a tick, its templates filled; `module:function` comes back as it is."""
        if isinstance(self.input, str):
            return self.input
        return template.fill(self.input, template.values(tick, self.timezone))

    def start_delay(self, tick: Tick) -> timedelta:
        """Return by how much the start of a tick is put off: the same on every replica, less than the gap to the next."""
        following = self.series.after(tick.fire_time)
        room = self.jitter if following is None else min(self.jitter, following - tick.fire_time)
        part = int.from_bytes(hashlib.sha256(str(tick).encode()).digest()[:8])
        return timedelta(microseconds=(room // timedelta(microseconds=1)) * part // 2**64)
