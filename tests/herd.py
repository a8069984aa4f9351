"""A herd: many graphs with a tick a second each, on replicas that are killed at random, and the books afterwards."""

import random
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.ledger_rows import wait_until_ended
from tests.replicas import Fleet, Replica
from tests.witness import GRAPHS, Witness


PATIENCE = 180
# Every fire time of every graph, from its first row on, that did not come to `ran`.
LOST = """
SELECT first.graph, expected.fire_time, t.outcome, t.error_type, t.attempt
FROM (SELECT graph, min(fire_time) AS since FROM tickd.ticks GROUP BY graph) AS first
CROSS JOIN LATERAL generate_series(first.since, %(until)s, interval '1 s') AS expected (fire_time)
LEFT JOIN tickd.ticks AS t ON t.graph = first.graph AND t.fire_time = expected.fire_time
WHERE t.outcome IS DISTINCT FROM 'ran'
"""
# The runs of every tick that had more than one, in their order.
REPEATED = """
SELECT graph, fire_time, array_agg(replica ORDER BY began) AS replicas
FROM witness.run
GROUP BY graph, fire_time
HAVING count(*) > 1
"""
COUNTS = """
SELECT count(*) AS ticks, count(DISTINCT graph) AS graphs, count(*) FILTER (WHERE attempt > 1) AS continued,
       count(*) FILTER (WHERE outcome IS NULL) AS open
FROM tickd.ticks
WHERE fire_time <= %(until)s
"""


@dataclass(slots=True)
class Herd:
    """The replicas and what was done to them."""

    fleet: Fleet
    witness: Witness
    graphs: int
    seed: int
    hold: str = "dedicated"
    kills: int = 0
    _killed: set[str] = field(default_factory=set)
    _alive: list[Replica] = field(default_factory=list)
    _started: int = 0
    _schedule: Path = field(init=False)
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        entry = {"graph": f"{GRAPHS}:quick", "every": "1s", "mode": "claim", "hold": self.hold}
        self._schedule = self.fleet.schedule({f"graph_{n}": entry for n in range(self.graphs)})
        self._chance = random.Random(self.seed)

    def start(self, count: int) -> None:
        """Start so many replicas, each with a name of its own."""
        for _ in range(count):
            self._started += 1
            self._alive.append(self.fleet.start(f"r{self._started}", self._schedule))

    def wait_until_ready(self) -> None:
        """Return when all of them fire."""
        for replica in self._alive:
            replica.wait_for("daemon.ready", timeout=PATIENCE)

    def kill_one(self) -> None:
        """Kill one of chance, and start another one in its place."""
        victim = self._chance.choice(self._alive)
        at = self.witness.now()
        victim.kill()
        self.witness.bury(victim.name, at)
        self._alive.remove(victim)
        self._killed.add(victim.name)
        self.kills += 1
        self.start(1)

    def run_on(self, nodes: int) -> None:
        """Return when so many more nodes have begun."""
        wanted, deadline = self.witness.last() + nodes, time.monotonic() + PATIENCE
        while self.witness.last() < wanted:
            assert time.monotonic() < deadline, f"no {nodes} nodes have begun within {PATIENCE} s"
            threading.Event().wait(0.1)

    def books(self, until: datetime, *, timeout: float) -> dict[str, Any]:
        """Wait until every tick up to the instant has ended; return what was lost, and what was doubled without a kill."""
        wait_until_ended(self.witness, until=until, timeout=timeout)
        doubled = [row for row in self.witness.query(REPEATED) if not set(row.replicas[:-1]) <= self._killed]
        return {
            "lost": self.witness.query(LOST, until=until),
            "doubled": doubled,
            "overlaps": self.witness.overlaps(),
        }

    def counts(self, until: datetime) -> dict[str, int]:
        """Return how many ticks came due up to the instant, of how many graphs, and how many were continued or wait."""
        (row,) = self.witness.query(COUNTS, until=until)
        return {**row._asdict(), "kills": self.kills}
