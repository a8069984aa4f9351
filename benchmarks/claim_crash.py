"""What a killed replica costs in claim mode: SIGKILL of whoever runs a ten-node graph, over three replicas.

    python -m benchmarks.claim_crash [--kills 200] [--seed N] [--json]

Each kill hits a node of chance, at a moment of chance within it; the next one comes when the replica that was started in
its place is ready. `gap` is the time from just before the kill to the begin of the next node, on any replica, both by
the database's clock. At the end every tick has to have run, each node once, but for those that were in mid-air.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.quantiles import spread
from tests.cluster import Cluster
from tests.database import Database, Server
from tests.kills import GRAPH, Kill, Killing, verdict
from tests.ledger_rows import ticks
from tests.replicas import Fleet
from tests.witness import Witness


def kill(fleet: Fleet, witness: Witness, options: argparse.Namespace) -> tuple[list[Kill], dict[str, int]]:
    """Kill so many, and return the kills and how many of each kind of wrong were found."""
    killing = Killing(fleet, witness, seed=options.seed, settle=True)
    killing.start(3)
    kills = []
    for number in range(options.kills):
        kills.append(killing.kill_one())
        if not options.json:
            sys.stderr.write(f"\rkill {number + 1}: {kills[-1].gap:.3f} s ")
    found = verdict(witness, kills, timeout=600)
    return kills, {"ticks": len(ticks(witness, GRAPH)), **{kind: len(wrong) for kind, wrong in found.items()}}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311  # chance, not secrecy
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and fail when a tick was lost or doubled."""
    options = parse()
    cluster = Cluster()
    with tempfile.TemporaryDirectory() as home:
        try:
            cluster.init()
            cluster.start()
            server = Server(cluster.admin_dsn("postgres"))
            server.make_owner()
            database = Database(server)
            database.create()
            witness = Witness(database.admin_dsn)
            os.environ["WITNESS_DSN"] = witness.dsn
            with Fleet(Path(home), database.dsn) as fleet:
                kills, found = kill(fleet, witness, options)
            witness.close()
            database.connection.close()
        finally:
            cluster.remove()
    gaps = {
        f"gap_{name}_s": round(value or 0, 3) for name, value in spread([one.gap for one in kills]).items()
    }
    facts = {"kills": len(kills), "seed": options.seed, **gaps, **found}
    sys.stdout.write(
        json.dumps(facts) + "\n"
        if options.json
        else "\n" + "\n".join(f"{k:26}{v}" for k, v in facts.items()) + "\n"
    )
    wrong = sum(count for kind, count in found.items() if kind != "ticks")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
