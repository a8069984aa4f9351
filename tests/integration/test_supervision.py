"""The supervision of a run, on a real lock session: whatever happens to it, no run goes on without its hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.proxy import Proxy
from tickd.dsn import parse_dsn
from tickd.lock import PROBE, LockPlace, LockSession, open_session
from tickd.policy import TrustWindows
from tickd.runs import EndKind, RunEnd
from tickd.stop import Stop
from tickd.supervision import Supervision


SOON = timedelta(milliseconds=50)


class StandIn:
    """A run that ends when it is cancelled, and notes in which order it was told what."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []
        self.threads = 0

    def cut_off(self, reason: str) -> None:
        """Note it."""
        self.told.append(f"cut off: {reason}")

    def cancel(self) -> None:
        """Note it and end."""
        self.told.append("cancel")
        self.ended.set_result(RunEnd(EndKind.CANCELLED, 0))


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[LockSession]:
    """A lock session that is probed at once."""
    windows = TrustWindows(probe_interval=SOON)
    session = await open_session(LockPlace(parse_dsn(dsn, setting="DSN"), "a", 7301, windows=windows))
    yield session
    with suppress(psycopg.Error):
        await session.close()


def supervise(run: StandIn, session: LockSession, newest_timeline: Any = lambda: 0) -> Supervision:
    """Return a supervision of the run."""
    fake: Any = run
    return Supervision(
        fake,
        session,
        stop=Stop(),
        timeout=None,
        drain_timeout=SOON,
        newest_timeline=newest_timeline,
        probe=(PROBE, ()),
        displaced=asyncio.Event(),
        waiting_for_threads=lambda _: None,
    )


async def test_a_supervision_that_fails_stops_its_run_first(session: LockSession):
    """The hold is let go as soon as the error passes; a run that went on would be a second writer."""

    def fail() -> int:
        raise LookupError("a fault of our own")

    run = StandIn()

    with pytest.raises(LookupError):
        await supervise(run, session, fail).see_to_its_end()

    assert run.told == ["cut off: its supervision ended", "cancel"]
    assert run.ended.done()


async def test_a_session_that_was_ended_is_in_doubt_until_somebody_reads_it(
    session: LockSession, admin_dsn: str
):
    """A graph's thread asks this before each step, so it may neither wait nor need the loop that reads."""
    assert not session.in_doubt()
    (pid,) = await session.fetch("SELECT pg_backend_pid()")
    assert not session.in_doubt()

    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    assert session.in_doubt()
    stopping, _ = await supervise(run := StandIn(), session).see_to_its_end()
    assert run.told[0] == "cut off: the lock was lost"
    assert stopping.loss is not None
    assert stopping.loss.cause == "session_ended"
    assert session.in_doubt()


async def test_a_run_whose_session_gives_no_answer_is_cancelled_at_once(dsn: str, admin_dsn: str):
    """To give a session up ends it: where the server was only slow, another replica has the graph in the next moment."""
    port = int(str(psycopg.conninfo.conninfo_to_dict(admin_dsn)["port"]))
    windows = TrustWindows(probe_interval=SOON, probe_timeout=SOON, stop_allowance=timedelta(minutes=5))
    with Proxy(port) as proxy:
        through = parse_dsn(dsn.replace(f":{port}/", f":{proxy.port}/"), setting="DSN")
        session = await open_session(LockPlace(through, "a", 7301, windows=windows))
        proxy.freeze()
        async with asyncio.timeout(20):
            stopping, _ = await supervise(run := StandIn(), session).see_to_its_end()
        proxy.cut()
        with suppress(psycopg.Error):
            await session.close()

    assert stopping.loss is not None
    assert stopping.loss.cause == "no_answer"
    assert run.told == ["cut off: the lock was lost", "cancel"]
