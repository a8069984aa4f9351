"""What the image runs, against a real replica."""

import signal
import socket
import subprocess
import sys

import pytest

from tests.dockerfile import health_command
from tests.replicas import replica_environment


@pytest.fixture
def address():
    """An address that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


def health(address):
    """Run the image's health check with this interpreter and return its exit code."""
    _, *arguments = health_command()
    return subprocess.run(
        [sys.executable, *arguments],
        env={**replica_environment(), "TICKD_HTTP": address},
        stderr=subprocess.DEVNULL,
        timeout=20,
        check=False,
    ).returncode


def test_the_health_check_tells_a_live_replica_from_one_that_stands_still(fleet, address):
    """A check that is always green hides a replica that fires nothing."""
    schedule = fleet.schedule({"witnessed": {"graph": "tests.graphs.witnessed:quick", "every": "1d"}})
    replica = fleet.start("a", schedule, env={"TICKD_HTTP": address})
    replica.wait_for("daemon.ready", timeout=30)

    assert health(address) == 0

    replica.signal(signal.SIGSTOP)
    assert health(address) != 0
    replica.signal(signal.SIGCONT)
    assert health(address) == 0

    assert replica.stop() == 0
    assert health(address) != 0
