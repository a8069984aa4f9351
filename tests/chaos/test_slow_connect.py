"""A replica whose lock connection opens late: the same double run as by skewed clocks, with the clocks in order."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.proxy import Proxy
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_who_connects_late_finds_the_tick_run(fleet: Fleet, database: Database, witness: Witness):
    """The lock is free again by then, so only the ledger can tell; a fix that looks at clocks alone fails here."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "3s", "input": {"seconds": 0.3}}}
    )
    port = conninfo_to_dict(database.admin_dsn)["port"]
    with Proxy(int(port or 5432)) as proxy:
        late_dsn = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        prompt = fleet.start("prompt", schedule)
        late = fleet.start("late", schedule, env={"TICKD_LOCK_DATABASE_URL": late_dsn})
        prompt.wait_for("daemon.ready")
        late.wait_for("daemon.ready")

        proxy.delay(1.5)
        prompt.wait_for_terminal(len(prompt.terminal_lines()) + 4)
        late.wait_for_terminal(4)
        assert fleet.stop() == [0, 0]

    # The first of them may have connected before the delay.
    late_lines = [lines["late"] for lines in list(fleet.accounts("restock").values())[1:]]
    assert len(late_lines) >= 2
    assert {(line["event"], line["reason"], line["holder"]) for line in late_lines} == {
        ("tick.skipped", "already_ran", "prompt")
    }
    assert (witness.overlaps(), witness.repeats()) == ([], [])
