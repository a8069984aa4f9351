"""Real replicas: `python -m tickd` processes that a test starts, reads, signals and kills.

Their log lines are the tests' signals: `wait_for` returns as soon as a line arrives, or fails with all that was said.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tickd.tick import Outcome, parse_instant


ROOT = Path(__file__).parent.parent
Line = dict[str, Any]

# What ends a tick on the replica that fired it; `tick.abandoned` is what a sweep says of somebody else's.
TERMINAL_EVENTS = frozenset(f"tick.{outcome}" for outcome in Outcome if outcome is not Outcome.ABANDONED)

FAKETIME_LIBRARIES = "*/faketime/libfaketimeMT.so.1"


class Replica:
    """One tickd process. `lines` is what it has logged so far, parsed as strict JSON."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.not_json: list[bytes] = []
        self._stderr: list[bytes] = []
        self._news = threading.Condition()
        self._open = True
        # A process group of its own, so that the clean-up reaches whatever it started as well.
        self.process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_log, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return b"".join(self._stderr).decode(errors="replace")

    def wait_for(
        self, event: str, *, timeout: float = 15, count: int = 1, after: Line | None = None, **fields: Any
    ) -> Line:
        """Return the first line (or the `count`-th) with this event and these fields, once it has been logged.

        With `after`, only lines later than that one count. Fails at the timeout (seconds), and at once when the
        process has ended without it.
        """
        wanted = {"event": event, **fields}

        def found() -> Line | None:
            lines = [line for line in self._since(after) if wanted.items() <= _Items(line)]
            return lines[count - 1] if len(lines) >= count else None

        return self._wait(found, f"{wanted} (x{count})", timeout)

    def wait_for_terminal(self, count: int, *, timeout: float = 15, graph: str | None = None) -> Line:
        """Return the line with which the replica ended its `count`-th tick, of one graph or of all."""

        def found() -> Line | None:
            lines = self.terminal_lines(graph)
            return lines[count - 1] if len(lines) >= count else None

        return self._wait(found, f"{count} terminal lines", timeout)

    def _wait(self, found: Callable[[], Line | None], wanted: str, timeout: float) -> Line:
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                line = found()
                if line is not None:
                    return line
                if not self._open or not self._news.wait(max(0, deadline - time.monotonic())):
                    raise AssertionError(f"{self.name} has not logged {wanted}:\n{self.said()}")

    def terminal_lines(self, graph: str | None = None) -> list[Line]:
        """Return the lines that ended a tick on this replica, of one graph or of all."""
        with self._news:
            lines = list(self.lines)
        return [line for line in lines if line["event"] in TERMINAL_EVENTS and graph in (None, line["graph"])]

    def events(self, event: str, **fields: Any) -> list[Line]:
        """Return the lines so far with this event and these fields."""
        with self._news:
            return [line for line in self.lines if {"event": event, **fields}.items() <= _Items(line)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 15) -> int:
        """Return the exit code once the process has ended and everything it wrote is read."""
        if self.process.poll() is None:
            # Told at once: `Popen.wait` asks every 50 ms, and another replica may have begun by then.
            end = os.pidfd_open(self.process.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise AssertionError(f"{self.name} does not end:\n{self.said()}")
            finally:
                os.close(end)
        code = self.process.wait()
        for reader in self._readers:
            reader.join(timeout)
            assert not reader.is_alive(), f"{self.name} has ended and left a process behind"
        return code

    def stop(self, timeout: float = 15) -> int:
        """Ask it to stop as an orchestrator does (SIGTERM) and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """Kill it, and whatever it started, with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def said(self) -> str:
        """Return all it has written, for a failure's message."""
        return "\n".join([*(json.dumps(line) for line in self.lines), *map(repr, self.not_json), self.stderr])

    def close(self) -> None:
        """Kill what is left of it, and close its pipes."""
        self.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def _since(self, after: Line | None) -> list[Line]:
        if after is None:
            return self.lines
        return self.lines[next(i for i, line in enumerate(self.lines) if line is after) + 1 :]

    def _read_log(self) -> None:
        assert self.process.stdout
        for raw in self.process.stdout:
            with self._news:
                try:
                    self.lines.append(strict_json(raw))
                except ValueError:
                    self.not_json.append(raw)
                self._news.notify_all()
        with self._news:
            self._open = False
            self._news.notify_all()

    def _read_stderr(self) -> None:
        assert self.process.stderr
        for raw in self.process.stderr:
            self._stderr.append(raw)


class _Items(set[Any]):
    """A line's items, of which only those with hashable values can be asked for."""

    def __init__(self, line: Line) -> None:
        super().__init__((key, value) for key, value in line.items() if not isinstance(value, list | dict))


def strict_json(raw: bytes) -> Line:
    """Return the one JSON object of a line; NaN, a repeated key, or anything beside the object is a ValueError."""
    line = json.loads(raw.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
    if not isinstance(line, dict) or not raw.endswith(b"}\n"):
        raise ValueError(f"not one JSON object and a newline: {raw!r}")
    return line


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> Line:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


class Fleet:
    """The replicas of one test, on one database and one schedule; leaving it kills them all."""

    def __init__(self, home: Path, dsn: str) -> None:
        self.home = home
        self.dsn = dsn
        self.replicas: list[Replica] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self.replicas:
            replica.close()
        broken = {replica.name: replica.not_json for replica in self.replicas if replica.not_json}
        if error is None:
            assert not broken, f"not strict JSON: {broken}"

    def schedule(self, graphs: Mapping[str, Mapping[str, Any]], **top: Any) -> Path:
        """Write a schedule file (JSON is YAML) and return its path."""
        path = self.home / f"schedule-{len(list(self.home.glob('schedule-*')))}.yaml"
        path.write_text(json.dumps({**top, "graphs": graphs}, indent=2))
        return path

    def start(
        self,
        name: str,
        schedule: Path,
        *,
        dsn: str | None = None,
        env: Mapping[str, str] | None = None,
        clock: str | None = None,
        prefix: Sequence[str] = (),
    ) -> Replica:
        """Start `tickd run`. `clock` shifts its wall clock (`+150ms`); `prefix` is a command that runs it.

        `env` adds to the environment; a `clock` that names a file is read again at every look at the clock.
        """
        environment = replica_environment()
        environment |= {
            "TICKD_DATABASE_URL": dsn or self.dsn,
            "TICKD_REPLICA": name,
            "TICKD_LOG_FORMAT": "json",
        }
        environment |= shifted(clock) if clock else {}
        environment |= env or {}
        command = [*prefix, sys.executable, "-m", "tickd", "run", str(schedule)]
        replica = Replica(name, command, environment, self.home)
        self.replicas.append(replica)
        return replica

    def named(self, name: str) -> Replica:
        """Return the replica of this name, the last one that was started under it."""
        return next(replica for replica in reversed(self.replicas) if replica.name == name)

    def lines(self, event: str, **fields: Any) -> list[Line]:
        """Return what all of them have logged of one event, in no order across replicas."""
        return [line for replica in self.replicas for line in replica.events(event, **fields)]

    def accounts(self, graph: str) -> dict[datetime, dict[str, Line]]:
        """Return how each replica ended each tick of the graph: fire time to replica to terminal line.

        Only the time counts in which all of them were at work. That a replica ended a tick twice is a failure here.
        """
        ended: dict[str, dict[datetime, Line]] = {}
        for replica in self.replicas:
            lines = [line for line in replica.terminal_lines(graph) if line.get("reason") != "draining"]
            ended[replica.name] = {parse_instant(line["fire_time"]): line for line in lines}
            assert len(ended[replica.name]) == len(lines), (
                f"{replica.name} ended a tick twice:\n{replica.said()}"
            )
        first, last = max(map(min, ended.values())), min(map(max, ended.values()))
        instants = sorted(instant for instant in set().union(*ended.values()) if first <= instant <= last)
        return {i: {name: lines[i] for name, lines in ended.items() if i in lines} for i in instants}

    def stop(self) -> list[int]:
        """Ask all of them to stop and return their exit codes."""
        for replica in self.replicas:
            replica.signal(signal.SIGTERM)
        return [replica.wait() for replica in self.replicas]


def replica_environment() -> dict[str, str]:
    """Return this environment without the developer's own settings of tickd, and with the tests' graphs in reach."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TICKD_", "PG"))}
    return {**kept, **python_path(ROOT)}


def python_path(*folders: Path) -> dict[str, str]:
    """Return the variable that puts these folders, and what this process was given by it, on another's import path.

    A checkout whose environment belongs to another one names its own sources so, and they are to be tested in every process.
    """
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, folders), *([given] if given else [])])
    return {"PYTHONPATH": path} if path else {}


def shifted(clock: str) -> dict[str, str]:
    """Return the environment in which a process sees a shifted wall clock (`+2s`, `-150ms`, or a file that says so).

    The monotonic clock stays true, as it does on a host whose wall clock is wrong. The library is preloaded by hand
    because the `faketime` command stays in between and passes no signals on.
    """
    libraries = sorted(Path("/usr/lib").glob(FAKETIME_LIBRARIES))
    if not libraries:
        raise RuntimeError("no libfaketime: run scripts/install-debian")
    common = {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
        # Otherwise it shifts the deadlines of monotonic waits as well, Python's wait for its own lock (5 ms) among
        # them: threads then starve each other for seconds.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }
    if clock.startswith("/"):
        return {**common, "FAKETIME_TIMESTAMP_FILE": clock, "FAKETIME_NO_CACHE": "1"}
    return {**common, "FAKETIME": offset(clock)}


def offset(clock: str) -> str:
    """Return a shift such as `+2s` or `-150ms` as libfaketime reads it: in seconds, always with a sign."""
    number = clock.removesuffix("ms") if clock.endswith("ms") else clock.removesuffix("s")
    return f"{float(number) / (1000 if clock.endswith('ms') else 1):+.6f}"
