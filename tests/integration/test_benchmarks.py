"""The benchmark suite, run small: a suite that nobody runs is broken on the day it is needed."""

import json
import subprocess
import sys

from tests.pages import ROOT


def test_the_suite_runs_and_writes_figures_of_real_replicas(tmp_path):
    """Its figures are published; what writes them has to follow every change of what it measures."""
    written = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "A", "B", "--quick", "--contenders", "tickd"]
    subprocess.run([*command, "--json", str(written)], cwd=ROOT, check=True, timeout=180)

    one, many = json.loads(written.read_text())["results"]
    assert (one["workload"], one["fire_times"], many["workload"], many["fire_times"]) == ("A", 1, "B", 10)
    assert [figures["doubled"] for figures in (one, many)] == [0, 0]
    assert [figures["missed"] for figures in (one, many)] == [0, 0]
    assert min(figures["late_ms"]["min"] for figures in (one, many)) > 0
    assert min(figures["connections"] for figures in (one, many)) > 2
