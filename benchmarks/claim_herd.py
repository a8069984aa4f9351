"""A herd in claim mode: many graphs with a tick a second each, on replicas that are killed at random.

    python -m benchmarks.claim_herd [--graphs 100] [--seconds 180] [--replicas 3] [--kill-every 10] [--hold shared]
        [--seed N] [--json]

A replica of chance is killed every so many seconds, give or take a half, and another one started in its place. At the
end the killing stops, and every tick that has come due by then is waited for: `drained_s` is how long that took. Each
has to have run, and none twice, unless its replica was killed. `late` is from the fire time to the start of the run.
"""

import argparse
import random
import sys
import threading
import time
from typing import Any

from benchmarks.field import field, rounded, tell
from tests.herd import Herd


LATE = "SELECT extract(epoch FROM began - fire_time)::float AS seconds FROM witness.run"


def drive(herd: Herd, options: argparse.Namespace) -> dict[str, Any]:
    """Let the herd run, kill, wait for the end, and return what was found."""
    chance = random.Random(options.seed)  # noqa: S311  # moments of chance
    herd.start(options.replicas)
    herd.wait_until_ready()
    end = time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        threading.Event().wait(min(left, options.kill_every * chance.uniform(0.5, 1.5)))
        if time.monotonic() < end:
            herd.kill_one()
    until, stopped = herd.witness.now(), time.monotonic()
    found = {kind: len(wrong) for kind, wrong in herd.books(until, timeout=1800).items()}
    drained = time.monotonic() - stopped
    return {
        **herd.counts(until),
        **found,
        "drained_s": round(drained, 1),
        **rounded("late", [row.seconds for row in herd.witness.query(LATE)]),
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311  # chance, not secrecy
    parser.add_argument("--hold", choices=("dedicated", "shared"), default="dedicated")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and fail when a tick was lost or doubled."""
    options = parse()
    with field() as place:
        facts = drive(Herd(place.fleet, place.witness, options.graphs, options.seed, options.hold), options)
    tell(
        {
            "hold": options.hold,
            "seconds": options.seconds,
            "replicas": options.replicas,
            "seed": options.seed,
            **facts,
        },
        options,
    )
    sys.exit(1 if facts["lost"] or facts["doubled"] or facts["overlaps"] else 0)


if __name__ == "__main__":
    main()
