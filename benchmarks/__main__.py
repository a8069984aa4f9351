"""The command: `python -m benchmarks A B --contenders tickd,bare_loop` measures, and prints a line for each figure.

A to F and J are run by replicas. G is the cost of each piece, H a day of the calendar, I the ledger grown to millions of
ticks, K one tick a second with more and more entries and replicas.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.calendars import calendars
from benchmarks.contest import CONTENDERS, run_contest
from benchmarks.costs import PRICED, costs
from benchmarks.growth import grow
from benchmarks.page import RESULTS, write_page
from benchmarks.server import Server, server_version
from benchmarks.sizes import sizes
from benchmarks.workloads import WORKLOADS, Workload, quick


DEFAULT_CONTENDERS = "tickd,bare_loop,one_session"
SCALES = ("graphs", "every", "window", "seconds", "replicas", "width", "connections")
# Without these, a server that takes in millions of rows is at its checkpoints most of the time.
SETTINGS = {"max_wal_size": "4GB", "checkpoint_timeout": "15min"}
Figures = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    letters = [*WORKLOADS, *PIECES]
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {' '.join(letters)}")
    parser.add_argument(
        "--contenders",
        default=DEFAULT_CONTENDERS,
        help=f"of {', '.join(CONTENDERS)}; default: {DEFAULT_CONTENDERS}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: to see that it works, not to measure"
    )
    parser.add_argument("--repeat", type=int, default=1, help="how often each workload is run")
    parser.add_argument("--rows", type=int, default=10_000_000, help="ticks in the ledger of I")
    parser.add_argument(
        "--json", type=Path, help="put the figures into this file, in the place of older ones"
    )
    parser.add_argument("--write-docs", action="store_true", help=f"make the page anew from {RESULTS.name}")
    parser.add_argument("--auth", default="trust", help="the server's method for TCP, e.g. scram-sha-256")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="as root: put replicas and server ahead of other work on the machine while they are measured",
    )
    parser.add_argument("--keep", action="store_true", help="keep the replicas' logs, and say where they are")
    for name in SCALES:
        kind = float if name == "seconds" else int
        parser.add_argument(f"--{name}", type=kind, help=f"instead of the workload's own `{name}`")
    given = parser.parse_args()
    if unknown := set(given.workloads) - set(letters):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {' '.join(letters)}")
    if unknown := set(names_in(given)) - set(CONTENDERS):
        parser.error(f"nobody is called {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    return given


def sized(workload: Workload, given: argparse.Namespace) -> Workload:
    """Return the workload in the size that was asked for."""
    if given.quick:
        workload = quick(workload)
    changes = {name: getattr(given, name) for name in SCALES if getattr(given, name) is not None}
    return replace(workload, **changes)


def names_in(given: argparse.Namespace) -> list[str]:
    """Return the contenders that were asked for."""
    names: list[str] = given.contenders.split(",")
    return names


def priced(server: Server, given: argparse.Namespace) -> Iterator[Figures]:
    """Measure the pieces of each contender."""
    for name in names_in(given):
        if name in PRICED:
            yield {"contender": name, **costs(server, name, 10 if given.quick else 300)}


def grown(server: Server, given: argparse.Namespace) -> Iterator[Figures]:
    """Grow a ledger; measure its statements, and how late workload A is on it and on an empty one."""
    workload = sized(WORKLOADS["A"], given)
    database, figures = grow(server, 20_000 if given.quick else given.rows)
    if given.quick:
        database.drop()
        yield {"contender": "tickd", **figures}
        return
    try:
        empty = run_contest(server, "tickd", workload, ahead=given.ahead)
        full = run_contest(server, "tickd", workload, ahead=given.ahead, database=database)
    finally:
        database.drop()
    late = {"late_ms_empty": empty["late_ms"], "late_ms_grown": full["late_ms"]}
    yield {"contender": "tickd", **figures, **late}


PIECES: dict[str, Callable[[Server, argparse.Namespace], Iterator[Figures]]] = {
    "G": priced,
    "H": lambda _, given: calendars(names_in(given), given.graphs or (20 if given.quick else 10_000)),
    "I": grown,
    "K": lambda server, given: iter([{"contender": "tickd", **sizes(server, quick=given.quick)}]),
}


def measured(given: argparse.Namespace) -> Iterator[Figures]:
    """Measure everything that was asked for on one server, and return the figures as they come."""
    workloads = {letter: sized(WORKLOADS[letter], given) for letter in given.workloads if letter in WORKLOADS}
    connections = max((workload.connections for workload in workloads.values()), default=100)
    server = Server(method=given.auth, settings={**SETTINGS, "max_connections": str(connections)})
    try:
        server.start()
        for letter in given.workloads:
            if letter in PIECES:
                yield from ({"workload": letter, **figures} for figures in PIECES[letter](server, given))
                continue
            for _ in range(given.repeat):
                for name in names_in(given):
                    yield run_contest(server, name, workloads[letter], keep=given.keep, ahead=given.ahead)
    finally:
        server.remove()


def main() -> None:
    """Measure, print, and write what is asked for."""
    given = arguments()
    results = []
    for figures in measured(given) if given.workloads else ():
        results.append(figures)
        print("\n".join(lines(figures)), flush=True)
        if given.json:
            put(given.json, results)
    if given.write_docs:
        write_page()


def put(path: Path, results: list[Figures]) -> None:
    """Put the figures into the file, in the place of those of the same workloads: ratios are made within one run."""
    fresh = {figures["workload"] for figures in results}
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    machine = {
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "postgres": server_version(),
    }
    results = [figures for figures in kept if figures["workload"] not in fresh] + results
    results.sort(key=lambda figures: figures["workload"])
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


def lines(figures: Figures) -> Iterator[str]:
    """Return the figures of one measurement, for reading along."""
    head = f"{figures['workload']} {figures['contender']:13}"
    if "failed" in figures:
        yield f"{head} failed: {figures['failed']}"
    elif "replicas" in figures:
        yield f"{head} {contest_line(figures)}"
        for piece in figures.get("pieces", ()):
            yield f"  {piece['station']:10} after {piece['after_ms']['p50']:9.2f} step {piece['step_ms']['p50'] or 0:8.2f}"
    else:
        yield f"{head} {json.dumps({key: value for key, value in figures.items() if key != 'statements'})}"
        for name, one in figures.get("statements", {}).items():
            yield f"  {name:30} {one['small_ms']:9.2f} {one['grown_ms']:9.2f} {' '.join(one['scans'])}"


def contest_line(figures: Figures) -> str:
    """Return one contest's figures in a line."""
    late = " / ".join("-" if value is None else f"{value:.1f}" for value in figures["late_ms"].values())
    return (
        f"late {late:38} missed {figures['missed']} doubled {figures['doubled']} extra {figures['extra_runs']} "
        f"of {figures['fire_times']} connections {figures['connections']} statements/s {figures['statements']:.0f} "
        f"commits/s {figures['commits']:.0f} cpu {figures['replica_cpu']:.3f} server {figures['server_cpu_s']:.2f} "
        f"MiB {figures['resident_mb']:.0f} share {figures['largest_share'] or 0:.2f} ready {figures['ready_after_s']:.1f} s "
        f"load {figures['load_average']:.1f} {figures.get('home', '')}"
    )


if __name__ == "__main__":
    main()
