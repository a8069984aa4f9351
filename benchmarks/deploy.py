"""A deploy under load: one of three replicas is stopped every two seconds, and another one started in its place.

    python -m benchmarks.deploy [--seconds 180] [--every 2] [--graphs 20] [--json]

Each graph is due every 5 s and has ten super-steps of a second, so half of its ticks are skipped for the one before, and
each run is handed off several times. `hand_off` is from the end of the last node on the replica that was stopped to the
begin of the next one elsewhere, by the database's clock. Lost: a fire time without a row, while no other tick of its
graph was open. Unaccounted: a fire time of which no replica said anything.
"""

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from benchmarks.field import Field, field, rounded, tell
from tests.ledger_rows import wait_until_ended
from tests.witness import GRAPHS, Witness
from tickd.tick import instant_text


EVERY = timedelta(seconds=5)
STEPS = 10
# A tick whose graph is let go of in this very moment may still be refused.
TOUCH = timedelta(seconds=0.3)
REPEATED = """
SELECT graph, fire_time, node FROM witness.node_run GROUP BY graph, fire_time, node HAVING count(*) > 1
"""
INCOMPLETE = """
SELECT t.graph, t.fire_time, t.outcome, t.error_type FROM tickd.ticks AS t
WHERE outcome IS DISTINCT FROM 'ran'
   OR %(steps)s <> (SELECT count(*) FROM witness.node_run AS n WHERE n.graph = t.graph AND n.fire_time = t.fire_time)
"""
HAND_OFFS = """
SELECT extract(epoch FROM began - before)::float AS seconds
FROM (
    SELECT began, replica,
           lag(ended) OVER tick AS before, lag(replica) OVER tick AS last_replica
    FROM witness.node_run
    WINDOW tick AS (PARTITION BY graph, fire_time ORDER BY id)
) AS node
WHERE replica <> last_replica
"""
SPANS = """
SELECT graph, fire_time, min(began) AS began, max(ended) AS ended FROM witness.node_run GROUP BY graph, fire_time
ORDER BY graph, fire_time
"""


def deploy(place: Field, options: argparse.Namespace) -> dict[str, Any]:
    """Restart replicas under load, let what has begun end, and return what was found."""
    entry = {"graph": f"{GRAPHS}:steps", "every": "5s", "input": {"seconds": 1, "steps": STEPS}}
    schedule = place.fleet.schedule({f"graph_{number}": entry for number in range(options.graphs)})
    names = (f"r{number}" for number in itertools.count(1))
    alive = [place.fleet.start(next(names), schedule) for _ in range(3)]
    for replica in alive:
        replica.wait_for("daemon.ready", timeout=60)
    place.witness.wait_for_begin("graph_0", "step_2", timeout=60)
    since, began, restarts, exits = place.witness.now(), time.monotonic(), 0, []
    while (moment := began + restarts * options.every) < began + options.seconds:
        threading.Event().wait(max(0, moment - time.monotonic()))
        exits.append(alive[0].stop(timeout=60))
        alive = [*alive[1:], place.fleet.start(next(names), schedule)]
        restarts += 1
    until = place.witness.now()
    for replica in alive:
        replica.wait_for("daemon.ready", timeout=60)
    threading.Event().wait(2 * EVERY.total_seconds())
    wait_until_ended(place.witness, until=until, timeout=120)
    exits += place.fleet.stop()[-3:]
    wait_for_the_rest(place, schedule)
    return {"restarts": restarts, "exits": sorted(set(exits)), **found(place, since, until)}


def wait_for_the_rest(place: Field, schedule: Any) -> None:
    """Let one more replica end what the last ones handed off, and no new tick run after that."""
    last = place.fleet.start("last", schedule)
    last.wait_for("daemon.ready", timeout=60)
    wait_until_ended(place.witness, until=place.witness.now() - timedelta(seconds=1), timeout=120)
    last.kill()


def found(place: Field, since: datetime, until: datetime) -> dict[str, Any]:
    """Return the figures of the fire times in between."""
    witness = place.witness
    said = {
        (line["graph"], line["fire_time"])
        for replica in place.fleet.replicas
        for line in replica.terminal_lines()
        if line.get("reason") != "draining"
    }
    expected = list(fire_times(witness, since, until))
    rows = witness.query("SELECT graph, fire_time FROM tickd.ticks")
    begun = {(row.graph, row.fire_time) for row in rows}
    spans = witness.query(SPANS)
    lost = [
        (graph, instant)
        for graph, instant in expected
        if (graph, instant) not in begun and not open_then(spans, graph, instant)
    ]
    incomplete = [row for row in witness.query(INCOMPLETE, steps=STEPS) if since <= row.fire_time <= until]
    hand_offs = [row.seconds for row in witness.query(HAND_OFFS)]
    return {
        "fire_times": len(expected),
        "begun": sum(tick in begun for tick in expected),
        "lost": len(lost),
        "unaccounted": sum((graph, instant_text(instant)) not in said for graph, instant in expected),
        "not_ran_whole": len(incomplete),
        "nodes_twice": len(witness.query(REPEATED)),
        "overlaps": len(witness.overlaps()),
        "hand_offs": len(hand_offs),
        **rounded("hand_off", hand_offs),
    }


def fire_times(witness: Witness, since: datetime, until: datetime) -> Iterator[tuple[str, datetime]]:
    """Return every tick that came due between the two instants."""
    rows = witness.query(
        "SELECT i FROM generate_series(timestamptz '2026-01-01Z', %(until)s, %(every)s::interval) AS i WHERE i > %(since)s",
        since=since,
        until=until,
        every=EVERY,
    )
    graphs = witness.query("SELECT DISTINCT graph FROM tickd.ticks")
    return itertools.product([row.graph for row in graphs], [row.i for row in rows])


def open_then(spans: list[Any], graph: str, instant: datetime) -> bool:
    """Say whether another tick of the graph was on its way at the instant."""
    return any(
        span.graph == graph and span.began - TOUCH <= instant <= span.ended + TOUCH
        for span in spans
        if span.fire_time != instant
    )


def main() -> None:
    """Measure, print, and fail when a tick was lost or a node run twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--every", type=float, default=2)
    parser.add_argument("--graphs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with field() as place:
        facts = deploy(place, options)
    tell(facts, options)
    wrong = ("lost", "unaccounted", "not_ran_whole", "nodes_twice", "overlaps")
    sys.exit(1 if any(facts[name] for name in wrong) else 0)


if __name__ == "__main__":
    main()
