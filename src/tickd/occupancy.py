"""The occupancy of one replica: which graphs it attempts or runs at this moment, one tick of each at a time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from tickd.clock import DatabaseClock
from tickd.tick import Tick


@dataclass(slots=True)
class Running:
    """A graph that this replica attempts or runs: since when, which tick, and whether that is to make room for a newer."""

    since: datetime
    tick: Tick | None = None
    newer: Tick | None = None
    displaced: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, tick: Tick) -> None:
        """Note which tick it is; one that a newer has asked for room already makes it at once."""
        self.tick = tick
        if self.newer is not None:
            self.displace(self.newer)

    def displace(self, newer: Tick) -> None:
        """Let the run make room, unless it is the newer tick's own, or that of a still newer one."""
        self.newer = newer
        if self.tick is not None and self.tick.fire_time < newer.fire_time:
            self.displaced.set()


class Occupancy:
    """The graphs that this replica is at."""

    def __init__(self, clock: DatabaseClock) -> None:
        self._clock = clock
        self._running: dict[str, Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def of(self, graph: str) -> Running | None:
        """Return what this replica does with the graph; None when it does nothing."""
        return self._running.get(graph)

    def displaced(self, graph: str) -> asyncio.Event:
        """Return the event of a graph that this replica runs: the run is to make room for a newer tick."""
        return self._running[graph].displaced

    @contextmanager
    def take(self, graph: str) -> Iterator[Running]:
        """Let this replica attempt and run one tick of the graph at a time."""
        assert graph not in self._running, graph  # noqa: S101  # callers have asked, without a wait in between
        self._running[graph] = Running(self._clock.now())
        try:
            yield self._running[graph]
        finally:
            del self._running[graph]

    def displace(self, newer: Tick) -> None:
        """Let an earlier tick that runs here, if there is one, make room for this one."""
        running = self._running.get(newer.graph)
        if running is not None:
            running.displace(newer)
