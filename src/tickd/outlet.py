"""The outlet: stdout as the log has it, where a line that cannot be written is lost, and nothing else is.

A disk is full, the reader of a pipe is gone or stands still, somebody else has made the terminal non-blocking: none of
it may end a run, or hold up the ticks and the holds of a replica that is well otherwise. A reader that is merely slow is
waited for.
"""

import io
import os
import select
import time
from contextlib import suppress
from typing import Final


PATIENCE: Final = 2.0  # in seconds: less than any hold needs to be given up
STDERR: Final = 2


class Outlet(io.TextIOBase):
    """Writes lines to a file descriptor; `lost` counts those that could not be written since the last that could."""

    def __init__(self, descriptor: int, *, patience: float = PATIENCE) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._patience = patience
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._cut = False
        self.lost = 0

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Say whether a person reads along."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Write a line, or count it among the lost."""
        line = text.encode("utf-8", "backslashreplace")
        # What is left of a line that was cut off must not spoil this one.
        left = whole = b"\n" + line if self._cut else line
        # The patience is for each time that it stands still, not for each line in it.
        deadline = time.monotonic() + (0 if self.lost else self._patience)
        try:
            while left:
                left = left[self._write_some(left, deadline) :]
        except OSError as error:
            self._cut = self._cut or len(left) < len(whole)
            self.lost += 1
            if self.lost == 1:
                _complain(error)
        else:
            self._cut = False
            self.lost = 0
        return len(text)

    def _write_some(self, data: bytes, deadline: float) -> int:
        if not self._room.poll(max(0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("nobody reads it")
        with suppress(BlockingIOError):
            # Where a pipe has room at all, so much can be written without waiting.
            return os.write(self._descriptor, data[: select.PIPE_BUF])
        return 0


def _complain(error: OSError) -> None:
    """Say on stderr, if there is room, that lines are lost: stderr may be the same pipe."""
    room = select.poll()
    room.register(STDERR, select.POLLOUT)
    reason = error.strerror or error
    with suppress(OSError):
        if room.poll(0):
            os.write(
                STDERR, f"tickd: stdout takes no log lines ({reason}); they are lost until it does\n".encode()
            )
