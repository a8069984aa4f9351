"""A host vanishes from the network: nobody is told, and two windows of time keep the writers apart."""

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.link import Link
from tests.proxy import Proxy
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


# Windows and time-outs of a second or two, so that the test can wait for all of them.
QUICK = {
    "TICKD_CONNECT_TIMEOUT": "1s",
    "TICKD_PROBE_INTERVAL": "500ms",
    "TICKD_PROBE_TIMEOUT": "500ms",
    "TICKD_STOP_ALLOWANCE": "1s",
    "TICKD_KEEPALIVE_IDLE": "2s",
    "TICKD_KEEPALIVE_INTERVAL": "1s",
    "TICKD_KEEPALIVE_COUNT": "2",
}


def test_a_link_that_moves_nothing_and_closes_nothing_holds_up_no_line_and_no_exit(
    fleet: Fleet, database: Database, witness: Witness
):
    """Both kernels acknowledge each other still, so keepalives see nothing: only time-outs of tickd's own can tell."""
    restock = {"graph": f"{GRAPHS}:steps", "every": "1s", "grace": "1s"}
    schedule = fleet.schedule({"restock": {**restock, "input": {"seconds": 0.05, "steps": 600}}})
    port = int(conninfo_to_dict(database.admin_dsn)["port"] or 5432)
    with Proxy(port) as proxy:
        dsn = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        replica = fleet.start("a", schedule, dsn=dsn, env=QUICK)
        started = replica.wait_for("tick.started")
        witness.wait_for_begin("restock", "step_3")

        at = witness.now()
        proxy.freeze()
        lost = replica.wait_for("tick.lock_lost", timeout=10)
        failed = replica.wait_for("tick.error", after=lost, timeout=10)
        frozen = witness.last()

        assert (lost["fire_time"], lost["cause"]) == (started["fire_time"], "no_answer")
        assert parse_instant(lost["timestamp"]) - at < timedelta(seconds=7)
        (run,) = witness.runs()
        assert run.ended - at < timedelta(seconds=2.5)
        assert failed["reason"] == "db_connect"

        proxy.thaw()
        witness.wait_for_begin("restock", "step_3", after=frozen)
        proxy.freeze()
        witness.wait_for_begin("restock", "step_4", after=frozen)
        began = time.monotonic()
        assert replica.stop(timeout=20) in (0, 1)
        assert time.monotonic() - began < 10
    seconds = [parse_instant(line["fire_time"]) for line in replica.terminal_lines()]
    assert len(seconds) == len(set(seconds))
    assert (max(seconds) - min(seconds)) // timedelta(seconds=1) == len(seconds) - 1
