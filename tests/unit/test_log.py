"""The log: each line one strict JSON object, whatever a graph raises, returns or does to the loggers it shares with us."""

import enum
import io
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.logbook import Logbook, logging_to
from tests.replicas import strict_json
from tickd import log as logs
from tickd.log import EVENTS, LONGEST_TEXT, TERMINAL_EVENTS, Log, configure_stream, plain, text_of
from tickd.tick import Outcome


SECRET = "Sw0rdf1sh-Zq8x"


class Mute:
    """Has no text of any kind."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class MuteText(str):
    """A text that does not want to be one."""

    __slots__ = ()

    def __str__(self) -> str:
        raise ValueError("no text")

    def encode(self, *_: Any) -> bytes:
        """Raise, like `str()` of it."""
        raise ValueError("no bytes")


class MuteMapping(Mapping[str, int]):
    """A mapping that cannot be read, like one that loads its items from somewhere."""

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not loaded")

    def __len__(self) -> int:
        return 1


class MuteZone(tzinfo):
    """A time zone that does not know its offset."""

    def _refuse(self, _: datetime | None) -> Any:
        raise RuntimeError("no offset")

    utcoffset = dst = tzname = _refuse


class Mood(enum.IntEnum):
    """A number that is more than one."""

    GLAD = 1


class MuteError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text either")


@pytest.fixture
def book() -> Logbook:
    """The lines of a replica."""
    return Logbook()


@pytest.fixture
def log(book: Logbook) -> Iterator[Log]:
    """The log of a replica called a, which holds a secret."""
    with logging_to(book, secrets=frozenset({SECRET})) as log:
        yield log


def endless() -> list[Any]:
    """Return a list that contains itself."""
    loop: list[Any] = []
    loop.append(loop)
    return loop


def deep(levels: int) -> list[Any]:
    """Return a list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


ODD_VALUES: dict[str, Any] = {
    "nan": math.nan,
    "infinity": -math.inf,
    "nan key": {math.nan: math.nan},
    "endless digits": 10**5000,
    "decimal": Decimal("NaN"),
    "bytes": b"\xff\xfe",
    "control characters": "\ud800 \x00 \u2028 \x1b[31m \r\n",
    "surrogate key": {"\ud800": "\ud800"},
    "odd keys": {(1, 2): object(), None: 1, 1: "one", "1": "1"},
    "mute": Mute(),
    "mute key": {Mute(): Mute()},
    "mute text": MuteText("x"),
    "mute text key": {MuteText("x"): MuteText("x")},
    "mute mapping": MuteMapping(),
    "enum": Mood.GLAD,
    "endless": endless(),
    "deep": deep(5000),
    "set": {1, 2},
    "end of time": datetime.max.replace(tzinfo=timezone(-timedelta(hours=5))),
    "mute zone": datetime(2026, 5, 4, tzinfo=MuteZone()),
    "naive": datetime(2026, 5, 4),  # noqa: DTZ001  # a graph may well return one
    "class": type,
    "iterator": iter([]),
}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in ODD_VALUES.items()])
def test_whatever_a_graph_returns_is_one_json_object(book: Logbook, log: Log, value: Any):
    """The values of `interrupt()` are the graph's own; a line that cannot be written would take its tick with it."""
    log.info("tick.interrupted", interrupts=[value], value=value)

    assert len(book.lines) == 1


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=9)
    | st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-11))]))
    | st.builds(Mute)
    | st.builds(MuteText, st.text()),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text() | st.floats(), children, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(JSON_LIKE)
def test_plain_is_what_json_has(value: Any):
    """Strictly: no NaN, no lone surrogate, no object."""
    line = json.dumps({"value": plain(value)}, allow_nan=False).encode() + b"\n"

    strict_json(line)


def test_what_json_has_already_stays_as_it_is():
    """Only what cannot be written may be changed."""
    value: Any = {"a": [1, -2.5, True, None, "Lager \u00d8st", {}], "b": {"c": {"d": [[]]}}}

    assert plain(value) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, "inf"),
        (datetime(2026, 5, 4, 12, tzinfo=timezone(timedelta(hours=2))), "2026-05-04T10:00:00Z"),
        ("\ud800", "\\ud800"),
        ({1: (2,)}, {"1": [2]}),
        (Mute(), "<Mute whose text raised ValueError>"),
        (MuteText("x"), "x"),
        (
            {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}},
            {"a": {"b": {"c": {"d": {"e": {"f": "{'g': 1}"}}}}}},
        ),
        ("x" * (LONGEST_TEXT + 1), "x" * LONGEST_TEXT + f"\u2026 ({LONGEST_TEXT + 1} characters)"),
        (deep(6), [[[[[["[]"]]]]]]),
    ],
    ids=["inf", "instant", "surrogate", "tuple", "mute", "mute text", "deep mapping", "long", "deep list"],
)
def test_what_json_has_not_is_written_as_text(value: Any, text: Any):
    """The reader still sees what it was."""
    assert plain(value) == text


def test_a_text_is_had_of_everything():
    """An error's text goes into the ledger too."""
    assert text_of(MuteError()) == "<MuteError whose text raised RuntimeError>"
    assert text_of(ValueError("no stock")) == "no stock"


def test_every_line_says_when_how_grave_what_and_by_whom(book: Logbook, log: Log):
    """These four come first on each line, and the time is UTC."""
    log.warning("clock.skewed", ahead_ms=1500)

    (line,) = book.lines
    assert list(line) == ["timestamp", "level", "event", "replica", "ahead_ms"]
    assert (line["level"], line["event"], line["replica"]) == ("warning", "clock.skewed", "a")
    assert line["timestamp"].endswith("Z")
    assert abs(datetime.fromisoformat(line["timestamp"]) - datetime.now(UTC)) < timedelta(minutes=1)  # noqa: TID251  # the log reads the clock itself


def test_an_event_outside_the_closed_list_is_a_fault_of_tickd(log: Log):
    """People's alerts hang on the list; a new event has to be put on it, and documented."""
    with pytest.raises(AssertionError, match=r"tick\.dropped is not in the closed list"):
        log.info("tick.dropped")


def test_each_outcome_has_its_terminal_event():
    """One terminal line per tick: so one event per outcome."""
    assert {f"tick.{outcome}" for outcome in Outcome} == TERMINAL_EVENTS
    assert TERMINAL_EVENTS < EVENTS


def test_lines_below_the_level_are_left_out(book: Logbook):
    """`TICKD_LOG_LEVEL=error` is for those who want the failures only."""
    with logging_to(book, level="error") as log:
        log.info("daemon.ready")
        log.error("daemon.failed")

    assert [line["event"] for line in book.lines] == ["daemon.failed"]


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("first\nsecond\r\nthird\u2028fourth\x00\ud800"),
        MuteError(),
        ExceptionGroup("several", [ValueError("one"), MuteError()]),
        KeyboardInterrupt(),
    ],
    ids=["lines", "mute", "group", "base"],
)
def test_a_traceback_is_one_field_once(book: Logbook, log: Log, error: BaseException):
    """A collector splits at line ends, whatever it takes for one."""
    log.error("tick.failed", error=error, exc_info=raised(error))

    (line,) = book.lines
    assert line["exception"].count("Traceback (most recent call last)") == 1
    assert "exc_info" not in line


def test_a_line_without_an_exception_has_no_such_field(book: Logbook, log: Log):
    """An alert may hang on its presence."""
    log.info("daemon.ready", exc_info=None)

    assert "exception" not in book.lines[0]
    assert "exc_info" not in book.lines[0]


def test_a_secret_is_nowhere_on_a_line(book: Logbook, log: Log):
    """A graph may raise an error that quotes its own database URL."""
    url = f"postgresql://tickd:{SECRET}@db/tickd"

    log.error(
        "tick.failed",
        error=url,
        interrupts=[{"nested": (url,), url: 1}],
        exc_info=raised(ConnectionError(url)),
    )
    logging.getLogger("psycopg.pool").warning("cannot connect to %s", url)

    assert len(book.lines) == 2
    assert SECRET not in json.dumps(book.lines)
    assert book.lines[0]["error"] == "postgresql://tickd:***@db/tickd"


def test_the_longer_of_two_secrets_is_looked_for_first(book: Logbook):
    """One password may begin like another, and then its rest would stay."""
    secrets = frozenset({SECRET[:n] for n in range(3, len(SECRET) + 1)})
    with logging_to(book, secrets=secrets) as log:
        log.info("daemon.started", database=SECRET)

    assert book.lines[0]["database"] == "***"


@pytest.mark.parametrize("password", ["tick", "info", "2026", "a", "restock", "held"])
def test_a_password_that_is_an_everyday_word_leaves_the_names_alone(book: Logbook, password: str):
    """Else `tick.ran` becomes `***.ran`, and nothing finds it any more."""
    with logging_to(book, replica="a", secrets=frozenset({password})) as log:
        log.info("tick.skipped", graph="restock_plan", fire_time="2026-05-04T10:00:00Z", reason="lock_held")

    (line,) = book.lines
    assert (line["event"], line["level"], line["replica"]) == ("tick.skipped", "info", "a")
    assert (line["graph"], line["fire_time"], line["reason"]) == (
        "restock_plan",
        "2026-05-04T10:00:00Z",
        "lock_held",
    )
    assert "***" not in line["timestamp"]


def test_a_secret_at_the_end_of_what_is_shown_is_not_shown_in_half(book: Logbook, log: Log):
    """A text is cut after the secrets are taken out of it."""
    log.error("tick.failed", error="x" * (LONGEST_TEXT - 4) + SECRET)

    assert SECRET[:4] not in book.lines[0]["error"]


@pytest.mark.parametrize(
    "value",
    [
        ["page " * 1000] * 100,
        {str(page): "page " * 1000 for page in range(100)},
        [[["page"] * 100] * 100] * 100,
    ],
    ids=["list", "mapping", "many small"],
)
def test_what_a_graph_asks_makes_no_endless_line(book: Logbook, log: Log, value: Any):
    """An interrupt may carry the document it asks about; what collects the log drops lines of such a length."""
    log.info("tick.interrupted", graph="restock_plan", interrupts=value)

    (line,) = book.find("tick.interrupted")
    text = json.dumps(value)
    assert line["interrupts"] == text[:LONGEST_TEXT] + f"\u2026 ({len(text)} characters)"


@pytest.mark.usefixtures("log")
def test_a_library_warns_in_a_line_of_its_own(book: Logbook):
    """Psycopg, APScheduler and asyncio report through Python's logging; their tracebacks span lines."""
    logging.getLogger("psycopg.pool").warning("a\nb %s", "c")
    logging.getLogger("asyncio").error("never retrieved", exc_info=raised(ValueError("no stock")))
    logging.getLogger("langgraph").info("chatter")

    warning, error = book.lines
    assert warning | {"timestamp": ""} == {
        "timestamp": "",
        "level": "warning",
        "event": "library.message",
        "replica": "a",
        "logger": "psycopg.pool",
        "message": "a\nb c",
    }
    assert (error["level"], error["message"]) == ("error", "never retrieved")
    assert error["exception"].endswith("ValueError: no stock\n")


@pytest.mark.usefixtures("log")
def test_a_trouble_of_a_pool_that_lasts_is_said_once_a_minute(book: Logbook, monkeypatch: pytest.MonkeyPatch):
    """A pool tries for a connection every second, through a night without a database."""
    pool = logging.getLogger("psycopg.pool")
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda now=now: now))
        pool.warning("error connecting in %r: %s", "tickd-ledger", "connection refused")
        pool.warning("reconnection attempt in pool %r failed after %s sec", "tickd-ledger", 2.0)
    pool.warning("error connecting in %r: %s", "tickd-ledger", "the database system is starting up")

    assert [line["message"] for line in book.find("library.message")] == [
        "error connecting in 'tickd-ledger': connection refused",
        "error connecting in 'tickd-ledger': connection refused",
        "error connecting in 'tickd-ledger': the database system is starting up",
    ]


@pytest.mark.parametrize(
    ("message", "arguments"), [("%d", ("x",)), (Mute(), ()), (Mute(), (1,)), ("%s", (Mute(),))]
)
def test_a_library_that_logs_nonsense_breaks_nothing(book: Logbook, message: Any, arguments: Any):
    """The error would come out of the library's call, in the middle of its work."""
    with logging_to(book):
        logging.getLogger("library").warning(message, *arguments)

    assert book.lines[0]["event"] == "library.message"


def test_python_warnings_are_lines_too(book: Logbook):
    """Printed to stderr they would be nowhere in the log."""
    with logging_to(book):
        warnings.simplefilter("always")
        warnings.warn("going away", DeprecationWarning, stacklevel=1)

    assert "going away" in book.lines[-1]["message"]
    assert book.lines[-1]["logger"] == "py.warnings"


@pytest.mark.usefixtures("log")
def test_a_graph_may_log_with_structlog_itself(book: Logbook, capsys: pytest.CaptureFixture[str]):
    """Its events are not on our list, and its lines do not belong into our log; it must not fail over them."""
    structlog.get_logger().info("reading stock", shelf=3)

    assert book.lines == []
    assert "reading stock" in capsys.readouterr().out


def test_a_graph_that_configures_structlog_leaves_our_log_alone(book: Logbook, log: Log):
    """Applications do so when they are imported, and a graph is a part of one."""
    before = structlog.get_config()
    try:
        structlog.configure(
            processors=[structlog.processors.KeyValueRenderer()],
            wrapper_class=structlog.BoundLogger,
            logger_factory=structlog.PrintLoggerFactory(),
        )
        structlog.contextvars.bind_contextvars(replica="not ours")
        log.info("daemon.ready", graphs=2)
    finally:
        structlog.contextvars.clear_contextvars()
        structlog.configure(**before)

    assert book.lines[0]["graphs"] == 2
    assert book.lines[0]["replica"] == "a"


@pytest.mark.usefixtures("log")
def test_an_error_that_nobody_caught_is_logged(book: Logbook):
    """A replica that dies has to say why in the log that people read."""
    error = raised(RuntimeError("no more"))
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)

    (line,) = book.lines
    assert (line["event"], line["error_type"], line["error"]) == ("daemon.failed", "RuntimeError", "no more")
    assert "RuntimeError: no more" in line["exception"]


def test_the_console_shows_one_line_per_event():
    """People read it; the fields of the four common ones are there in some form."""
    stream = io.StringIO()
    with logging_to(Logbook()):
        log = configure_stream(stream, replica="a", as_console=True, level="info")
        log.info("tick.ran", graph="restock_plan", fire_time="2026-05-04T10:00:00Z", duration_ms=12.0)

    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "restock_plan" in text
