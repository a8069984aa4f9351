"""The page: docs/benchmarks.md, whose tables and picture are made from the figures in results.json.

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; the words around them are written by hand.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parent / "results.json"
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
NAMES = {
    "tickd": "**tickd**",
    "tickd_shared": "tickd with `hold: shared`",
    "bare_loop": "the bare loop",
    "told_loop": "a session per run, told whose it is",
    "one_session": "the one-session loop",
    "apscheduler4": "APScheduler 4.0.0a6",
    "procrastinate": "Procrastinate 3.10",
    "dbos": "DBOS 3.4",
}
# What computes the fire times of each contender, and in whose time.
CALENDARS = {
    "tickd": "its own",
    "bare_loop": "APScheduler 3.11's `CronTrigger`, as both loops might",
    "apscheduler4": "its `CronTrigger`",
    "procrastinate": "croniter 7.0, in UTC, whatever the entry's zone is",
    "dbos": "croniter 7.0",
}
Figures = dict[str, Any]
Row = Sequence[str]


class Results:
    """The figures of one file; of a workload that was run again and again, the run in the middle counts."""

    def __init__(self, results: list[Figures]) -> None:
        self._results = results

    def of(self, letter: str, contender: str = "tickd") -> Figures:
        """Return the typical figures of a contender on a workload; raises LookupError when it was not run."""
        runs = [f for f in self._results if (f["workload"], f["contender"]) == (letter, contender)]
        if not runs:
            raise LookupError(f"{RESULTS.name} has no figures of {contender} on {letter}")
        runs.sort(key=lambda figures: (figures.get("late_ms") or {}).get("p95") or 0.0)
        return runs[(len(runs) - 1) // 2]

    def contests(self, letter: str) -> dict[str, Figures]:
        """Return the typical figures of every contender on a workload, in the order of the page."""
        there = {figures["contender"] for figures in self._results if figures["workload"] == letter}
        if not there:
            raise LookupError(f"{RESULTS.name} has no figures of {letter}")
        return {name: self.of(letter, name) for name in NAMES if name in there}

    def letters(self) -> set[str]:
        """Return the workloads that have figures."""
        return {figures["workload"] for figures in self._results}


def write_page() -> None:
    """Write every table of the page anew, and the picture."""
    from benchmarks.picture import draw, draw_sizes  # noqa: PLC0415  # only who makes the page has matplotlib

    results = Results(json.loads(RESULTS.read_text())["results"])
    PAGE.write_text(filled(PAGE.read_text(), results))
    draw(results, DOCS / "benchmarks.svg")
    draw_sizes(results, DOCS / "growth.svg")


def filled(page: str, results: Results) -> str:
    """Return the page with each of its tables made from the figures; a workload without any keeps its table."""

    def table(found: re.Match[str]) -> str:
        try:
            rows = "\n".join(f"| {' | '.join(row)} |" for row in TABLES[found[1]](results))
        except LookupError:
            return found[0]
        return f"<!-- figures: {found[1]} -->\n{rows}\n<!-- end -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def lateness(results: Results, letter: str) -> Iterator[Row]:
    """Yield how late each contender's tasks started, in ms and as ratios to the floors."""
    rows = results.contests(letter)
    yield (
        "",
        "p50",
        "p95",
        "p99",
        "p50 ÷ bare",
        "p95 ÷ one-session",
        "missed",
        "doubled",
        "connections",
        "largest share",
        "load",
    )
    yield ("---", *["--:"] * 10)
    bare, one = rows.get("bare_loop"), rows.get("one_session")
    for name, figures in rows.items():
        if "failed" in figures:
            yield (NAMES[name], figures["failed"].splitlines()[0], *[""] * 9)
            continue
        late = figures["late_ms"]
        yield (
            NAMES[name],
            *(milliseconds(late[q]) for q in ("p50", "p95", "p99")),
            ratio(late["p50"], bare, "p50"),
            ratio(late["p95"], one, "p95"),
            f"{figures['missed']} of {figures['fire_times']}",
            str(figures["doubled"]),
            str(figures["connections"]),
            f"{figures['largest_share'] or 0:.0%}",
            f"{figures['load_average']:.1f}",
        )


def idle(results: Results) -> Iterator[Row]:
    """Yield what a replica costs while nothing is due."""
    yield (
        "",
        "ready after",
        "processor, of one core",
        "÷ one-session",
        "statements a second",
        "memory",
        "connections, all replicas",
    )
    yield ("---", *["--:"] * 6)
    rows = results.contests("F")
    floor = rows.get("one_session", {}).get("replica_cpu")
    for name, figures in rows.items():
        if "failed" in figures:
            yield (NAMES[name], figures["failed"].splitlines()[0], *[""] * 5)
            continue
        yield (
            NAMES[name],
            f"{figures['ready_after_s']:.1f} s",
            f"{figures['replica_cpu']:.1%}",
            times(figures["replica_cpu"], floor),
            f"{figures['statements'] / figures['replicas']:.1f}",
            f"{figures['resident_mb']:.0f} MiB",
            str(figures["connections"]),
        )


def stations(results: Results) -> Iterator[Row]:
    """Yield where the time of one tick goes."""
    from benchmarks.pieces import STATIONS  # noqa: PLC0415  # it imports all of tickd

    yield ("station", "after the fire time, p50", "since the station before, p50", "p95")
    yield ("---", "--:", "--:", "--:")
    for one in results.of("A", "pieces")["pieces"]:
        steps = one["step_ms"]
        yield (
            STATIONS[one["station"]],
            milliseconds(one["after_ms"]["p50"]),
            milliseconds(steps["p50"]),
            milliseconds(steps["p95"]),
        )


def costs(results: Results) -> Iterator[Row]:
    """Yield what each contender's pieces take on an idle server, in ms and as ratios to what does the same."""
    rows = results.contests("G")
    took = {piece: cost for figures in rows.values() for piece, cost in figures.get("cost_ms", {}).items()}
    yield ("", "piece", "p50", "p95", "p50 ÷", "that of")
    yield ("---", "---", "--:", "--:", "--:", "---")
    for name, figures in rows.items():
        if "failed" in figures:
            yield (NAMES[name], figures["failed"].splitlines()[0], *[""] * 4)
            continue
        for piece, cost in figures["cost_ms"].items():
            floor = figures.get("floors", {}).get(piece, "")
            yield (
                NAMES[name],
                piece,
                milliseconds(cost["p50"]),
                milliseconds(cost["p95"]),
                times(cost["p50"], took.get(floor, {}).get("p50")),
                floor,
            )


def reading(results: Results) -> Iterator[Row]:
    """Yield what reading a large schedule and computing a day of it take."""
    figures = results.of("H")
    day = figures["a_day"]
    yield (f"{figures['graphs']:,} graphs", "processor")
    yield ("---", "--:")
    yield ("read and check the file", f"{figures['read_and_check']['processor_s']:.1f} s")
    yield ("the first fire time of every graph", f"{figures['first_fire_times']['processor_s']:.2f} s")
    yield (f"every fire time of 24 hours: {day['ticks']:,}", f"{day['processor_s']:.1f} s")
    yield ("one fire time", f"{day['microseconds_per_tick']:.0f} µs")
    yield ("memory that the schedule keeps", f"{figures['memory']['kept_mib']:.0f} MiB")


def calendars(results: Results) -> Iterator[Row]:
    """Yield what each contender's calendar takes for a day, and what it finds."""
    rows = results.contests("H")
    floor = rows.get("bare_loop", {}).get("a_day", {}).get("microseconds_per_tick")
    yield ("", "calendar", "entries", "fire times", "one fire time", "÷ the floors'", "it lacks", "it adds")
    yield ("---", "---", *["--:"] * 6)
    for name, figures in rows.items():
        whose = "the floors" if name == "bare_loop" else NAMES[name]
        if "failed" in figures:
            yield (whose, CALENDARS[name], figures["failed"].splitlines()[0], *[""] * 5)
            continue
        day, kinds = figures["a_day"], figures.get("of_every_kind")
        yield (
            whose,
            CALENDARS[name],
            f"{figures['graphs']:,}",
            f"{day['ticks']:,}",
            f"{day['microseconds_per_tick']:.0f} µs",
            times(day["microseconds_per_tick"], floor),
            *((f"{kinds['lacking']} of {kinds['ours']:,}", str(kinds["added"])) if kinds else ("", "")),
        )


def growth(results: Results) -> Iterator[Row]:
    """Yield what each statement takes on a small and on a grown ledger."""
    figures = results.of("I")
    yield ("statement, p50 in ms", "10,000 ticks", f"{figures['rows']:,} ticks")
    yield ("---", "--:", "--:")
    for name, one in figures["statements"].items():
        yield (f"`{name}`", milliseconds(one["small_ms"]), milliseconds(one["grown_ms"]))
    empty, full = figures["late_ms_empty"], figures["late_ms_grown"]
    for q in ("p50", "p95"):
        yield (f"A: fire time to first node, {q}", milliseconds(empty[q]), milliseconds(full[q]))


def by_size(results: Results) -> Iterator[Row]:
    """Yield what one tick a second costs, by the number of entries and of replicas."""
    yield (
        "entries",
        "replicas",
        "p50",
        "p99",
        "processor per replica",
        "memory per replica",
        "statements a second per replica",
        "connections, all replicas",
        "ready after",
    )
    yield tuple(["--:"] * 9)
    figures = results.of("K")
    for one in (*figures["by_entries"], *figures["by_replicas"]):
        yield (
            f"{one['entries']:,}",
            str(one["replicas"]),
            milliseconds(one["late_ms"]["p50"]),
            milliseconds(one["late_ms"]["p99"]),
            f"{one['replica_cpu']:.1%}",
            f"{one['resident_mb']:.0f} MiB",
            f"{one['statements']:.1f}",
            str(one["connections"]),
            f"{one['ready_after_s']:.1f} s",
        )


def machine(_: Results) -> Iterator[Row]:
    """Yield what the figures were measured on."""
    facts = json.loads(RESULTS.read_text())["machine"]
    yield ("processors", "Python", "system", "Postgres")
    yield ("--:", "---", "---", "---")
    yield (str(facts["processors"]), facts["python"], facts["system"], facts["postgres"])


def milliseconds(value: float | None) -> str:
    """Return a duration as it stands in a table: three digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio(value: float | None, floor: Figures | None, q: str) -> str:
    """Return how many times a floor's figure a value is."""
    return times(value, floor.get("late_ms", {}).get(q) if floor else None)


def times(value: float | None, floor: float | None) -> str:
    """Return how many times another value a value is, where both are there."""
    return f"{value / floor:.2f}" if value is not None and floor else ""


TABLES: dict[str, Callable[[Results], Iterator[Row]]] = {
    **{letter: partial(lateness, letter=letter) for letter in "ABCDEJ"},
    "F": idle,
    "G": costs,
    "H": reading,
    "calendars": calendars,
    "I": growth,
    "K": by_size,
    "stations": stations,
    "machine": machine,
}
