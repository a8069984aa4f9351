"""The start on a database that stops answering in the middle of it: no step of it may keep the process."""

import asyncio
from datetime import timedelta

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.database import Database
from tests.lock_sessions import place_of
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.proxy import Proxy
from tickd.clock import DatabaseClock
from tickd.database import DatabaseStart
from tickd.log import Log
from tickd.stop import Stop


STEPS = {
    "clock": b"SELECT clock_timestamp()",
    "versions": b"tickd.migrations",
    "tables": b"CREATE SCHEMA",
    "standby": b"pg_is_in_recovery",
    "identity": b"pg_control_system",
}
SHORT = timedelta(seconds=0.5)
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("step", STEPS)
async def test_a_stop_is_heard_where_the_database_answers_no_more(
    database: Database, onlooker: Onlooker, log: Log, step: str
):
    """An orchestrator would kill it in the end; and without a stop, its deadline would never come."""
    port = int(conninfo_to_dict(database.dsn)["port"] or 5432)
    stop = Stop()
    with Proxy(port) as proxy:
        address = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        place = place_of(address, connect_timeout=SHORT, answer_timeout=SHORT)
        start = DatabaseStart(place.dsn, place, clock=DatabaseClock(), stop=stop, log=log)
        proxy.freeze_at(STEPS[step])
        starting = asyncio.create_task(start.wait(MINUTE))
        await onlooker.until(proxy.frozen)

        stop.request()

        async with asyncio.timeout(10):
            assert await starting is None


async def test_a_pools_way_that_answers_no_more_is_tried_again(database: Database, log: Log, book: Logbook):
    """It was asked for whether a pooler is in it, and waited for without an end."""
    port = int(conninfo_to_dict(database.dsn)["port"] or 5432)
    stop = Stop()
    place = place_of(database.dsn, connect_timeout=SHORT, answer_timeout=SHORT)
    with Proxy(port) as proxy:
        way = place_of(database.dsn.replace(f":{port}/", f":{proxy.port}/")).dsn
        start = DatabaseStart(way, place, clock=DatabaseClock(), stop=stop, log=log)
        proxy.freeze_at(STEPS["identity"])
        starting = asyncio.create_task(start.wait(MINUTE))
        await book.wait_for("database.unreachable")
        proxy.freeze_at(b"no word of ours")
        proxy.thaw()

        async with asyncio.timeout(10):
            assert await starting is False
