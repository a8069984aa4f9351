"""Retries in claim mode: the next attempt is anybody's, wherever the last one failed."""

from typing import Any

import pytest

from tests.ledger_rows import FALLIBLE, state_of, wait_for_row
from tests.replicas import Fleet
from tests.witness import Witness
from tickd.policy import retry_pause
from tickd.schedule import Retries
from tickd.tick import Tick, parse_instant


pytestmark = pytest.mark.chaos


def failing(retries: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return a graph of the nodes a and b in claim mode, with these retries and this input."""
    entry = {"graph": f"{FALLIBLE}:letters", "every": "1s", "mode": "claim"}
    return {**entry, "retries": retries, "input": {"log": [], "fail": "b", **given}}


def test_another_replica_tries_again_where_the_first_one_failed_and_died(fleet: Fleet, witness: Witness):
    """The failure, its pause and how often it may be tried again are the tick's, not the process's."""
    often = {"attempts": "2", "backoff": "4s", "max_backoff": "4s"}
    schedule = fleet.schedule(
        {
            "passing": failing(often, fails=1),
            "lasting": failing({"attempts": 2, "backoff": "100ms"}, fails=99),
            "unlisted": failing({"attempts": 2, "backoff": "100ms", "on": ["ConnectionError"]}, fails=1),
            "listed": failing(
                {"attempts": 2, "backoff": "100ms", "on": ["ConnectionError"]},
                fails=1,
                error="ConnectionResetError",
            ),
        }
    )
    a = fleet.start("a", schedule)
    retrying = a.wait_for("tick.retrying", graph="passing", timeout=60)
    a.kill()
    witness.bury("a", witness.now())
    at = parse_instant(retrying["fire_time"])
    b = fleet.start("b", schedule)
    b.wait_for("daemon.ready", timeout=60)
    since = witness.now()

    row = wait_for_row(witness, "passing", lambda row: row.fire_time == at and row.outcome, timeout=60)
    assert (row.outcome, row.attempt, row.failures, row.replica) == ("ran", 2, 1, "b")
    nodes = [(n.node, n.attempt, n.replica) for n in witness.nodes("passing") if n.fire_time == at]
    assert nodes == [("a", 1, "a"), ("b", 1, "a"), ("b", 2, "b")]
    assert state_of(witness, row.thread_id)["log"] == ["a", "b"]
    pause = retry_pause(Retries.model_validate(often), failures=1, names=set(), seed=str(Tick("passing", at)))
    assert pause is not None
    assert retrying["retry_in_ms"] == round(pause.total_seconds() * 1000, 1)

    lasting = wait_for_row(witness, "lasting", lambda row: row.outcome and row.fire_time > since)
    assert (lasting.outcome, lasting.error_type, lasting.attempt) == ("failed", "RuntimeError", 3)
    unlisted = wait_for_row(witness, "unlisted", lambda row: row.outcome and row.fire_time > since)
    assert (unlisted.outcome, unlisted.attempt) == ("failed", 1)
    listed = wait_for_row(witness, "listed", lambda row: row.outcome and row.fire_time > since)
    assert (listed.outcome, listed.attempt) == ("ran", 2)
    assert witness.overlaps() == []
