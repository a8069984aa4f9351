"""The absence: what becomes of the fire times that passed while no replica fired.

The first replica to start after all were down goes through every graph's calendar for that time and gives each fire time
a row, by the graph's `missed`: missed, coalesced into a later one, or open for whoever claims it first. What is older
than `catch_up`, or more than `max_backlog`, is told as one stretch. A row that is there already stands. A fire time
belongs to the time in which its tick was to start: jitter may have put that off past the end of the old fleet, or past
the beginning of the new one, which then fires it itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from tickd.entry import Entry
from tickd.fleet import Account, Fleet
from tickd.log import Log
from tickd.policy import Unfired, unfired
from tickd.tick import Outcome, SkipReason, Tick, instant_text, run_id


BATCH = 2000


@dataclass(frozen=True, slots=True)
class Absence:
    """A time in which no replica fired: after `since`, up to `until`."""

    since: datetime
    until: datetime


async def account_for_absence(
    fleet: Fleet,
    entries: Mapping[str, Entry],
    fires_since: Mapping[str, datetime],
    absence: Absence,
    log: Log,
) -> None:
    """Give every fire time of the absence its row and its line; call it while no other replica can begin.

    Of a graph that does not fire (it is paused) nothing is told.
    """
    rows: list[Account] = []
    for name, since in fires_since.items():
        entry = entries[name]
        found = unfired(
            entry.series.after,
            since=max(entry.started_by(absence.since), since),
            until=entry.started_by(absence.until),
            missed=entry.missed,
            catch_up=entry.catch_up,
            most=entry.max_backlog,
        )
        if found.before is not None:
            _log_stretch(log, name, found.before, absence)
        rows.extend(_rows(entry, found))
        while len(rows) >= BATCH:
            await _write(fleet, rows[:BATCH], absence, log)
            del rows[:BATCH]
    await _write(fleet, rows, absence, log)


def _rows(entry: Entry, found: Unfired) -> Iterator[Account]:
    for instants, outcome, reason in (
        (found.missed, Outcome.MISSED.value, "down"),
        (found.coalesced, Outcome.SKIPPED.value, SkipReason.COALESCED.value),
        (found.run, None, None),
    ):
        for instant in instants:
            tick = Tick(entry.name, instant)
            yield Account(tick, entry.thread_id(tick), run_id(tick), outcome, reason)


async def _write(fleet: Fleet, rows: list[Account], absence: Absence, log: Log) -> None:
    written = await fleet.account(rows)
    for row in rows:
        if row.tick not in written or row.outcome is None:
            continue
        facts = {"graph": row.tick.graph, "fire_time": instant_text(row.tick.fire_time), "reason": row.reason}
        level = "warning" if row.outcome == Outcome.MISSED.value else "info"
        getattr(log, level)(f"tick.{row.outcome}", **facts, **_bounds(absence))


def _log_stretch(log: Log, graph: str, stretch: tuple[datetime, datetime], absence: Absence) -> None:
    """Tell of fire times that are not looked at one by one: from the first of them up to an instant."""
    first, until = (instant_text(instant) for instant in stretch)
    log.warning("tick.missed", graph=graph, fire_time=first, before=until, reason="down", **_bounds(absence))


def _bounds(absence: Absence) -> dict[str, str]:
    return {"down_since": instant_text(absence.since), "down_until": instant_text(absence.until)}
