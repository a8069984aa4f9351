"""`tickd next`: when the graphs of a schedule fire, and with `--explain` why then."""

import difflib
import heapq
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from tickd.calendar import ClockChange, clock_changes
from tickd.cli.arguments import Json, ScheduleFile
from tickd.cli.output import print_json
from tickd.duration import duration_text
from tickd.errors import Unusable
from tickd.schedule import Entry, Schedule
from tickd.schedule_file import read
from tickd.tick import Tick, instant_text, parse_instant


DEFAULT_COUNT: Final = 10
FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)
LAST: Final = datetime(9000, 1, 1, tzinfo=UTC)

GraphOption = Annotated[
    list[str] | None, typer.Option(help="Only this graph; may stand several times.", show_default="all")
]
After = Annotated[str | None, typer.Option(help="Begin after this instant.", show_default="now")]
Until = Annotated[str | None, typer.Option(help="End with this instant.", show_default=False)]
Count = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many fire times, with --explain of each graph.", show_default="10; with --until all"
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="In words, with local times and every change of the clocks.")
]


def upcoming(
    file: ScheduleFile,
    *,
    graph: GraphOption = None,
    after: After = None,
    until: Until = None,
    count: Count = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Print when graphs fire next.

    Instants are written 2026-05-04T10:00:00Z, or with another offset.
    """
    now = datetime.now(UTC).replace(microsecond=0)  # noqa: TID251  # the shell reads the clock
    most = count if count is not None or until is not None else DEFAULT_COUNT
    window = Window(
        _instant("--after", after, otherwise=now), _instant("--until", until, otherwise=LAST), most
    )
    entries = _chosen(read(file, os.environ), graph)
    if explain:
        for entry in entries:
            _explain(entry, window, as_json=as_json)
    else:
        _list(entries, window, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Window:
    """Which fire times are asked for: later than `after`, no later than `until`, at most `count` unless it is None."""

    after: datetime
    until: datetime
    count: int | None

    def of(self, entry: Entry) -> Iterator[tuple[datetime, Entry]]:
        """Yield the fire times of a graph in the window."""
        for fire_time in itertools.islice(entry.series.between(self.after, self.until), self.count):
            yield fire_time, entry


def _instant(option: str, text: str | None, *, otherwise: datetime) -> datetime:
    if text is None:
        return otherwise
    try:
        instant = parse_instant(text)
    except (ValueError, OverflowError) as error:
        raise Unusable(f"{option}: {error}") from None
    if not FIRST <= instant <= LAST:
        raise Unusable(f"{option}: {text!r} is not within {FIRST.year} to {LAST.year}")
    return instant


def _chosen(schedule: Schedule, names: list[str] | None) -> list[Entry]:
    """Return the graphs asked for, disabled ones too when they are named; all that are enabled when none is."""
    if not names:
        return [entry for entry in schedule.entries.values() if entry.enabled]
    unknown = [name for name in names if name not in schedule.entries]
    if unknown:
        near = difflib.get_close_matches(unknown[0], schedule.entries, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(schedule.entries)}"
        raise Unusable(f"{schedule.path} has no graph {unknown[0]!r}; {hint}")
    return [schedule.entries[name] for name in dict.fromkeys(names)]


def _list(entries: list[Entry], window: Window, *, as_json: bool) -> None:
    merged = heapq.merge(*map(window.of, entries), key=lambda pair: (pair[0], pair[1].name))
    found = False
    for fire_time, entry in itertools.islice(merged, window.count):
        found = True
        if as_json:
            print_json({"graph": entry.name, **_tick_facts(fire_time, entry)})
        else:
            typer.echo(f"{instant_text(fire_time)}  {_local(fire_time, entry)}  {entry.name}")
    if not found and not as_json:
        typer.echo(_nothing(window))


def _tick_facts(fire_time: datetime, entry: Entry) -> dict[str, Any]:
    return {
        "fire_time": instant_text(fire_time),
        "local_time": fire_time.astimezone(entry.timezone).isoformat(),
        "timezone": entry.timezone.key,
        "start_delay_ms": entry.start_delay(Tick(entry.name, fire_time)) / timedelta(milliseconds=1),
    }


def _local(instant: datetime, entry: Entry) -> str:
    return f"{instant.astimezone(entry.timezone):%a %Y-%m-%d %H:%M:%S %z}"


def _nothing(window: Window) -> str:
    end = "" if window.until == LAST else f" until {instant_text(window.until)}"
    return f"nothing fires after {instant_text(window.after)}{end}"


def _explain(entry: Entry, window: Window, *, as_json: bool) -> None:
    fire_times = [fire_time for fire_time, _ in window.of(entry)]
    last = fire_times[-1] if fire_times else min(window.until, window.after + timedelta(days=366))
    changes = list(clock_changes(entry.timezone, window.after, last))
    if as_json:
        print_json(
            {
                "graph": entry.name,
                "enabled": entry.enabled,
                "timezone": entry.timezone.key,
                "triggers": _triggers(entry),
                "fire_times": [_tick_facts(fire_time, entry) for fire_time in fire_times],
                "clock_changes": [_change_facts(change, entry) for change in changes],
            }
        )
        return
    typer.echo(
        f"{entry.name}{'' if entry.enabled else ' (disabled: it does not fire)'}, in {entry.timezone.key}"
    )
    for trigger in _triggers(entry):
        typer.echo(f"  {trigger['written']}: {trigger['words']}")
    if entry.jitter:
        typer.echo(f"  each tick starts up to {duration_text(entry.jitter)} later, the same on every replica")
    # A change comes before the tick of the same instant: its clock shows the new time.
    lines = [(change.instant, 0, _change_line(change, entry)) for change in changes]
    lines += [(fire_time, 1, _local(fire_time, entry)) for fire_time in fire_times]
    for instant, _, words in sorted(lines):
        typer.echo(f"  {instant_text(instant)}  {words}")
    if not fire_times:
        typer.echo(f"  {_nothing(window)}")


def _triggers(entry: Entry) -> list[dict[str, str]]:
    """Return what makes a graph fire, as it is written and in words."""
    found = [{"written": f'cron "{cron.text}"', "words": cron.in_words()} for cron in entry.cron]
    if entry.every is not None:
        words = (
            f"Every {duration_text(entry.every)} of elapsed time, counted from {instant_text(entry.anchor)}"
        )
        found.append({"written": f"every {duration_text(entry.every)}", "words": words})
    if entry.at:
        found.append(
            {"written": "at", "words": ", ".join(instant_text(instant) for instant in sorted(set(entry.at)))}
        )
    return found


def _change_facts(change: ClockChange, entry: Entry) -> dict[str, Any]:
    return {
        "instant": instant_text(change.instant),
        "from": f"{change.wall_clock_after - change.by:%H:%M:%S}",
        "to": f"{change.wall_clock_after:%H:%M:%S}",
        "meaning": _meaning(change, entry),
    }


def _change_line(change: ClockChange, entry: Entry) -> str:
    facts = _change_facts(change, entry)
    direction = "forward" if change.by > timedelta(0) else "back"
    return f"-- clocks go {direction} from {facts['from']} to {facts['to']}: {facts['meaning']}"


def _meaning(change: ClockChange, entry: Entry) -> str:
    """Return what a change of the clocks does to a graph's fire times."""
    forward = change.by > timedelta(0)
    fixed = (
        "a time in between fires once, at the end of the gap"
        if forward
        else "a time that comes twice fires once, the first"
    )
    wild = "nothing fires in between" if forward else "what comes twice fires twice"
    meanings = {cron.text: fixed if cron.fixed else wild for cron in entry.cron}
    if len(set(meanings.values())) > 1:
        return "; ".join(f'of "{text}" {meaning}' for text, meaning in meanings.items())
    return next(iter(meanings.values()), "elapsed time goes on, nothing changes")
