"""Graphs that say something on every channel that a log could be spoilt by."""

import asyncio
import logging
import os
import subprocess
import sys
import warnings
from typing import Any

from langchain_core.runnables import RunnableConfig

from tests.graphs.witnessed import State, one_node


class Unprintable:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


async def _fail_unseen() -> None:
    raise LookupError("nobody\nretrieves this")


async def _noisy(_state: State, config: RunnableConfig) -> dict[str, Any]:  # noqa: ARG001  # LangGraph's signature
    print("a print\nof two lines")  # noqa: T201  # the noise
    sys.stdout.write("no newline at the end")
    os.write(1, b"straight to the descriptor \xff\n")
    subprocess.run(["sh", "-c", "echo from a child"], check=True)  # noqa: ASYNC221  # the noise again
    logging.getLogger("apscheduler.test").error(
        "a library's\r\nlines\u2028and a lone \ud800 %s", Unprintable()
    )
    logging.getLogger("psycopg.pool").warning("arguments that do not fit: %d %d", 1)  # noqa: PLE1206  # the noise
    logging.getLogger("langgraph").error("with a traceback", exc_info=ValueError("of\ntwo lines"))
    warnings.warn("a warning\nof two lines", RuntimeWarning, stacklevel=1)
    task = asyncio.ensure_future(_fail_unseen())
    await asyncio.wait({task})
    return {}


async def _nan(_state: State, config: RunnableConfig) -> dict[str, Any]:  # noqa: ARG001  # LangGraph's signature
    raise ValueError(float("nan"), Unprintable(), b"\xff", {"key": float("inf")})


noisy = one_node("noisy", _noisy)
nan = one_node("nan", _nan)
