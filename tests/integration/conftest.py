"""Fixtures of tests in one process: where locks are taken, the log, and somebody who looks on."""

from collections.abc import Callable, Iterator
from functools import partial

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


@pytest.fixture
def book() -> Logbook:
    """The lines of replica a."""
    return Logbook()


@pytest.fixture
def log(book: Logbook) -> Iterator[Log]:
    """The log of replica a."""
    with logging_to(book) as log:
        yield log
