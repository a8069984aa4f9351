"""The log: one valid JSON object a line on stdout, or one readable line, and the closed list of events.

Whatever else writes to stdout (a graph's `print`, a library in C, a child process) is sent to stderr, so that a reader
of stdout meets nothing but events. Lines of the libraries' stdlib loggers become `library.message` events.
"""

import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, TextIO, cast

import structlog
from rich.console import Console
from rich.text import Text

from tickd import console as console_lines
from tickd.errors import Unusable
from tickd.outlet import Outlet
from tickd.tick import Outcome, instant_text


TERMINAL_EVENTS = frozenset(f"tick.{outcome}" for outcome in Outcome)
EVENTS = TERMINAL_EVENTS | {
    "tick.started",
    "tick.waiting",
    "tick.retrying",
    "claim.expired",
    "lock.unlock_failed",
    "daemon.started",
    "daemon.ready",
    "daemon.draining",
    "daemon.stopped",
    "daemon.failed",
    "schedule.loaded",
    "schedule.reloaded",
    "schedule.rejected",
    "schedule.warning",
    "settings.warning",
    "clock.skewed",
    "clock.jumped",
    "loop.blocked",
    "database.unreachable",
    "database.reachable",
    "database.failed_over",
    "database.migrated",
    "retention.swept",
    "retention.stuck",
    "library.message",
}
# In seconds, for a pool's trouble that lasts.
SAID_AGAIN = 60
LONGEST_TEXT = 20_000
DEEPEST = 6
# In bits. Python refuses to write an integer of more than 4300 digits, or of fewer where it is told so.
WIDEST_INTEGER = 2000
# Fields in which nothing stands that came from outside. A password may be a part of one of their words, and a reader
# who looks for `tick.ran` would not find `***.ran`.
OWN_WORDS = frozenset({"timestamp", "level", "event", "replica", "graph", "fire_time", "reason"})

Log = structlog.typing.FilteringBoundLogger


def configure(
    *, replica: str, log_format: Literal["json", "console"] | None, level: str, secrets: Collection[str] = ()
) -> Log:
    """Take over stdout, route every library's logger, and return the log that writes events.

    `secrets` are replaced by `***` wherever they would appear, in an exception that a graph raised as much as elsewhere.
    """
    stream = _own_stdout()
    as_console = log_format == "console" or (log_format is None and stream.isatty())
    # To typeshed, what io calls a text stream is none.
    return configure_stream(
        cast("TextIO", stream), replica=replica, as_console=as_console, level=level, secrets=secrets
    )


def configure_stream(
    stream: TextIO, *, replica: str, as_console: bool, level: str, secrets: Collection[str] = ()
) -> Log:
    """Log to the given stream; `configure` without taking over stdout."""
    # Not structlog's global configuration: a graph may log with structlog too, and configure it as it likes.
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            _stamp(replica),
            _lost_lines(stream),
            _exception_field,
            _plain(secrets),
            _console(stream) if as_console else _json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_LibraryHandler(log)]
    root.setLevel(logging.WARNING)
    # APScheduler reports our one timer entry as if it were news, and its errors as tracebacks of its own.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    logging.getLogger("psycopg.pool").filters[:] = [_PoolNews()]
    logging.captureWarnings(capture=True)
    sys.excepthook = partial(_log_uncaught, log)
    return log


def _own_stdout() -> Outlet:
    """Keep the real stdout for the log alone and send file descriptor 1 to stderr."""
    if sys.stdout is None or sys.stderr is None:
        # Their file descriptors are free, and are or will be somebody else's.
        raise Unusable("stdout or stderr is closed: redirect it, to /dev/null if nobody is to read it")
    sys.stdout.flush()
    outlet = Outlet(os.dup(1))
    os.dup2(2, 1)
    return outlet


def _stamp(replica: str) -> structlog.typing.Processor:
    def stamp(_: Any, __: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
        assert line["event"] in EVENTS, f"{line['event']} is not in the closed list of events"  # noqa: S101  # a programming error
        # The wall clock of this host, for people: nothing is decided by it.
        now = instant_text(datetime.now(UTC))  # noqa: TID251  # the log is the shell
        head = {"timestamp": now, "level": line.pop("level"), "event": line.pop("event"), "replica": replica}
        return {**head, **line}

    return stamp


def _lost_lines(stream: TextIO) -> structlog.typing.Processor:
    """Let the first line that comes through again say how many before it did not."""

    def add(_: Any, __: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(stream, Outlet) and stream.lost:
            line["lines_lost"] = stream.lost
        return line

    return add


def _exception_field(_: Any, __: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Put a traceback into one field, once."""
    raised = line.pop("exc_info", None)
    if isinstance(raised, BaseException):
        line["exception"] = _traceback_text(raised)
    return line


def _traceback_text(raised: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(raised))
    except Exception:  # noqa: BLE001  # an exception whose own text raises must not take the log line with it
        return f"{type(raised).__name__} (its text cannot be shown)"


def _plain(secrets: Collection[str]) -> structlog.typing.Processor:
    # The longest first, because one may begin like another.
    ordered = tuple(sorted(secrets, key=len, reverse=True))

    def make_plain(_: Any, __: str, line: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            key: _not_too_long(plain(value, secrets=() if key in OWN_WORDS else ordered))
            for key, value in line.items()
        }

    return make_plain


def _not_too_long(value: Any) -> Any:
    """Return a field's plain value, or the beginning of its JSON text: a graph may ask a person about a whole document."""
    if not isinstance(value, list | dict):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= LONGEST_TEXT else _beginning(text)


def _json(_: Any, __: str, line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False)


def _console(stream: TextIO) -> structlog.typing.Processor:
    console = Console(file=stream, highlight=False, soft_wrap=True)
    fold = console_lines.Fold()

    def render(_: Any, __: str, line: Mapping[str, Any]) -> str:
        shown = fold.shown(line)
        if not shown:
            raise structlog.DropEvent
        with console.capture() as capture:
            console.print(Text("\n").join(map(console_lines.render, shown)), end="")
        return capture.get()

    return render


def plain(value: Any, *, secrets: Sequence[str] = (), depth: int = 0) -> Any:
    """Return the value as something JSON has: NaN, objects, odd keys and deep or endless structures become text."""
    try:
        return _plain_value(value, secrets, depth)
    except Exception as error:  # noqa: BLE001  # a mapping that cannot be read, an instant outside the calendar
        return f"<{type(value).__name__} that raised {type(error).__name__}>"


def _plain_value(value: Any, secrets: Sequence[str], depth: int) -> Any:  # noqa: PLR0911  # one return per JSON type
    if value is None or (isinstance(value, int) and int.bit_length(value) <= WIDEST_INTEGER):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str):
        return _clean(value, secrets)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return instant_text(value)
    if depth < DEEPEST and isinstance(value, Mapping):
        return {
            _clean(text_of(key), secrets): plain(item, secrets=secrets, depth=depth + 1)
            for key, item in value.items()
        }
    if depth < DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, secrets=secrets, depth=depth + 1) for item in value]
    return _clean(text_of(value), secrets)


def text_of(value: Any) -> str:
    """Return `str(value)`, whatever that raises."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  # a graph's own __str__ may raise anything
        return f"<{type(value).__name__} whose text raised {type(error).__name__}>"


def _clean(text: str, secrets: Sequence[str]) -> str:
    """Return the text in valid UTF-8, without the secrets, and not too long: in this order, or half a secret stays."""
    # The class's own method, because a subclass may have an `encode` that raises.
    text = str.encode(text, "utf-8", "backslashreplace").decode()
    for secret in secrets:
        text = text.replace(secret, "***")
    return text if len(text) <= LONGEST_TEXT else _beginning(text)


def _beginning(text: str) -> str:
    return text[:LONGEST_TEXT] + f"… ({len(text)} characters)"


class _LibraryHandler(logging.Handler):
    """Turns a line of a stdlib logger into a `library.message` event."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001  # a wrong %-format of a library must not raise from here
            message = f"{text_of(record.msg)} (with arguments that do not fit)"
        raised = record.exc_info[1] if record.exc_info else None
        level = "error" if record.levelno >= logging.ERROR else "warning"
        getattr(self._log, level)("library.message", logger=record.name, message=message, exc_info=raised)


class _PoolNews(logging.Filter):
    """Of what the pools say, lets through what somebody has missed a connection by, and each trouble once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        said = str(record.msg)
        # One that ended while it lay idle is replaced; an attempt that was given up is followed by another one.
        if said.startswith(("discarding closed connection", "reconnection attempt")):
            return False
        if not said.startswith("error connecting"):
            return True
        # While anybody waits there is an attempt a second, for as long as the database is away.
        now, trouble = time.monotonic(), record.getMessage()
        self._said = {one: at for one, at in self._said.items() if now - at < SAID_AGAIN}
        return self._said.setdefault(trouble, now) == now


def _log_uncaught(
    log: Log, kind: type[BaseException], raised: BaseException, _: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    log.error("daemon.failed", error_type=kind.__name__, error=text_of(raised), exc_info=raised)
