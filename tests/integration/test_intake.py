"""The intake of one replica whose ledger cannot be reached."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.lock_sessions import SPACE
from tests.proxy import Proxy
from tests.turns import turn
from tickd.claim import Due
from tickd.intake import Intake
from tickd.pool import Pool
from tickd.stop import Stop
from tickd.tick import Tick, run_id


pytestmark = pytest.mark.migrated

SECOND = timedelta(seconds=1)
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def due(graph: str, second: int) -> Due:
    """Return a tick that has come due."""
    tick = Tick(graph, NOON + second * SECOND)
    return Due(tick, str(tick), run_id(tick), 1000, "backlog_full")


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    """A link to the server that can be frozen."""
    with Proxy(int(conninfo_to_dict(database.admin_dsn)["port"] or 5432)) as proxy:
        yield proxy


@pytest.fixture
async def pool(proxy: Proxy, database: Database) -> AsyncIterator[Pool]:
    """The ledger's pool, over that link."""

    async def parameters() -> dict[str, Any]:
        return {**conninfo_to_dict(database.dsn), "port": proxy.port, "autocommit": True}

    async with Pool(
        "test", parameters, minimum=1, maximum=2, patience=2 * SECOND, check_within=2 * SECOND
    ) as pool:
        yield pool


async def test_what_cannot_be_reached_fails_once_for_all_who_wait(proxy: Proxy, pool: Pool):
    """The ticks of one graph go out one after the other, and each would wait out the time-out before the next."""
    intake = Intake(pool, SPACE, Stop())
    dues = [due(graph, second) for second in range(20) for graph in ("letters", "parcels")]
    await intake.put(due("letters", 0))
    asked = pool.get_stats()["requests_num"]
    proxy.freeze()

    found = await asyncio.gather(*map(intake.put, dues), return_exceptions=True)

    assert {type(error) for error in found} == {type(found[0])}
    assert isinstance(found[0], psycopg.OperationalError)
    # One loan for all, and maybe a second one in place of the connection that was found dead.
    assert pool.get_stats()["requests_num"] - asked <= 2

    proxy.thaw()
    written = await asyncio.gather(*map(intake.put, dues))
    assert [enqueued.new for enqueued in written] == [False] + [True] * 39


async def test_a_row_is_not_waited_for_long_after_a_stop(proxy: Proxy, pool: Pool):
    """Where the ledger is away, the replica has to end all the same, and what comes due now is tried for no longer."""
    stop = Stop()
    intake = Intake(pool, SPACE, stop)
    pool.timeout = 3600
    proxy.freeze()
    await pool.drain()
    async with asyncio.timeout(20):
        waiting = [asyncio.create_task(intake.put(due("letters", second))) for second in range(5)]
        await turn()
        stop.request()
        waiting.append(asyncio.create_task(intake.put(due("letters", 5))))
        found = await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(error) for error in found] == ["the ledger gave no answer before the stop"] * 6
