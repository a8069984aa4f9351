"""The pool of connections that are not locks, with connections that end while they lie idle."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tickd.pool import Pool


END_ALL = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'pooled' AND datname = current_database()
"""
STILL_THERE = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pooled' AND datname = current_database()"
)


def pool_of(dsn: str, *, patience: timedelta) -> Pool:
    """Return a pool of at most five connections that asks none of them without need."""

    async def parameters() -> dict[str, object]:
        return {**conninfo_to_dict(dsn), "application_name": "pooled", "autocommit": True}

    return Pool(
        "test",
        parameters,
        minimum=1,
        maximum=5,
        patience=patience,
        check_within=timedelta(seconds=5),
        trusted_for=timedelta(minutes=1),
    )


async def fill(pool: Pool) -> None:
    """Have all five connections open and idle."""
    async with AsyncExitStack() as lent:
        for _ in range(5):
            await lent.enter_async_context(pool.connection())


@pytest.mark.usefixtures("log")
async def test_after_a_restart_the_first_loan_does_not_wait_for_each_dead_connection(
    database: Database, onlooker: Onlooker, book: Logbook
):
    """The library's own check pauses for 0, 1, 2, 4 seconds from one dead connection to the next.

    Nor is each of them a line of the log.
    """
    async with pool_of(database.dsn, patience=timedelta(seconds=5)) as pool:
        await fill(pool)
        onlooker.rows(END_ALL)
        await onlooker.until(lambda: not onlooker.value(STILL_THERE))

        async with pool.connection() as connection:
            assert await (await connection.execute("SELECT 1")).fetchone() == (1,)

        assert pool.get_stats()["returns_bad"] == 5
        assert book.find("library.message") == []


async def test_a_loan_ends_with_the_error_when_even_new_connections_end_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """Every one of them costs the server a fork, so this must not go on for as long as the patience lasts."""
    tries = 0

    async def fail(_: object) -> None:
        nonlocal tries
        tries += 1
        raise psycopg.OperationalError("terminating connection")

    async with pool_of(database.dsn, patience=timedelta(minutes=1)) as pool:
        monkeypatch.setattr(pool, "_check_alive", fail)
        with pytest.raises(psycopg.OperationalError, match="terminating"):
            async with asyncio.timeout(20), pool.connection():
                pass
    assert tries == 6


async def test_a_cancelled_check_costs_the_pool_no_connection(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """A slot that is lost with each cancelled run would starve the replica in the end."""
    checking = asyncio.Event()

    async def wait(_: object) -> None:
        checking.set()
        await asyncio.Event().wait()

    async with pool_of(database.dsn, patience=timedelta(seconds=20)) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(pool, "_check_alive", wait)
            for _ in range(6):
                checking.clear()
                borrower = asyncio.create_task(pool.getconn())
                async with asyncio.timeout(20):
                    await checking.wait()
                borrower.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await borrower
        await fill(pool)
