"""A holder that stands still: stopped anywhere, its lock session ended, its long-lived thread taken over, then let go on.

    python -m benchmarks.stale_holder [--tries 200] [--lanes 3] [--seed N] [--json]

Whole replicas, in pairs that take the graph from each other. A trigger notes every row that the saver's tables accept, and
the session it came over. `late_rows`: rows over a session of the stopped replica, after the new hold had begun and before
the old one's end was told. `late_nodes`: nodes of the old run that were entered in that time, by the host's clock: their step
had been let through when the process was stopped. They end with the run, and what they return is not written.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.field import cluster_with_database, tell
from tests.database import Database, Server
from tests.holds import terminate
from tests.lock_sessions import place_of
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.migrations import migrate_at
from tickd.tick import parse_instant


STEPS = 100_000
ENTRY = {
    "graph": f"{GRAPHS}:steps",
    "every": "1s",
    "thread": "per_graph",
    # The thread is every run's, so each begins by setting back what the last one has counted.
    "input": {"seconds": 0.02, "steps": STEPS, "done": 0},
}
LONGEST_PAUSE = 0.1
ACCOUNT = """
CREATE TABLE witness.accepted (relation text, session text, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION witness.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO witness.accepted (relation, session) VALUES (TG_TABLE_NAME, current_setting('application_name'));
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON checkpoints FOR EACH ROW EXECUTE FUNCTION witness.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON checkpoint_blobs FOR EACH ROW EXECUTE FUNCTION witness.note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON checkpoint_writes FOR EACH ROW EXECUTE FUNCTION witness.note()
"""
ACCEPTED = """
SELECT count(*) FILTER (WHERE at < %(since)s) AS before, count(*) FILTER (WHERE at > %(since)s AND at < %(until)s) AS late
FROM witness.accepted
WHERE session = %(session)s
"""
LATE_NODES = "SELECT count(*) AS late FROM witness.node_run WHERE token = %(token)s AND entered > %(since)s"


def one_lane(lane: int, tries: int, seed: int, server: Server) -> dict[str, int]:
    """Let two replicas take a graph from each other so many times, and return what came too late."""
    chance = random.Random(seed + lane)  # noqa: S311  # moments of chance
    database = Database(server)
    database.create()
    found = {"late_rows": 0, "late_nodes": 0, "overlapping": 0, "rows_before": 0}
    with tempfile.TemporaryDirectory() as home, Fleet(Path(home), database.dsn) as fleet:
        witness = Witness(database.admin_dsn)
        asyncio.run(migrate_at(place_of(database.dsn), deadline=inf))
        witness.connection.execute(ACCOUNT)
        schedule = fleet.schedule({"restock": ENTRY})
        for name in "ab":
            fleet.start(name, schedule, env={"WITNESS_DSN": witness.dsn})
        for replica in fleet.replicas:
            replica.wait_for("daemon.ready", timeout=60)
        witness.wait_for_begin("restock", "step_1", timeout=60)
        for _ in range(tries):
            for kind, count in stop_one(fleet, witness, chance).items():
                found[kind] += count
        witness.close()
    database.close()
    return found


def stop_one(fleet: Fleet, witness: Witness, chance: random.Random) -> dict[str, int]:
    """Stop whoever holds the graph, let the other one run it for a while, and let the first go on."""
    running = last(witness)
    step = int(running.node.removeprefix("step_")) + chance.randint(1, 6)
    old = witness.wait_for_begin("restock", f"step_{step}", after=running.id, timeout=60)
    stopped = fleet.named(old.replica)
    threading.Event().wait(chance.uniform(0, LONGEST_PAUSE))
    stopped.signal(signal.SIGSTOP)
    terminate(witness, "restock")
    new = witness.wait_for_begin("restock", "step_1", after=last(witness).id, timeout=60)
    if chance.random() < 0.5:
        witness.wait_for_begin("restock", "step_4", after=new.id)
    stopped.signal(signal.SIGCONT)
    lost = stopped.wait_for("tick.lock_lost", token=old.token, timeout=60)
    return late(witness, old, since=new.began, until=parse_instant(lost["timestamp"])) | {
        "overlapping": int(new.replica == old.replica)
    }


def late(witness: Witness, old: Any, *, since: datetime, until: datetime) -> dict[str, int]:
    """Count what the old run has done since the new hold."""
    session = f"tickd/{old.replica}"
    (rows,) = witness.query(ACCEPTED, since=since, until=until, session=session)
    (nodes,) = witness.query(LATE_NODES, token=old.token, since=since)
    return {"rows_before": rows.before, "late_rows": rows.late, "late_nodes": nodes.late}


def last(witness: Witness) -> Any:
    """Return the newest node's row, without reading all of them."""
    (row,) = witness.query("SELECT * FROM witness.node_run ORDER BY id DESC LIMIT 1")
    return row


def main() -> None:
    """Measure, print, and fail when anything of an old run was written after the new hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311  # chance, not secrecy
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shares = [len(range(lane, options.tries, options.lanes)) for lane in range(options.lanes)]
    with cluster_with_database() as (_, database), ThreadPoolExecutor(options.lanes) as lanes:
        tries = [
            lanes.submit(one_lane, lane, share, options.seed, database.server)
            for lane, share in enumerate(shares)
        ]
        found = [one.result() for one in tries]
    facts = {kind: sum(one[kind] for one in found) for kind in found[0]}
    tell({"tries": options.tries, "seed": options.seed, **facts}, options)
    sys.exit(1 if facts["late_rows"] or facts["overlapping"] else 0)


if __name__ == "__main__":
    main()
