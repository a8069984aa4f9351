"""The command: `python -m benchmarks A B --contenders tickd,bare_loop` runs contests and prints a table."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.contest import CONTENDERS, run_contest
from benchmarks.server import Server
from benchmarks.workloads import WORKLOADS, quick


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--peers", default="", help="the Python of the peers' environment")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--auth", default="trust")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    server = Server(method=arguments.auth)
    results: list[dict[str, Any]] = []
    try:
        server.start()
        for letter in arguments.workloads:
            workload = quick(WORKLOADS[letter]) if arguments.quick else WORKLOADS[letter]
            for _ in range(arguments.repeat):
                for name in arguments.contenders.split(","):
                    results.append(run_contest(server, name, workload, python=arguments.peers, keep=arguments.keep))
                    print(line(results[-1]), flush=True)
    finally:
        server.remove()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, default=float))


def line(f: dict[str, Any]) -> str:
    """Return one contest's figures in a line."""
    late = " / ".join("-" if v is None else f"{v:.1f}" for v in f["late_ms"].values())
    return (
        f"{f['workload']} {f['contender']:12} late {late:38} miss {f['missed']} dbl {f['doubled']} extra {f['extra_runs']} of {f['fire_times']}"
        f" conns {f['connections']} sess/s {f['sessions']:.1f} stmt/s {f['statements']:.0f} commits/s {f['commits']:.0f} cpu {f['replica_cpu']:.2f} pg {f['server_cpu_s']:.2f} rss {f['resident_mb']:.0f}"
        f" share {f['largest_share'] or 0:.2f} load {f['load_average']:.1f} {f.get('home', '')}"
    )


if __name__ == "__main__":
    main()
