"""The benchmark suite, run small: a suite that nobody runs is broken on the day it is needed."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apscheduler.triggers.cron import CronTrigger

from benchmarks import page
from benchmarks.contenders.peer import cron_fields
from benchmarks.contest import CONTENDERS, Contender, Contest, run_contest
from benchmarks.plan import name_of
from benchmarks.program import Failed
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


def test_what_rests_is_not_due(tmp_path):
    """A tenth of D's graphs and all of F's are due once a day, which no contender may take for now."""
    figures = measure(
        tmp_path / "figures.json", "D", "F", "--contenders", "tickd_shared,bare_loop,one_session"
    )

    found = {(one["workload"], one["contender"]): (one["fire_times"], one["missed"]) for one in figures}
    contenders = ("bare_loop", "one_session", "tickd_shared")
    assert found == {("D", name): (9, 0) for name in contenders} | {
        ("F", name): (0, 0) for name in contenders
    }
    assert {one["late_ms"]["max"] for one in figures if one["workload"] == "F"} == {None}


def test_a_cron_line_says_what_the_plan_says():
    """The peers are told cron lines, and tickd and the floors are not: all have to mean the same instants."""
    now = 1_777_888_999
    for letter in "ABCDEFJ":
        plan = WORKLOADS[letter].plan("", "", now)
        for number in {0, 29, plan.graphs - 1} & {*range(plan.graphs)}:
            second, minute, hour, *_ = cron_fields(plan, number)
            trigger = CronTrigger(second=second, minute=minute, hour=hour, timezone=UTC)
            first = trigger.get_next_fire_time(None, datetime.fromtimestamp(now, UTC))
            second_one = trigger.get_next_fire_time(first, first)

            assert name_of(number) in plan.due(int(first.timestamp()))
            assert name_of(number) not in plan.due(int(first.timestamp()) - 1) or plan.every == 1
            assert (second_one - first).total_seconds() == plan.period(number)


def test_a_floor_or_a_peer_that_fails_is_a_row_and_tickd_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """A peer that cannot do a workload has said something; a tickd that cannot is a bug, and stops the run."""
    database: Any = SimpleNamespace(dsn="postgresql://nowhere")
    server: Any = None  # none is started for this
    monkeypatch.setitem(CONTENDERS, "bare_loop", Contender("bare_loop", "benchmarks.contenders.nobody"))
    monkeypatch.setattr("benchmarks.contest.TICKD", "benchmarks.contenders.nowhere")
    monkeypatch.setitem(CONTENDERS, "tickd", Contender("tickd", "benchmarks.contenders.nowhere"))

    row = run_contest(server, "bare_loop", WORKLOADS["A"], database=database)

    assert row["failed"].splitlines()[0].endswith("No module named benchmarks.contenders.nobody")
    with pytest.raises(Failed, match="not set up"):
        run_contest(server, "tickd", WORKLOADS["A"], database=database)


def test_the_page_divides_a_piece_by_the_floors_and_says_why_there_is_none():
    """Ratios are what is published; a peer without figures must not cost the page its table."""
    results: list[Any] = [
        {
            "workload": "G",
            "contender": "tickd",
            "cost_ms": {"a": {"p50": 1.0, "p95": 2.0}},
            "floors": {"a": "b"},
        },
        {"workload": "G", "contender": "bare_loop", "cost_ms": {"b": {"p50": 0.5, "p95": 2.0}}},
        {"workload": "G", "contender": "dbos", "failed": "it fell\nover"},
    ]

    rows = [*page.TABLES["G"](page.Results(results))][2:]

    assert [row[1:] for row in rows] == [
        ("a", "1.00", "2.00", "2.00", "b"),
        ("b", "0.50", "2.00", "", ""),
        ("it fell", "", "", "", ""),
    ]


def test_the_pieces_are_measured_and_no_statement_reads_the_whole_ledger(tmp_path):
    """A statement that reads every tick is quick in every test, and stops a fleet after a year."""
    figures = measure(tmp_path / "figures.json", "G", "H", "I", "K")

    costs = {one["contender"]: one for one in figures if one["workload"] == "G"}
    took = {piece: cost["p50"] for one in costs.values() for piece, cost in one["cost_ms"].items()}
    assert set(costs) == {"tickd", "bare_loop", "one_session"}
    assert took["an attempt that skips: the tick has run"] > 0
    assert {floor for one in costs.values() for floor in one["floors"].values()} <= set(took)
    day, floors = (one for one in figures if one["workload"] == "H")
    assert (day["a_day"]["ticks"], floors["of_every_kind"]["lacking"]) == (1200, 0)
    grown, sized = figures[-2:]
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
