"""The shared session: many holds, one connection, and one fate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from tests.lock_sessions import place_of
from tests.onlooker import Onlooker
from tests.proxy import Proxy
from tests.turns import turn
from tickd.batch import Question
from tickd.lock import UNLOCK, LockPlace, LockSession, sole_writer
from tickd.policy import TrustWindows
from tickd.shared import SharedHolds
from tickd.tick import lock_key


GRAPHS = [f"graph-{n}" for n in range(20)]
# Fails when it is asked for the first time, is true when for the second, and then false.
IN_TURN = "1 / (nextval('public.asked') - 1) > 0"
QUICK = TrustWindows(probe_interval=timedelta(milliseconds=30), probe_timeout=timedelta(milliseconds=150))


@pytest.fixture
async def holds(place: LockPlace) -> AsyncIterator[SharedHolds]:
    """The shared session of replica a."""
    holds = SharedHolds(place, lambda: 0)
    yield holds
    await holds.end()


async def hold_all(stack: AsyncExitStack, holds: SharedHolds, place: LockPlace) -> list[Any]:
    """Hold every graph on the shared session."""
    session = await holds.session()
    return [await stack.enter_async_context(sole_writer(graph, place, session=session)) for graph in GRAPHS]


async def test_many_holds_take_one_connection_and_each_is_let_go_alone(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """Runs are bounded by memory then, and no longer by Postgres' connections."""
    async with AsyncExitStack() as stack:
        assert all(await hold_all(stack, holds, place))
        assert len(onlooker.locks()) == len(GRAPHS)
        assert len(onlooker.sessions("tickd/")) == 1

        async with sole_writer("one more", place, session=await holds.session()) as hold:
            assert len(onlooker.locks()) == len(GRAPHS) + 1
        assert hold.unlocked is True
        assert len(onlooker.locks()) == len(GRAPHS)
    assert onlooker.locks() == []
    assert len(onlooker.sessions("tickd/")) == 1


async def test_it_gives_its_connection_up_when_nothing_is_held_on_it(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """A server that has no connection left for a tick has none for a session that only writes for others."""
    async with sole_writer("held", place, session=await holds.session()) as hold:
        await holds.give_way()
        assert hold
        assert len(onlooker.sessions("tickd/")) == 1
    await holds.give_way()
    assert onlooker.sessions("tickd/") == []
    await holds.give_way()

    async with sole_writer("held", place, session=await holds.session()) as hold:
        assert hold


async def test_it_keeps_its_connection_while_a_tick_waits_with_it_until_it_is_due(
    holds: SharedHolds, place: LockPlace
):
    """It has no key yet."""
    session = await holds.session()
    with session.lent():
        await holds.give_way()
        async with sole_writer("held", place, session=session) as hold:
            assert hold


async def test_its_loss_is_the_loss_of_every_hold_and_the_next_run_gets_a_new_one(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """One backend that is ended frees all keys at once, so all runs have to hear of it at once."""
    async with AsyncExitStack() as stack:
        all_held = await hold_all(stack, holds, place)
        watches = [asyncio.ensure_future(hold.session.watch()) for hold in all_held]
        onlooker.terminate(onlooker.locks()[0][0])
        async with asyncio.timeout(5):
            losses = await asyncio.gather(*watches)

        assert {loss.cause for loss in losses} == {"session_ended"}
        async with sole_writer("after", place, session=await holds.session()) as hold:
            assert hold
    assert [hold.unlocked for hold in all_held] == [None] * len(GRAPHS)


async def test_a_link_that_died_without_a_word_is_found_by_asking(dsn: str):
    """Nobody tells: the shared session asks for all of its holds."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    with Proxy(int(str(parts["port"]))) as proxy:
        url = f"postgresql://{parts['user']}:{parts['password']}@127.0.0.1:{proxy.port}/{parts['dbname']}"
        place = place_of(url, windows=QUICK, answer_timeout=timedelta(milliseconds=150))
        holds = SharedHolds(place, lambda: 0)
        async with sole_writer(GRAPHS[0], place, session=await holds.session()) as hold:
            proxy.freeze()
            async with asyncio.timeout(5):
                loss = await hold.session.watch()
        await holds.end()

    assert loss.cause == "no_answer"


async def test_a_statement_under_way_when_the_link_dies_does_not_put_the_loss_off(dsn: str):
    """The probe waits behind it, and the runs of all other holds have to be stopped in time."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    second = timedelta(seconds=1)
    windows = replace(QUICK, stop_allowance=0.1 * second, server_idle=second, server_count=0)
    with Proxy(int(str(parts["port"]))) as proxy:
        url = f"postgresql://{parts['user']}:{parts['password']}@127.0.0.1:{proxy.port}/{parts['dbname']}"
        place = place_of(url, windows=windows, answer_timeout=60 * second)
        holds = SharedHolds(place, lambda: 0)
        session = await holds.session()
        async with sole_writer(GRAPHS[0], place, session=session) as hold:
            proxy.freeze()
            asking = asyncio.create_task(session.fetch("SELECT 1"))
            async with asyncio.timeout(10):
                await hold.session.watch()
            with pytest.raises((psycopg.Error, TimeoutError)):
                await asking
        await holds.end()


async def test_a_failover_loses_all_of_them(place: LockPlace):
    """A session on the old primary stays healthy, and excludes nobody any more."""
    newest = [0]
    holds = SharedHolds(place_of_quick(place), lambda: newest[0])
    async with sole_writer(GRAPHS[0], place, session=await holds.session()) as hold:
        newest[0] = 1_000_000
        async with asyncio.timeout(5):
            loss = await hold.session.watch()
    await holds.end()

    assert loss.cause == "failover"


def place_of_quick(place: LockPlace) -> LockPlace:
    """Return the place with a watch that asks all the time."""
    return LockPlace(place.dsn, place.replica, place.space, windows=QUICK)


async def test_a_probe_of_its_own_loses_one_hold_alone(place: LockPlace, onlooker: Onlooker):
    """A claim that has passed to somebody else says nothing about the other holds."""
    quick = place_of_quick(place)
    holds = SharedHolds(quick, lambda: 0)
    session = await holds.session()
    async with (
        sole_writer(GRAPHS[0], quick, session=session) as one,
        sole_writer(GRAPHS[1], quick, session=session),
        asyncio.timeout(5),
    ):
        nothing = Question(one="", many="SELECT 1 WHERE %(key)s::int[] IS NULL", apart="key", probe=True)
        loss = await one.session.watch(probe=(nothing, {"key": 1}))
        assert loss.cause == "superseded"
        assert not session.lost
        assert len(onlooker.locks()) == 2
    await holds.end()


@pytest.fixture
def _asked(onlooker: Onlooker) -> None:
    """Let statements count how often they were asked."""
    onlooker.connection.execute("CREATE SEQUENCE asked; GRANT ALL ON asked TO public")


@pytest.mark.usefixtures("_asked")
async def test_a_probe_of_its_own_that_failed_is_asked_again(place: LockPlace):
    """Somebody cancels one renewal, or the disk is full for a moment: never renewed again, the run would lose its claim."""
    quick = place_of_quick(place)
    holds = SharedHolds(quick, lambda: 0)
    session = await holds.session()
    many = f"SELECT 1, 1 WHERE {IN_TURN} AND %(key)s::int[] IS NOT NULL"
    async with sole_writer(GRAPHS[0], quick, session=session) as hold, asyncio.timeout(5):
        renewal = Question(one="", many=many, apart="key", probe=True)
        loss = await hold.session.watch(probe=(renewal, {"key": 1}))
    assert loss.cause == "superseded"
    assert not session.lost
    await holds.end()


@pytest.mark.usefixtures("_asked")
async def test_an_unlock_that_failed_is_done_again(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """The session stays, so the key would be taken for as long as this replica lives, and no other could run the graph."""
    monkeypatch.setattr("tickd.lock.UNLOCK", replace(UNLOCK, many=f"{UNLOCK.many} WHERE {IN_TURN}"))
    session = await holds.session()

    async with sole_writer("restock_plan", place, session=session):
        pass

    assert onlooker.locks() == []
    assert not session.lost


async def test_where_no_unlock_has_an_answer_the_session_is_ended(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Better that all holds on it are lost than that one of its keys stays with nobody's run."""
    monkeypatch.setattr(
        "tickd.lock.UNLOCK", replace(UNLOCK, many=f"{UNLOCK.many} WHERE 1 / (number - 1) > 0")
    )
    session = await holds.session()

    async with sole_writer("restock_plan", place, session=session):
        pass

    async with asyncio.timeout(5):
        assert (await session.watch()).cause == "session_ended"
    await onlooker.until(lambda: not onlooker.locks())


@pytest.mark.parametrize("statement", ["SELECT pg_sleep(0.1)", "SELECT pg_advisory_lock(1)"])
async def test_a_session_that_answers_all_the_time_is_trusted_however_busy_it_is(
    place: LockPlace, onlooker: Onlooker, statement: LiteralString
):
    """Statements in a hurry kept its own watch from asking, until it gave all holds up for want of an answer.

    That a statement has waited for too long is an answer as well.
    """
    onlooker.rows("SELECT pg_advisory_lock(1)")
    # Longer than one statement, or the watch asks in a hurry itself; and trusted for a shorter time than those in a hurry take
    # before it is the watch's turn, so that their answers have to count.
    windows = TrustWindows(
        probe_interval=timedelta(milliseconds=200),
        server_idle=timedelta(milliseconds=300),
        server_interval=timedelta(milliseconds=100),
    )
    compared = asyncio.Event()

    def newest_timeline() -> int:
        compared.set()
        return 0

    holds = SharedHolds(replace(place, windows=windows), newest_timeline)
    session = await holds.session()
    await session.change("SET lock_timeout = '100ms'")

    async def keep_busy() -> None:
        for _ in range(20):
            with suppress(psycopg.errors.LockNotAvailable):
                await session.fetch(statement)

    async with asyncio.timeout(20):
        compared.clear()
        busy = asyncio.gather(keep_busy(), keep_busy())
        for _ in range(3):
            compared.clear()
            await compared.wait()
        assert not busy.done()
        await busy
        compared.clear()
        await compared.wait()
    assert not session.lost
    await holds.end()


@pytest.mark.parametrize(("windows", "wait"), [(TrustWindows(), "2s"), (QUICK, "135ms")])
async def test_a_wait_for_a_row_ends_before_the_session_is_given_up(
    place: LockPlace, windows: TrustWindows, wait: str
):
    """Postgres ends the statement then, and not this side every hold; and the others wait behind it."""
    holds = SharedHolds(replace(place, windows=windows), lambda: 0)
    assert await (await holds.session()).fetch("SHOW lock_timeout") == (wait,)
    await holds.end()


async def test_no_key_is_taken_twice_on_it(holds: SharedHolds, place: LockPlace):
    """Session locks stack: the second try would win, and two runs would share one hold."""
    session = await holds.session()
    async with sole_writer("restock_plan", place, session=session):
        with pytest.raises(ValueError, match="at the key of restock_plan already"):
            async with sole_writer("restock_plan", place, session=session):
                pass
    async with sole_writer("restock_plan", place, session=session) as again:
        assert again


async def test_a_try_cancelled_in_mid_statement_is_undone_and_costs_the_others_nothing(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """The server may have taken the lock for a task that is not there any more, and closing is no way out here."""
    session = await holds.session()

    async def slow(session: LockSession) -> tuple[bool, None]:
        parameters = (place.space, lock_key("slow"))
        await session.fetch("SELECT pg_sleep(0.2), pg_try_advisory_lock(%s, %s)", parameters)
        return True, None

    async def attempt() -> None:
        async with sole_writer("slow", place, attempt=slow, session=session):
            raise AssertionError("it was cancelled before")

    async with sole_writer("other", place, session=session):
        task = asyncio.create_task(attempt())
        await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert [key for _, _, key in onlooker.locks()] == [lock_key("other")]
        assert not session.lost


async def test_a_try_that_is_cancelled_again_while_it_is_undone_leaves_no_key_on_the_session(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """Nobody would unlock it for as long as this replica lives, and no other could ever run the graph."""
    session = await holds.session()

    async def slow(session: LockSession) -> tuple[bool, None]:
        parameters = (place.space, lock_key("slow"))
        await session.fetch("SELECT pg_try_advisory_lock(%s, %s) FROM pg_sleep(0.1)", parameters)
        await asyncio.Event().wait()
        return True, None

    async def attempt() -> None:
        async with sole_writer("slow", place, attempt=slow, session=session):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(attempt())
    await onlooker.until(onlooker.locks)
    behind = asyncio.create_task(session.fetch("SELECT pg_sleep(0.5)"))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if row[2] == "active"])
    for _ in range(2):
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    with suppress(psycopg.OperationalError):
        await behind

    await onlooker.until(lambda: not onlooker.locks(), seconds=5)
    assert not session.lost


async def test_a_session_that_is_closed_while_a_try_is_undone_takes_the_try_s_own_end_from_nobody(
    holds: SharedHolds, place: LockPlace, onlooker: Onlooker
):
    """A lost session is closed for the next run. A tick that heard of a cancellation instead would have no line."""
    session = await holds.session()

    async def fail(_: LockSession) -> tuple[bool, None]:
        raise psycopg.OperationalError("no answer")

    async def attempt() -> None:
        async with sole_writer("doubtful", place, attempt=fail, session=session):
            raise AssertionError("it has failed before")

    behind = asyncio.create_task(session.fetch("SELECT pg_sleep(0.5)"))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    task = asyncio.create_task(attempt())
    while not session._sending:
        await turn()
    await holds.end()

    with pytest.raises(psycopg.OperationalError, match="no answer"):
        await task
    with suppress(psycopg.OperationalError):
        await behind


async def test_what_lies_unread_is_no_doubt_where_what_was_asked_a_moment_ago_is_answered(
    holds: SharedHolds, admin_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    """Mostly it is the answer to another hold, and each run would wait for each of those before each of its steps."""
    session = await holds.session()
    (pid,) = await session.fetch("SELECT pg_backend_pid()")
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        # Waits until the session has ended, and this loop, which would read of it, waits with it.
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    monkeypatch.setattr("tickd.shared.JUST_ASKED", 3600)
    assert not session.in_doubt()
    monkeypatch.setattr("tickd.shared.JUST_ASKED", 0)
    assert session.in_doubt()


async def test_an_answer_that_had_lain_unread_leaves_the_session_in_doubt(
    holds: SharedHolds, admin_dsn: str, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """A process that stood still reads it first, and the session's end is behind it."""
    monkeypatch.setattr("tickd.shared.JUST_ASKED", 0.3)
    session = await holds.session()
    pid = session.connection.info.backend_pid
    asking = asyncio.create_task(session.fetch("SELECT 1 FROM pg_sleep(0.5)"))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])

    # This loop stands still, until there is the answer and then the session's end.
    while [row for row in onlooker.sessions("tickd/a") if row[2] == "active"]:
        onlooker.rows("SELECT pg_sleep(0.01)")
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    assert await asking == (1,)
    assert session.in_doubt()


async def test_a_session_that_was_closed_stays_in_doubt(holds: SharedHolds, monkeypatch: pytest.MonkeyPatch):
    """A lost one is closed for the next run, while those that shared it are still ending and ask before each step."""
    monkeypatch.setattr("tickd.shared.JUST_ASKED", 0)
    session = await holds.session()
    assert not session.in_doubt()

    await holds.end()

    assert session.in_doubt()


async def test_a_hold_is_in_doubt_when_its_session_is_lost(holds: SharedHolds, onlooker: Onlooker):
    """Its descriptor is closed while runs are still ending, and there is nothing left to look at."""
    session = await holds.session()
    (pid,) = await session.fetch("SELECT pg_backend_pid()")
    onlooker.terminate(pid)
    async with asyncio.timeout(5):
        await session.watch()
    await session.end()

    assert session.in_doubt()
