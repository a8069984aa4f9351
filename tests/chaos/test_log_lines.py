"""Whatever graphs and libraries say, each line of stdout is one JSON object with an event of ours.

That each line parses strictly, NaN refused, is checked for every replica of every test; here it is provoked.
"""

import pytest

from tests.graphs import noisy, witnessed
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos


def test_hostile_errors_are_one_line_each_with_one_traceback(fleet: Fleet):
    """F4: A log shipper splits at newlines; half a traceback is an alarm about nothing, and a forged line is worse."""
    graphs = {name: {"graph": f"{GRAPHS}:{name}", "every": "1s"} for name in ("hostile", "failing")}
    graphs["nan"] = {"graph": f"{noisy.__file__}:nan", "every": "1s"}
    replica = fleet.start("a", fleet.schedule(graphs))
    hostile, failing = (
        replica.wait_for("tick.failed", graph="hostile"),
        replica.wait_for("tick.failed", graph="failing"),
    )
    nan = replica.wait_for("tick.failed", graph="nan")
    assert replica.stop() == 0

    assert failing["error"] == "supplier feed down"
    assert failing["error_type"] == "RuntimeError"
    assert failing["exception"].count("Traceback (most recent call last)") == 1
    assert failing["exception"].count("RuntimeError: supplier feed down") == 1
    assert hostile["error_type"] == witnessed.HostileError.__name__
    assert "first\nsecond" in hostile["exception"]
    assert nan["error_type"] == "ValueError"
    assert {line["event"] for line in replica.lines if "forged" in str(line)} == {"tick.failed"}


def test_noise_of_graphs_and_libraries_stays_out_of_the_log(fleet: Fleet):
    """A print in somebody's node must not break the parser of the whole log."""
    replica = fleet.start("a", fleet.schedule({"noisy": {"graph": f"{noisy.__file__}:noisy", "every": "1s"}}))
    replica.wait_for("tick.ran", count=2)
    assert replica.stop() == 0

    assert "a print\nof two lines" in replica.stderr
    assert "from a child" in replica.stderr
    said = {line["logger"]: line for line in replica.events("library.message")}
    assert {"apscheduler.test", "psycopg.pool", "langgraph"} <= set(said)
    assert said["langgraph"]["exception"].endswith("ValueError: of\ntwo lines\n")
    assert all({"event", "level", "timestamp", "replica"} <= set(line) for line in replica.lines)


def test_every_line_has_the_four_common_fields(fleet: Fleet):
    """Dashboards are built on these, so a line without one of them is lost to whoever looks."""
    replica = fleet.start("a", fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "500ms"}}))
    replica.wait_for("tick.ran", count=2)
    assert replica.stop() == 0

    for line in replica.lines:
        assert line["replica"] == "a"
        assert line["timestamp"].endswith("Z")
        if line["event"].startswith("tick."):
            assert line["graph"] == "restock"
            assert line["fire_time"].endswith("Z")
    started, ran = replica.wait_for("tick.started"), replica.wait_for("tick.ran")
    assert started["thread_id"] == f"restock/{started['fire_time']}"
    assert {"thread_id", "token", "attempt", "late_ms"} <= set(started)
    assert {"token", "attempt", "duration_ms", "late_ms", "steps"} <= set(ran)
    assert [line["fire_time"] for line in replica.events("tick.started")] == [
        line["fire_time"] for line in replica.terminal_lines() if line["event"] == "tick.ran"
    ]


def test_a_stdout_that_takes_nothing_stops_no_tick(fleet: Fleet, witness: Witness):
    """The log's disk is full or its reader gone: the ticks are what a replica is for, and the ledger knows of them."""
    graphs = {"restock": {"graph": f"{GRAPHS}:quick", "every": "500ms"}}
    replica = fleet.start(
        "a", fleet.schedule(graphs), prefix=["sh", "-c", 'exec "$@" > /dev/full', "to a full disk"]
    )

    third = witness.wait_for_node("quick", count=3, timeout=30)

    assert third.replica == "a"
    assert replica.stop() == 0
    assert "stdout takes no log lines (No space left on device)" in replica.stderr


def test_a_closed_stdout_is_refused_in_words(fleet: Fleet):
    """Its file descriptor goes to whatever is opened next, a database session perhaps, and the log would be written there."""
    graphs = {"restock": {"graph": f"{GRAPHS}:quick", "every": "500ms"}}
    replica = fleet.start("a", fleet.schedule(graphs), prefix=["sh", "-c", 'exec "$@" >&-', "to nothing"])

    assert replica.wait() == 2
    assert "stdout or stderr is closed" in replica.stderr
    assert "Traceback" not in replica.stderr
