"""Ends: what a run came to, and what pressed it, as one outcome and the fields of one line."""

from datetime import UTC, datetime, timedelta
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from tickd.admissions import Refusal, Unfinished
from tickd.ends import End, Ran, Stopping, end_of_run, error_end, lost, milliseconds, skipped, skipped_by
from tickd.ledger import Finish
from tickd.lock import Hold, Holder, Loss
from tickd.runs import CutOff, EndKind, RunEnd
from tickd.tick import Outcome, SkipReason


TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
FACTS = {"token": 7, "attempt": 1}
LOSS = Loss("session_ended", "terminating connection")
DOWN = RuntimeError("supplier feed down")

FINISHED = RunEnd(EndKind.FINISHED, 3)
CANCELLED = RunEnd(EndKind.CANCELLED, 0)
DRAINED = RunEnd(EndKind.DRAINED, 1, next_nodes=("plan",))
RAISED = RunEnd(EndKind.RAISED, 0, error=DOWN)
INTERRUPTED = RunEnd(EndKind.INTERRUPTED, 1, interrupts=("approve?",))
CUT_OFF = RunEnd(EndKind.RAISED, 0, error=CutOff("the lock was lost"))
FAILURE = {"error_type": "RuntimeError", "error": "supplier feed down", "exc_info": DOWN}
LOST = {"cause": "session_ended", "lock_error": "terminating connection"}


def end(ended: RunEnd, **pressed: Any) -> End:
    """Return the end of a run under this pressure, with a time-out of two seconds in its entry."""
    return end_of_run(ended, Stopping(**pressed), timedelta(seconds=2), dict(FACTS))


@pytest.mark.parametrize(
    ("ended", "pressed", "outcome", "fields"),
    [
        (FINISHED, {}, "ran", {"steps": 3}),
        (RAISED, {}, "failed", FAILURE),
        (INTERRUPTED, {}, "interrupted", {"interrupts": ["approve?"]}),
        (DRAINED, {"draining": True}, "handed_off", {"next_nodes": ["plan"]}),
        (FINISHED, {"draining": True}, "ran", {"steps": 3}),
        (RAISED, {"draining": True}, "failed", FAILURE),
        (RAISED, {"displaced": True}, "failed", FAILURE),
        (INTERRUPTED, {"draining": True}, "interrupted", {"interrupts": ["approve?"]}),
        (CANCELLED, {"timed_out": True}, "timed_out", {"timeout_ms": 2000.0}),
        # A node that swallows its cancellation may even finish: it was too late all the same.
        (FINISHED, {"timed_out": True}, "timed_out", {"timeout_ms": 2000.0}),
        (CANCELLED, {"timed_out": True, "draining": True}, "timed_out", {"timeout_ms": 2000.0}),
        (FINISHED, {"loss": LOSS}, "lock_lost", LOST),
        (CANCELLED, {"loss": LOSS}, "lock_lost", LOST),
        (CUT_OFF, {"loss": LOSS}, "lock_lost", LOST),
        (RAISED, {"loss": LOSS}, "lock_lost", LOST | FAILURE),
        (CANCELLED, {"loss": LOSS, "timed_out": True, "draining": True}, "lock_lost", LOST),
    ],
)
def test_each_end_of_a_run_is_one_outcome(
    ended: RunEnd, pressed: dict[str, Any], outcome: str, fields: dict[str, Any]
):
    """A lost lock weighs more than a time-out, and that more than a stop: the graver fact must not be hidden."""
    assert end(ended, **pressed) == End(Outcome(outcome), FACTS | fields)


def test_a_run_that_did_not_stop_in_time_says_which_setting_was_too_short():
    """The reader can do something about it."""
    fields = end(CANCELLED, draining=True).fields

    assert (fields["reason"], fields["error_type"]) == ("shutdown", "Cancelled")
    assert "TICKD_DRAIN_TIMEOUT" in fields["error"]


@pytest.mark.parametrize("ended", [DRAINED, CANCELLED])
def test_a_run_that_made_room_for_a_newer_tick_failed_by_that(ended: RunEnd):
    """Not handed off: nobody is to continue it."""
    made_room = end(ended, displaced=True)

    assert made_room.outcome is Outcome.FAILED
    assert made_room.fields["reason"] == "overlap"


def test_a_run_that_finished_before_it_could_make_room_ran():
    """Its work is done, and the ledger has to say so."""
    assert end(FINISHED, displaced=True).outcome is Outcome.RAN


def test_the_earliest_moment_to_cancel_counts():
    """A time-out in the middle of a drain must not put the cancellation off, nor the other way round."""
    stopping = Stopping()
    assert stopping.cancel_at == inf

    for moment in (5.0, 3.0, 9.0):
        stopping.cancel_by(moment)

    assert stopping.cancel_at == 3.0


@pytest.mark.parametrize(
    ("ended", "finish"),
    [
        (FINISHED, Finish(Outcome.RAN, 2)),
        (RAISED, Finish(Outcome.FAILED, 2, "RuntimeError", "supplier *** down")),
    ],
)
def test_the_ledger_is_told_what_the_log_is_told(ended: RunEnd, finish: Finish):
    """`tickd history` reads the one, people the other; a secret is in neither."""

    def redact(text: str) -> str:
        return text.replace("feed", "***")

    assert Ran(end(ended), Stopping(), ended).finish(2, redact) == finish


def test_the_ledger_is_told_of_ends_that_no_graph_raised():
    """A failed tick without a reason would send its reader to the log of a replica that is long gone."""
    displaced = Ran(end(DRAINED, displaced=True), Stopping(), DRAINED).finish(2, str)

    assert (displaced.outcome, displaced.error_type) == (Outcome.FAILED, "Displaced")
    assert Ran.given_up(21).finish(22, str).error_type == "HoldersLost"
    assert Ran.skipped(SkipReason.INTERRUPTED).finish(2, str) == Finish(Outcome.SKIPPED, 2, "interrupted")


def test_a_skip_leaves_out_what_is_not_known():
    """A holder called null would look like a name."""
    assert skipped(SkipReason.LOCK_HELD, holder=None) == End(Outcome.SKIPPED, {"reason": "lock_held"})


def hold(granted: Any, holder: Holder | None = None) -> Hold[Any]:
    """Return an attempt that did not get the lock."""
    return Hold("a", held=False, granted=granted, holder=holder, session=SimpleNamespace())  # type: ignore[arg-type]  # not asked for


B = Holder("b", 4711, TEN - timedelta(hours=1))


@pytest.mark.parametrize(
    ("attempt", "fields"),
    [
        (hold(Refusal(SkipReason.ALREADY_RAN, "b")), {"reason": "already_ran", "holder": "b"}),
        (hold(Refusal(SkipReason.PAUSED, None)), {"reason": "paused"}),
        # The session may be old, from a pool of another application; the run's own begin says more.
        (
            hold(Unfinished("b", TEN, TEN), B),
            {"reason": "lock_held", "holder": "b", "holder_since": "2026-05-04T10:00:00Z"},
        ),
        (hold(None, B), {"reason": "lock_held", "holder": "b", "holder_since": "2026-05-04T09:00:00Z"}),
        # A tick of c was left unfinished, and b holds now: since b's own begin.
        (
            hold(Unfinished("c", TEN, TEN), B),
            {"reason": "lock_held", "holder": "b", "holder_since": "2026-05-04T09:00:00Z"},
        ),
        (
            hold(Unfinished("b", TEN, TEN)),
            {"reason": "lock_held", "holder": "b", "holder_since": "2026-05-04T10:00:00Z"},
        ),
        (hold(None, Holder("b", 4711, None)), {"reason": "lock_held", "holder": "b"}),
        (hold(None), {"reason": "lock_held"}),
    ],
)
def test_a_skip_says_whom_the_tick_was_left_to_and_since_when(attempt: Hold[Any], fields: dict[str, Any]):
    """The first question of whoever reads a skip is who has it."""
    assert skipped_by(attempt) == End(Outcome.SKIPPED, fields)


def test_a_lost_lock_keeps_what_the_run_came_to():
    """F14: the graph's own error is the news; that the session died beside it is the second."""
    after = lost(LOSS, End(Outcome.FAILED, FACTS | FAILURE))

    assert after == End(Outcome.LOCK_LOST, FACTS | FAILURE | LOST)


def test_a_tick_that_could_not_be_tried_says_why():
    """Messages of libpq end in a new line."""
    assert error_end(ConnectionError("no route\n"), reason="db_connect", tries=3) == End(
        Outcome.ERROR,
        {"error_type": "ConnectionError", "error": "no route", "reason": "db_connect", "tries": 3},
    )


def test_milliseconds_have_one_decimal():
    """The log's times are for people and for sums, not for physics."""
    assert milliseconds(timedelta(microseconds=1_234_567)) == 1234.6
