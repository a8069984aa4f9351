"""The pieces of one tick: a tickd that stamps the clock at each station between the fire time and its end.

It is tickd itself, started as `python -m benchmarks.pieces run SCHEDULE`, with its functions wrapped from outside.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tickd import ledger, lock, runner, runs
from tickd.cli import main as tickd_main


STAMPS: list[tuple[str, str, float]] = []


def stamp(tick: Any, station: str) -> None:
    """Note that the tick has come to a station."""
    STAMPS.append((f"{tick.graph}|{tick.fire_time.timestamp():.0f}", station, time.time()))


def _around(owner: Any, name: str, tick_of: Callable[..., Any], before: str | None, after: str | None) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        tick = tick_of(*args, **kwargs)
        if before:
            stamp(tick, before)
        result = await plain(*args, **kwargs)
        if after:
            stamp(tick, after)
        return result

    setattr(owner, name, wrapped)


def _wrap() -> None:
    _around(runner.Runner, "run_tick", lambda _, tick: tick, "fired", "logged")
    _around(runner.Runner, "_open_in_time", lambda _, tick, __: tick, "open", "opened")
    _around(runner.Runner, "_end_before_attempt", lambda _, __, tick, ___: tick, None, "due")
    _around(ledger, "hold_and_admit", lambda _, tick, **__: tick, "ask", "admitted")
    _around(runner.Runner, "_record", lambda _, tick, *__: tick, "record", "recorded")
    _around(runs.Run, "_work", lambda run, _: run.order.tick, "begun", "worked")
    _around(runs.Run, "_invoke", lambda run, _: run.order.tick, "invoke", None)
    _around(runs.RunSaver, "aget_tuple", lambda saver, _: saver._run.order.tick, "read", "has_read")  # noqa: SLF001
    plain_run = runs.GraphThread.run

    def run(self: Any, order: Any) -> Any:
        stamp(order.tick, "ordered")
        return plain_run(self, order)

    runs.GraphThread.run = run  # type: ignore[method-assign]

    from benchmarks import graphs

    plain_started = graphs.Witness.started

    def started(self: Any, name: str, fire_time: float) -> None:
        STAMPS.append((f"{name}|{fire_time:.0f}", "node", time.time()))
        plain_started(self, name, fire_time)

    graphs.Witness.started = started  # type: ignore[method-assign]


def main() -> None:
    """Run tickd, and write the stamps when it ends."""
    _wrap()
    try:
        tickd_main()
    finally:
        path = Path(os.environ["BENCHMARK_HOME"]) / f"stamps-{os.environ['BENCHMARK_REPLICA']}"
        path.write_text("\n".join(f"{tick} {station} {at:.6f}" for tick, station, at in STAMPS))


def report(home: str, skip: int = 4) -> None:
    """Print the median and the 95th percentile of each station after the fire time, and of each step between two."""
    ticks: dict[str, dict[str, float]] = {}
    for path in Path(home).glob("stamps-*"):
        mine: dict[str, dict[str, float]] = {}
        for line in path.read_text().splitlines():
            tick, station, at = line.rsplit(" ", 2)
            mine.setdefault(tick, {}).setdefault(station, float(at))
        ticks |= {f"{path.name} {tick}": stations for tick, stations in mine.items() if "node" in stations}
    fires = sorted({tick.rpartition("|")[2] for tick in ticks})[skip:]
    ticks = {tick: stations for tick, stations in ticks.items() if tick.rpartition("|")[2] in fires}
    order = ["fired", "open", "opened", "due", "ask", "admitted", "ordered", "begun", "invoke", "read", "has_read", "node", "worked", "record", "recorded", "logged"]
    print(f"{len(ticks)} runs")
    previous = None
    for station in order:
        after = sorted(s[station] * 1000 - float(t.rpartition("|")[2]) * 1000 for t, s in ticks.items() if station in s)
        if not after:
            continue
        step = sorted((s[station] - s[previous]) * 1000 for s in ticks.values() if previous in s and station in s) if previous else [0.0]
        p = lambda v, q: v[min(len(v) - 1, int(q * len(v)))]  # noqa: E731
        print(f"{station:10} after fire p50 {p(after, .5):9.2f} p95 {p(after, .95):9.2f}   step p50 {p(step, .5):8.2f} p95 {p(step, .95):8.2f}")
        previous = station


if __name__ == "__main__":
    if sys.argv[1] == "report":
        report(sys.argv[2])
    else:
        main()
