"""A contest: one contender on one workload, from an empty database to figures."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import program
from benchmarks.pieces import report
from benchmarks.plan import Plan, Start, read_starts
from benchmarks.program import Failed, last_line
from benchmarks.quantiles import spread
from benchmarks.server import ConnectionSampler, Database, Server, put_ahead, resident_bytes, tree_cpu_seconds
from benchmarks.workloads import Workload


TICKD = "benchmarks.contenders.tickd_replica"
START_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Contender:
    """How a contender is started; peers run on the Python of an environment of their own."""

    name: str
    module: str
    peer: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


CONTENDERS = {
    one.name: one
    for one in (
        Contender("tickd", TICKD),
        Contender("tickd_shared", TICKD, env={"BENCHMARK_HOLD": "shared"}),
        Contender("bare_loop", "benchmarks.contenders.bare_loop"),
        Contender("told_loop", "benchmarks.contenders.told_loop"),
        Contender("one_session", "benchmarks.contenders.one_session"),
        Contender("apscheduler4", "benchmarks.contenders.apscheduler4", peer=True),
        Contender("procrastinate", "benchmarks.contenders.procrastinate", peer=True),
        Contender("dbos", "benchmarks.contenders.dbos_replica", peer=True),
        Contender("pieces", TICKD, env={"BENCHMARK_TICKD": "benchmarks.pieces"}),
    )
}


class Contest:
    """Runs the replicas of one contender and measures them over the workload's window."""

    def __init__(
        self, server: Server, contender: Contender, workload: Workload, *, keep: bool, ahead: bool
    ) -> None:
        self._server = server
        self._contender = contender
        self._workload = workload
        self._python = program.python(peer=contender.peer)
        self._keep = keep
        self._ahead = ahead
        self._home = Path(tempfile.mkdtemp(prefix=f"bench-{workload.letter}-{contender.name}-"))
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, given: Database | None) -> dict[str, Any]:
        """Return the figures, on a new database or on one that is given."""
        database = given or self._server.new_database()
        try:
            return self._measured(database)
        finally:
            self._kill()
            if given is None:
                database.drop()
            if not self._keep:
                shutil.rmtree(self._home)

    def _measured(self, database: Database) -> dict[str, Any]:
        workload = self._workload
        plan = workload.plan(database.dsn, str(self._home), time.time())
        plan.write()
        self._set_up()
        began = time.time()
        for number in range(workload.replicas):
            self._start(f"r{number + 1}")
        self._await_ready()
        if self._ahead:
            self._server.put_ahead()
            for process in self._processes:
                put_ahead(process.pid)
        ready_after = time.time() - began
        first = workload.begins(time.time())
        last = first + workload.window - 1
        _sleep_until(first - 0.5)
        before, cpu, began = database.load(), self._cpu(), time.time()
        with ConnectionSampler(database) as connections:
            _sleep_until(last + 1)
            after, cpu, took = database.load(), self._cpu() - cpu, time.time() - began
            self._await_starts(plan, first, last)
        resident = [resident_bytes(process.pid) for process in self._processes]
        statements = database.statements()
        self._stop()
        figures = figures_of(plan, read_starts(plan.home), first, last)
        return {
            "workload": workload.letter,
            "contender": self._contender.name,
            "replicas": workload.replicas,
            **figures,
            "ready_after_s": ready_after,
            "connections": connections.most,
            "replica_cpu": cpu / took / workload.replicas,
            "resident_mb": max(resident) / 2**20,
            "window_s": took,
            **{key: (after[key] - before[key]) / took for key in after},
            "load_average": os.getloadavg()[0],
            "top_statements": statements,
            **({"home": str(self._home)} if self._keep else {}),
            **({"pieces": report(plan.home, first, last)} if self._contender.name == "pieces" else {}),
        }

    def _environment(self, replica: str) -> dict[str, str]:
        return {
            **program.environment(),
            "BENCHMARK_HOME": str(self._home),
            "BENCHMARK_REPLICA": replica,
            **self._contender.env,
        }

    def _set_up(self) -> None:
        """Run the contender's module to its end, for what it needs before any replica starts."""
        try:
            program.run(
                self._contender.module,
                "set_up",
                peer=self._contender.peer,
                extra=self._environment("set_up"),
                cwd=self._home,
            )
        except Failed as error:
            raise Failed(f"not set up: {error}") from error

    def _start(self, replica: str) -> None:
        with (self._home / f"log-{replica}").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    # No replica outlives the benchmark, even if that is killed.
                    ["setpriv", "--pdeathsig", "KILL", self._python, "-m", self._contender.module, replica],
                    env=self._environment(replica),
                    cwd=self._home,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _await_ready(self) -> None:
        deadline = time.time() + START_SECONDS
        while self._ready() < self._workload.replicas:
            for number, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    log = (self._home / f"log-r{number}").read_text()
                    raise Failed(f"a replica ended at its start: {last_line(log)}\n{log[-2000:]}")
            if time.time() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self._home.glob("log-*"))
                raise Failed(f"not every replica fired within {START_SECONDS} s of its start\n{logs}")
            time.sleep(0.05)

    def _ready(self) -> int:
        """Return how many replicas fire; tickd says so in its log, every other contender by a file."""
        logs = self._home.glob("log-*")
        return len(list(self._home.glob("ready-*"))) + sum("daemon.ready" in log.read_text() for log in logs)

    def _await_starts(self, plan: Plan, first: int, last: int) -> None:
        """Wait until every fire time of the window was started and nothing more comes, or patience has run out."""
        expected = len(set(plan.fires(first, last)))
        deadline = last + 1 + self._workload.patience
        seen, since = -1, time.time()
        while time.time() < deadline:
            starts = [start for start in read_starts(plan.home) if first <= start.fire_time <= last]
            if len(starts) != seen:
                seen, since = len(starts), time.time()
            enough = len({(start.name, start.fire_time) for start in starts}) >= expected
            if enough and time.time() - since > self._workload.quiet:
                return
            time.sleep(0.5)

    def _cpu(self) -> float:
        return sum(tree_cpu_seconds(process.pid) for process in self._processes)

    def _stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        deadline = time.time() + 15
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def figures_of(plan: Plan, starts: list[Start], first: int, last: int) -> dict[str, Any]:
    """Return lateness (ms), doubles, misses and the spread over replicas, for the fire times of the window."""
    fires = set(plan.fires(first, last))
    by_fire: dict[tuple[str, int], list[Start]] = {}
    for start in starts:
        if (start.name, start.fire_time) in fires:
            by_fire.setdefault((start.name, start.fire_time), []).append(start)
    late = [
        (min(start.started for start in group) - fire_time) * 1000
        for (_, fire_time), group in by_fire.items()
    ]
    shares = Counter(start.replica for group in by_fire.values() for start in group)
    return {
        "fire_times": len(fires),
        "missed": len(fires) - len(by_fire),
        "doubled": sum(len(group) > 1 for group in by_fire.values()),
        "extra_runs": sum(len(group) - 1 for group in by_fire.values()),
        "late_ms": spread(late),
        "largest_share": max(shares.values()) / sum(shares.values()) if shares else None,
    }


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def run_contest(
    server: Server,
    name: str,
    workload: Workload,
    *,
    keep: bool = False,
    ahead: bool = False,
    database: Database | None = None,
) -> dict[str, Any]:
    """Run one contender on one workload and return the figures, ready for JSON.

    A floor or a peer that does not get through a workload has said something, too: its row is the reason.
    """
    contender = CONTENDERS[name]
    try:
        return Contest(server, contender, workload, keep=keep, ahead=ahead).run(database)
    except Failed as error:
        if contender.module == TICKD:
            raise
        return {"workload": workload.letter, "contender": name, "failed": str(error)}
