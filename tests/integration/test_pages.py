"""The tutorial, followed to the letter, and the SQL of the pages, run."""

import json
import signal

import psycopg

from tests.pages import DOCS, blocks, files
from tests.sessions import Session, forget


def test_the_tutorial_leads_where_it_says(tmp_path):
    """A tutorial that fails at its second step loses its reader for good."""
    tutorial = files(DOCS / "tutorial.md")
    assert set(tutorial) == {"audit.py", "seed.sql", "schedule.yaml"}
    for name, text in tutorial.items():
        (tmp_path / name).write_text(text)
    queries = [
        query
        for page in ("tutorial.md", "operating.md")
        for query in blocks(DOCS / page, "sql")
        if "SELECT" in query
    ]
    try:
        with Session(tmp_path / "schedule.yaml", arguments=["--json"]) as session:
            ran = json.loads(session.wait_for('"event": "tick.ran"', timeout=60)[0])
            session.wait_for('"event": "tick.skipped"', count=2)
            url = session.wait_for("export TICKD_DATABASE_URL=")[0].split("'")[1]
            with psycopg.connect(url, autocommit=True) as connection:
                audits = connection.execute("SELECT unlabelled FROM audit").fetchall()
                answers = [connection.execute(query.encode()).fetchall() for query in queries]
            session.signal(signal.SIGINT)

            assert session.wait() == 0
            assert (ran["graph"], ran["steps"]) == ("parcel_audit", 2)
            assert audits[0] == ([2, 4],)
            assert len(queries) == 3
            ticks, ledger, _ = answers
            assert ticks[0][3] in ("ran", None)
            assert ledger[0][0] == "parcel_audit"
    finally:
        forget(tmp_path)
