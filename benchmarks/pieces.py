"""The pieces of one tick: a tickd that stamps the clock at each station between the fire time and its end.

It is tickd itself, started as `python -m benchmarks.pieces run SCHEDULE`, with its functions wrapped from outside;
`python -m benchmarks A --contenders pieces` runs it in a contest and prints what `report` makes of the stamps.
"""

import functools
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.quantiles import quantile
from tickd import admissions, fence, graph_thread, ledger, runner, runs
from tickd.cli import main as tickd_main
from tickd.tick import Tick


# In the order of a tick that runs; what each station says has just happened.
STATIONS = {
    "fired": "the timer has handed the tick over",
    "opened": "a lock connection is open",
    "due": "it is time to try",
    "ask": "the statement that tries and admits is sent",
    "admitted": "it is answered",
    "ordered": "the run is handed to the graph loop",
    "begun": "the graph loop has begun it",
    "read": "LangGraph reads the thread",
    "has_read": "it is read",
    "freed": "the tick is due, and its graph may begin",
    "node": "the first node runs",
    "worked": "the graph has finished",
    "recorded": "the outcome is in the row",
    "logged": "unlocked, closed and logged",
}
STAMPS: list[tuple[str, str, float]] = []


def stamp(graph: str, fire_time: float, station: str) -> None:
    """Note that a tick has come to a station."""
    STAMPS.append((f"{graph}|{fire_time:.0f}", station, time.time()))


def _around(owner: Any, name: str, before: str | None, after: str | None) -> None:
    """Stamp the tick that is among a function's arguments, or is that of a run among them."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        tick = _tick_of(args)
        if before:
            stamp(tick.graph, tick.fire_time.timestamp(), before)
        result = await plain(*args, **kwargs)
        if after:
            stamp(tick.graph, tick.fire_time.timestamp(), after)
        return result

    setattr(owner, name, wrapped)


def _tick_of(arguments: tuple[Any, ...]) -> Tick:
    for one in arguments:
        if isinstance(one, Tick):
            return one
        if isinstance(one, runs.RunSaver):
            return one._run.order.tick  # noqa: SLF001  # no other way from a saver to its tick
        if isinstance(one, runs.Run):
            return one.order.tick
    raise LookupError(f"no tick among {arguments!r}")


def _wrap() -> None:
    _around(runner.Runner, "run_tick", "fired", "logged")
    _around(runner.Runner, "open_in_time", None, "opened")
    _around(runner.Runner, "_end_before_attempt", None, "due")
    _around(admissions, "hold_and_admit", "ask", "admitted")
    _around(ledger, "record", None, "recorded")
    _around(runs.Run, "work", "begun", "worked")
    _around(fence.FencedSaver, "aget_tuple", "read", "has_read")
    _around(runs.RunSaver, "aget_tuple", None, "freed")
    plain_run, plain_started = graph_thread.GraphThread.run, plan.Witness.started

    def run(self: Any, order: Any, **kwargs: Any) -> Any:
        stamp(order.tick.graph, order.tick.fire_time.timestamp(), "ordered")
        return plain_run(self, order, **kwargs)

    def started(self: Any, name: str, fire_time: float) -> None:
        stamp(name, fire_time, "node")
        plain_started(self, name, fire_time)

    graph_thread.GraphThread.run = run  # type: ignore[method-assign]  # to be measured from outside
    plan.Witness.started = started  # type: ignore[method-assign]  # likewise


def main() -> None:
    """Run tickd, and write the stamps when it ends."""
    _wrap()
    try:
        tickd_main()
    finally:
        path = Path(os.environ["BENCHMARK_HOME"]) / f"stamps-{os.environ['BENCHMARK_REPLICA']}"
        path.write_text("".join(f"{tick} {station} {at:.6f}\n" for tick, station, at in STAMPS))


def report(home: str, first: int, last: int) -> list[dict[str, Any]]:
    """Return, for each station, the milliseconds after the fire time and since the station before, for the runs of a window."""
    ticks = [
        tick
        for path in Path(home).glob("stamps-*")
        for tick in _stations(path, first, last).values()
        if "node" in tick
    ]
    rows: list[dict[str, Any]] = []
    before: str | None = None
    for station in STATIONS:
        reached = [tick for tick in ticks if station in tick]
        if not reached:
            continue
        after = sorted(tick[station] for tick in reached)
        steps = sorted(tick[station] - tick[before] for tick in reached if before in tick) if before else []
        rows.append(
            {
                "station": station,
                "runs": len(reached),
                "after_ms": {"p50": quantile(after, 0.5), "p95": quantile(after, 0.95)},
                "step_ms": {"p50": quantile(steps, 0.5), "p95": quantile(steps, 0.95)},
            }
        )
        before = station
    return rows


def _stations(path: Path, first: int, last: int) -> dict[str, dict[str, float]]:
    """Return the stations of each tick of one replica, in milliseconds after the fire time; the first visit counts."""
    ticks: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        tick, station, at = line.rsplit(" ", 2)
        fire_time = int(tick.rpartition("|")[2])
        if first <= fire_time <= last:
            ticks.setdefault(tick, {}).setdefault(station, (float(at) - fire_time) * 1000)
    return ticks


if __name__ == "__main__":
    main()
