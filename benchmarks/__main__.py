"""The command: `python -m benchmarks A B --contenders tickd,bare_loop` runs contests and prints a line for each."""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contest import CONTENDERS, run_contest
from benchmarks.server import Server
from benchmarks.workloads import WORKLOADS, Workload, quick


DEFAULT_CONTENDERS = "tickd,bare_loop,one_session"
SCALES = ("graphs", "every", "window", "seconds", "replicas", "width", "connections")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS), metavar="WORKLOAD", help="A to F")
    parser.add_argument(
        "--contenders",
        default=DEFAULT_CONTENDERS,
        help=f"of {', '.join(CONTENDERS)}; default: {DEFAULT_CONTENDERS}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: to see that it works, not to measure"
    )
    parser.add_argument("--repeat", type=int, default=1, help="how often each workload is run")
    parser.add_argument("--json", type=Path, help="write every figure into this file")
    parser.add_argument("--auth", default="trust", help="the server's method for TCP, e.g. scram-sha-256")
    parser.add_argument("--keep", action="store_true", help="keep the replicas' logs, and say where they are")
    for name in SCALES:
        kind = float if name == "seconds" else int
        parser.add_argument(f"--{name}", type=kind, help=f"instead of the workload's own `{name}`")
    return parser.parse_args()


def sized(workload: Workload, given: argparse.Namespace) -> Workload:
    """Return the workload in the size that was asked for."""
    if given.quick:
        workload = quick(workload)
    changes = {name: getattr(given, name) for name in SCALES if getattr(given, name) is not None}
    return replace(workload, **changes)


def contests(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every contest that was asked for, on one server, and return its figures."""
    workloads = [sized(WORKLOADS[letter], given) for letter in given.workloads]
    connections = max(workload.connections for workload in workloads)
    server = Server(method=given.auth, settings={"max_connections": str(connections)})
    try:
        server.start()
        for workload in workloads:
            for _ in range(given.repeat):
                for name in given.contenders.split(","):
                    yield run_contest(server, name, workload, keep=given.keep)
    finally:
        server.remove()


def main() -> None:
    """Run what the arguments name."""
    given = arguments()
    results = []
    for figures in contests(given):
        results.append(figures)
        print(line(figures), flush=True)
        for piece in figures.get("pieces", []):
            print(
                f"  {piece['station']:10} after {piece['after_ms']['p50']:9.2f}  step {piece['step_ms']['p50'] or 0:8.2f}"
            )
    if given.json:
        machine = {
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        given.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


def line(figures: dict[str, Any]) -> str:
    """Return one contest's figures in a line."""
    head = f"{figures['workload']} {figures['contender']:13}"
    if "failed" in figures:
        return f"{head} failed: {figures['failed']}"
    late = " / ".join("-" if value is None else f"{value:.1f}" for value in figures["late_ms"].values())
    return (
        f"{head} late {late:38} missed {figures['missed']} doubled {figures['doubled']} "
        f"of {figures['fire_times']} connections {figures['connections']} statements/s {figures['statements']:.0f} "
        f"commits/s {figures['commits']:.0f} cpu {figures['replica_cpu']:.3f} server {figures['server_cpu_s']:.2f} "
        f"MiB {figures['resident_mb']:.0f} share {figures['largest_share'] or 0:.2f} ready {figures['ready_after_s']:.1f} s "
        f"load {figures['load_average']:.1f} {figures.get('home', '')}"
    )


if __name__ == "__main__":
    main()
