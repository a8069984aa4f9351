"""How soon a terminated lock session stops its run: from pg_terminate_backend to the request to drain.

    python -m benchmarks.terminations [--tries 100] [--json]

Each try opens a lock session, takes a lock,
and puts the daemon's own watch and supervision on it, with a stand-in for the graph that notes when it is told to stop.
The time is taken before the statement that terminates is sent, so it contains that statement's own round trip.
"""

import argparse
import asyncio
import time
from datetime import timedelta
from typing import Any

import psycopg

from benchmarks.field import cluster_with_database, rounded, tell
from tickd.dsn import parse_dsn
from tickd.lock import PROBE, LockPlace, open_session, sole_writer
from tickd.runs import EndKind, RunEnd
from tickd.stop import Stop
from tickd.supervision import Supervision


class StandIn:
    """A run that ends when it is cancelled."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        self.told_at = 0.0
        self.threads = 0

    def cut_off(self, _: str) -> None:
        """Note when the drain was requested."""
        self.told_at = self.told_at or time.monotonic()

    def cancel(self) -> None:
        """End."""
        if not self.ended.done():
            self.ended.set_result(RunEnd(EndKind.CANCELLED, 0))


def _terminate(dsn: str, pid: int) -> float:
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        connection.execute("SELECT pg_terminate_backend(%s)", [pid])
    return began


async def _one(dsn: str, place: LockPlace) -> float:
    session = await open_session(place)
    async with sole_writer("benchmark", place, session=session) as hold:
        assert hold  # noqa: S101  # nobody else is here
        run: Any = StandIn()
        supervision = Supervision(
            run,
            session,
            stop=Stop(),
            timeout=None,
            drain_timeout=timedelta(seconds=1),
            newest_timeline=lambda: 0,
            probe=(PROBE, ()),
            displaced=asyncio.Event(),
            waiting_for_threads=lambda _: None,
        )
        end = asyncio.ensure_future(supervision.see_to_its_end())
        began = await asyncio.to_thread(_terminate, dsn, session.connection.info.backend_pid)
        await end
        return float(run.told_at - began) * 1000


async def measure(dsn: str, tries: int) -> list[float]:
    """Return the milliseconds of so many tries."""
    place = LockPlace(parse_dsn(dsn, setting="the database"), "benchmark", 7301)
    await _one(dsn, place)  # the first one loads what the others use
    return [await _one(dsn, place) for _ in range(tries)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with cluster_with_database() as (_, database):
        took = asyncio.run(measure(database.dsn, options.tries))
    tell({"tries": options.tries, **rounded("drain", [value / 1000 for value in took])}, options)


if __name__ == "__main__":
    main()
