"""Fast restarts of Postgres under load: every ten seconds, for two minutes, under three replicas.

    python -m benchmarks.restarts [--seconds 120] [--every 10] [--json]

What is said of each tick is held against what ran: every replica has one line for each fire time, no two runs of a graph
overlap, no tick of skip mode runs twice, and no node of claim mode does but one that was in mid-air. `back` is from the
end of a restart to the begin of the next node of any graph. The witness is in a cluster of its own.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.field import cluster_with_database, rounded, tell
from tests.cluster import Cluster
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


LONG = {"graph": f"{GRAPHS}:steps", "every": "2s", "grace": "10s", "input": {"seconds": 0.3, "steps": 5}}
SHORT = {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "10s"}
SCHEDULE: dict[str, dict[str, Any]] = {
    **{f"long_{number}": LONG for number in range(6)},
    **{f"short_{number}": SHORT for number in range(4)},
    **{f"claimed_{number}": {**LONG, "mode": "claim"} for number in range(4)},
}
NEXT = "SELECT min(began) AS began FROM witness.node_run WHERE began > %(at)s"
REPEATED = """
SELECT graph, fire_time, count(*) AS runs FROM witness.run
WHERE graph NOT LIKE 'claimed%%' GROUP BY graph, fire_time HAVING count(*) > 1
"""
# A node that a restart has hit is run again; one that had ended and was kept is not.
THRICE = """
SELECT graph, fire_time, node, count(*) AS runs FROM witness.node_run
WHERE graph LIKE 'claimed%%' GROUP BY graph, fire_time, node HAVING count(*) > 2
"""


def restart_again_and_again(
    cluster: Cluster, fleet: Fleet, witness: Witness, options: argparse.Namespace
) -> dict[str, Any]:
    """Restart the server at intervals under load, and return what was found."""
    schedule = fleet.schedule(SCHEDULE)
    for name in "abc":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready", timeout=60)
    witness.wait_for_begin("long_0", "step_5", timeout=60)
    began, restarts, back = time.monotonic(), 0, []
    while (moment := began + (restarts + 1) * options.every) < began + options.seconds + 1:
        threading.Event().wait(max(0, moment - time.monotonic()))
        cluster.restart("fast")
        restarts += 1
        at = witness.now()
        threading.Event().wait(options.every / 2)
        (row,) = witness.query(NEXT, at=at)
        back.append((row.began - at).total_seconds() if row.began else float("inf"))
    threading.Event().wait(options.every)
    exits = fleet.stop()
    return {"restarts": restarts, "exits": exits, **rounded("back", back), **found(fleet, witness)}


def found(fleet: Fleet, witness: Witness) -> dict[str, Any]:
    """Return what became of the ticks, and what went wrong."""
    fire_times = uneven = 0
    for graph, entry in SCHEDULE.items():
        every = timedelta(seconds=1 if entry["every"] == "1s" else 2)
        for replica in fleet.replicas:
            said = [parse_instant(line["fire_time"]) for line in replica.terminal_lines(graph)]
            # In claim mode a replica may have lines of two kinds for a tick: that it was left, and how its run ended.
            said = sorted(set(said) if entry.get("mode") == "claim" else said)
            fire_times += len(said)
            uneven += said != [said[0] + number * every for number in range(len(said))]
    ends = Counter(line["event"] for replica in fleet.replicas for line in replica.terminal_lines())
    return {
        "lines": fire_times,
        "graphs_unaccounted": uneven,
        **{event.removeprefix("tick."): count for event, count in sorted(ends.items())},
        "overlaps": len(witness.overlaps()),
        "ran_twice": len(witness.query(REPEATED)),
        "nodes_thrice": len(witness.query(THRICE)),
    }


def main() -> None:
    """Measure, print, and fail when a tick was not accounted for or doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with (
        cluster_with_database() as (cluster, database),
        cluster_with_database() as (_, apart),
        tempfile.TemporaryDirectory() as home,
    ):
        witness = Witness(apart.admin_dsn)
        os.environ["WITNESS_DSN"] = witness.dsn
        with Fleet(Path(home), database.dsn) as fleet:
            facts = restart_again_and_again(cluster, fleet, witness, options)
        witness.close()
    tell(facts, options)
    wrong = ("graphs_unaccounted", "overlaps", "ran_twice", "nodes_thrice")
    sys.exit(1 if any(facts[name] for name in wrong) else 0)


if __name__ == "__main__":
    main()
