"""All replicas killed at once, for a minute, under ticks every five seconds: what each policy makes of the fire times.

    python -m benchmarks.absence [--seconds 60] [--json]

For each of `missed: all | latest | skip`, in both modes: how many fire times the absence had, how many of them ran, were
coalesced and were recorded as missed, how often that was told, and how long after the new start the last of them had run.
"""

import argparse
import signal
import sys
import threading
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from benchmarks.field import Field, field, tell
from tests.ledger_rows import fates, wait_for_row, wait_until_ended
from tests.replicas import Replica
from tests.witness import GRAPHS
from tickd.tick import instant_text, parse_instant


EVERY = timedelta(seconds=5)
POLICIES = ("all", "latest", "skip")
SCHEDULE: dict[str, dict[str, Any]] = {
    f"{missed}_{mode}": {"graph": f"{GRAPHS}:quick", "every": "5s", "missed": missed, "mode": mode}
    for missed in POLICIES
    for mode in ("skip", "claim")
}
OWED = """
SELECT i FROM generate_series(timestamptz '2026-01-01Z', %(until)s, %(every)s::interval) AS i WHERE i > %(since)s
"""


def start(place: Field, names: str) -> list[Replica]:
    """Start replicas and return them when they fire."""
    schedule = place.fleet.schedule(SCHEDULE)
    replicas = [place.fleet.start(name, schedule) for name in names]
    for replica in replicas:
        replica.wait_for("daemon.ready", timeout=60)
    return replicas


def be_absent(place: Field, seconds: float) -> dict[str, Any]:
    """Kill three replicas, wait, start three others, and return what became of the fire times in between."""
    old = start(place, "abc")
    for graph in SCHEDULE:
        wait_for_row(place.witness, graph, lambda row: row.outcome == "ran")
    for replica in old:
        replica.signal(signal.SIGKILL)
    for replica in old:
        replica.wait()
    gone = place.witness.now()
    written = {graph: set(fates(place.witness, graph)) for graph in SCHEDULE}
    threading.Event().wait(seconds)
    start(place, "def")
    told = place.fleet.lines("tick.missed", reason="down")
    (until,) = {parse_instant(line["down_until"]) for line in told}
    (since,) = {parse_instant(line["down_since"]) for line in told}
    wait_until_ended(place.witness, until=until)
    instants = [row.i for row in place.witness.query(OWED, since=since, until=until, every=EVERY)]
    facts: dict[str, Any] = {"absent_s": round((until - gone).total_seconds(), 1), "wrong": 0}
    for graph in SCHEDULE:
        owed = [instant for instant in instants if instant not in written[graph]]
        facts |= {graph: (outcome := became(place, graph, owed))}
        facts["wrong"] += outcome != documented(graph, len(owed))
    return facts


def became(place: Field, graph: str, owed: list[datetime]) -> dict[str, int]:
    """Count what became of a graph's fire times: rows, runs, and lines over all replicas."""
    rows = fates(place.witness, graph)
    runs = Counter(run.fire_time for run in place.witness.runs(graph) if run.fire_time in owed)
    texts = {instant_text(instant) for instant in owed}
    lines = [
        line
        for event, reason in (("tick.missed", "down"), ("tick.skipped", "coalesced"))
        for line in place.fleet.lines(event, graph=graph, reason=reason)
        if line["fire_time"] in texts
    ]
    outcomes = Counter(" ".join(filter(None, rows[instant])) for instant in owed if instant in rows)
    return {"owed": len(owed), **outcomes, "runs": runs.total(), "lines": len(lines)}


def documented(graph: str, owed: int) -> dict[str, int]:
    """Return what docs/claim.md says of so many fire times."""
    match graph.partition("_")[0]:
        case "all":
            return {"owed": owed, "ran": owed, "runs": owed, "lines": 0}
        case "latest":
            return {"owed": owed, "skipped coalesced": owed - 1, "ran": 1, "runs": 1, "lines": owed - 1}
        case _:
            return {"owed": owed, "missed down": owed, "runs": 0, "lines": owed}


def main() -> None:
    """Measure, print, and fail when a fire time had another end than is documented."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with field() as place:
        facts = be_absent(place, options.seconds)
    tell(facts, options)
    sys.exit(1 if facts["wrong"] else 0)


if __name__ == "__main__":
    main()
