"""Ends: what a tick came to on this replica, as the outcome and the fields of its terminal line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any

from tickd.ledger import Refusal
from tickd.lock import Hold, Loss
from tickd.log import text_of
from tickd.runs import CutOff, EndKind, RunEnd
from tickd.tick import Outcome, SkipReason, instant_text


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
    cancelled: bool = False
    gave_up: bool = False
    cancel_at: float = inf

    def cancel_by(self, moment: float) -> None:
        """Let the run be cancelled at the moment (monotonic seconds), or at an earlier one that was set before."""
        self.cancel_at = min(self.cancel_at, moment)


def end_of_run(  # noqa: PLR0911  # one return per kind of end reads best
    ended: RunEnd, stopping: Stopping, timeout: timedelta | None, facts: dict[str, Any]
) -> End:
    """Turn a run's end, and what pressed it, into the tick's end."""
    # A checkpoint that the cut-off refused is a consequence of the loss, not an error of the graph.
    failure = {} if isinstance(ended.error, CutOff) else failure_fields(ended.error)
    if stopping.loss is not None:
        return lost(stopping.loss, End(Outcome.FAILED if ended.error else Outcome.RAN, facts | failure))
    if stopping.timed_out:
        return End(Outcome.TIMED_OUT, facts | {"timeout_ms": milliseconds(timeout or timedelta(0))})
    if ended.kind is EndKind.FINISHED:
        return End(Outcome.RAN, facts | {"steps": ended.steps})
    if ended.kind is EndKind.INTERRUPTED:
        return End(Outcome.INTERRUPTED, facts | {"interrupts": list(ended.interrupts)})
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
        return skipped(SkipReason.ALREADY_RAN, holder=hold.granted.replica)
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
