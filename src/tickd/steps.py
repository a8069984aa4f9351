"""Steps: how many super-steps a run took, told from the checkpoints that it read and wrote."""

from collections.abc import Mapping
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple


# LangGraph's number of the step before the first: a new thread's input is saved as step -1.
BEFORE_A_THREAD = -2
# The pseudo-node that hands a state graph's input to its first nodes, in a super-step of its own.
START = "__start__"


class StepCount:
    """Counts the super-steps of one run, subgraphs' left out; right in every durability mode.

    LangGraph numbers a thread's checkpoints: the input takes a number, the pseudo-node `__start__` takes one, and so
    does each super-step. With durability `exit` only the last checkpoint is ever seen, so the numbers are compared with
    those of the checkpoint from which the run set out.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._step = BEFORE_A_THREAD
        self._started: dict[str, Any] = {}
        self._run_id: object = None

    def set_out_from(self, found: CheckpointTuple | None) -> None:
        """Note the checkpoint that the run found when it began; None for a new thread."""
        if found is None:
            self._step, self._started, self._run_id = BEFORE_A_THREAD, {}, None
            return
        self._step = found.metadata.get("step", BEFORE_A_THREAD)
        # A copy, for LangGraph goes on to work in the very dict that it was given.
        self._started = dict(found.checkpoint["versions_seen"].get(START, {}))
        self._run_id = found.metadata.get("run_id")

    def add(self, checkpoint: Mapping[str, Any], metadata: Mapping[str, Any], run_id: object) -> None:
        """Count what led to a checkpoint that the run writes; `run_id` is the one its metadata will have."""
        gained = metadata["step"] - self._step
        if metadata.get("source") != "loop":
            # An input, a fork or an update: takes a number, and no node has run.
            gained = 0
        elif gained > 1 and (run_id is None or run_id != self._run_id):
            # Several at once means that the checkpoints between were not saved; a run of its own began with an input.
            gained -= 1
        started = dict(checkpoint["versions_seen"].get(START, {}))
        if gained and started != self._started:
            gained -= 1
        self.steps += gained
        self._step, self._started, self._run_id = metadata["step"], started, run_id
