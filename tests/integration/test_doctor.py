"""`tickd doctor`: each thing that does not fit is said, with what to change."""

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.fences import prepare
from tests.pooler import Pooler


SCHEDULE = "graphs:\n  a:\n    graph: ./a.py:graph\n    every: 1m\n"


def examine(folder: Path, dsn: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command and return its exit code and findings by subject."""
    (folder / "schedule.yaml").write_text(SCHEDULE)
    ended = subprocess.run(
        [sys.executable, "-m", "tickd", "doctor", "--json"],
        cwd=folder,
        env={"TICKD_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    findings = [json.loads(line) for line in ended.stdout.splitlines()]
    return ended.returncode, {finding["subject"]: finding for finding in findings}


async def test_a_fit_replica_hears_good_of_everything(dsn: str, tmp_path: Path):
    """Before a first deployment, silence would not be reassuring."""
    await prepare(dsn)

    code, findings = examine(tmp_path, dsn, TICKD_MAX_RUNNING="10")

    assert code == 0
    assert {finding["health"] for finding in findings.values()} == {"good"}
    assert set(findings) == {
        "schedule",
        "server",
        "locks",
        "tables",
        "clock",
        "trust",
        "connections",
        "lock table",
    }
    assert "1 x (4 pool + 4 + 10 runs + 10 attempts) = 28 connections" in findings["connections"]["sentence"]


async def test_budgets_that_do_not_fit_are_doubtful(dsn: str, admin_dsn: str, tmp_path: Path):
    """Connections that run out at the full minute are a tick that could not be tried."""
    role = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(f'ALTER ROLE "{role}" CONNECTION LIMIT 30')

    code, findings = examine(tmp_path, dsn, TICKD_TYPO="1")

    assert code == 0
    assert findings["connections"]["health"] == "doubtful"
    assert "30 are allowed" in findings["connections"]["sentence"]
    assert "hold: shared" in findings["connections"]["sentence"]
    assert findings["tables"]["health"] == "doubtful"
    assert "TICKD_TYPO" in findings["settings"]["sentence"]


async def test_a_way_to_locks_through_a_pooler_is_bad(dsn: str, pooler: Pooler, tmp_path: Path):
    """A replica would refuse to start; the doctor says so before."""
    code, findings = examine(tmp_path, dsn, TICKD_LOCK_DATABASE_URL=pooler.through(dsn))

    assert code == 1
    bad = [finding for finding in findings.values() if finding["health"] == "bad"]
    assert len(bad) == 1


@pytest.mark.parametrize("url", ["postgresql://u:Sw0rdf1sh@127.0.0.1:1/x"])
def test_a_database_that_is_not_there_is_bad_and_its_password_is_not_shown(url: str, tmp_path: Path):
    """The output of this command is what people paste into tickets."""
    code, findings = examine(tmp_path, url)

    assert code == 1
    assert "u@127.0.0.1:1/x cannot be reached" in findings["database"]["sentence"]
    assert "Sw0rdf1sh" not in json.dumps(findings)
