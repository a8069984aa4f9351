"""One log line as people read it."""

from collections.abc import Mapping

import pytest
from rich.console import Console

from tickd.console import SENTENCES, SKIPS, Fold, render, span
from tickd.log import EVENTS
from tickd.tick import Outcome, SkipReason


TICK = {
    "level": "info",
    "timestamp": "2026-05-04T12:00:05.412345Z",
    "replica": "b",
    "graph": "restock_plan",
    "fire_time": "2026-05-04T12:00:05Z",
}
DAEMON = {"level": "info", "timestamp": "2026-05-04T12:00:05.412345Z", "replica": "b"}

TICKS: dict[str, tuple[dict[str, object], str]] = {
    "tick.started": (
        {"thread_id": "restock_plan/x", "token": 7, "attempt": 2, "late_ms": 3},
        "started, attempt 2",
    ),
    "tick.retrying": (
        {"failed_as": "timed_out", "retry_in_ms": 1500, "duration_ms": 40, "error_type": "E", "error": "x"},
        "timed out after 40 ms, tried again in 1.5 s: E: x",
    ),
    "tick.waiting": (
        {"reason": "sync_node", "threads": 1},
        "waits for a node in a thread, which cannot be stopped from outside",
    ),
    "tick.ran": (
        {"token": 7, "attempt": 1, "duration_ms": 43, "late_ms": 3, "steps": 4},
        "ran in 43 ms, 4 steps",
    ),
    "tick.failed": (
        {"duration_ms": 1500, "error_type": "RuntimeError", "error": "supplier feed down"},
        "failed after 1.5 s: RuntimeError: supplier feed down",
    ),
    "tick.timed_out": ({"timeout_ms": 600_000, "duration_ms": 600_002}, "timed out: longer than 10 min 0 s"),
    "tick.interrupted": ({"interrupts": ["approve?"]}, "waits for an answer: ['approve?']"),
    "tick.skipped": (
        {"reason": "lock_held", "holder": "a", "holder_since": "2026-05-04T12:00:05.01Z"},
        "skipped: a holds it (since 12:00:05)",
    ),
    "tick.missed": (
        {"late_ms": 31_000, "grace_ms": 30_000, "reason": "no_room"},
        "missed: 31.0 s late, 30.0 s allowed; no room to run it",
    ),
    "tick.lock_lost": (
        {"cause": "session_ended", "duration_ms": 40},
        "lost its lock after 40 ms: Postgres ended the session; the run was stopped",
    ),
    "tick.handed_off": (
        {"next_nodes": ["plan", "write"]},
        "handed off before plan, write; another replica may continue",
    ),
    "tick.abandoned": ({"holder": "a"}, "abandoned: a began it and is gone"),
    "tick.error": (
        {"error_type": "OperationalError", "error": "connection refused"},
        "could not be tried: OperationalError: connection refused",
    ),
}
REASONS: dict[str, tuple[dict[str, object], str]] = {
    "lock_held": ({}, "another session holds it"),
    "already_ran": ({"holder": "c", "holder_since": "2026-05-04T12:00:05.01Z"}, "c ran it (at 12:00:05)"),
    "paused": ({}, "the graph is paused"),
    "draining": ({}, "this replica is stopping"),
    "disabled": ({}, "the graph is disabled"),
    "queued": ({"holder": "c"}, "it waits in the backlog, c is at the graph"),
    "coalesced": ({}, "a later tick stands for it"),
    "backlog_full": ({}, "too many ticks wait already"),
    "interrupted": ({}, "an earlier run waits for an answer"),
}
OTHERS = {
    "lock.unlock_failed": "the unlock found no lock: it had been lost before",
    "claim.expired": "its holder let the lease run out; its session was ended",
    "daemon.started": "started",
    "daemon.ready": "ready",
    "daemon.draining": "stopping: nothing runs here",
    "daemon.stopped": "stopped",
    "daemon.failed": "failed",
    "schedule.loaded": "schedule loaded",
    "schedule.reloaded": "schedule loaded again",
    "schedule.rejected": "schedule rejected",
    "schedule.warning": "warning: ",
    "settings.warning": "warning: ",
    "clock.skewed": "this clock differs from the database's",
    "clock.jumped": "this clock jumped",
    "loop.blocked": "the event loop was blocked",
    "database.unreachable": "database unreachable",
    "database.reachable": "database reachable again",
    "database.migrated": "tables created or updated",
    "database.failed_over": "another server is the primary now",
    "retention.swept": "removed what is older than its keep",
    "retention.stuck": "cannot remove what is older than its keep: even one row takes too long",
    "library.message": "a library: ",
}


@pytest.mark.parametrize("event", TICKS)
def test_each_tick_line_names_time_replica_graph_and_says_what_happened(event):
    """The line must be read without the reference page at hand."""
    fields, sentence = TICKS[event]

    assert render({**TICK, "event": event, **fields}).plain == f"12:00:05  b  restock_plan  {sentence}"


@pytest.mark.parametrize("reason", REASONS)
def test_each_skip_says_why_and_whom_it_deferred_to(reason):
    """A skip is work that did not happen: its reason is the news."""
    fields, words = REASONS[reason]
    line = {**TICK, "event": "tick.skipped", "reason": reason, **fields}

    assert render(line).plain == f"12:00:05  b  restock_plan  skipped: {words}"


@pytest.mark.parametrize("event", OTHERS)
def test_each_other_event_has_a_sentence_and_keeps_its_fields(event):
    """Fields of lifecycle events are for people as well."""
    line = {**DAEMON, "event": event, "late_ms": 12}

    assert render(line).plain == f"12:00:05  b  {OTHERS[event]}  late_ms=12"


def test_every_event_outcome_and_reason_has_its_words():
    """A new outcome or reason must not reach a terminal as a bare identifier."""
    assert {f"tick.{outcome}" for outcome in Outcome} | {
        "tick.started",
        "tick.waiting",
        "tick.retrying",
    } == TICKS.keys()
    assert set(SkipReason) == REASONS.keys() == SKIPS.keys()
    assert TICKS.keys() | OTHERS.keys() == SENTENCES.keys() == EVENTS


@pytest.mark.parametrize("event", [*TICKS, *OTHERS])
def test_a_line_without_its_fields_is_still_a_sentence(event):
    """A replica of another version may leave fields out; its lines must not break the terminal."""
    assert "{" not in render({"event": event}).plain


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"event": "library.message", "logger": "table_health", "message": "bloat"}, "table_health: bloat"),
        ({"event": "settings.warning", "warning": "TICKD_X is set"}, "warning: TICKD_X is set"),
        (
            {"event": "daemon.draining", "running": 2, "drain_timeout_ms": 5000},
            "stopping: waits for what runs here (2), at most 5.0 s",
        ),
        ({"event": "of another version", "size": 3}, "of another version  size=3"),
    ],
)
def test_a_line_that_is_no_tick_tells_what_it_brings(fields, sentence):
    """What libraries, graphs and the daemon say is for people as well."""
    assert render({**DAEMON, **fields}).plain == f"12:00:05  b  {sentence}"


def test_a_session_that_stays_is_not_said_to_have_been_ended():
    """Whoever reads it is the one who has to end that session."""
    line = {"event": "claim.expired", "graph": "restock_plan", "error": "permission denied"}

    assert "its session stays" in render({**DAEMON, **line}).plain


def test_a_field_the_words_do_not_know_follows_them():
    """Nothing that an operator was sent is lost on the way to the terminal."""
    line = {**TICK, "event": "tick.ran", "duration_ms": 43, "shade": "blue"}

    assert render(line).plain.endswith("ran in 43 ms  shade=blue")


def test_a_tick_is_named_when_its_line_comes_in_another_second():
    """Three lines belong to one tick; when the times differ, the fire time says so."""
    line = {**TICK, "event": "tick.ran", "fire_time": "2026-05-04T12:00:00Z"}

    assert render(line).plain.endswith("ran  (tick of 12:00:00)")


def test_a_traceback_follows_on_lines_of_its_own():
    """A traceback on one line cannot be read."""
    line = {**TICK, "event": "tick.failed", "exception": "Traceback\n  File x\nRuntimeError: no"}

    rows = render(line).plain.split("\n")[1:]

    assert rows == ["          Traceback", "            File x", "          RuntimeError: no"]


def test_no_field_can_move_the_cursor_or_start_a_line():
    """A graph's error text comes from anywhere, and would otherwise forge lines or clear the screen."""
    evil = "x\n12:00:06  a  fine\x1b[2J\x9b2J\u2028y\u202ez\x7f\ud800"
    line = {**TICK, "event": "tick.failed", "graph": evil, "error": evil, "exception": evil, evil: evil}

    text = render(line).plain

    assert not set("\x1b\x9b\u2028\u202e\x7f\ud800") & set(text)
    assert len(text.split("\n")) == 3
    assert "x\\n12:00:06  a  fine\\x1b[2J" in text


def test_square_brackets_in_a_field_are_text():
    """Rich reads `[red]` as markup; an error that contains a list must come out whole."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render({**TICK, "event": "tick.failed", "error": "[red]no[/red] [0]"}), soft_wrap=True)

    assert "failed: [red]no[/red] [0]\n" in capture.get()


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0 ms"),
        (43.4, "43 ms"),
        (999.6, "1.0 s"),
        (59_960, "1 min 0 s"),
        (125_000, "2 min 5 s"),
        ("?", "?"),
    ],
)
def test_a_duration_has_the_unit_of_its_size(milliseconds, words):
    """`600002 ms` has to be counted; `10 min 0 s` is read."""
    assert span(milliseconds) == words


def test_a_row_that_stays_locked_is_not_told_as_a_stopped_run():
    """The run came to its end; only its row is missing."""
    line = {**TICK, "event": "tick.lock_lost", "cause": "row_locked", "duration_ms": 40}

    words = "its end after 40 ms could not be recorded: another session keeps its row locked"
    assert render(line).plain.endswith(words)


def test_a_tick_that_passed_while_no_replica_was_up_says_so():
    """Lateness is one thing; that everything was down is another, and needs another remedy."""
    line = {**TICK, "event": "tick.missed", "reason": "down", "down_since": "2026-05-04T11:00:00Z"}

    assert render(line).plain.endswith("missed: no replica was up since 11:00:00")


def test_the_level_gives_the_colour():
    """Red is for what went wrong, and only for that."""
    failed = render({**TICK, "event": "tick.failed", "level": "error"})
    ran = render({**TICK, "event": "tick.ran"})

    assert "not dim red" in {str(part.style) for part in failed.spans}
    assert "not dim green" in {str(part.style) for part in ran.spans}


def unfired(second: int, **fields: object) -> dict[str, object]:
    """Return the line of a tick that no replica was up to fire."""
    down = {"event": "tick.missed", "reason": "down", "down_since": "2026-05-04T11:00:00Z"}
    return TICK | down | {"fire_time": f"2026-05-04T12:00:0{second}Z"} | fields


def told(*lines: Mapping[str, object]) -> list[str]:
    """Return the sentences that a reader gets to see."""
    fold = Fold()
    return [
        render(one).plain.split("restock_plan  ")[-1].split("  (")[0]
        for line in lines
        for one in fold.shown(line)
    ]


READY = DAEMON | {"event": "daemon.ready"}
MISSED = "missed: no replica was up since 11:00:00"


def test_of_many_ticks_that_nobody_fired_the_first_and_the_last_are_shown():
    """An hour of a graph that is due each five seconds was 720 lines, before anything that runs."""
    lines = told(*(unfired(second) for second in range(5)), READY)

    assert lines == [
        MISSED,
        "missed, like 3 before it: no replica was up since 11:00:00",
        "12:00:05  b  ready",
    ]


def test_two_ticks_that_nobody_fired_are_two_lines():
    """Nothing lies between them."""
    assert told(unfired(1), unfired(2), READY) == [MISSED, MISSED, "12:00:05  b  ready"]


def test_ticks_that_nobody_fired_are_told_for_each_graph_and_each_reason():
    """A run of lines ends where they are about something else."""
    coalesced = {"event": "tick.skipped", "reason": "coalesced"}
    first = [unfired(second) for second in range(3)]
    second = [unfired(second, **coalesced) for second in range(4)]

    assert told(*first, *second, READY) == [
        MISSED,
        "missed, like 1 before it: no replica was up since 11:00:00",
        "skipped: a later tick stands for it",
        "skipped, like 2 before it: a later tick stands for it",
        "12:00:05  b  ready",
    ]


def test_another_replicas_lines_do_not_end_a_run_of_them():
    """The lines of several replicas come in one stream."""
    other = READY | {"replica": "c"}

    assert told(unfired(1), unfired(2), other, unfired(3), READY) == [
        MISSED,
        "12:00:05  c  ready",
        "missed, like 1 before it: no replica was up since 11:00:00",
        "12:00:05  b  ready",
    ]


def test_a_tick_that_a_replica_itself_missed_is_shown_each_time():
    """Those are news."""
    late = {"reason": "late", "late_ms": 31_000, "grace_ms": 30_000}
    lines = told(*(unfired(second, **late) for second in range(4)))

    assert lines == ["missed: 31.0 s late, 30.0 s allowed"] * 4
