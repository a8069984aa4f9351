"""Fixtures of tests in one process: where locks are taken, the log, and somebody who looks on."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.database import Database
from tests.lock_sessions import place_of
from tests.logbook import Logbook, logging_to
from tests.onlooker import Onlooker
from tickd.lock import LockPlace
from tickd.log import Log


Places = Callable[..., LockPlace]


@pytest.fixture
def places(database: Database) -> Places:
    """Makes the lock place of a replica in the test's database, by its name."""
    return partial(place_of, database.dsn)


@pytest.fixture
def place(places: Places) -> LockPlace:
    """The lock place of replica a."""
    return places()


@pytest.fixture
def onlooker(admin_dsn: str) -> Iterator[Onlooker]:
    """What Postgres says of the test's database."""
    onlooker = Onlooker(admin_dsn)
    yield onlooker
    onlooker.close()


class RowsLocked:
    """An operator's open transaction that has rows of the ledger locked."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def lock(self) -> None:
        """Lock every tick's row."""
        await self._connection.execute("SELECT FROM tickd.ticks FOR UPDATE")

    async def let_go(self) -> None:
        """End the transaction."""
        await self._connection.rollback()


@pytest.fixture
async def rows_locked(admin_dsn: str) -> AsyncIterator[RowsLocked]:
    """An operator who may lock rows, and lets go of them at the end."""
    async with await psycopg.AsyncConnection.connect(admin_dsn) as connection:
        yield RowsLocked(connection)
        await connection.rollback()


@pytest.fixture
def book() -> Logbook:
    """The lines of replica a."""
    return Logbook()


@pytest.fixture
def log(book: Logbook) -> Iterator[Log]:
    """The log of replica a."""
    with logging_to(book) as log:
        yield log
