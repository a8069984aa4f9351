"""All replicas gone at once, killed or stopped: what becomes of the fire times that nobody fired."""

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.ledger_rows import ticks, wait_for_row, wait_until_ended
from tests.replicas import Fleet, Replica
from tests.witness import GRAPHS, Witness
from tickd.tick import instant_text, parse_instant


pytestmark = pytest.mark.chaos

EVERY = timedelta(seconds=1)
PAUSE = "UPDATE tickd.graphs SET paused_at = clock_timestamp() WHERE graph = 'paused' RETURNING 1 AS one"
ALIVE_AT = "SELECT alive_at FROM tickd.spaces"
FIRE_TIMES = """
SELECT instant
FROM generate_series(timestamptz '2026-01-01Z', %(until)s, %(every)s::interval) AS instant
WHERE instant > %(since)s
"""

POLICIES: dict[str, Callable[[datetime, datetime], tuple[str, str | None]]] = {
    "all": lambda _instant, _last: ("ran", None),
    "latest": lambda instant, last: ("ran", None) if instant == last else ("skipped", "coalesced"),
    "skip": lambda _instant, _last: ("missed", "down"),
}


def graph(**keys: str) -> dict[str, Any]:
    """Return a graph that fires each second, on the second."""
    return {"graph": f"{GRAPHS}:quick", "every": "1s", **keys}


def schedule(*, after: bool) -> dict[str, Any]:
    """Return the schedule, before all were down or after: one graph was edited meanwhile, and one renamed."""
    graphs = {
        f"{missed}_{mode}": graph(missed=missed, mode=mode)
        for missed in ("all", "latest", "skip")
        for mode in ("skip", "claim")
    }
    graphs["paused"] = graph(missed="all", mode="claim")
    graphs["edited"] = graph(missed="all", mode="claim")
    graphs["edited"]["every"] = "1300ms" if after else "1s"
    graphs["renamed_to" if after else "renamed_from"] = graph(missed="all", mode="claim")
    return graphs


WAIT_UNTIL = """
SELECT pg_sleep(GREATEST(0, extract(epoch FROM %(instant)s::timestamptz - clock_timestamp()))::float)::text AS slept
"""


@dataclass(frozen=True, slots=True)
class Down:
    """An absence: the old fleet's last word, when the last of it had ended, when the new one began; and what it found."""

    word: datetime
    gone_at: datetime
    until: datetime
    found: set[tuple[str, datetime]]

    def fire_times(self, witness: Witness) -> list[datetime]:
        """Return the fire times between the word and the new beginning."""
        rows = witness.query(FIRE_TIMES, since=self.word, until=self.until, every=EVERY)
        return [row.instant for row in rows]


def start(fleet: Fleet, names: str, *, after: bool) -> list[Replica]:
    """Start replicas on the schedule of that time and return them when they fire."""
    path = fleet.schedule(schedule(after=after))
    replicas = [fleet.start(name, path) for name in names]
    for replica in replicas:
        replica.wait_for("daemon.ready", timeout=90)
    return replicas


def go_down(fleet: Fleet, witness: Witness, how: signal.Signals) -> Down:
    """Let two replicas fire, let all of them go at once in this way, and others come."""
    old = start(fleet, "ab", after=False)
    for name in schedule(after=False):
        wait_for_row(witness, name, lambda row: row.outcome == "ran")
    witness.query(PAUSE)
    for replica in old:
        replica.signal(how)
    for replica in old:
        replica.wait()
    gone_at = witness.now()
    (row,) = witness.query(ALIVE_AT)
    found = {(row.graph, row.fire_time) for row in ticks(witness)}
    # Several ticks of each graph come due before the new ones are there, however quickly these start.
    witness.query(WAIT_UNTIL, instant=gone_at + 3 * EVERY)
    start(fleet, "cd", after=True)
    told = fleet.lines("tick.missed", reason="down")
    (until,) = {parse_instant(line["down_until"]) for line in told}
    assert {line["down_since"] for line in told} == {instant_text(row.alive_at)}
    assert row.alive_at <= gone_at < until
    return Down(row.alive_at, gone_at, until, found)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_every_fire_time_of_an_absence_is_accounted_for_by_its_graphs_policy_and_once(
    fleet: Fleet, witness: Witness, how: signal.Signals
):
    """B4: two pods roll over on the tick, nobody runs it and nobody says so."""
    down = go_down(fleet, witness, how)

    absent = down.fire_times(witness)
    assert len([instant for instant in absent if instant > down.gone_at]) >= 2
    for missed, policy in POLICIES.items():
        for mode in ("skip", "claim"):
            name = f"{missed}_{mode}"
            wait_until_ended(witness, name, until=down.until)
            # What the old fleet had written after its last word stands.
            owed = [instant for instant in absent if (name, instant) not in down.found]
            assert owed == [] or owed[-1] == absent[-1]
            check(fleet, witness, name, {instant: policy(instant, absent[-1]) for instant in owed})
    # None of these owed anything for the time before it began, or for its pause.
    for name in ("paused", "edited", "renamed_from", "renamed_to"):
        rows = [row.fire_time for row in ticks(witness, name)]
        assert [instant for instant in rows if down.gone_at < instant <= down.until] == [], name
    assert witness.overlaps() == []


def check(
    fleet: Fleet, witness: Witness, name: str, expected: dict[datetime, tuple[str, str | None]]
) -> None:
    """Compare a graph's rows, runs and lines of these fire times with what is to be of them."""
    rows = {row.fire_time: row for row in ticks(witness, name) if row.fire_time in expected}
    assert {instant: (row.outcome, row.error_type) for instant, row in rows.items()} == expected
    ran = {instant for instant, fate in expected.items() if fate[0] == "ran"}
    assert {rows[instant].mode for instant in ran} <= {"claim"}
    runs = Counter(run.fire_time for run in witness.runs(name) if run.fire_time in expected)
    assert runs == dict.fromkeys(ran, 1)
    told = [
        line["fire_time"]
        for event, reason in (("tick.missed", "down"), ("tick.skipped", "coalesced"))
        for line in fleet.lines(event, graph=name, reason=reason)
    ]
    assert sorted(told) == sorted(instant_text(instant) for instant in expected if instant not in ran)


def test_what_waited_for_a_place_when_the_last_replica_was_killed_is_accounted_for(
    fleet: Fleet, witness: Witness
):
    """It had been fired, and the fleet's word went past it: no row, no line, and for the next fleet it was before its time."""
    busy = graph(missed="skip") | {"graph": f"{GRAPHS}:slow", "input": {"seconds": 600}}
    path = fleet.schedule({"busy": busy, "quick": {**graph(missed="all"), "grace": "1m"}})
    old = fleet.start("a", path, env={"TICKD_MAX_RUNNING": "1"})
    old.wait_for("tick.started", graph="busy")
    since = witness.now()
    witness.query(WAIT_UNTIL, instant=since + 6 * EVERY)
    old.kill()
    new = fleet.start("b", path)
    new.wait_for("daemon.ready")
    until = witness.now()
    wait_for_row(witness, "quick", lambda row: row.fire_time > until)
    wait_until_ended(witness, "quick", until=until)

    due = [row.instant for row in witness.query(FIRE_TIMES, since=since, until=until, every=EVERY)]
    assert len(due) >= 6
    found = {row.fire_time for row in ticks(witness, "quick")}
    assert [instant for instant in due if instant not in found] == []
