"""A killed holder says nothing, so the others say it: once, with who it was and since when."""

import pytest

from tests.holds import outcomes
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos


def test_what_a_killed_holder_left_is_named_once_over_all_replicas(fleet: Fleet, witness: Witness):
    """Three alarms for one loss, or none, and nobody trusts the alarm."""
    schedule = fleet.schedule(
        {
            "restock": {"graph": f"{GRAPHS}:slow", "every": "1s", "input": {"seconds": 60}},
            "pack_audit": {"graph": f"{GRAPHS}:quick", "every": "1s"},
        }
    )
    for name in "abcd":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    node = witness.wait_for_begin("restock", "slow")
    killed = fleet.named(node.replica)
    started = killed.wait_for("tick.started", graph="restock")
    others = [replica for replica in fleet.replicas if replica is not killed]

    killed.kill()
    at = witness.now()
    following = witness.wait_for_begin("restock", "slow", after=node.id)
    witness.bury(killed.name, at)
    # Each of the others has swept once more by then, and each could have said it again.
    for replica in others:
        replica.wait_for("tick.skipped", graph="pack_audit", reason="lock_held", timeout=5)
        replica.wait_for_terminal(len(replica.terminal_lines("pack_audit")) + 5, graph="pack_audit")

    # It may have been at a tick of the other graph as well.
    ticks = [(line["graph"], line["fire_time"], line["holder"]) for line in fleet.lines("tick.abandoned")]
    assert len(set(ticks)) == len(ticks)
    assert {holder for _, _, holder in ticks} == {killed.name}
    (abandoned,) = fleet.lines("tick.abandoned", graph="restock")
    assert abandoned["fire_time"] == started["fire_time"]
    assert (abandoned["holder"], abandoned["token"], abandoned["attempt"]) == (killed.name, node.token, 1)
    since = parse_instant(abandoned["holder_since"])
    assert parse_instant(started["fire_time"]) <= since <= node.began
    row = next(row for row in outcomes(witness, "restock") if row.fire_time == node.fire_time)
    assert (row.replica, row.outcome) == (killed.name, "abandoned")
    assert following.replica != killed.name
    assert witness.overlaps() == []
