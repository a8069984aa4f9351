"""One graph of a schedule: its keys, and what follows from them for a tick."""

import hashlib
import itertools
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tickd import template, values
from tickd.calendar import EPOCH, Instants, Interval, Series, WallClock, zone
from tickd.cron import Cron
from tickd.document import Place
from tickd.duration import duration_text
from tickd.tick import Tick, instant_text


MILLISECOND: Final = timedelta(milliseconds=1)
SECOND: Final = timedelta(seconds=1)
NEVER: Final = timedelta(0)
SHORTEST_EVERY: Final = 100 * MILLISECOND
DEFAULT_GRACE: Final = 30 * SECOND

OneOrMore: Final = BeforeValidator(values.one_or_more)


class Keys(BaseModel):
    """A mapping of the file: no keys but those named here, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class RunConfig(Keys):
    """LangGraph's run configuration."""

    recursion_limit: Annotated[int | None, values.whole_number(least=1)] = Field(
        None, description="How many super-steps a run may take; LangGraph's own default otherwise."
    )
    tags: Annotated[tuple[Annotated[str, values.TEXT], ...], OneOrMore] = Field(
        (), description="Tags of the run in traces, next to `tickd`."
    )
    metadata: Annotated[dict[str, Any], values.METADATA] = Field(
        {}, description="Metadata of the run, next to tickd's own, which begin with tickd_."
    )
    configurable: Annotated[dict[str, Any], values.CONFIGURABLE] = Field(
        {}, description="What nodes read from config['configurable']; thread_id and run_id are tickd's."
    )


class Retries(Keys):
    """How often a tick that failed is tried again, and after what wait."""

    attempts: Annotated[int, values.whole_number(least=1)] = Field(
        description="How often a tick that failed is tried again."
    )
    backoff: Annotated[timedelta, values.duration(least=NEVER)] = Field(
        SECOND, description="The wait after the first failure; it doubles with each further one."
    )
    max_backoff: Annotated[timedelta, values.duration(least=NEVER)] = Field(
        300 * SECOND, description="The longest wait."
    )
    on: Annotated[tuple[Annotated[str, values.TEXT], ...], OneOrMore] = Field(
        (), description="Names of the exceptions that are worth another try; all of them if left out."
    )


class Keep(Keys):
    """How long what a graph leaves behind is kept; for ever if left out."""

    threads: Annotated[timedelta | None, values.duration(least=SECOND)] = Field(
        None, description="How long the checkpoints of a tick's thread are kept after it ended."
    )
    ticks: Annotated[timedelta | None, values.duration(least=SECOND)] = Field(
        None, description="How long the ledger's row of a tick is kept after it ended."
    )


KeptFor = Annotated[timedelta, values.duration(least=SECOND)]


def _keep(value: Any) -> Any:
    return {"threads": value, "ticks": value} if isinstance(value, str) else value


class GraphKeys(Keys):
    """The keys that a graph may have in the file, and that `defaults` may have for all of them."""

    graph: Annotated[str, values.GRAPH] = Field(
        "",
        description="The graph: ./file.py:attribute (relative to this file), package.module:attribute, or langgraph.json#name.",
    )
    cron: Annotated[tuple[Annotated[Cron, values.CRON], ...], OneOrMore] = Field(
        (),
        description='When it fires, as in crontab(5): "minute hour day-of-month month day-of-week", or six fields with '
        "seconds first, or @hourly, @daily, @weekly, @monthly, @yearly. One, or a list. Quote it.",
    )
    every: Annotated[timedelta | None, values.duration(least=SHORTEST_EVERY)] = Field(
        None, description="It fires every so much elapsed time (30s, 10m, 2h, 1d), counted from `anchor`."
    )
    anchor: Annotated[datetime, values.INSTANT] = Field(
        EPOCH,
        description="The instant from which `every` counts, in both directions; 1970-01-01T00:00:00Z if left out.",
    )
    at: Annotated[tuple[Annotated[datetime, values.INSTANT], ...], OneOrMore] = Field(
        (),
        description="It fires at these instants, each with its offset: 2026-05-04T10:00:00Z. One, or a list.",
    )
    timezone: Annotated[ZoneInfo, values.ZONE] = Field(
        zone("UTC"),
        description="The IANA time zone in which `cron` is read: Europe/Oslo. UTC if left out, never the host's.",
    )
    jitter: Annotated[timedelta, values.duration(least=NEVER)] = Field(
        NEVER,
        description="Spreads the starts: each tick starts up to this much later, the same on every replica.",
    )
    enabled: Annotated[bool, values.FLAG] = Field(default=True, description="false: it does not fire.")
    input: Annotated[Any, values.INPUT] = Field(
        None,
        description="The input of each run: a mapping, whose texts may name {graph}, {fire_time}, {fire_date}, {local_time}, "
        "{local_date}, or package.module:function that makes it from the tick.",
    )
    context: Annotated[dict[str, Any] | None, values.MAPPING] = Field(
        None, description="The context of each run."
    )
    config: RunConfig = Field(RunConfig(), description="LangGraph's run configuration.")
    thread: Annotated[str, values.THREAD] = Field(
        "per_tick",
        description="The thread of a run: per_tick (a thread for each tick), per_graph (one for all ticks, which piles up "
        "state), or a text with {graph}, {fire_time} and the like.",
    )
    durability: Annotated[Literal["sync", "async", "exit"] | None, values.choice(values.DURABILITY)] = Field(
        None, description="When LangGraph writes checkpoints: sync, async or exit."
    )
    timeout: Annotated[timedelta | None, values.duration(least=MILLISECOND)] = Field(
        None, description="A run that takes longer is stopped."
    )
    grace: Annotated[timedelta, values.duration(least=MILLISECOND)] = Field(
        DEFAULT_GRACE,
        description="How late a tick may start; after that it is missed. 30s if left out, or the period of a graph that fires "
        "more often.",
    )
    retries: Retries | None = Field(None, description="Another try for ticks that failed.")
    mode: Annotated[Literal["skip", "claim", "enqueue"], values.choice(values.MODE)] = Field(
        "skip",
        description="What becomes of a tick that could not run: skip lets it go, with a line in the log; claim keeps it as a "
        "row until some replica has run it.",
    )
    missed: Annotated[Literal["skip", "latest", "all"], values.choice(values.MISSED)] = Field(
        "skip",
        description="What is done with ticks that no replica fired: skip lets them go, latest runs the last one, all runs all, "
        "within catch_up.",
    )
    catch_up: Annotated[timedelta, values.duration(least=SECOND)] = Field(
        timedelta(hours=1), description="How far back missed ticks are looked for; 1h if left out."
    )
    max_backlog: Annotated[int, values.whole_number(least=1)] = Field(
        1000, description="How many ticks may wait at most; 1000 if left out."
    )
    overlap: Annotated[Literal["skip", "queue", "cancel"], values.choice(values.OVERLAP)] = Field(
        "skip",
        description="What a tick does when the one before still runs: skip, queue (in claim mode, and its default), or cancel: "
        "drain the running one.",
    )
    after_interrupt: Annotated[Literal["skip", "run"], values.choice(values.AFTER_INTERRUPT)] = Field(
        "skip", description="Whether later ticks skip or run while a per_graph thread waits on interrupt()."
    )
    lock: Annotated[Literal["postgres", "redis", "etcd"], values.choice(values.LOCK)] = Field(
        "postgres", description="Where the graph's lock lives."
    )
    hold: Annotated[Literal["dedicated", "shared"], values.choice(values.HOLD)] = Field(
        "dedicated", description="Whether the lock has a session of its own."
    )
    keep: Annotated[Keep, BeforeValidator(_keep, json_schema_input_type=KeptFor | Keep)] = Field(
        Keep(),
        description="How long threads and ticks are kept: a duration for both, or {threads: 7d, ticks: 30d}.",
    )


def default_grace(keys: GraphKeys) -> timedelta:
    """Return the grace of a graph that names none: 30 seconds, or less for one that surely fires more often."""
    gaps = [DEFAULT_GRACE, keys.every or DEFAULT_GRACE]
    gaps += [later - earlier for earlier, later in itertools.pairwise(sorted(set(keys.at)))]
    for cron in keys.cron:
        gaps += [(later - earlier) * SECOND for earlier, later in itertools.pairwise(cron.seconds)]
    return min(gaps)


class Entry(GraphKeys):
    """A graph of the schedule under its name; `place` is where the file says what graph it is."""

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
        """Return the input of a tick, fresh, its templates filled; `module:function` comes back as it is."""
        if isinstance(self.input, str):
            return self.input
        return template.fill(self.input, template.values(tick, self.timezone))

    def start_delay(self, tick: Tick) -> timedelta:
        """Return by how much the start of a tick is put off: the same on every replica, less than the gap to the next."""
        if not self.jitter:
            return NEVER
        following = self.series.after(tick.fire_time)
        room = self.jitter if following is None else min(self.jitter, following - tick.fire_time)
        part = int.from_bytes(hashlib.sha256(str(tick).encode()).digest()[:8])
        return timedelta(microseconds=(room // timedelta(microseconds=1)) * part // 2**64)

    def started_by(self, instant: datetime) -> datetime:
        """Return up to when every fire time has come to its start by the instant: the last one may be put off past it."""
        back = min(self.jitter, SECOND)
        while back < self.jitter and next(self.series.between(instant - back, instant), None) is None:
            back = min(self.jitter, 2 * back)
        for fire_time in self.series.between(instant - back, instant):
            if fire_time + self.start_delay(Tick(self.name, fire_time)) > instant:
                return fire_time - timedelta(microseconds=1)
        return instant
