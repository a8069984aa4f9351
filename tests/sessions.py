"""`tickd dev` as a test runs it: a real process, its lines, its children, and proof that none is left."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.replicas import replica_environment
from tickd.embedded import home_of


# Runs a stand-in for `tickd run`, so that a test decides how a replica behaves.
STAND_IN = """
import sys
from pathlib import Path
from tickd.dev import develop
sys.exit(develop(Path(sys.argv[1]), replicas=3, as_json="--json" in sys.argv, command=[sys.executable, sys.argv[2]]))
"""


def dev_command(schedule: Path, *, stand_in: Path | None = None, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line of `tickd dev`, with the program that stands in for `tickd run` if one is given."""
    if stand_in is None:
        return [sys.executable, "-m", "tickd", "dev", str(schedule), *arguments]
    return [sys.executable, "-c", STAND_IN, str(schedule), str(stand_in), *arguments]


class Session:
    """One `tickd dev`. Leaving it kills whatever it has left behind."""

    def __init__(
        self, schedule: Path, *, stand_in: Path | None = None, arguments: Sequence[str] = ()
    ) -> None:
        self.schedule = schedule
        self.home = home_of(schedule.parent)
        self.process = subprocess.Popen(
            # Whoever runs the tests may ignore SIGHUP, as nohup does, or SIGINT, as a shell's background does: a child inherits it.
            ["env", "--default-signal", *dev_command(schedule, stand_in=stand_in, arguments=arguments)],
            cwd=schedule.parent,
            env=replica_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=pipe, daemon=True)
            for pipe in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what is left of it, and close its pipes."""
        for pid in [self.process.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream
            stream.close()

    def wait_for(self, text: str, *, count: int = 1, timeout: float = 30) -> list[str]:
        """Return the lines that contain the text, once there are so many; fail at the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                found = [line for line in (*self.stdout, *self.stderr) if text in line]
                if len(found) >= count:
                    return found
                if not self._news.wait(max(0, deadline - time.monotonic())):
                    raise AssertionError(f"no {text!r} (x{count}):\n{self.said()}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        """Return the exit code, once it has ended and all it said is read."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.said()}") from None
        for reader in self._readers:
            reader.join(timeout)
        return code

    def children(self) -> list[int]:
        """Return the processes of this session that are alive: replicas by their schedule, Postgres by its data."""
        return [pid for pid in processes_with(self.schedule, self.home / "data") if pid != self.process.pid]

    def replica(self, name: str) -> int:
        """Return the process of a replica."""
        mark = f"TICKD_REPLICA={name}".encode()
        (pid,) = [p for p in self.children() if mark in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")]
        return pid

    def postgres(self) -> int:
        """Return the server's process."""
        return int((self.home / "data" / "postmaster.pid").read_text().split()[0])

    def wait_for_nobody(self, pids: Sequence[int], timeout: float = 10) -> None:
        """Return once these processes have ended; fail at the timeout (seconds)."""
        deadline = time.monotonic() + timeout
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                watch = os.pidfd_open(pid)
                try:
                    ended, _, _ = select.select([watch], [], [], max(0, deadline - time.monotonic()))
                finally:
                    os.close(watch)
                assert ended, f"process {pid} is still there:\n{self.said()}"

    def said(self) -> str:
        """Return all it has written, for a failure's message."""
        return "".join([*self.stdout, "--- stderr\n", *self.stderr])

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            with self._news:
                lines.append(line)
                self._news.notify_all()


def processes_with(*arguments: Path) -> list[int]:
    """Return the processes that have one of these paths as an argument."""
    marks = {str(argument).encode() for argument in arguments}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks & set((entry / "cmdline").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def forget(directory: Path) -> None:
    """Remove the embedded Postgres of a directory."""
    shutil.rmtree(home_of(directory), ignore_errors=True)
