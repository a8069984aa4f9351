"""A host vanishes from the network: nobody is told, and two windows of time keep the writers apart."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.link import Link
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.policy import TrustWindows
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos


@pytest.fixture
def link() -> Iterator[Link]:
    """A host of its own for one replica, and a database both it and this host reach."""
    with Link() as link:
        yield link


@pytest.fixture
def link_witness(link: Link, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    """The oracle in the database at the link's end."""
    witness = Witness(link.database.admin_dsn)
    monkeypatch.setenv("WITNESS_DSN", witness.dsn)
    yield witness
    witness.close()


def test_another_replica_takes_over_from_a_host_that_vanished_and_had_stopped_before(
    link: Link, link_witness: Witness, tmp_path: Path
):
    """With the default settings. Without the server's own keepalives the lock would stay for more than two hours."""
    with Fleet(tmp_path, link.database.dsn) as fleet:
        schedule = fleet.schedule(
            {"restock": {"graph": f"{GRAPHS}:steps", "every": "1s", "input": {"seconds": 0.2, "steps": 400}}}
        )
        cut_off = fleet.start("cut-off", schedule, dsn=link.dsn, env=link.environment, prefix=link.prefix)
        ready = cut_off.wait_for("daemon.ready")
        started = cut_off.wait_for("tick.started")
        other = fleet.start("other", schedule)
        other.wait_for("tick.skipped", reason="lock_held", holder="cut-off")
        node = link_witness.wait_for_begin("restock", "step_3")

        at = link_witness.now()
        link.cut()
        taken = other.wait_for("tick.started", timeout=40)
        lost = cut_off.wait_for("tick.lock_lost", timeout=10)
        link_witness.wait_for_begin("restock", "step_1", after=node.id)

        windows = TrustWindows()
        assert (ready["client_window_ms"], ready["server_window_ms"]) == (17_000, 24_000)
        assert parse_instant(taken["timestamp"]) - at < timedelta(seconds=30)
        assert (lost["fire_time"], lost["cause"]) == (started["fire_time"], "no_answer")
        assert parse_instant(lost["timestamp"]) - at < timedelta(seconds=30)
        old, new = link_witness.runs("restock")
        assert (old.replica, new.replica) == ("cut-off", "other")
        assert old.ended is not None
        assert old.ended - at < windows.client
        assert link_witness.overlaps() == []
        assert [line["event"] for line in other.terminal_lines() if line["event"] != "tick.skipped"] == []
