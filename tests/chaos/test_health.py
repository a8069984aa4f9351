"""What an orchestrator asks, and a replica that breaks: it never stays alive without firing."""

import http.client
import itertools
import json
import signal
from datetime import timedelta
from typing import Any

import pytest

from tests.cluster import free_port
from tests.replicas import ROOT, Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos

SABOTEUR = f"{ROOT}/tests/graphs/saboteur.py:graph"
SHORT_DRAIN = {"TICKD_DRAIN_TIMEOUT": "1s", "TICKD_STOP_ALLOWANCE": "1s"}


def ask(port: int, path: str, method: str = "GET") -> tuple[int, Any]:
    """Return the status and the JSON body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        return answer.status, json.loads(body) if body else None
    finally:
        connection.close()


def test_a_replica_is_ready_until_it_drains_and_alive_until_it_ends(fleet: Fleet, witness: Witness):
    """A draining replica gets no new traffic, and must not be killed for it; a graph that blocks does not matter."""
    port = free_port()
    schedule = fleet.schedule(
        {"restock": {"graph": f"{GRAPHS}:blocking", "every": "1s", "input": {"seconds": 3}}}
    )
    replica = fleet.start("a", schedule, env={"TICKD_HTTP": f"127.0.0.1:{port}"})
    replica.wait_for("daemon.ready")
    witness.wait_for_begin("restock", "blocking")

    assert ask(port, "/ready") == (200, {"ok": True, "replica": "a", "running": 1})
    assert ask(port, "/ready?verbose=1", "HEAD") == (200, None)
    status, live = ask(port, "/live")
    assert (status, live["ok"]) == (200, True)
    assert ask(port, "/") == (404, {"paths": ["/live", "/ready"]})
    assert ask(port, "/ready", "POST")[0] == 404

    replica.signal(signal.SIGTERM)
    replica.wait_for("daemon.draining")
    assert ask(port, "/ready") == (503, {"ok": False, "replica": "a", "running": 1})
    assert ask(port, "/live")[0] == 200
    assert replica.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/live")


def test_a_start_that_waits_for_the_database_is_alive_and_not_ready(fleet: Fleet):
    """Killed for it, it would begin to wait anew; sent traffic, it could do nothing with it."""
    port = free_port()
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    nowhere = f"postgresql://tickd@127.0.0.1:{free_port()}/tickd"
    replica = fleet.start("a", schedule, dsn=nowhere, env={"TICKD_HTTP": f"127.0.0.1:{port}"})
    replica.wait_for("database.unreachable")

    assert ask(port, "/live")[0] == 200
    assert ask(port, "/ready") == (503, {"ok": False, "replica": "a", "running": 0})
    assert replica.stop() == 0


def test_a_port_that_is_taken_is_refused_by_name(fleet: Fleet):
    """A replica without its health page would be killed again and again, and nobody would know why."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    port = free_port()
    env = {"TICKD_HTTP": f"127.0.0.1:{port}"}
    fleet.start("a", schedule, env=env).wait_for("daemon.ready")

    other = fleet.start("b", schedule, env=env)

    assert other.wait() == 2
    assert f"TICKD_HTTP=127.0.0.1:{port}" in other.said()


def test_a_fault_of_its_own_ends_a_replica_and_its_ticks_are_accounted_for(fleet: Fleet):
    """Half alive is worst: a sweep that died in silence, or an exit that waits for a thread which never ends."""
    schedule = fleet.schedule(
        {
            "restock": {"graph": f"{GRAPHS}:sync_sleep", "every": "1s", "input": {"seconds": 60}},
            "saboteur": {"graph": SABOTEUR, "every": "1h"},
        }
    )
    replica = fleet.start("a", schedule, env={**SHORT_DRAIN, "SABOTAGE": "sweep"})

    failed = replica.wait_for("daemon.failed")
    assert replica.wait() == 1

    assert (failed["error_type"], failed["error"]) == ("LookupError", "a fault of tickd's own")
    assert "saboteur.py" in failed["exception"]
    assert replica.lines[-1]["event"] == "daemon.stopped"
    assert replica.lines[-1]["exit_code"] == 1
    begun = {line["fire_time"] for line in replica.events("tick.started")}
    assert begun
    assert begun <= {line["fire_time"] for line in replica.terminal_lines()}


def test_a_timer_that_lost_its_alarm_is_woken_and_drops_nothing(fleet: Fleet, witness: Witness):
    """Alive and not firing is what nobody notices; the ticks of the silence are run or named."""
    schedule = fleet.schedule({"saboteur": {"graph": SABOTEUR, "every": "1s", "grace": "20s"}})
    replica = fleet.start("a", schedule, env={"SABOTAGE": "timer"})

    replica.wait_for("tick.ran", count=10, timeout=30)
    assert replica.stop() == 0

    lines = {parse_instant(line["fire_time"]): line for line in replica.terminal_lines()}
    seconds = sorted(lines)
    assert seconds == [seconds[0] + timedelta(seconds=n) for n in range(len(seconds))]
    # Of the ticks that come together after the silence one runs, and the others find the graph at work.
    ran = [parse_instant(line["timestamp"]) for line in replica.events("tick.ran")]
    assert max(later - earlier for earlier, later in itertools.pairwise(ran)) > timedelta(seconds=3)
    assert witness.repeats() == []
