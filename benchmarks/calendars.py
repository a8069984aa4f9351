"""Calendars: what a day of fire times costs each contender, and how many of them it finds."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import load_schedule
from benchmarks.contest import CONTENDERS
from benchmarks.day import differing
from benchmarks.program import figures_of


# Both floors have the same one; it stands in the place of the first.
TRIGGERS = {
    "bare_loop": "apscheduler3",
    "apscheduler4": "apscheduler4",
    "procrastinate": "procrastinate",
    "dbos": "dbos",
}


def calendars(names: Sequence[str], graphs: int) -> Iterator[dict[str, Any]]:
    """Compute a day of so many entries with each contender's calendar; yield the figures."""
    ours = load_schedule.instants()
    for name in names:
        if name == "tickd":
            yield {"contender": name, **load_schedule.measured(graphs)}
        elif name in TRIGGERS:
            yield {"contender": name, **_computed(name, graphs, ours)}


def _computed(name: str, graphs: int, ours: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what a trigger makes of the day, beside what tickd makes of it."""
    told = figures_of("benchmarks.triggers", TRIGGERS[name], str(graphs), peer=CONTENDERS[name].peer)
    if "failed" in told:
        return told
    lacking, added = differing(ours, told["fire_times"])
    return {
        "graphs": told["graphs"],
        "a_day": {
            "processor_s": told["processor_s"],
            "ticks": told["ticks"],
            "microseconds_per_tick": round(told["processor_s"] / told["ticks"] * 1e6, 1),
        },
        "of_every_kind": {"ours": sum(map(len, ours)), "lacking": lacking, "added": added},
    }
