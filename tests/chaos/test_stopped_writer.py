"""A holder that is stopped anywhere in its run, and goes on when the thread has been another's for a while."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from psycopg import AsyncConnection

from tests.fences import THREAD, admit, asking, connect, open_pool, prepare, rows, run, saver
from tests.replicas import ROOT, replica_environment
from tickd.stale_writers import StaleWriters


pytestmark = pytest.mark.chaos

TRIES = 200
# A run of the stale writer takes about as long, so that stops fall into all of its parts.
LATEST_STOP = 0.06

# What has been written since a set of checkpoints was noted, and is not of the hold that may write.
STRANGE = """
WITH new AS (
    SELECT checkpoint_id, checkpoint FROM checkpoints
    WHERE thread_id = %(thread)s AND (metadata ->> 'tickd_token')::int = %(token)s
)
SELECT 'checkpoint', checkpoint_id FROM checkpoints
WHERE thread_id = %(thread)s AND NOT checkpoint_id = ANY(%(before)s) AND checkpoint_id NOT IN (SELECT checkpoint_id FROM new)
UNION ALL
SELECT 'write', checkpoint_id || '/' || task_id || '/' || idx FROM checkpoint_writes
WHERE thread_id = %(thread)s AND NOT checkpoint_id || '/' || task_id || '/' || idx = ANY(%(before)s)
  AND checkpoint_id NOT IN (SELECT checkpoint_id FROM new)
UNION ALL
SELECT 'blob', channel || '/' || version FROM checkpoint_blobs AS b
WHERE thread_id = %(thread)s AND NOT channel || '/' || version = ANY(%(before)s)
  AND NOT EXISTS (SELECT FROM new WHERE new.checkpoint -> 'channel_versions' ->> b.channel = b.version)
"""


@asynccontextmanager
async def stale_writer(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that writes until it is told no; killed at the end, stopped or not."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.stale_writer",
        dsn,
        cwd=ROOT,
        env=replica_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def says(process: asyncio.subprocess.Process) -> str:
    """Return the process's next line."""
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


async def stop_somewhere(process: asyncio.subprocess.Process, token: int, chance: random.Random) -> None:
    """Let the process write under a token and stop it at a random moment."""
    assert process.stdin is not None
    process.stdin.write(f"{token}\n".encode())
    assert await says(process) == "begun"
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), chance.uniform(0, LATEST_STOP))
    os.kill(process.pid, signal.SIGSTOP)


async def strange_rows(
    connection: AsyncConnection[Any], token: int, before: list[tuple[str, ...]]
) -> list[Any]:
    """Return what somebody else than the holder of a token has written since then."""
    known = [key for _, _, *keys in before for key in (keys[0], "/".join(keys))]
    known += [f"{checkpoint}/{write.rsplit('/', 1)[0]}" for _, _, checkpoint, write in before]
    parameters = {"thread": THREAD, "token": token, "before": known}
    return await (await connection.execute(STRANGE, parameters)).fetchall()


async def test_a_stopped_holder_writes_nothing_after_the_next_hold(dsn: str):
    """The stop is anywhere: between runs, between super-steps, in the middle of a checkpoint's statements."""
    chance = random.Random(5)
    ends: Counter[str] = Counter()
    await prepare(dsn)
    async with (
        await connect(dsn) as connection,
        open_pool(dsn) as pool,
        stale_writer(dsn) as stale,
    ):
        for attempt in range(TRIES):
            old, new = 2 * attempt + 1, 2 * attempt + 2
            await admit(connection, old)
            await stop_somewhere(stale, old, chance)

            waiting = connection.info.backend_pid
            await StaleWriters(waiting, asking(dsn)).past(admit(connection, new))
            before = await rows(connection)
            if attempt % 2:
                # It goes on while the new holder runs, else when that has finished.
                stale.send_signal(signal.SIGCONT)
            result = await run(saver(pool, new), tickd_token=new)
            stale.send_signal(signal.SIGCONT)
            ends[await says(stale)] += 1

            assert await strange_rows(connection, new, before) == []
            found: Any = await saver(pool, new).aget_tuple({"configurable": {"thread_id": THREAD}})
            assert found.checkpoint["channel_values"] == result
            await saver(pool, new).adelete_thread(THREAD)

    # Few stops fall between the statements of one checkpoint; then the session was ended, and there is nobody to refuse.
    assert ends.total() == TRIES
    assert ends.keys() <= {"refused", "ended"}
    assert ends["refused"] > TRIES / 2
