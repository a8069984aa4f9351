"""The plan: what a replica of any contender is told, and where it bears witness.

Peers run on a Python of their own, so nothing here needs more than the standard library.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import floor
from pathlib import Path


DAY = 86_400


@dataclass(frozen=True, slots=True)
class Plan:
    """Which schedules fire when, on which database, and what their task does.

    Schedule number i fires at every whole second that is `i % every` (with `spread`) or 0 past a multiple of `every`;
    the last `resting` of them fire once a day, in the second `rest_at` of it (UTC).
    """

    dsn: str
    home: str
    graphs: int
    every: int
    spread: bool = False
    resting: int = 0
    rest_at: int = 0
    seconds: float = 0.0
    pool_size: int = 6
    width: int = 50
    replicas: int = 3
    durability: str = "sync"

    def names(self) -> list[str]:
        """Return the schedules' names, in the order of the schedule."""
        return [name_of(number) for number in range(self.graphs)]

    def period(self, number: int) -> int:
        """Return the distance between a schedule's fire times, in seconds."""
        return self.every if number < self.graphs - self.resting else DAY

    def phase(self, number: int) -> int:
        """Return by how many seconds a schedule is off the multiples of its period."""
        if number >= self.graphs - self.resting:
            return self.rest_at
        return number % self.every if self.spread else 0

    def due(self, instant: int) -> list[str]:
        """Return the names of what is due at a whole second, without a look at what is not."""
        awake = self.graphs - self.resting
        if self.spread:
            due = [*range(instant % self.every, awake, self.every)]
        else:
            due = [*range(awake)] if instant % self.every == 0 else []
        if instant % DAY == self.rest_at:
            due += range(awake, self.graphs)
        return [name_of(number) for number in due]

    def fires(self, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Return every fire time from the first to the last second, both included."""
        return ((name, instant) for instant in range(first, last + 1) for name in self.due(instant))

    def write(self) -> None:
        """Leave the plan where replicas read it."""
        (Path(self.home) / "plan.json").write_text(json.dumps(asdict(self)))


def name_of(number: int) -> str:
    """Return a schedule's name."""
    return f"graph_{number:05}"


def read_plan() -> Plan:
    """Return the plan that this process was started for."""
    return Plan(**json.loads((Path(os.environ["BENCHMARK_HOME"]) / "plan.json").read_text()))


class Witness:
    """Writes one line per start of a task: appended in one call, so that a line is whole whatever ends the process."""

    def __init__(self, home: str, replica: str) -> None:
        self._file = os.open(Path(home) / f"starts-{replica}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def started(self, name: str, fire_time: float) -> None:
        """Write that the task of this fire time (seconds since 1970) starts now."""
        os.write(self._file, f"{name} {fire_time:.6f} {time.time():.6f}\n".encode())


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a task, as its witness wrote it; times are in seconds since 1970."""

    name: str
    fire_time: int
    started: float
    replica: str


def read_starts(home: str, names: Sequence[str] | None = None) -> list[Start]:
    """Return every start that was witnessed."""
    starts = []
    for path in Path(home).glob("starts-*"):
        replica = path.name.removeprefix("starts-")
        for line in path.read_text().splitlines():
            name, fire_time, started = line.split()
            starts.append(Start(name, round(float(fire_time)), float(started), replica))
    return starts if names is None else [start for start in starts if start.name in set(names)]


def seconds_of(text: str) -> float:
    """Return the instant that an ISO 8601 text names, in seconds since 1970."""
    return datetime.fromisoformat(text).astimezone(UTC).timestamp()


def ready(plan: Plan) -> None:
    """Tell the benchmark that this replica fires from now on."""
    (Path(plan.home) / f"ready-{replica_name()}").touch()


def replica_name() -> str:
    """Return the name that this replica was given."""
    return sys.argv[1]


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM sets."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


def next_second() -> int:
    """Return the first whole second that is still ahead."""
    return floor(time.time()) + 1
