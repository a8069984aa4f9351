"""A host that vanishes: the network of the holder goes down without a word, and another replica takes over.

    python -m benchmarks.cut_link [--tries 20] [--lanes 4] [--json]

Each try has a cluster, a network namespace and two replicas of its own, with the default settings; so many go on beside
each other, for they wait. From the cut, by the database's clock: `stopped` until the last node of the cut-off holder has
ended, `told` until its line says so, `taken` until the first node of the other replica begins.
"""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.field import rounded, tell
from tests.link import Link
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


ENTRY = {"graph": f"{GRAPHS}:steps", "every": "1s", "input": {"seconds": 0.2, "steps": 400}}


@dataclass(frozen=True, slots=True)
class Cut:
    """One try, in seconds from the cut, and whether two runs overlapped."""

    stopped: float
    told: float
    taken: float
    overlapped: bool


def cut_once(_: int) -> Cut:
    """Cut a holder off, and wait until another replica runs its graph."""
    with Link() as link, tempfile.TemporaryDirectory() as home, Fleet(Path(home), link.database.dsn) as fleet:
        witness = Witness(link.database.admin_dsn)
        schedule = fleet.schedule({"restock": ENTRY})
        cut_off = fleet.start("cut-off", schedule, dsn=link.dsn, env=link.environment, prefix=link.prefix)
        cut_off.wait_for("tick.started", timeout=60)
        other = fleet.start("other", schedule, env={"WITNESS_DSN": witness.dsn})
        other.wait_for("tick.skipped", timeout=60, reason="lock_held", holder="cut-off")
        node = witness.wait_for_begin("restock", "step_3")

        at = witness.now()
        link.cut()
        lost = cut_off.wait_for("tick.lock_lost", timeout=60)
        witness.wait_for_begin("restock", "step_1", after=node.id, timeout=60)
        old, new = witness.runs("restock")
        overlapped = bool(witness.overlaps())
        witness.close()
    stopped, told, taken = (
        (moment - at).total_seconds() for moment in (old.ended, parse_instant(lost["timestamp"]), new.began)
    )
    return Cut(stopped, told, taken, overlapped)


def main() -> None:
    """Measure, print, and fail when a holder stopped too late or another one came too late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.lanes) as lanes:
        cuts = list(lanes.map(cut_once, range(options.tries)))
    wrong = [cut for cut in cuts if cut.overlapped or cut.stopped >= cut.taken or cut.taken >= 30]
    facts: dict[str, float] = {"tries": len(cuts), "wrong": len(wrong)}
    for name in ("stopped", "told", "taken"):
        facts |= rounded(name, [getattr(cut, name) for cut in cuts])
    tell(facts, options)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
