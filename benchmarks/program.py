"""A program of the suite: a module of it, run to its end on the Python that has what it needs, whose figures are JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import peers_python


ROOT = Path(__file__).parent.parent
SECONDS = 300


class Failed(Exception):
    """What was measured did not get to its end; the first line says why, the others are of its log."""


def environment() -> dict[str, str]:
    """Return the environment of whatever is measured: nothing of the user's settings, and the code of this very tree."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TICKD_", "PG"))}
    # tickd of this very tree, not of the one that is installed: a clone measures its own code.
    return {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


def python(*, peer: bool) -> str:
    """Return the Python that has the peers installed, or the suite's own."""
    return str(peers_python()) if peer else sys.executable


def run(
    module: str, *arguments: str, peer: bool, extra: dict[str, str] | None = None, cwd: Path = ROOT
) -> str:
    """Run a module to its end and return what it printed."""
    try:
        ended = subprocess.run(
            [python(peer=peer), "-m", module, *arguments],
            env={**environment(), **(extra or {})},
            cwd=cwd,
            check=True,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not done within {SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        log = error.stderr.decode()
        raise Failed(f"{last_line(log)}\n{log[-2000:]}") from error
    return ended.stdout.decode()


def figures_of(
    module: str, *arguments: str, peer: bool, extra: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a module and return the figures that it prints last; why there are none is a figure, too."""
    try:
        told = run(module, *arguments, peer=peer, extra=extra)
    except Failed as error:
        return {"failed": str(error)}
    figures: dict[str, Any] = json.loads(last_line(told))
    return figures


def last_line(text: str) -> str:
    """Return the last line of a log that has something in it: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "without a word")
