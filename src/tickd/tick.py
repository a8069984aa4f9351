"""A tick: one graph at one fire time, with the names, keys and outcomes that follow from it."""

import re
import uuid
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum


# UUIDv5 namespace of run ids; fixed for ever, because a resumed run must find its own checkpoint.
RUN_NAMESPACE = uuid.UUID("6f2d7a52-6b0e-5c0b-9f3e-7d1c0f5b7a31")


@dataclass(frozen=True, slots=True, order=True)
class Tick:
    """The unit that has one writer: (graph, fire time). The fire time is an aware UTC instant."""

    graph: str
    fire_time: datetime

    def __str__(self) -> str:
        return f"{self.graph}/{instant_text(self.fire_time)}"


class Outcome(StrEnum):
    """How a tick ended on one replica; each is one terminal log line, `tick.<outcome>`."""

    RAN = "ran"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"
    MISSED = "missed"
    LOCK_LOST = "lock_lost"
    HANDED_OFF = "handed_off"
    ABANDONED = "abandoned"
    ERROR = "error"


class SkipReason(StrEnum):
    """Why a replica did not run a tick that it fired: a closed list."""

    LOCK_HELD = "lock_held"
    ALREADY_RAN = "already_ran"
    PAUSED = "paused"
    DRAINING = "draining"
    DISABLED = "disabled"
    QUEUED = "queued"
    COALESCED = "coalesced"
    BACKLOG_FULL = "backlog_full"
    INTERRUPTED = "interrupted"


def lock_key(graph: str) -> int:
    """Return the second int4 of the graph's advisory lock.

    crc32 is the same in every process, unlike `hash()`, which is salted; the shift makes it fit a signed int4.
    """
    return zlib.crc32(graph.encode()) - 2**31


def run_id(tick: Tick) -> uuid.UUID:
    """Return the LangGraph run id of a tick, the same for each of its attempts.

    It hangs on the tick, not on the thread: on a thread that lives longer than a tick, an equal run id would make
    LangGraph resume the tick before instead of starting this one.
    """
    return uuid.uuid5(RUN_NAMESPACE, str(tick))


def instant_text(instant: datetime) -> str:
    """Return an aware instant as ISO 8601 in UTC with `Z`, with a fraction only where there is one."""
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def parse_instant(text: str) -> datetime:
    """Return the aware UTC instant that an ISO 8601 text names; a text that names none raises ValueError."""
    # Python 3.11 reads basic formats, week dates and a bare date; an instant has a date, a time and an offset.
    if not re.fullmatch(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)", text.strip()):
        raise ValueError(f"{text!r} is not an instant such as 2026-05-04T10:00:00Z (date, time and offset)")
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except OverflowError:  # the first and the last day of all have instants that no datetime in UTC can name
        raise ValueError(f"{text!r} is before the year 1 or after the year 9999 in UTC") from None
