"""The child processes of this one: started so that none outlives it, ended step by step.

A supervisor that is killed cannot clean up, so the kernel does it: on Linux each child asks for a signal at the death of
its parent (PR_SET_PDEATHSIG). A pipe that a guard process watches would also work elsewhere, but somebody has to
keep the guard alive. Each child leads a process group of its own, so that Ctrl-C at the terminal reaches this
process alone and the children are stopped in order.
"""

import asyncio
import ctypes
import os
import pwd
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO


PR_SET_PDEATHSIG = 1
# Long enough for a traceback of a deep graph on one line; the default of 64 KiB is not.
LONGEST_LINE = 16 * 2**20

Step = tuple[signal.Signals, float]


class Children:
    """The processes that are to die with this one."""

    def __init__(self) -> None:
        self._started: list[tuple[Process, signal.Signals]] = []

    async def start(
        self,
        *command: str | os.PathLike[str],
        env: Mapping[str, str],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        last_signal: signal.Signals,
        account: pwd.struct_passwd | None = None,
    ) -> Process:
        """Start a process, as another account if one is given (which takes root).

        `last_signal` is the one that ends it at once: it is sent by `kill`, and by the kernel when this process dies.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            limit=LONGEST_LINE,
            process_group=0,
            preexec_fn=_tied_to_this_process(last_signal),
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
        )
        self._started.append((process, last_signal))
        return process

    def kill(self) -> None:
        """End every child at once, with its process group."""
        for process, last_signal in self._started:
            _signal_group(process, last_signal)


async def end(process: Process, *steps: Step) -> None:
    """Send the first signal, wait its number of seconds, send the next if the process is still there, and so on.

    SIGKILL goes to the whole process group: what the process started must not be left behind without it.
    """
    for number, seconds in steps:
        if process.returncode is not None:
            return
        if number == signal.SIGKILL:
            _signal_group(process, number)
        else:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)


def _signal_group(process: Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _tied_to_this_process(number: signal.Signals) -> Callable[[], None] | None:
    """Return what the child runs between fork and exec, after it has changed its user, which would undo it."""
    if sys.platform != "linux":
        return None
    # Loaded here, because the loader takes locks that another thread may hold at the fork.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above, so no signal will come
            os._exit(1)

    return tie
