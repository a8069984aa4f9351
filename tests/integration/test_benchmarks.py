"""The benchmark suite, run small: a suite that nobody runs is broken on the day it is needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest import CONTENDERS, Contest
from benchmarks.workloads import WORKLOADS
from tests.pages import ROOT


def measure(path, *arguments):
    """Run the suite in its small sizes; return its figures in the order of the workloads."""
    command = [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return json.loads(path.read_text())["results"]


def test_the_suite_runs_real_replicas_and_writes_their_figures(tmp_path):
    """Its figures are published; what measures them has to follow every change of what it measures."""
    one, many = measure(tmp_path / "figures.json", "A", "B", "--contenders", "tickd")

    assert (one["workload"], one["fire_times"], many["workload"], many["fire_times"]) == ("A", 1, "B", 10)
    assert [figures["doubled"] for figures in (one, many)] == [0, 0]
    assert [figures["missed"] for figures in (one, many)] == [0, 0]
    assert min(figures["late_ms"]["min"] for figures in (one, many)) > 0
    assert min(figures["connections"] for figures in (one, many)) > 2


def test_the_pieces_are_measured_and_no_statement_reads_the_whole_ledger(tmp_path):
    """A statement that reads every tick is quick in every test, and stops a fleet after a year."""
    costs, day, grown, sized = measure(tmp_path / "figures.json", "G", "H", "I", "K")

    assert costs["cost_ms"]["an attempt that skips: the tick has run"]["p50"] > 0
    assert day["a_day"]["ticks"] > 0
    assert [(one["entries"], one["missed"]) for one in sized["by_entries"]] == [(10, 0)]
    assert {name: one["scans"] for name, one in grown["statements"].items() if one["scans"]} == {}


@pytest.mark.parametrize("name", ["tickd", "tickd_shared", "pieces"])
def test_a_replica_that_is_measured_is_of_the_suites_own_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """With another one installed, a second clone measured that, and two versions were as quick as each other."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server: Any = None  # none is started for this
    contest = Contest(server, CONTENDERS[name], WORKLOADS["A"], keep=False, ahead=False)

    found = subprocess.run(
        [sys.executable, "-c", "import tickd; print(tickd.__file__)"],
        env=contest._environment("r1"),
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    assert Path(found.stdout.strip()) == ROOT / "src" / "tickd" / "__init__.py"
