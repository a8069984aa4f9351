"""The log of a replica that lives in the test's own process: every line as strict JSON, and waits on lines to come."""

import asyncio
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.replicas import TERMINAL_EVENTS, strict_json
from tickd import log as logs


Line = dict[str, Any]


class Logbook(io.StringIO):
    """A stream to log to, and its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._news = threading.Condition()

    def write(self, text: str) -> int:
        """Take one line, which has to be one strict JSON object."""
        with self._news:
            self.lines.extend(strict_json(line) for line in text.encode().splitlines(keepends=True))
            self._news.notify_all()
        return len(text)

    async def wait_for(self, event: str, *, count: int = 1, seconds: float = 10, **fields: Any) -> Line:
        """Return the `count`-th line with this event and these fields, once there is one; fail after so many seconds."""

        def wait() -> Line:
            with self._news:
                if not self._news.wait_for(lambda: len(self.find(event, **fields)) >= count, seconds):
                    raise AssertionError(f"no {event} with {fields} (x{count}) in {self.lines}")
                return self.find(event, **fields)[count - 1]

        return await asyncio.to_thread(wait)

    def find(self, event: str, **fields: Any) -> list[Line]:
        """Return the lines so far with this event and these fields."""
        return [
            line
            for line in tuple(self.lines)
            if line["event"] == event and all(line.get(key) == value for key, value in fields.items())
        ]

    def terminal(self) -> list[Line]:
        """Return the lines that ended a tick."""
        return [line for line in tuple(self.lines) if line["event"] in TERMINAL_EVENTS]


@contextmanager
def logging_to(
    book: Logbook, *, replica: str = "a", level: str = "info", secrets: frozenset[str] = frozenset()
) -> Iterator[logs.Log]:
    """Log there as a replica does, and give Python's own logging back at the end."""
    root, apscheduler = logging.getLogger(), logging.getLogger("apscheduler")
    handlers, levels, hook = root.handlers[:], (root.level, apscheduler.level), sys.excepthook
    try:
        with warnings.catch_warnings():
            yield logs.configure_stream(book, replica=replica, as_console=False, level=level, secrets=secrets)
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        apscheduler.setLevel(levels[1])
        sys.excepthook = hook
