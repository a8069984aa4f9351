"""The pool of connections that are not locks, with connections that end while they lie idle."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import PoolTimeout
from psycopg_pool.base import AttemptWithBackoff

from tests.cluster import Cluster
from tests.database import Database
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.proxy import Proxy
from tickd.pool import Pool


END_ALL = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'pooled' AND datname = current_database()
"""
STILL_THERE = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pooled' AND datname = current_database()"
)


class Attempts:
    """How often a pool has begun to open a connection."""

    def __init__(self) -> None:
        self.count = 0
        self._more = asyncio.Condition()

    async def note(self) -> None:
        """Count one more."""
        async with self._more:
            self.count += 1
            self._more.notify_all()

    async def reach(self, count: int) -> None:
        """Wait until there were so many."""
        async with asyncio.timeout(30), self._more:
            await self._more.wait_for(lambda: self.count >= count)


def pool_of(
    dsn: str,
    *,
    patience: timedelta,
    check_within: timedelta = timedelta(seconds=5),
    attempts: Attempts | None = None,
    **given: Any,
) -> Pool:
    """Return a pool of at most five connections that asks none of them without need."""

    async def parameters() -> dict[str, Any]:
        if attempts is not None:
            await attempts.note()
        return {**conninfo_to_dict(dsn), "application_name": "pooled", "autocommit": True, **given}

    return Pool(
        "test",
        parameters,
        minimum=1,
        maximum=5,
        patience=patience,
        check_within=check_within,
        trusted_for=timedelta(minutes=1),
    )


@asynccontextmanager
async def outage(pool: Pool, cluster: Cluster) -> AsyncIterator[None]:
    """Stop the server under the pool, whose five connections are idle then, and start it at the end of the block."""
    await fill(pool)
    await asyncio.to_thread(cluster.stop, "fast")
    yield
    await asyncio.to_thread(cluster.start)


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

        # A dead one is taken back by one of three tasks, which may all be opening others at this moment. In the place of each
        # there is another one only after that.
        await fill(pool)
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


# An outage


async def test_after_an_outage_the_first_loan_does_not_wait_for_as_long_again(
    private_cluster: Cluster, private_database: Database, monkeypatch: pytest.MonkeyPatch
):
    """The library waits twice as long after each attempt that fails, and a loan starts none while it waits."""
    # As if it had been away for a minute.
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 60.0)
    async with pool_of(private_database.dsn, patience=timedelta(seconds=10)) as pool:
        async with outage(pool, private_cluster):
            with pytest.raises(PoolTimeout):
                await pool.getconn(0.3)

        async with pool.connection() as connection:
            assert await (await connection.execute("SELECT 1")).fetchone() == (1,)


@pytest.mark.usefixtures("log")
async def test_as_long_as_anybody_waits_a_connection_is_tried_for_and_not_in_a_hurry(
    private_cluster: Cluster, private_database: Database, book: Logbook
):
    """Checkpoints wait for half a minute; a server that comes up is not to be met by a storm, nor is each a line."""
    attempts = Attempts()
    async with pool_of(private_database.dsn, patience=timedelta(minutes=1), attempts=attempts) as pool:
        async with outage(pool, private_cluster):
            before, began = attempts.count, time.monotonic()
            waiting = asyncio.create_task(pool.getconn())
            # Five had been open, and each of them is given up with its third attempt.
            await attempts.reach(before + 3 * 5 + 3)
            assert time.monotonic() - began > 2
            assert not waiting.done()
            assert len(book.find("library.message")) == 1

        async with asyncio.timeout(10):
            await pool.putconn(await waiting)


async def test_all_who_waited_through_an_outage_share_the_connections_there_may_be(
    private_cluster: Cluster, private_database: Database
):
    """What the server can serve is counted, and every replica comes back at the same moment."""
    pids: set[int] = set()
    there: set[Any] = set()

    async def borrow(pool: Pool) -> None:
        async with pool.connection() as connection:
            pids.add(connection.info.backend_pid)
            there.update(await (await connection.execute(STILL_THERE)).fetchall())

    attempts = Attempts()
    async with pool_of(private_database.dsn, patience=timedelta(minutes=1), attempts=attempts) as pool:
        async with asyncio.TaskGroup() as waiting, outage(pool, private_cluster):
            before = attempts.count
            for _ in range(30):
                waiting.create_task(borrow(pool))
            await attempts.reach(before + 3 * 5 + 2)
        assert 1 <= len(pids) <= 5
        assert max(there) <= (5,)
        await fill(pool)


@pytest.mark.parametrize(
    ("within", "given"), [(1, {}), (3600, {"connect_timeout": 2})], ids=["the pool's own", "the DSN's"]
)
async def test_a_server_that_says_nothing_does_not_keep_an_attempt(
    database: Database, within: float, given: dict[str, Any]
):
    """Psycopg's default is two minutes, and a pool has three that connect."""
    port = int(conninfo_to_dict(database.admin_dsn)["port"] or 5432)
    attempts = Attempts()
    with Proxy(port) as proxy:
        proxy.freeze()
        dsn = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        limits = {"patience": timedelta(minutes=1), "check_within": timedelta(seconds=within)}
        async with pool_of(dsn, **limits, attempts=attempts, **given):
            await attempts.reach(2)
