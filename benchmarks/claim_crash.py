"""What a killed replica costs in claim mode: SIGKILL of whoever runs a ten-node graph, over three replicas.

    python -m benchmarks.claim_crash [--kills 200] [--seed N] [--json]

Each kill hits a node of chance, at a moment of chance within it; the next one comes when the replica that was started in
its place is ready. `gap` is the time from just before the kill to the begin of the next node, on any replica, both by
the database's clock. At the end every tick has to have run, each node once, but for those that were in mid-air.
"""

import argparse
import random
import sys

from benchmarks.field import field, rounded, tell
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
    with field() as place:
        kills, found = kill(place.fleet, place.witness, options)
    gaps = rounded("gap", [one.gap for one in kills])
    tell({"kills": len(kills), "seed": options.seed, **gaps, **found}, options)
    sys.exit(1 if sum(count for kind, count in found.items() if kind != "ticks") else 0)


if __name__ == "__main__":
    main()
