"""`tickd doctor`: each thing that does not fit is said, with what to change."""

import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tests.database import Database
from tests.fences import prepare
from tests.pooler import Pooler
from tests.replicas import python_path


SCHEDULE = "graphs:\n  a:\n    graph: ./a.py:graph\n    every: 1m\n"


def examine(folder: Path, dsn: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command and return its exit code and findings by subject."""
    (folder / "schedule.yaml").write_text(SCHEDULE)
    ended = subprocess.run(
        [sys.executable, "-m", "tickd", "doctor", "--json"],
        cwd=folder,
        env={"TICKD_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin", **python_path(), **variables},
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


@pytest.mark.migrated
def test_tables_that_are_not_for_this_role_are_bad(database: Database, tmp_path: Path):
    """One role migrates and another runs: the GRANT that was forgotten is what the doctor is asked for."""
    code, findings = examine(tmp_path, database.role(owner=False).dsn)

    assert code == 1
    assert findings["tables"]["health"] == "bad"
    assert "permission denied for schema tickd" in findings["tables"]["sentence"]
    assert findings["locks"]["health"] == "good"


@pytest.mark.parametrize(
    ("grants", "said"),
    [((), "the schema tickd"), (("CREATE ON DATABASE {database}",), "the checkpointer's tables")],
)
def test_tables_that_this_role_could_not_create_are_bad(
    database: Database, tmp_path: Path, grants: tuple[str, ...], said: str
):
    """That the next start would bring them is no comfort where it may not."""
    role = database.role(owner=False)
    for grant in grants:
        names = {"database": sql.Identifier(database.name), "role": sql.Identifier(role.name)}
        database.connection.execute(sql.SQL(f"GRANT {grant} TO {{role}}").format(**names))

    code, findings = examine(tmp_path, role.dsn)

    assert code == 1
    assert findings["tables"]["health"] == "bad"
    assert f"permission denied to create {said}" in findings["tables"]["sentence"]


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_an_encoding_that_cannot_hold_every_text_is_doubtful(
    database: Database, tmp_path: Path, encoding: str
):
    """A state with an em dash in it fails a run on the one, and comes back as bytes from the other."""
    database.drop()
    statement = "CREATE DATABASE {} OWNER {} TEMPLATE template0 ENCODING {} LOCALE 'C'"
    names = sql.Identifier(database.name), sql.Identifier(database.server.owner), sql.Literal(encoding)
    database.connection.execute(sql.SQL(statement).format(*names))

    code, findings = examine(tmp_path, database.dsn)

    assert code == 0
    assert findings["server"]["health"] == "doubtful"
    assert f"encoding is {encoding}" in findings["server"]["sentence"]
    assert "b'" not in findings["server"]["sentence"]


async def test_a_way_to_locks_through_a_pooler_is_bad(dsn: str, pooler: Pooler, tmp_path: Path):
    """A replica would refuse to start; the doctor says so before."""
    code, findings = examine(tmp_path, dsn, TICKD_LOCK_DATABASE_URL=pooler.through(dsn))

    assert code == 1
    (bad,) = [finding for finding in findings.values() if finding["health"] == "bad"]
    assert "Set TICKD_LOCK_DATABASE_URL to the address of the Postgres server itself" in bad["sentence"]


def test_a_server_that_only_reads_is_bad_with_what_to_do(database: Database, tmp_path: Path):
    """A lock on a hot standby excludes nobody; libpq's "session is read-only" says that to those who know it already."""
    role = database.role(settings={"default_transaction_read_only": "on"})

    code, findings = examine(tmp_path, role.dsn)

    assert code == 1
    assert "Point TICKD_LOCK_DATABASE_URL at the primary" in findings["database"]["sentence"]
    assert "cannot be reached" not in findings["database"]["sentence"]


@pytest.mark.parametrize("url", ["postgresql://u:Sw0rdf1sh@127.0.0.1:1/x"])
def test_a_database_that_is_not_there_is_bad_and_its_password_is_not_shown(url: str, tmp_path: Path):
    """The output of this command is what people paste into tickets."""
    code, findings = examine(tmp_path, url)

    assert code == 1
    assert "u@127.0.0.1:1/x cannot be reached" in findings["database"]["sentence"]
    assert "Sw0rdf1sh" not in json.dumps(findings)
