"""Ends: what a tick came to on this replica, as the outcome and the fields of its terminal line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import inf
from typing import Any

from tickd.admissions import Refusal
from tickd.entry import Entry
from tickd.fence import is_refused
from tickd.ledger import Finish
from tickd.lock import Hold, Loss
from tickd.log import text_of
from tickd.policy import retry_pause
from tickd.runs import CutOff, EndKind, RunEnd
from tickd.tick import Outcome, SkipReason, Tick, instant_text


@dataclass(frozen=True, slots=True)
class End:
    """How a tick ended here: the outcome and the fields of its terminal line."""

    outcome: Outcome
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Stopping:
    """Why and by when a run has to stop; all of it may come together."""

    loss: Loss | None = None
    timed_out: bool = False
    draining: bool = False
    displaced: bool = False
    cancelled: bool = False
    gave_up: bool = False
    cancel_at: float = inf

    def cancel_by(self, moment: float) -> None:
        """Let the run be cancelled at the moment (monotonic seconds), or at an earlier one that was set before."""
        self.cancel_at = min(self.cancel_at, moment)


@dataclass(frozen=True, slots=True)
class Ran:
    """One attempt that ran: the tick's end by it, what pressed it, and how the run itself ended."""

    end: End
    stopping: Stopping
    ended: RunEnd

    def finish(self, attempt: int, redact: Callable[[str], str]) -> Finish:
        """Return what the tick's row is to say of it: what the log says, and as little of a secret."""
        fields = self.end.fields
        why = "reason" if self.end.outcome is Outcome.SKIPPED else "error_type"
        error = fields.get("error")
        return Finish(self.end.outcome, attempt, fields.get(why), None if error is None else redact(error))

    @classmethod
    def skipped(cls, reason: SkipReason) -> "Ran":
        """Return the end of a tick that was claimed and is not to be run after all."""
        return cls(skipped(reason), Stopping(), RunEnd(EndKind.FINISHED, 0))

    @classmethod
    def given_up(cls, failures: int) -> "Ran":
        """Return the end of a tick that is not run any more, because it has cost too many holders."""
        error = f"its holder was lost on {failures} attempts; it is not tried again"
        fields = {"reason": "holders_lost", "error_type": "HoldersLost", "error": error}
        return cls(End(Outcome.FAILED, fields), Stopping(), RunEnd(EndKind.FINISHED, 0))

    @property
    def cut_short(self) -> bool:
        """Say whether it was the stop of the replica that ended the run, and not at a super-step."""
        shutdown = self.end.fields.get("reason") == "shutdown"
        return self.stopping.draining and (shutdown or self.stopping.gave_up)

    def handed_off(self) -> "Ran":
        """Return the same attempt as one that another replica is to continue."""
        fields = {name: self.end.fields[name] for name in ("token", "attempt", "duration_ms", "late_ms")}
        return replace(self, end=End(Outcome.HANDED_OFF, fields))

    def retry_pause(self, entry: Entry, tick: Tick, failures: int) -> timedelta | None:
        """Return the pause after which the tick is tried again by its entry's `retries`; None when this was its end."""
        if self.end.outcome not in (Outcome.FAILED, Outcome.TIMED_OUT) or self.stopping.displaced:
            return None
        error = self.ended.error
        names = (
            {self.end.outcome.value, *(kind.__name__ for kind in type(error).__mro__)}
            if error
            else {self.end.outcome.value}
        )
        return retry_pause(entry.retries, failures=failures, names=names, seed=str(tick))


def end_of_run(ended: RunEnd, stopping: Stopping, timeout: timedelta | None, facts: dict[str, Any]) -> End:
    """Turn a run's end, and what pressed it, into the tick's end."""
    # A checkpoint that the cut-off refused is a consequence of the loss, not an error of the graph.
    failure = {} if isinstance(ended.error, CutOff) else failure_fields(ended.error)
    if stopping.loss is not None:
        return lost(stopping.loss, End(Outcome.FAILED if ended.error else Outcome.RAN, facts | failure))
    if ended.error is not None and is_refused(ended.error):
        # Postgres knows of a newer hold than this process does.
        return lost(Loss("fenced", text_of(ended.error).strip()), End(Outcome.FAILED, facts))
    if stopping.timed_out:
        return End(Outcome.TIMED_OUT, facts | {"timeout_ms": milliseconds(timeout or timedelta(0))})
    return _end_by_kind(ended, stopping, facts, failure)


def _end_by_kind(ended: RunEnd, stopping: Stopping, facts: dict[str, Any], failure: dict[str, Any]) -> End:
    if ended.kind is EndKind.FINISHED:
        return End(Outcome.RAN, facts | {"steps": ended.steps})
    if ended.kind is EndKind.INTERRUPTED:
        return End(Outcome.INTERRUPTED, facts | {"interrupts": list(ended.interrupts)})
    if stopping.displaced and ended.kind in (EndKind.DRAINED, EndKind.CANCELLED):
        reason = "a newer tick of the graph took its place (overlap: cancel)"
        return End(Outcome.FAILED, facts | {"reason": "overlap", "error_type": "Displaced", "error": reason})
    if ended.kind is EndKind.DRAINED:
        return End(Outcome.HANDED_OFF, facts | {"next_nodes": list(ended.next_nodes)})
    if stopping.draining and ended.kind is EndKind.CANCELLED:
        reason = "the replica was stopped, and the run did not end within TICKD_DRAIN_TIMEOUT"
        return End(Outcome.FAILED, facts | {"reason": "shutdown", "error_type": "Cancelled", "error": reason})
    return End(Outcome.FAILED, facts | failure)


def failure_fields(error: BaseException | None) -> dict[str, Any]:
    """Return the fields that tell an error, none for None."""
    if error is None:
        return {}
    return {"error_type": type(error).__name__, "error": text_of(error), "exc_info": error}


def lost(loss: Loss, end: End) -> End:
    """Return the end of a run whose hold ended under it; what the run itself came to stays in the line."""
    return End(Outcome.LOCK_LOST, {**end.fields, "cause": loss.cause, "lock_error": loss.error})


def skipped(reason: SkipReason, **fields: Any) -> End:
    """Return a skip; fields that are None are left out."""
    return End(
        Outcome.SKIPPED, {"reason": reason.value, **{k: v for k, v in fields.items() if v is not None}}
    )


def skipped_by(hold: Hold[Any]) -> End:
    """Return the skip of an attempt that was not granted, with whom it was left to."""
    if isinstance(hold.granted, Refusal):
        return skipped(hold.granted.reason, holder=hold.granted.replica)
    running = hold.granted
    holder = hold.holder.replica if hold.holder else (running and running.replica)
    if running is not None and running.replica == holder:
        since = running.since
    else:
        # Without a running tick of the holder's, its session's age says the most there is.
        since = hold.holder.since if hold.holder else None
    return skipped(SkipReason.LOCK_HELD, holder=holder, holder_since=since and instant_text(since))


def error_end(error: BaseException, **fields: Any) -> End:
    """Return the end of a tick that could not even be tried."""
    return End(Outcome.ERROR, {"error_type": type(error).__name__, "error": text_of(error).strip(), **fields})


def milliseconds(duration: timedelta) -> float:
    """Return the duration in milliseconds, to a tenth, as log fields have it."""
    return round(duration.total_seconds() * 1000, 1)
