"""The daemon in this very process: from start to stop, with everything it can meet at its start."""

import asyncio
import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.database import PASSWORD, Database
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tests.pooler import Pooler
from tickd.daemon import Daemon
from tickd.errors import DatabaseUnusable, Unusable
from tickd.fleet import ALONE, BOOKS
from tickd.log import Log
from tickd.schedule_file import read
from tickd.settings import Settings, read_settings


SHOP = """
import asyncio
from contextlib import asynccontextmanager
from tests.played import graph_of, step


@asynccontextmanager
async def broken():
    async with asyncio.TaskGroup() as group:
        group.create_task(lose_the_feed())
        yield graph


async def lose_the_feed():
    raise ConnectionError("the feed is gone")


graph = graph_of(one=step("one"))
quick = graph_of(one=step("one"), two=step("two"))
"""

Make = Callable[..., Daemon]


@pytest.fixture
def make(dsn: str, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a daemon on a schedule of one graph that fires every 200 ms."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TICKD_{name.upper()}", raising=False)
    (tmp_path / "shop.py").write_text(SHOP)
    schedule = tmp_path / "schedule.yaml"

    def make(graph: str = "./shop.py:graph", *, more: str = "", **settings: Any) -> Daemon:
        schedule.write_text(f"graphs:\n  restock_plan:\n    graph: {graph}\n    every: 200ms\n{more}")
        given = read_settings(schedule=schedule, replica="a", **{"database_url": dsn, **settings})
        return Daemon(given, read(schedule, os.environ), log)

    yield make
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    """Let the collector see everything before and after."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def stop() -> None:
    """Ask this process to stop, as an orchestrator does."""
    os.kill(os.getpid(), signal.SIGTERM)


async def serve(daemon: Daemon, seconds: float = 20) -> int:
    """Serve to the end."""
    async with asyncio.timeout(seconds):
        return await daemon.serve()


@pytest.mark.parametrize("hold", ["dedicated", "shared"])
async def test_a_replica_comes_up_on_an_empty_database_fires_and_stops(
    make: Make, book: Logbook, onlooker: Onlooker, hold: str
):
    """Nothing is left behind: no lock, no connection, no thread; and each tick that was fired has one line."""
    before = set(threading.enumerate())
    serving = asyncio.create_task(serve(make(more=f"    hold: {hold}\n")))
    await book.wait_for("tick.ran", count=3)
    stop()

    assert await serving == 0

    events = [line["event"] for line in book.lines if line["event"].startswith(("daemon.", "database."))]
    assert events == [
        "daemon.started",
        "database.migrated",
        "daemon.ready",
        "daemon.draining",
        "daemon.stopped",
    ]
    assert set(Counter(line["fire_time"] for line in book.terminal()).values()) == {1}
    started = {line["fire_time"] for line in book.find("tick.started")}
    assert started == {line["fire_time"] for line in book.terminal() if line["event"] != "tick.skipped"}
    assert onlooker.locks() == []
    await onlooker.until(lambda: not onlooker.sessions("tickd/"))
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("tickd-")]


async def test_a_replica_whose_session_ends_while_it_joins_joins_on_another(
    make: Make, book: Logbook, onlooker: Onlooker
):
    """A database error there left the start in a traceback, while each other step of it is tried again."""
    books = BOOKS | 7301
    onlooker.rows("SELECT pg_advisory_lock(%s)", books)
    serving = asyncio.create_task(serve(make()))

    def joining() -> list[int]:
        return [row[0] for row in onlooker.sessions("tickd/a") if row[3] == ALONE.replace("%s", "$1")]

    await book.wait_for("database.migrated")
    (pid,) = await onlooker.until(joining)
    onlooker.terminate(pid)
    await book.wait_for("database.unreachable")
    onlooker.rows("SELECT pg_advisory_unlock(%s)", books)
    await book.wait_for("daemon.ready")
    stop()

    assert await serving == 0


@pytest.mark.usefixtures("_unfrozen")
async def test_a_replica_that_is_ready_has_its_own_objects_out_of_the_collectors_way(
    make: Make, book: Logbook
):
    """The collector would go through every library and entry again and again, while both loops stand still."""
    serving = asyncio.create_task(serve(make()))
    await book.wait_for("daemon.ready")

    frozen = gc.get_freeze_count()
    stop()
    assert await serving == 0

    assert frozen > 10_000  # langgraph alone has more


async def test_what_the_first_lines_say_holds_no_password(make: Make, book: Logbook, database: Database):
    """They are the first that anybody pastes into a ticket."""
    serving = asyncio.create_task(serve(make()))
    await book.wait_for("daemon.ready")
    stop()
    await serving

    (started,) = book.find("daemon.started")
    assert (started["lock_space"], started["pid"]) == (7301, os.getpid())
    assert started["database"] == f"{database.server.owner}@127.0.0.1:{port_of(database)}/{database.name}"
    assert PASSWORD not in str(book.lines)


def port_of(database: Database) -> str:
    """Return the port of the test's server."""
    return str(conninfo_to_dict(database.dsn)["port"])


async def test_a_disabled_graph_is_announced_and_not_fired(make: Make, book: Logbook):
    """People look for it in the log, and wonder."""
    more = "  asleep:\n    graph: ./shop.py:quick\n    every: 200ms\n    enabled: false\n"
    serving = asyncio.create_task(serve(make(more=more)))
    await book.wait_for("tick.ran", count=2)
    stop()
    await serving

    (loaded,) = book.find("schedule.loaded")
    assert (loaded["graphs"], loaded["disabled"]) == (1, ["asleep"])
    assert {line["graph"] for line in book.terminal()} == {"restock_plan"}


async def test_a_graph_that_cannot_be_loaded_is_refused_before_the_database_is_touched(
    make: Make, onlooker: Onlooker
):
    """A replica that cannot run anything must not migrate anything."""
    with pytest.raises(Unusable, match=r"graph restock_plan: \./shop\.py has no attribute 'nope'"):
        await serve(make("./shop.py:nope"))

    assert onlooker.value("SELECT to_regclass('tickd.ticks')") is None


async def test_a_graph_whose_clients_break_down_is_named_and_the_replica_goes_on(make: Make, book: Logbook):
    """Its runs begin to fail, hours after the start perhaps, and the log has to say what to do."""
    serving = asyncio.create_task(serve(make("./shop.py:broken")))
    warned = await book.wait_for("schedule.warning")
    await book.wait_for("tick.ran")
    stop()

    assert await serving == 0
    assert warned["graph"] == "restock_plan"
    assert "restart this replica" in warned["warning"]
    assert "ConnectionError: the feed is gone (" in warned["warning"]
    assert book.find("daemon.stopped")


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        (lambda url: url.replace(PASSWORD, "N0tth1s"), "the password is wrong"),
        (lambda url: url + "_gone", "the database or the role does not exist"),
    ],
)
async def test_what_waiting_does_not_mend_is_said_at_once(
    make: Make, book: Logbook, database: Database, dsn: Callable[[str], str], said: str
):
    """F7: a minute of patience with a wrong password helps nobody."""
    with pytest.raises(DatabaseUnusable, match=said) as refused:
        await serve(make(database_url=dsn(database.dsn)), seconds=5)

    assert book.find("database.unreachable") == []
    assert "N0tth1s" not in str(refused.value)


@pytest.fixture
def closed(database: Database) -> Iterator[Callable[[], None]]:
    """A database that admits nobody, until the function that is given is called."""
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format
    name = sql.Identifier(database.name)
    database.connection.execute(allow(name, sql.SQL("false")))

    def open_up() -> None:
        database.connection.execute(allow(name, sql.SQL("true")))

    yield open_up
    open_up()


async def test_a_database_that_comes_later_is_waited_for(
    make: Make, book: Logbook, closed: Callable[[], None]
):
    """F7: one line per attempt, with a growing pause between them."""
    serving = asyncio.create_task(serve(make()))
    await book.wait_for("database.unreachable", count=3)
    closed()
    await book.wait_for("daemon.ready")
    stop()

    assert await serving == 0
    tries = book.find("database.unreachable")
    assert [line["tries"] for line in tries] == list(range(1, len(tries) + 1))
    assert tries[2]["retry_in_ms"] > tries[0]["retry_in_ms"]
    assert book.find("database.reachable")


@pytest.mark.usefixtures("closed")
async def test_a_database_that_never_comes_is_given_up_at_the_deadline(make: Make):
    """The orchestrator starts another one, and somebody sees it restart."""
    with pytest.raises(
        DatabaseUnusable, match=r"was not reachable within 0\.8 s \(TICKD_DATABASE_DEADLINE\)"
    ):
        await serve(make(database_deadline="800ms"), seconds=10)


@pytest.mark.usefixtures("closed")
async def test_a_stop_while_it_waits_for_the_database_ends_it(make: Make, book: Logbook):
    """Idle is idle: within a second, and with 0."""
    serving = asyncio.create_task(serve(make()))
    await book.wait_for("database.unreachable")
    stop()

    async with asyncio.timeout(2):
        assert await serving == 0


async def test_locks_and_checkpoints_have_to_be_in_one_database(make: Make, server: Any):
    """A lock elsewhere would guard nothing here."""
    other = Database(server)
    try:
        other.create()
        with pytest.raises(DatabaseUnusable, match="reach different databases"):
            await serve(make(lock_database_url=other.dsn))
    finally:
        other.close()


async def test_checkpoints_may_go_through_a_pooler_when_locks_do_not(
    make: Make, book: Logbook, dsn: str, pooler: Pooler
):
    """The common set-up of larger sites; nothing is left prepared on a connection that somebody else gets."""
    serving = asyncio.create_task(serve(make(database_url=pooler.through(dsn), lock_database_url=dsn), 40))
    await book.wait_for("tick.ran", count=5, seconds=30)
    stop()

    assert await serving == 0
    assert {line["event"] for line in book.terminal()} <= {"tick.ran", "tick.skipped"}


async def test_locks_through_a_pooler_are_refused(make: Make, dsn: str, pooler: Pooler):
    """They would look taken and exclude nobody."""
    with pytest.raises(DatabaseUnusable, match="goes through a connection pooler"):
        await serve(make(database_url=pooler.through(dsn)))
