"""How long a large schedule takes to read and check, how much memory it keeps, and what a day of its calendar costs.

    python -m benchmarks.load_schedule [GRAPHS]

Time is that of the processor, so that a busy machine does not show in it; the wall clock stands beside it.
"""

import json
import platform
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from benchmarks.day import BEGIN, END, entries, kinds
from tickd.schedule import Schedule, parse


def text_of(graphs: int) -> str:
    """Return a schedule in which every graph has seven keys, templates and nested ones among them."""
    lines = ["timezone: Europe/Oslo", "defaults:", "  timeout: 10m", "  keep: 7d", "graphs:"]
    for number, entry in enumerate(entries(graphs)):
        lines += [
            f"  graph_{number:05}:",
            f"    graph: ./graphs/restock_{number % 50}.py:graph",
            f'    cron: "{entry.cron}"',
            f"    timezone: {entry.zone}",
            "    input: {feed_down: false, at: '{fire_time}', limit: 20}",
            "    config: {tags: [stock, nightly], recursion_limit: 50}",
            "    jitter: 5s",
            "    grace: 1m",
        ]
    return "\n".join(lines) + "\n"


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a call returns, and how long it took."""
    processor, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, {
        "processor_s": round(time.process_time() - processor, 3),
        "wall_s": round(time.perf_counter() - wall, 3),
    }


def read(text: str) -> Schedule:
    """Read and check a schedule."""
    return parse(text, path="schedule.yaml", environment={})


def kept_by(text: str) -> dict[str, float]:
    """Return the memory that the schedule keeps, and the most that reading it needed."""
    tracemalloc.start()
    schedule = read(text)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "kept_mib": round(kept / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1),
        "kept_kib_per_graph": round(kept / 1024 / len(schedule.entries), 1),
    }


def a_day(schedule: Schedule) -> int:
    """Go through every fire time of every graph in a day; return how many there are."""
    return sum(sum(1 for _ in entry.series.between(BEGIN, END)) for entry in schedule.entries.values())


def instants() -> list[list[float]]:
    """Return the fire times of the day for every kind of entry, in seconds since 1970."""
    schedule = read(text_of(kinds()))
    return [
        [instant.timestamp() for instant in entry.series.between(BEGIN, END)]
        for entry in schedule.entries.values()
    ]


def measured(graphs: int) -> dict[str, Any]:
    """Read and check a schedule of so many graphs, and compute a day of it; return the figures."""
    text = text_of(graphs)
    schedule, loading = timed(lambda: read(text))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    _, first = timed(lambda: [entry.series.after(BEGIN) for entry in schedule.entries.values()])
    ticks, day = timed(lambda: a_day(schedule))
    return {
        "python": platform.python_version(),
        "graphs": graphs,
        "text_mib": round(len(text) / 2**20, 2),
        "read_and_check": loading,
        "resident_mib": resident,
        "memory": kept_by(text),
        "first_fire_times": first,
        "a_day": {**day, "ticks": ticks, "microseconds_per_tick": round(day["processor_s"] / ticks * 1e6, 1)},
    }


def main() -> None:
    """Measure, and print one JSON object."""
    print(json.dumps(measured(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000), indent=2))


if __name__ == "__main__":
    main()
