"""A process that runs a graph on one thread, again and again, under the token it was told, until that is over.

It is told a token per line of stdin, and answers with a line when it begins and a line when it has been stopped:
`refused` by the guard, or `ended` with its session.
"""

import asyncio
import logging
import sys
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

from tests.fences import open_pool, run, saver
from tickd.fence import is_refused


async def run_until_stopped(pool: AsyncConnectionPool[Any], token: int) -> str:
    """Run under a token until Postgres says no, and return how it said so."""
    while True:
        try:
            await run(saver(pool, token), steps=5, tickd_token=token)
        except psycopg.OperationalError:
            return "ended"
        except psycopg.DatabaseError as error:
            if not is_refused(error):
                raise
            return "refused"


def say(word: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main(dsn: str) -> None:
    """Serve tokens from stdin."""
    async with open_pool(dsn) as pool:
        while line := await asyncio.to_thread(sys.stdin.readline):
            say("begun")
            say(await run_until_stopped(pool, int(line)))


if __name__ == "__main__":
    # A pipeline that breaks off is what this is about, and no news.
    logging.disable()
    asyncio.run(main(sys.argv[1]))
