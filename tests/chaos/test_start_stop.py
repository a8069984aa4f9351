"""How a replica starts when its database is not there, and how it ends: signals, exit codes, time."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster, free_port
from tests.database import PASSWORD, Database
from tests.replicas import Fleet, Replica
from tests.witness import GRAPHS, Witness
from tickd import collector


pytestmark = pytest.mark.chaos


@pytest.fixture
def idle(fleet: Fleet) -> Path:
    """A schedule with nothing due for a long time."""
    return fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1d"}})


def slices_of(secret: str) -> list[str]:
    """Return every part of a secret that is long enough to give it away."""
    return [secret[i : i + 4] for i in range(len(secret) - 3)]


def seconds_to_end(replica: Replica, pid: int) -> float:
    """Ask the process to end, and return how long that took."""
    before = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert replica.wait() == 0, replica.said()
    return time.monotonic() - before


def test_an_idle_replica_ends_within_a_second(fleet: Fleet, idle: Path):
    """An orchestrator that has to wait kills in the end, and then nothing is tidied up."""
    replica = fleet.start("a", idle)
    replica.wait_for("daemon.ready")

    assert seconds_to_end(replica, replica.process.pid) < 1
    assert replica.wait_for("daemon.stopped")["exit_code"] == 0


LOOK = """
import gc

from tests.played import graph_of


async def look(state):
    raise RuntimeError(f"{gc.get_threshold()}, {gc.get_freeze_count() > 0}")


graph = graph_of(look=look)
"""


def test_a_replica_collects_garbage_seldom_and_not_among_what_stays(fleet: Fleet, tmp_path: Path):
    """With ten thousand entries the collector's default takes a quarter of a busy replica's time."""
    (tmp_path / "look.py").write_text(LOOK)
    replica = fleet.start("a", fleet.schedule({"look": {"graph": "./look.py:graph", "every": "1s"}}))

    failed = replica.wait_for("tick.failed")

    assert failed["error"] == f"({collector.YOUNG}, {collector.ROUNDS}, {collector.ROUNDS}), True"


def test_it_ends_as_process_1_too(fleet: Fleet, idle: Path):
    """F1: In a container it is process 1, for which the kernel ignores every signal that has no handler."""
    # Without root, a user namespace gives the right to make the other one.
    namespaces = ["--pid"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--pid"]
    replica = fleet.start(
        "a", idle, prefix=["unshare", *namespaces, "--fork", "--kill-child", "--mount-proc"]
    )
    assert replica.wait_for("daemon.started")["pid"] == 1
    replica.wait_for("daemon.ready")
    children = Path(f"/proc/{replica.process.pid}/task/{replica.process.pid}/children").read_text().split()

    assert seconds_to_end(replica, int(children[0])) < 1


def test_a_stop_waits_for_the_run(fleet: Fleet, witness: Witness):
    """A deployment must not cut off a run that is nearly done."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 1.5}}}
    )
    replica = fleet.start("a", schedule)
    witness.wait_for_node("slow")

    assert replica.stop() == 0
    assert len(replica.events("tick.ran")) == 1
    assert len(replica.events("tick.started")) == 1
    assert [run.ended is not None for run in witness.runs()] == [True]


STUCK = """
import asyncio
import logging
import threading
from contextlib import asynccontextmanager, contextmanager

from tests.played import graph_of, step

MINUTE = 60
builder = graph_of(one=step("one"))


@contextmanager
def blocked():
    yield builder
    threading.Event().wait(MINUTE)


@asynccontextmanager
async def in_a_thread():
    yield builder
    await asyncio.to_thread(threading.Event().wait, MINUTE)


@asynccontextmanager
async def waiting():
    yield builder
    await asyncio.Event().wait()


async def opening():
    logging.getLogger("shop").warning("opening")
    await asyncio.Event().wait()
"""


def test_a_factory_that_does_not_let_go_holds_no_replica_up(fleet: Fleet, tmp_path: Path):
    """What it blocks, the graph loop, cannot even be asked to stop; the orchestrator would kill without a word in the log."""
    (tmp_path / "stuck.py").write_text(STUCK)
    names = ("blocked", "in_a_thread", "waiting")
    for name in names:
        entries = {each: {"graph": f"./stuck.py:{each}", "every": "1d"} for each in (name, "builder")}
        fleet.start(name, fleet.schedule(entries))
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")

    for replica in fleet.replicas:
        replica.signal(signal.SIGTERM)

    assert [replica.wait() for replica in fleet.replicas] == [0, 0, 0]
    for name in names:
        stopped = fleet.named(name).wait_for("daemon.stopped")
        assert stopped["reason"] == f"not closed within 5 s: {name}; the process ends it"


def test_a_factory_that_does_not_come_to_an_end_holds_no_replica_up(fleet: Fleet, tmp_path: Path):
    """It waits for a server that does not answer, and the first SIGTERM has to be enough all the same."""
    (tmp_path / "stuck.py").write_text(STUCK)
    replica = fleet.start("a", fleet.schedule({"opening": {"graph": "./stuck.py:opening", "every": "1d"}}))
    replica.wait_for("library.message", message="opening")

    assert replica.stop() == 0
    assert (
        replica.wait_for("daemon.stopped")["reason"] == "not closed within 5 s: opening; the process ends it"
    )


def test_a_drain_that_runs_out_ends_the_run_and_says_so(fleet: Fleet, witness: Witness):
    """The orchestrator's patience is limited; what it would kill is better ended in order."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 60}}}
    )
    replica = fleet.start("a", schedule, env={"TICKD_DRAIN_TIMEOUT": "1s"})
    witness.wait_for_node("slow")

    assert replica.stop() == 1
    failed = replica.wait_for("tick.failed")
    assert failed["reason"] == "shutdown"
    assert replica.wait_for("daemon.stopped")["exit_code"] == 1
    assert len(witness.runs()) == 1


def test_a_second_signal_ends_it_at_once(fleet: Fleet):
    """Who presses Ctrl-C twice does not want to wait."""
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 60}}}
    )
    replica = fleet.start("a", schedule)
    replica.wait_for("tick.started")

    replica.signal(signal.SIGINT)
    replica.wait_for("daemon.draining")
    replica.signal(signal.SIGINT)

    assert replica.wait(timeout=2) == 130


def test_it_waits_for_a_database_that_starts_later(
    fleet: Fleet, idle: Path, private_cluster: Cluster, private_database: Database
):
    """In a compose file everything starts at once; the reason of each attempt is one line, and not a flood."""
    private_cluster.stop()
    replica = fleet.start("a", idle, dsn=private_database.dsn)
    replica.wait_for("database.unreachable", count=3)
    assert "refused" in replica.events("database.unreachable")[0]["error"]

    private_cluster.start()
    replica.wait_for("daemon.ready")

    assert len(replica.events("database.unreachable")) < 8
    assert len(replica.events("database.reachable")) == 1
    assert replica.stop() == 0


def test_a_database_that_never_comes_is_exit_3_at_the_deadline(fleet: Fleet, idle: Path):
    """Waiting for ever would look like working; the exit code tells the orchestrator whom to blame."""
    nowhere = f"postgresql://tickd:{PASSWORD}@127.0.0.1:{free_port()}/tickd"
    replica = fleet.start("a", idle, dsn=nowhere, env={"TICKD_DATABASE_DEADLINE": "2s"})

    assert replica.wait() == 3
    failed = replica.wait_for("daemon.failed")
    assert "refused" in failed["error"]
    assert failed["exit_code"] == 3
    assert "Traceback" not in replica.said()
    assert [part for part in slices_of(PASSWORD) if part in replica.said()] == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PASSWORD, "Wr0ngP4ss-Kj7v", "password authentication failed"),
        ("/t_", "/not_", "does not exist"),
    ],
    ids=["wrong password", "missing database"],
)
def test_what_waiting_will_not_mend_is_exit_3_at_once(
    fleet: Fleet, idle: Path, old: str, new: str, said: str
):
    """A typo must not cost a minute of waiting, nor be called a time-out."""
    replica = fleet.start("a", idle, dsn=fleet.dsn.replace(old, new), env={"TICKD_DATABASE_DEADLINE": "10m"})

    assert replica.wait() == 3
    assert said in replica.wait_for("daemon.failed")["error"]
    assert replica.events("database.unreachable") == []
    assert "Traceback" not in replica.said()
    secrets = [part for secret in (PASSWORD, "Wr0ngP4ss-Kj7v") for part in slices_of(secret)]
    assert [part for part in secrets if part in replica.said()] == []


def test_without_a_database_url_it_refuses_and_names_dev(fleet: Fleet, idle: Path):
    """Replicas with a database each would exclude nobody, so none is made up."""
    replica = fleet.start("a", idle, env={"TICKD_DATABASE_URL": ""})

    assert replica.wait() == 2
    assert "tickd dev" in replica.stderr
    assert "Traceback" not in replica.said()


def test_a_schedule_that_cannot_be_used_is_exit_2(fleet: Fleet):
    """Restarting does not mend a file, and the exit code must say so."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:nope", "every": "1s"}})
    replica = fleet.start("a", schedule)

    assert replica.wait() == 2
    rejected = replica.wait_for("schedule.rejected")
    assert "restock" in rejected["error"]
    assert "nope" in rejected["error"]
    assert "Traceback" not in replica.said()
