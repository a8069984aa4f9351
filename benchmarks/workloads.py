"""The workloads that are measured by replicas: which schedules fire when, and for how long."""

from dataclasses import dataclass, replace
from math import ceil

from benchmarks.plan import DAY, Plan


@dataclass(frozen=True, slots=True)
class Workload:
    """Schedules, the distance of their fire times in seconds, and how many whole seconds are measured after the warm-up.

    `resting` is the share of the schedules that are due once a day, and not while anything is measured. `seconds` is how
    long a task works, `width` how many a replica may have at work at once, `connections` the server's `max_connections`,
    `patience` how many seconds after the window a start still counts, and `durability` how LangGraph saves.
    """

    letter: str
    title: str
    graphs: int
    every: int
    window: int
    warm_up: int
    spread: bool = False
    resting: float = 0.0
    seconds: float = 0.0
    patience: int = 20
    replicas: int = 3
    width: int = 50
    connections: int = 300
    quiet: float = 2.0
    durability: str = "sync"

    def begins(self, now: float) -> int:
        """Return the first second that counts, after the warm-up: a fire time, if the window has whole periods."""
        step = 1 if self.spread or self.window < self.every else self.every
        return ceil((now + self.warm_up + 1) / step) * step

    def plan(self, dsn: str, home: str, now: float) -> Plan:
        """Return what replicas are told; what rests is due half a day from now, as far off as can be."""
        return Plan(
            dsn=dsn,
            home=home,
            graphs=self.graphs,
            every=self.every,
            spread=self.spread,
            resting=round(self.graphs * self.resting),
            rest_at=(round(now) + DAY // 2) % DAY,
            seconds=self.seconds,
            width=self.width,
            replicas=self.replicas,
            durability=self.durability,
        )


WORKLOADS = {
    one.letter: one
    for one in (
        Workload("A", "one graph a second", graphs=1, every=1, window=60, warm_up=3),
        Workload("B", "200 graphs due at once", graphs=200, every=10, window=60, warm_up=10),
        Workload(
            "C",
            "2,000 graphs due at once",
            graphs=2000,
            every=60,
            window=120,
            warm_up=30,
            patience=60,
            connections=100,
        ),
        Workload(
            "D",
            "10,000 graphs, 300 due each second",
            graphs=10_000,
            # What a cron line can say: 9,000 of them twice a minute, 300 in each second of the half.
            every=30,
            resting=0.1,
            window=60,
            # All of them once, so that whatever a start costs is over.
            warm_up=35,
            spread=True,
            patience=60,
        ),
        Workload(
            "E",
            "1,000 graphs that each run for 30 s, due at once",
            graphs=1000,
            every=60,
            window=60,
            warm_up=10,
            seconds=30.0,
            patience=60,
            replicas=2,
            width=500,
            connections=1200,
        ),
        Workload("F", "10,000 graphs, none due", graphs=10_000, every=1, resting=1.0, window=60, warm_up=20),
    )
}
WORKLOADS["J"] = replace(
    WORKLOADS["D"],
    letter="J",
    title="10,000 graphs, 300 due each second, each saved once",
    durability="exit",
)


def quick(workload: Workload) -> Workload:
    """Return a small version that takes a few seconds: to see that everything works, not to measure."""
    return replace(
        workload,
        graphs=min(workload.graphs, 10),
        every=1,
        window=1,
        warm_up=0,
        seconds=min(workload.seconds, 1.0),
        patience=10,
        replicas=2,
        quiet=0.3,
    )
