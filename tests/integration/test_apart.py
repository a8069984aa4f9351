"""A tick whose lock is on one session and whose row is written over another: nothing is written without the lock."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.lock_sessions import Open, sessions
from tests.onlooker import Onlooker
from tickd import admissions, ledger
from tickd.admissions import Admission, Refusal
from tickd.ledger import Finish
from tickd.lock import LockSession
from tickd.tick import Outcome, SkipReason, Tick, run_id


pytestmark = pytest.mark.migrated

GRAPH = "restock_plan"
TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
RAN = Finish(Outcome.RAN, 1)


@pytest.fixture
async def open_as(dsn: str):
    """Opens such a session for a replica's name."""
    async with sessions(dsn, kind="apart") as open_as:
        yield open_as


def tick(second: int = 0, graph: str = GRAPH) -> Tick:
    """Return the tick of so many seconds after ten."""
    return Tick(graph, TEN + timedelta(seconds=second))


async def admit(session: LockSession, one: Tick) -> Any:
    """Try the lock and admit the tick; return both answers."""
    return await admissions.hold_and_admit(session, one, thread_id=str(one), run_id=run_id(one))


def pid(session: LockSession) -> int:
    """Return the session's backend."""
    return session.connection.info.backend_pid


def just_before(monkeypatch: pytest.MonkeyPatch, session: LockSession, happening: Any) -> None:
    """Let something happen between the session's try and what is asked of the other one."""
    ask = session.ledger.ask

    async def asked(*arguments: Any) -> Any:
        await happening()
        return await ask(*arguments)

    monkeypatch.setattr(session.ledger, "ask", asked)


async def test_the_lock_is_on_its_own_session_and_the_row_comes_over_the_other(
    open_as: Open, onlooker: Onlooker
):
    """A new backend would spend more on the admission than on all else."""
    session = await open_as("a")

    assert await admit(session, tick()) == (True, Admission(1, 1, str(tick())))
    assert await ledger.record(session, tick(), token=1, finish=RAN)

    assert [row[0] for row in onlooker.locks()] == [pid(session)]
    queries = {row[0]: row[3] for row in onlooker.sessions("tickd/a")}
    assert "pg_try_advisory_lock" in queries[pid(session)]
    assert "UPDATE tickd.ticks" in queries[pid(session.ledger)]
    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [("ran",)]


async def test_many_are_admitted_together(open_as: Open, onlooker: Onlooker):
    """In one statement with one commit."""
    first = await open_as("a")
    others = [await open_as("a") for _ in range(5)]
    for session in others:
        session.ledger = first.ledger
    ticks = [tick(graph=f"graph_{number}") for number in range(6)]

    answers = await asyncio.gather(*map(admit, [first, *others], ticks))

    assert [answer[0] for answer in answers] == [True] * 6
    assert sorted(row[0] for row in onlooker.locks()) == sorted(map(pid, [first, *others]))
    assert onlooker.value("SELECT count(DISTINCT xmin::text) FROM tickd.ticks") < 6


async def test_a_lock_that_was_lost_in_between_admits_nothing(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Somebody else has the graph by now, and its run must not be superseded by one without a lock."""
    late, other = await open_as("a"), await open_as("b")

    async def lose() -> None:
        onlooker.terminate(pid(late))
        await onlooker.until(lambda: not onlooker.locks())
        assert (await admit(other, tick(1)))[0]

    just_before(monkeypatch, late, lose)
    assert await admit(late, tick()) == (False, None)

    assert onlooker.rows("SELECT fire_time, replica, token FROM tickd.ticks") == [(tick(1).fire_time, "b", 1)]
    assert onlooker.rows("SELECT token FROM tickd.threads") == [(1,)]


async def test_another_lock_does_not_count(open_as: Open, onlooker: Onlooker):
    """The one that is asked about is the backend that tried, and the graph's own key in the lock space."""
    session, other = await open_as("a"), await open_as("b")
    await admit(other, tick(1))
    await session.fetch("SELECT pg_try_advisory_lock(7301, 0), pg_try_advisory_lock(0, 904759473)")

    values = {
        "graph": GRAPH, "fire_time": tick().fire_time, "key": 904759473, "thread_id": "t", "run_id": run_id(tick()),
        "heed_interrupt": True, "pid": pid(session),
    }  # fmt: skip
    held, token, *_ = await session.ledger.ask(admissions.ADMIT_HELD, values)

    assert (held, token) == (False, None)
    assert onlooker.value("SELECT count(*) FROM tickd.ticks") == 1


async def test_a_tick_that_has_ended_leaves_the_graph_free(open_as: Open, onlooker: Onlooker):
    """The lock was taken to learn that there is nothing to do."""
    a, b = await open_as("a"), await open_as("b")
    await admit(a, tick())
    assert await ledger.record(a, tick(), token=1, finish=RAN)
    await a.unlock(GRAPH)

    assert await admit(b, tick()) == (None, Refusal(SkipReason.ALREADY_RAN, "a"))
    assert onlooker.locks() == []


async def test_without_the_other_session_a_tick_is_admitted_over_its_own(open_as: Open, onlooker: Onlooker):
    """An operator has ended that one, and nothing is wrong with the hold."""
    session = await open_as("a")
    onlooker.terminate(pid(session.ledger))
    await onlooker.until(lambda: len(onlooker.sessions("tickd/a")) == 1)

    assert await admit(session, tick()) == (True, Admission(1, 1, str(tick())))
    assert await ledger.record(session, tick(), token=1, finish=RAN)
    assert await session.unlock(GRAPH)

    assert onlooker.locks() == []
    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [("ran",)]


async def test_an_end_whose_answer_was_lost_is_recorded_once(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """It is in the row, and asking again over the hold's own session finds it there."""
    session = await open_as("a")
    await admit(session, tick())
    ask = session.ledger.ask

    async def lost(*arguments: Any) -> Any:
        await ask(*arguments)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(session.ledger, "ask", lost)
    assert await ledger.record(session, tick(), token=1, finish=RAN)

    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [("ran",)]


async def test_the_end_of_a_hold_that_is_gone_is_not_recorded_as_if_it_were_there(
    open_as: Open, onlooker: Onlooker
):
    """F14: a success whose last moments were unguarded is not one."""
    session = await open_as("a")
    await admit(session, tick())
    onlooker.terminate(pid(session))
    await onlooker.until(lambda: not onlooker.locks())

    with pytest.raises(psycopg.OperationalError):
        await ledger.record(session, tick(), token=1, finish=RAN)
    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [(None,)]


async def test_an_end_under_an_older_token_is_refused(open_as: Open, onlooker: Onlooker):
    """The token still decides, wherever it is asked."""
    session = await open_as("a")
    await admit(session, tick())
    onlooker.connection.execute("UPDATE tickd.ticks SET token = 2")

    assert not await ledger.record(session, tick(), token=1, finish=RAN)
