"""Kills of the replica that runs a graph, at moments of chance, and what the witness makes of them afterwards."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.ledger_rows import ticks, wait_until_ended
from tests.replicas import Fleet, Replica
from tests.witness import GRAPHS, Witness


STEPS = 10
NODE_SECONDS = 0.1
EVERY = timedelta(seconds=2)
GRAPH = "ten_nodes"
ENTRY: dict[str, Any] = {
    "graph": f"{GRAPHS}:steps",
    "every": "2s",
    "mode": "claim",
    "input": {"steps": STEPS, "seconds": NODE_SECONDS},
}
PATIENCE = 120
NEXT = """
SELECT *
FROM witness.node_run
WHERE graph = %(graph)s AND began > %(at)s AND replica <> %(killed)s
ORDER BY id
LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: of whom, when by the database's clock, in which node of which tick, and when the next node began."""

    replica: str
    at: datetime
    fire_time: datetime
    node: str
    next_began: datetime

    @property
    def gap(self) -> float:
        """Return the seconds from the kill to the next node's start."""
        return (self.next_began - self.at).total_seconds()


class Killing:
    """Replicas of which the one at work is killed and replaced, again and again; each has a name of its own.

    `settle`: the next one is killed when the new one is ready, and not as soon as there is another one at all.
    """

    def __init__(self, fleet: Fleet, witness: Witness, *, seed: int, settle: bool) -> None:
        self._fleet = fleet
        self._witness = witness
        self._settle = settle
        self._alive: list[Replica] = []
        self._chance = random.Random(seed)
        self._schedule: Path = fleet.schedule({GRAPH: ENTRY})
        self._started = 0
        self._last_killed: datetime | None = None

    def start(self, count: int) -> None:
        """Start so many replicas."""
        for _ in range(count):
            self._started += 1
            self._alive.append(self._fleet.start(f"r{self._started}", self._schedule))

    def kill_one(self) -> Kill:
        """Kill whoever is at work, in a node of chance, and start another one in its place."""
        for replica in self._alive if self._settle else self._alive[:2]:
            replica.wait_for("daemon.ready", timeout=PATIENCE)
        node = self._node_at_work()
        threading.Event().wait(self._chance.uniform(0, NODE_SECONDS))
        at, victim = self._witness.now(), self._fleet.named(node.replica)
        victim.kill()
        self._alive.remove(victim)
        self._witness.bury(victim.name, at)
        self._last_killed = node.fire_time
        following = self._following(at, victim.name)
        self.start(1)
        return Kill(victim.name, at, node.fire_time, node.node, following.began)

    def _following(self, at: datetime, killed: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (rows := self._witness.query(NEXT, graph=GRAPH, at=at, killed=killed)):
            left = deadline - time.monotonic()
            assert left > 0, f"nobody goes on since {at}: {self._witness.nodes(GRAPH)[-20:]}"
            list(self._witness.connection.notifies(timeout=left, stop_after=1))
        return rows[0]

    def _node_at_work(self) -> Any:
        """Wait for a step of chance of a tick after the last one that was killed."""
        wanted = f"step_{self._chance.randint(1, STEPS)}"
        after = self._witness.last()
        while True:
            node = self._witness.wait_for_begin(GRAPH, wanted, after=after, timeout=PATIENCE)
            if self._last_killed is None or node.fire_time > self._last_killed:
                return node
            after = node.id


def verdict(witness: Witness, kills: list[Kill], *, timeout: float = 120) -> dict[str, Any]:
    """Wait until every tick that has come due by now has ended; return what went wrong, each kind in a list."""
    until = witness.now()
    wait_until_ended(witness, GRAPH, until=until, timeout=timeout)
    rows = [row for row in ticks(witness, GRAPH) if row.fire_time <= until]
    nodes: dict[tuple[datetime, str], list[Any]] = {}
    for node in witness.nodes(GRAPH):
        if node.fire_time <= until:
            nodes.setdefault((node.fire_time, node.node), []).append(node)
    in_mid_air = {(kill.fire_time, kill.replica) for kill in kills}
    last_of = {(node.fire_time, node.replica): node.id for node in witness.nodes(GRAPH)}
    repeated = {key: runs for key, runs in nodes.items() if len(runs) > 1}
    steps = Counter(fire_time for fire_time, _ in nodes)
    return {
        "not_ran": [row for row in rows if row.outcome != "ran"],
        "not_fired": witness.gaps(GRAPH, EVERY),
        "incomplete": [row.fire_time for row in rows if steps[row.fire_time] != STEPS],
        "more_than_twice": [key for key, runs in repeated.items() if len(runs) > 2],
        # The first of the two was the last thing that a killed replica did.
        "repeated_without_a_kill": [
            key
            for key, (first, *_) in repeated.items()
            if (first.fire_time, first.replica) not in in_mid_air
            or last_of[first.fire_time, first.replica] != first.id
        ],
        "overlaps": witness.overlaps(),
    }
