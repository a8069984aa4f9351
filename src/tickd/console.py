"""One log line as people read it: from the fields of a JSON line to one line of coloured text.

`tickd run` uses it when stdout is a terminal, `tickd dev` for the lines of its replicas. It is pure: the same fields give
the same text, and nothing that a graph puts into a field can move the cursor or start a line of its own.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from tickd.tick import SkipReason


Line = Mapping[str, Any]

GRAPH_WIDTH = 12
LEVEL_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}
COMMON = {"event", "level", "timestamp", "replica", "graph", "fire_time", "exception"}
CAUSE = ("error_type", "error")
# What the sentence of a tick tells, and what only a machine wants to read.
TICK_FIELDS = {
    *("thread_id", "token", "attempt", "late_ms", "duration_ms", "steps", "timeout_ms", "interrupts"),
    *("reason", "holder", "holder_since", "grace_ms", "cause", "next_nodes", "threads", "resumed"),
    *("failed_as", "retry_in_ms", "before", "down_since", "down_until", "like_it"),
}
# What becomes of ticks that no replica was up to fire: as many lines of a kind as the absence had fire times.
UNFIRED = {"down", SkipReason.COALESCED.value}
OTHER_FIELDS = {"warning", "logger", "message", "running", "drain_timeout_ms"}
# C0, DEL, C1, the line and paragraph separators, the marks that turn the reading direction around, lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def render(line: Line, *, replica_style: str = "cyan") -> Text:
    """Return the line's text: time of day (UTC), replica, graph, and what happened, in words.

    A field that the words do not use follows as `key=value`; a traceback follows on lines of its own. A field that is
    missing or of an unexpected shape shortens the sentence and never raises.
    """
    event = str(line.get("event", ""))
    sentence = SENTENCES[event](line) if event in SENTENCES else plain(event)
    text = Text(f"{clock(line.get('timestamp'))}  ", style="dim", end="")
    text.append(f"{plain(line.get('replica', '-'))}  ", style=f"not dim {replica_style}")
    if "graph" in line:
        text.append(f"{plain(line['graph']):<{GRAPH_WIDTH}}  ", style="not dim bold")
    text.append(sentence + cause(line), style=f"not dim {style_of(event, line)}")
    told = COMMON | (TICK_FIELDS if event.startswith("tick.") else OTHER_FIELDS)
    for key in line:
        if key not in told and key not in CAUSE:
            text.append(f"  {plain(key)}={plain(line[key])}")
    if "fire_time" in line and clock(line["fire_time"]) != clock(line.get("timestamp")):
        text.append(f"  (tick of {clock(line['fire_time'])})")
    if line.get("exception"):
        for row in str(line["exception"]).rstrip("\n").split("\n"):
            text.append(f"\n          {plain(row)}")
    return text


class Fold:
    """Holds back the middle of a run of lines about ticks that nobody fired; an hour without replicas has hundreds."""

    def __init__(self) -> None:
        self._runs: dict[Any, tuple[Any, list[Line], int]] = {}

    def shown(self, line: Line) -> list[Line]:
        """Return what is to be shown for the line, at most with the last one of the run before it, or nothing yet."""
        replica = line.get("replica")
        run = None
        if line.get("reason") in UNFIRED and "before" not in line:
            run = (line.get("event"), line.get("graph"), line["reason"])
        current, last, before = self._runs.get(replica, (None, [], 0))
        if run is not None and run == current:
            like_it = {"like_it": before} if before else {}
            self._runs[replica] = (run, [{**line, **like_it}], before + 1)
            return []
        self._runs[replica] = (run, [], 0)
        return [*last, line]


def plain(value: Any) -> str:
    """Return the value as text on one line, with every control character spelled out."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(value))


def clock(instant: Any) -> str:
    """Return the time of day of an ISO 8601 text, without its fraction, or the text itself."""
    match = re.search(r"[T ](\d\d:\d\d:\d\d)", str(instant))
    return match[1] if match else plain(instant)


def span(milliseconds: Any) -> str:
    """Return a number of milliseconds as `43 ms`, `3.2 s` or `2 min 5 s`."""
    if not isinstance(milliseconds, int | float) or not math.isfinite(milliseconds):
        return plain(milliseconds)
    if abs(milliseconds) < 999.5:  # noqa: PLR2004 - what rounds to 1000 ms reads better as a second
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1000
    if abs(seconds) < 59.95:  # noqa: PLR2004 - likewise a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def style_of(event: str, line: Line) -> str:
    """Return the colour of the sentence: green for a run, dim for what is not news, else that of the level."""
    level = str(line.get("level", "info"))
    if level in LEVEL_STYLES:
        return LEVEL_STYLES[level]
    if event == "tick.ran":
        return "green"
    return "dim" if event in {"tick.started", "tick.skipped"} else ""


def started(line: Line) -> str:
    """Say that a run began or goes on, and which attempt it is when it is not the first."""
    attempt = line.get("attempt", 1)
    again = "" if attempt == 1 else f", attempt {plain(attempt)}"
    return f"{'resumed' if line.get('resumed') else 'started'}{again}"


def ran(line: Line) -> str:
    """Say how long the run took and how many super-steps it had."""
    return f"ran{within(line)}{steps(line)}"


def within(line: Line) -> str:
    """Return ` in 43 ms` where the duration is known."""
    return f" in {span(line['duration_ms'])}" if "duration_ms" in line else ""


def after(line: Line) -> str:
    """Return ` after 43 ms` where the duration is known."""
    return f" after {span(line['duration_ms'])}" if "duration_ms" in line else ""


def steps(line: Line) -> str:
    """Return `, 4 steps` where the number is known."""
    if "steps" not in line:
        return ""
    return f", {plain(line['steps'])} {'step' if line['steps'] == 1 else 'steps'}"


def cause(line: Line) -> str:
    """Return `: RuntimeError: supplier feed down`, or as much of it as the line has."""
    return "".join(f": {plain(line[key])}" for key in CAUSE if line.get(key))


def retrying(line: Line) -> str:
    """Say how the attempt ended, and when the tick is tried again."""
    pause = f" in {span(line['retry_in_ms'])}" if "retry_in_ms" in line else ""
    return f"{plain(line.get('failed_as', 'failed')).replace('_', ' ')}{after(line)}, tried again{pause}"


def queued(line: Line) -> str:
    """Say that the tick waits, and behind whom."""
    behind = f", {plain(line['holder'])} is at the graph" if line.get("holder") else ""
    return f"it waits in the backlog{behind}"


def timed_out(line: Line) -> str:
    """Say how long the run was allowed to take."""
    return f"timed out{': longer than ' + span(line['timeout_ms']) if 'timeout_ms' in line else ''}"


def interrupted(line: Line) -> str:
    """Say that the graph waits for an answer, and to what."""
    asked = line.get("interrupts")
    return f"waits for an answer{': ' + plain(asked) if asked else ''}"


def skipped(line: Line) -> str:
    """Say why this replica did not run the tick, and whom it deferred to."""
    reason = plain(line.get("reason", "no reason given"))
    return f"skipped{like_it(line)}: {SKIPS[reason](line) if reason in SKIPS else reason}"


def lock_held(line: Line) -> str:
    """Name the holder and since when, where they are known."""
    since = f" (since {clock(line['holder_since'])})" if line.get("holder_since") else ""
    return f"{plain(line.get('holder') or 'another session')} holds it{since}"


def already_ran(line: Line) -> str:
    """Name the replica that ran the tick, where it is known."""
    since = f" (at {clock(line['holder_since'])})" if line.get("holder_since") else ""
    return f"{plain(line['holder'])} ran it{since}" if line.get("holder") else "it ran already"


def missed(line: Line) -> str:
    """Say how late the tick was and how late it might have been, or that no replica was up."""
    if line.get("reason") == "down":
        before = f", and all until {clock(line['before'])}" if line.get("before") else ""
        since = f" since {clock(line['down_since'])}" if line.get("down_since") else ""
        return f"missed{like_it(line)}{before}: no replica was up{since}"
    late = f": {span(line['late_ms'])} late" if "late_ms" in line else ""
    allowed = f", {span(line['grace_ms'])} allowed" if "grace_ms" in line else ""
    why = {"no_room": "; no room to run it", "loop_blocked": "; a graph blocked the graph loop"}
    return f"missed{late}{allowed}{why.get(plain(line.get('reason')), '')}"


def like_it(line: Line) -> str:
    """Return `, like 718 before it` for the last of a run of lines whose middle was held back."""
    return f", like {plain(line['like_it'])} before it" if line.get("like_it") else ""


def lock_lost(line: Line) -> str:
    """Say why the hold ended under the run, or without the run's end in the ledger."""
    if line.get("cause") == "row_locked":
        return f"its end{after(line)} could not be recorded: another session keeps its row locked"
    why = f": {LOSSES.get(plain(line['cause']), plain(line['cause']))}" if line.get("cause") else ""
    return f"lost its lock{after(line)}{why}; the run was stopped"


def handed_off(line: Line) -> str:
    """Say before which node the run stopped."""
    nodes = line.get("next_nodes")
    if isinstance(nodes, list | tuple):
        nodes = ", ".join(map(plain, nodes))
    return f"handed off{' before ' + plain(nodes) if nodes else ''}; another replica may continue"


def abandoned(line: Line) -> str:
    """Name the replica that began the tick and is gone."""
    return f"abandoned: {plain(line.get('holder') or 'its holder')} began it and is gone"


def draining(line: Line) -> str:
    """Say for how many runs the replica waits, and how long at most."""
    if not line.get("running"):
        return "stopping: nothing runs here"
    most = f", at most {span(line['drain_timeout_ms'])}" if "drain_timeout_ms" in line else ""
    return f"stopping: waits for what runs here ({plain(line['running'])}){most}"


def warning(line: Line) -> str:
    """Give the warning itself."""
    return f"warning: {plain(line.get('warning', ''))}"


def library_message(line: Line) -> str:
    """Name the logger of a library or a graph, and give its message."""
    return f"{plain(line.get('logger', 'a library'))}: {plain(line.get('message', ''))}"


LOSSES = {
    "session_ended": "Postgres ended the session",
    "no_answer": "Postgres did not answer in time",
    "not_confirmed": "this process stood still for too long",
    "failover": "its server is not the primary any more",
    "superseded": "another replica holds the graph by now",
}

SKIPS: dict[str, Callable[[Line], str]] = {
    SkipReason.LOCK_HELD: lock_held,
    SkipReason.ALREADY_RAN: already_ran,
    SkipReason.PAUSED: lambda _: "the graph is paused",
    SkipReason.DRAINING: lambda _: "this replica is stopping",
    SkipReason.DISABLED: lambda _: "the graph is disabled",
    SkipReason.QUEUED: queued,
    SkipReason.COALESCED: lambda _: "a later tick stands for it",
    SkipReason.BACKLOG_FULL: lambda _: "too many ticks wait already",
    SkipReason.INTERRUPTED: lambda _: "an earlier run waits for an answer",
}

SENTENCES: dict[str, Callable[[Line], str]] = {
    "tick.started": started,
    "tick.retrying": retrying,
    "tick.waiting": lambda _: "waits for a node in a thread, which cannot be stopped from outside",
    "tick.ran": ran,
    "tick.failed": lambda line: f"failed{after(line)}",
    "tick.timed_out": timed_out,
    "tick.interrupted": interrupted,
    "tick.skipped": skipped,
    "tick.missed": missed,
    "tick.lock_lost": lock_lost,
    "tick.handed_off": handed_off,
    "tick.abandoned": abandoned,
    "tick.error": lambda _: "could not be tried",
    "lock.unlock_failed": lambda _: "the unlock found no lock: it had been lost before",
    "claim.expired": lambda line: (
        f"its holder let the lease run out; its session {'stays' if 'error' in line else 'was ended'}"
    ),
    "daemon.started": lambda _: "started",
    "daemon.ready": lambda _: "ready",
    "daemon.draining": draining,
    "daemon.stopped": lambda _: "stopped",
    "daemon.failed": lambda _: "failed",
    "schedule.loaded": lambda _: "schedule loaded",
    "schedule.reloaded": lambda _: "schedule loaded again",
    "schedule.rejected": lambda _: "schedule rejected",
    "schedule.warning": warning,
    "settings.warning": warning,
    "clock.skewed": lambda _: "this clock differs from the database's",
    "clock.jumped": lambda _: "this clock jumped",
    "loop.blocked": lambda _: "the event loop was blocked",
    "database.unreachable": lambda _: "database unreachable",
    "database.reachable": lambda _: "database reachable again",
    "database.migrated": lambda _: "tables created or updated",
    "database.failed_over": lambda _: "another server is the primary now",
    "retention.swept": lambda _: "removed what is older than its keep",
    "retention.stuck": lambda _: "cannot remove what is older than its keep: even one row takes too long",
    "library.message": library_message,
}
