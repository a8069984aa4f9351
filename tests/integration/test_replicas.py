"""The harness of real processes itself: what it must notice, and what it must never wait for."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.replicas import Fleet, Replica, offset, replica_environment, shifted, strict_json


Start = Callable[..., Replica]

TALK = """
import json, signal, sys
print(json.dumps({"event": "daemon.ready", "level": "info"}), flush=True)
print(json.dumps({"event": "tick.ran", "graph": "g", "steps": 1}), flush=True)
print(json.dumps({"event": "tick.ran", "graph": "g", "steps": 2, "list": [1]}), flush=True)
sys.stderr.write("on stderr\\n")
"""
STAY = TALK + "signal.pause()\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a Python program in the place of tickd."""
    with Fleet(tmp_path, "postgresql://nowhere") as fleet:

        def start(program: str, **env: str) -> Replica:
            command = [sys.executable, "-c", program]
            fleet.replicas.append(Replica("a", command, {**replica_environment(), **env}, tmp_path))
            return fleet.replicas[-1]

        yield start


def test_a_line_is_waited_for_by_its_fields(start: Start):
    """A test names what it waits for; everything else goes by."""
    replica = start(STAY)

    second = replica.wait_for("tick.ran", graph="g", count=2)

    assert second["steps"] == 2
    assert replica.wait_for("tick.ran", after=replica.wait_for("tick.ran"))["steps"] == 2
    assert len(replica.terminal_lines("g")) == 2
    assert replica.terminal_lines("h") == []


def test_what_this_process_was_told_to_import_its_replicas_import_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A checkout with the environment of another one would test that one's code in each process but the first."""
    sources = tmp_path / "src"  # it runs in `tmp_path` itself
    sources.mkdir()
    (sources / "of_this_checkout.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(sources))

    replica = start(f"import of_this_checkout, tests\n{TALK}")

    assert replica.wait() == 0, replica.said()


def test_waiting_fails_at_its_deadline_with_all_that_was_said(start: Start):
    """The log of the replica is what explains a failure on somebody else's machine."""
    with pytest.raises(AssertionError, match=r"(?s)daemon\.stopped.*daemon\.ready.*on stderr"):
        start(STAY).wait_for("daemon.stopped", timeout=0.5)


def test_waiting_ends_with_the_process(start: Start):
    """A replica that died at once must not cost the whole time-out."""
    replica = start(TALK)
    replica.wait()

    with pytest.raises(AssertionError, match="has not logged"):
        replica.wait_for("daemon.stopped", timeout=3600)


def test_the_exit_code_of_a_signal_is_seen(start: Start):
    """An exit code is part of the contract with the orchestrator."""
    replica = start(STAY)
    replica.wait_for("daemon.ready")

    assert replica.stop() == -signal.SIGTERM


def test_what_a_replica_started_dies_with_it(start: Start):
    """A test that fails must leave no process behind."""
    child = "import subprocess, sys; print('{\"event\": \"daemon.ready\"}', flush=True); subprocess.run(['sleep', '600'])"
    replica = start(child)
    replica.wait_for("daemon.ready")

    replica.close()

    assert replica.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "raw",
    [
        b"Traceback (most recent call last):\n",
        b'{"event": "a", "x": NaN}\n',
        b'{"event": "a", "x": -Infinity}\n',
        b'{"event": "a", "event": "b"}\n',
        b'{"event": "a"} {"event": "b"}\n',
        b'"a"\n',
        b'{"event": "a"}',
        b" \n",
        b'{"event": "a\rb"}\n',
        b'{"event": "\xff"}\n',
    ],
)
def test_what_is_not_one_json_object_a_line_is_refused(raw: bytes):
    """Python's own parser takes NaN and repeated keys; a log shipper does not."""
    with pytest.raises(ValueError, match=r"."):
        strict_json(raw)


def test_a_fleet_fails_over_a_line_that_is_not_json(tmp_path: Path):
    """No test has to ask for it, so no test can forget it."""
    program = [sys.executable, "-c", "print('hello')"]

    fleet = Fleet(tmp_path, "postgresql://nowhere")
    fleet.replicas.append(Replica("a", program, replica_environment(), tmp_path))
    fleet.replicas[0].wait()

    with pytest.raises(AssertionError, match="not strict JSON"), fleet:
        pass


CLOCK = """
import json, time
print(json.dumps({"event": "daemon.ready", "wall": time.time(), "monotonic": time.monotonic()}), flush=True)
"""


def test_a_shifted_clock_is_shifted_and_keeps_its_monotonic_time(start: Start):
    """The skew tests prove nothing if the shift does not reach the process."""
    true = start(CLOCK).wait_for("daemon.ready")

    line = start(CLOCK, **shifted("+3600s")).wait_for("daemon.ready")

    assert line["wall"] - true["wall"] == pytest.approx(3600, abs=60)
    assert line["monotonic"] - true["monotonic"] == pytest.approx(0, abs=60)


@pytest.mark.parametrize(
    ("clock", "expected"), [("+2s", "+2.000000"), ("-150ms", "-0.150000"), ("+0s", "+0.000000")]
)
def test_a_shift_is_written_as_libfaketime_reads_it(clock: str, expected: str):
    """Without a sign libfaketime would take it for an absolute time."""
    assert offset(clock) == expected
