"""Sizes: what one tick a second costs as the schedule has more entries, and as there are more replicas.

However many entries there are, one of them is due each second, so whatever grows with their number is the price of
having them, not of running them.
"""

from typing import Any

from benchmarks.contest import run_contest
from benchmarks.server import Server
from benchmarks.workloads import Workload


ENTRIES = (1, 100, 1_000, 10_000)
REPLICAS = (1, 2, 4, 8)
# With which the other one varies.
COMMON_ENTRIES, COMMON_REPLICAS = 1_000, 3
SECONDS = 30
KEPT = ("connections", "replica_cpu", "resident_mb", "missed", "doubled", "ready_after_s")


def sizes(server: Server, *, quick: bool) -> dict[str, Any]:
    """Return the figures of each size: lateness in ms, and per replica processor, memory and statements a second."""
    entries, replicas = ((10,), (2,)) if quick else (ENTRIES, REPLICAS)
    common = (10, 2) if quick else (COMMON_ENTRIES, COMMON_REPLICAS)
    seconds = 3 if quick else SECONDS
    return {
        "by_entries": [_point(server, n, common[1], seconds) for n in entries],
        "by_replicas": [_point(server, common[0], n, seconds) for n in replicas],
    }


def _point(server: Server, entries: int, replicas: int, seconds: int) -> dict[str, Any]:
    workload = Workload(
        "K",
        f"one tick a second, {entries:,} entries, {replicas} replicas",
        graphs=entries,
        every=entries,
        window=seconds,
        warm_up=3,
        spread=True,
        replicas=replicas,
    )
    figures = run_contest(server, "tickd", workload)
    return {
        "entries": entries,
        "replicas": replicas,
        "late_ms": figures["late_ms"],
        "statements": figures["statements"] / replicas,
        **{name: figures[name] for name in KEPT},
    }
