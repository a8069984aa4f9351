"""The workloads that are measured by replicas: which schedules fire when, and for how long."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Workload:
    """Schedules, the distance of their fire times in seconds, and how many whole seconds are measured after the warm-up."""

    letter: str
    title: str
    graphs: int
    every: int
    window: int
    warm_up: int
    spread: bool = False
    seconds: float = 0.0
    patience: int = 20
    replicas: int = 3


WORKLOADS = {
    one.letter: one
    for one in (
        Workload("A", "one graph a second", graphs=1, every=1, window=60, warm_up=3),
        Workload("B", "200 graphs due at once", graphs=200, every=10, window=60, warm_up=10),
        Workload("C", "2,000 graphs due at once", graphs=2000, every=60, window=180, warm_up=60, patience=60),
        Workload("D", "10,000 graphs, 300 due each second", graphs=10_000, every=33, window=60, warm_up=5, spread=True),
    )
}


def quick(workload: Workload) -> Workload:
    """Return a small version that takes a few seconds: to see that everything works, not to measure."""
    return replace(
        workload,
        graphs=min(workload.graphs, 20),
        every=min(workload.every, 2),
        window=2,
        warm_up=0,
        patience=10,
        replicas=2,
    )
