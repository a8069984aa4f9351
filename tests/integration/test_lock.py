"""The lock of one graph: who has it, how it is freed whatever happens, and how its loss is noticed."""

import asyncio
import errno
import socket
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.cluster import Cluster
from tests.database import Database
from tests.integration.conftest import Places
from tests.lock_sessions import place_of
from tests.onlooker import Onlooker
from tests.pooler import Pooler
from tests.proxy import Proxy
from tickd.errors import DatabaseUnusable
from tickd.lock import (
    Holder,
    LockPlace,
    LockSession,
    Loss,
    closing,
    open_session,
    probe,
    reaches_pooler,
    sole_writer,
)
from tickd.policy import TrustWindows
from tickd.tick import lock_key


GRAPH = "restock_plan"
KEY = 904759473
SHORT = timedelta(milliseconds=150)
# A watch that asks all the time and is soon disappointed.
QUICK = TrustWindows(probe_interval=timedelta(milliseconds=30), probe_timeout=SHORT)


def through(proxy: Proxy, dsn: str) -> str:
    """Return the URL that leads through the proxy."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    return f"postgresql://{parts['user']}:{parts['password']}@127.0.0.1:{proxy.port}/{parts['dbname']}"


@pytest.fixture
def proxy(dsn: str):
    """A link to the server that can be frozen and cut."""
    with Proxy(int(psycopg.conninfo.conninfo_to_dict(dsn)["port"])) as proxy:  # type: ignore[arg-type]  # a test's URL has one
        yield proxy


async def test_a_hold_is_one_lock_of_the_graphs_key_on_a_session_with_the_replicas_name(
    place: LockPlace, onlooker: Onlooker
):
    """An administrator who looks into pg_locks finds the replica by it."""
    async with sole_writer(GRAPH, place) as hold:
        assert hold
        ((pid, space, key),) = onlooker.locks()

        assert (space, key) == (7301, KEY)
        assert [row[:2] for row in onlooker.sessions()] == [(pid, "tickd/a")]
        assert (hold.holder, hold.unlocked) == (None, None)

    assert not hold
    assert hold.unlocked is True
    assert onlooker.locks() == []


async def test_a_held_graph_is_skipped_and_names_its_holder(places: Places, onlooker: Onlooker):
    """Whoever reads the skip wants to know whom the tick was left to, and since when."""
    before = onlooker.value("SELECT clock_timestamp()")
    async with sole_writer(GRAPH, places("a")):
        async with sole_writer(GRAPH, places("b")) as second:
            assert not second

        ((pid, *_),) = onlooker.locks()
        assert second.holder is not None
        assert (second.holder.replica, second.holder.pid) == ("a", pid)
        assert second.holder.since is not None
        assert before <= second.holder.since <= datetime.now(UTC)  # noqa: TID251  # the test's server is on this host
        assert second.holder.since.tzinfo is UTC


async def test_a_refused_attempt_frees_nothing_of_the_holders(places: Places, onlooker: Onlooker):
    """An unlock by the loser would be a lock for nobody."""
    async with sole_writer(GRAPH, places("a")):
        async with sole_writer(GRAPH, places("b")) as second:
            pass

        assert second.unlocked is None
        assert len(onlooker.locks()) == 1


async def test_each_attempt_has_a_session_of_its_own_and_closes_it(places: Places, onlooker: Onlooker):
    """C1: From a pool, the session would come back with the lock, and every later tick would skip."""
    pids = set()
    for _ in range(3):
        async with sole_writer(GRAPH, places("a")) as hold:
            pids |= {pid for pid, *_ in onlooker.locks()}

        assert hold.session.connection.closed
    await onlooker.until(lambda: not onlooker.sessions("tickd/"))

    assert len(pids) == 3


async def test_an_error_in_the_run_frees_the_lock_and_comes_out_as_it_is(
    place: LockPlace, onlooker: Onlooker
):
    """A graph that raises must not keep its graph from the next tick."""
    with pytest.raises(RuntimeError, match="supplier feed down"):
        async with sole_writer(GRAPH, place) as hold:
            raise RuntimeError("supplier feed down")

    assert hold.unlocked is True
    assert onlooker.locks() == []


async def test_a_session_that_was_ended_does_not_hide_the_runs_own_error(
    place: LockPlace, onlooker: Onlooker
):
    """F14: the unlock finds a dead session right when the graph's error is on its way out."""

    def fail() -> None:
        onlooker.terminate(onlooker.locks()[0][0])
        raise RuntimeError("supplier feed down")

    with pytest.raises(RuntimeError, match="supplier feed down"):
        async with sole_writer(GRAPH, place) as hold:
            fail()

    assert hold.unlocked is None


async def test_a_session_that_was_ended_does_not_turn_a_success_into_an_error(
    place: LockPlace, onlooker: Onlooker
):
    """What became of the hold is a fact to look at, not something to be raised on the way out."""
    async with sole_writer(GRAPH, place) as hold:
        onlooker.terminate(onlooker.locks()[0][0])

    assert hold.unlocked is None
    assert hold.session.connection.closed


async def test_an_unlock_that_was_not_held_is_told(place: LockPlace):
    """Postgres answers false: then the run was unguarded, for who knows how long."""
    async with sole_writer(GRAPH, place) as hold:
        await hold.session.fetch("SELECT pg_advisory_unlock_all()")

    assert hold.unlocked is False


async def test_an_attempt_cancelled_in_mid_statement_keeps_nothing(place: LockPlace, onlooker: Onlooker):
    """The server may have taken the lock for a task that is not there any more."""

    async def slow(session: LockSession) -> tuple[bool, None]:
        await session.fetch("SELECT pg_sleep(0.2), pg_try_advisory_lock(%s, %s)", (7301, KEY))
        return True, None

    async def attempt() -> None:
        async with sole_writer(GRAPH, place, attempt=slow):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(attempt())
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await onlooker.until(lambda: not onlooker.sessions("tickd/"))
    assert onlooker.locks() == []


async def test_a_run_cancelled_under_its_hold_frees_it(place: LockPlace, onlooker: Onlooker):
    """The unlock is done, and the cancellation is not swallowed by it."""
    held = asyncio.Event()

    async def run() -> None:
        async with sole_writer(GRAPH, place):
            held.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert onlooker.locks() == []


async def test_an_attempt_may_do_more_in_the_same_round_trip(place: LockPlace, onlooker: Onlooker):
    """The ledger admits the tick in the statement that takes the lock, over a session that was opened ahead."""

    async def attempt(session: LockSession) -> tuple[bool, str]:
        (held, name) = await session.fetch("SELECT pg_try_advisory_lock(%s, %s), 'extra'", (7301, KEY))
        return held, name

    session = await open_session(place)
    async with sole_writer(GRAPH, place, attempt=attempt, session=session) as hold:
        assert (bool(hold), hold.granted) == (True, "extra")
        assert hold.session is session
        assert len(onlooker.locks()) == 1

    assert session.connection.closed
    assert onlooker.locks() == []


@pytest.mark.parametrize("space", [-(2**31), -1, 0, 7301, 2**31 - 1])
@pytest.mark.parametrize("graph", [GRAPH, "pack_audit"])
async def test_every_space_and_key_finds_its_holder(places: Places, space: int, graph: str):
    """pg_locks shows both numbers unsigned, and half of them are negative."""
    async with (
        sole_writer(graph, places("a", space=space)) as first,
        sole_writer(graph, places("b", space=space)) as second,
    ):
        assert (bool(first), bool(second)) == (True, False)
        assert second.holder is not None
        assert second.holder.replica == "a"


async def test_spaces_do_not_meet(places: Places):
    """Two applications may share one database."""
    async with sole_writer(GRAPH, places("a")) as one, sole_writer(GRAPH, places("a", space=7302)) as two:
        assert one
        assert two


async def test_a_lock_in_another_database_is_nobodys_business(places: Places, place: LockPlace, server):
    """Locks are per database: no exclusion, and no false holder."""
    other = Database(server)
    try:
        other.create()
        async with sole_writer(GRAPH, place_of(other.dsn, "elsewhere")) as elsewhere:
            assert elsewhere
            async with closing(await open_session(place)) as session:
                assert await session.holder(GRAPH) is None
            async with sole_writer(GRAPH, places("b")) as here:
                assert here
    finally:
        other.close()


@pytest.mark.parametrize(("application", "shown"), [("psql", "psql"), ("", "another role's session")])
async def test_a_lock_that_somebody_else_took_has_a_holder_too(
    places: Places, admin_dsn: str, application: str, shown: str
):
    """An administrator may hold the graph by hand, under another role, to keep it from running."""
    with psycopg.connect(admin_dsn, autocommit=True, application_name=application) as by_hand:
        by_hand.execute("SELECT pg_advisory_lock(7301, %s)", [KEY])
        async with sole_writer(GRAPH, places("a")) as hold:
            assert not hold
            assert hold.holder is not None
            assert (hold.holder.replica, hold.holder.pid) == (shown, by_hand.info.backend_pid)


ROLE = {
    "idle_session_timeout": "1s",
    "idle_in_transaction_session_timeout": "1s",
    "statement_timeout": "1s",
    "lock_timeout": "1s",
    "default_transaction_isolation": "serializable",
    "search_path": "warehouse",
}


async def test_the_session_is_fit_for_a_long_run_whatever_the_roles_defaults_are(
    database: Database,
):
    """A role's time-outs would end the session in the middle of a run, and the server's keepalives would not end a dead one."""
    role = database.role(settings=ROLE)
    windows = TrustWindows(
        server_idle=timedelta(seconds=21), server_interval=timedelta(seconds=7), server_count=2
    )
    place = place_of(f"{role.dsn}?options=-c%20geqo%3Doff", windows=windows)

    async with closing(await open_session(place)) as session:
        rows = await session.fetch_all("SELECT name, setting FROM pg_settings")

    settings = dict(rows)
    assert {name: settings[name] for name in ROLE} == {
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "statement_timeout": "0",
        "lock_timeout": "9000",  # below the answer time-out, so that no backend waits on for nobody
        "default_transaction_isolation": "read committed",
        "search_path": "warehouse",
    }
    assert settings["geqo"] == "off"
    assert {name: value for name, value in settings.items() if name.startswith("tcp_")} == {
        "tcp_keepalives_idle": "21",
        "tcp_keepalives_interval": "7",
        "tcp_keepalives_count": "2",
        "tcp_user_timeout": "35000",
    }


async def test_the_client_has_keepalives_too(place: LockPlace):
    """Each side has to notice on its own that the other is gone."""
    async with closing(await open_session(place)) as session:
        link = socket.socket(fileno=socket.dup(session.connection.fileno()))
        with link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 17_000


async def lose(place: LockPlace, **watch: Any) -> Loss:
    """Hold the graph and return how the hold is lost."""
    async with sole_writer(GRAPH, place) as hold, asyncio.timeout(10):
        return await hold.session.watch(**watch)


async def test_a_session_that_was_ended_is_heard_of_at_once(place: LockPlace, onlooker: Onlooker):
    """C5: psycopg itself says nothing until its next query, and the next probe is seconds away."""
    watching = asyncio.create_task(lose(place))
    ((pid, *_),) = await onlooker.until(onlooker.locks)
    loop = asyncio.get_running_loop()
    began = loop.time()
    onlooker.terminate(pid)
    loss = await watching

    assert (loss.cause, loss.error) == (
        "session_ended",
        "terminating connection due to administrator command",
    )
    assert loop.time() - began < 1


async def test_a_link_that_died_without_a_word_is_found_by_asking(dsn: str, proxy: Proxy):
    """Nobody tells: no packet arrives, and both kernels think that all is well."""
    place = place_of(through(proxy, dsn), windows=QUICK)
    async with sole_writer(GRAPH, place) as hold:
        watching = asyncio.create_task(hold.session.watch())
        proxy.freeze()
        async with asyncio.timeout(5):
            loss = await watching

    assert loss == Loss("no_answer", "Postgres gave no answer within 0.15 s")
    assert hold.unlocked is None


async def test_a_process_that_stood_still_knows_that_it_may_have_lost_its_hold(places: Places):
    """Stopped for longer than the server waits, it must not go on as if nothing had been."""
    place = places(windows=TrustWindows(probe_interval=SHORT, server_idle=timedelta(0), server_count=0))

    assert (await lose(place)).cause == "not_confirmed"


async def silent(seconds: float) -> None:
    """Let time pass in which nothing is asked: until a tick is due, or between two attempts of a failed one."""
    await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=seconds)


async def test_a_session_that_was_silent_before_the_watch_is_not_lost_for_it(
    places: Places, onlooker: Onlooker
):
    """It may have waited for its tick, or through a retry's pause, for longer than the server's window; it is asked."""
    windows = TrustWindows(probe_interval=SHORT, server_idle=timedelta(milliseconds=400), server_count=0)
    onlooker.connection.execute("CREATE TABLE probes (n int); GRANT ALL ON probes TO public")
    async with closing(await open_session(places(windows=windows))) as session:
        for attempt in (1, 2):
            await silent(0.6)
            watching = asyncio.create_task(
                session.watch(probe=("WITH p AS (INSERT INTO probes VALUES (1)) SELECT 1", ()))
            )
            enough = partial(onlooker.value, "SELECT count(*) >= %s FROM probes", 3 * attempt)
            await onlooker.until(lambda: watching.done() or enough())  # noqa: B023  # asked within this round
            assert not watching.done(), watching.result()
            watching.cancel()
            await asyncio.wait({watching})


async def test_a_hold_on_a_primary_that_is_none_any_more_is_lost(places: Places):
    """After a failover the old server answers as before; its timeline is older than the new one's."""
    loss = await lose(places(windows=QUICK), newest_timeline=lambda: 99)

    assert loss == Loss("failover", "the lock is on timeline 1, and the primary on 99")


async def test_a_probe_that_finds_nothing_has_been_superseded(places: Places):
    """A claimed run probes with the renewal of its lease; no row means that it is another's."""
    loss = await lose(places(windows=QUICK), probe=("SELECT 1 WHERE false", ()))

    assert loss.cause == "superseded"


async def test_a_probe_that_answers_keeps_the_hold(places: Places, onlooker: Onlooker):
    """Many probes later the watch is still watching, and when it ends the session is as good as before."""
    async with sole_writer(GRAPH, places(windows=QUICK)) as hold:
        onlooker.connection.execute("CREATE TABLE probes (n int)")
        probe = ("WITH p AS (INSERT INTO probes VALUES (1)) SELECT 1", ())
        onlooker.connection.execute("GRANT ALL ON probes TO public")
        watching = asyncio.create_task(hold.session.watch(probe=probe))
        await onlooker.until(lambda: onlooker.value("SELECT count(*) >= 5 FROM probes"))
        assert not watching.done()
        watching.cancel()
        await asyncio.wait({watching})

    assert hold.unlocked is True


async def test_a_watch_cancelled_in_mid_probe_leaves_the_session_whole(places: Places, onlooker: Onlooker):
    """The run ends while a probe is under way; the record and the unlock still go over this session."""
    async with sole_writer(GRAPH, places(windows=TrustWindows(probe_interval=SHORT))) as hold:
        watching = asyncio.create_task(hold.session.watch(probe=("SELECT 1 FROM pg_sleep(0.3)", ())))
        await onlooker.until(lambda: [row for row in onlooker.sessions() if "pg_sleep" in row[3]])
        watching.cancel()
        await asyncio.wait({watching})
        assert watching.cancelled()

        assert await hold.session.fetch("SELECT 7") == (7,)

    assert hold.unlocked is True


async def test_a_statement_without_an_answer_is_ended_by_its_time_out(dsn: str, proxy: Proxy):
    """Cancelling it in psycopg would first open another connection to the host that does not answer."""
    async with closing(await open_session(place_of(through(proxy, dsn), answer_timeout=SHORT))) as session:
        proxy.freeze()
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError, match=r"Postgres gave no answer within 0\.15 s"):
                await session.fetch("SELECT 1")
            with pytest.raises(psycopg.OperationalError):
                await session.fetch("SELECT 1")


async def test_a_hold_on_a_frozen_link_is_left_within_its_time_out(
    dsn: str, proxy: Proxy, onlooker: Onlooker
):
    """The unlock cannot get through, and must neither hang nor raise."""
    async with (
        asyncio.timeout(5),
        sole_writer(GRAPH, place_of(through(proxy, dsn), answer_timeout=SHORT)) as hold,
    ):
        proxy.freeze()

    assert hold.unlocked is None
    proxy.cut()
    await onlooker.until(lambda: not onlooker.locks())


async def test_a_link_that_is_reset_while_it_is_given_up_is_a_time_out_too(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    """Shutting down a socket that the other side has just reset raises; the statement has ended all the same."""
    shut_down = socket.socket.shutdown

    def reset(link: socket.socket, how: int) -> None:
        shut_down(link, how)
        raise OSError(errno.ENOTCONN, "not connected")

    async with (
        asyncio.timeout(5),
        sole_writer(GRAPH, place_of(through(proxy, dsn), answer_timeout=SHORT)) as hold,
    ):
        proxy.freeze()
        with monkeypatch.context() as patch:
            patch.setattr("tickd.lock.socket.socket.shutdown", reset)
            with pytest.raises(TimeoutError):
                await hold.session.fetch("SELECT 1")


async def test_a_session_that_is_closed_has_no_backend_any_more(place: LockPlace, onlooker: Onlooker):
    """Of sessions that follow each other there are never more than anybody counts."""
    for _ in range(20):
        session = await open_session(place)
        pid = session.connection.info.backend_pid
        await session.close()
        assert onlooker.value("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0


async def test_a_link_that_fails_at_the_farewell_ends_the_wait(
    place: LockPlace, monkeypatch: pytest.MonkeyPatch
):
    """Its host cannot be reached any more, which is not how a connection that is closed fails."""
    monkeypatch.setattr("tickd.lock.EXIT", timedelta(minutes=10))
    session = await open_session(place)

    class Failing(socket.socket):
        def recv(self, *_: Any) -> bytes:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    session._link = Failing(fileno=session._link.detach())
    async with asyncio.timeout(10):
        await session.close()


async def test_a_server_that_does_not_end_its_session_is_not_waited_for(
    dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    """Its host may have vanished."""
    monkeypatch.setattr("tickd.lock.EXIT", SHORT)
    session = await open_session(place_of(through(proxy, dsn)))
    proxy.freeze()

    async with asyncio.timeout(10):
        await session.close()
        await session.close()


async def test_a_server_that_does_not_answer_costs_one_time_out(dsn: str, proxy: Proxy):
    """A tick has a grace, and a hung connect would eat it."""
    proxy.freeze()

    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await open_session(place_of(through(proxy, dsn), connect_timeout=SHORT))


async def test_a_wrong_password_says_so_and_does_not_show_it(dsn: str):
    """The text ends in a log."""
    wrong = dsn.replace("Sw0rdf1sh", "N0tth1s")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed") as refused:
        await open_session(place_of(wrong))

    assert "N0tth1s" not in str(refused.value)


async def test_a_role_that_may_only_read_cannot_hold(database: Database):
    """A lock on a hot standby excludes nobody, and this setting is how one looks from outside."""
    role = database.role(settings={"default_transaction_read_only": "on"})

    with pytest.raises(psycopg.OperationalError, match="session is read-only"):
        await open_session(place_of(role.dsn))


async def test_a_standby_cannot_hold(private_database: Database, standby: Cluster):
    """The same on a real one: as long as it is a standby, its locks are its own."""
    dsn = private_database.dsn.replace(
        f":{private_database.server.admin.split('port=')[1].split()[0]}/", f":{standby.port}/"
    )

    with pytest.raises(psycopg.OperationalError, match="session is read-only"):
        await open_session(place_of(dsn))


async def test_two_ways_to_one_database_are_recognised(place: LockPlace, dsn: str):
    """By what the server says, not by names: an address and an alias may be the same server."""
    identity = await probe(place)

    alias = place_of(dsn.replace("127.0.0.1", "localhost")).dsn
    assert await reaches_pooler(alias, timedelta(seconds=5), same_as=identity) is False


async def test_another_database_is_refused(place: LockPlace, server):
    """Locks in one and checkpoints in another database would guard nothing."""
    other = Database(server)
    try:
        other.create()
        with pytest.raises(DatabaseUnusable, match="reach different databases"):
            await reaches_pooler(place_of(other.dsn).dsn, timedelta(seconds=5), same_as=await probe(place))
    finally:
        other.close()


async def test_a_pooler_is_noticed_before_it_does_harm(place: LockPlace, dsn: str, pooler: Pooler):
    """In transaction mode a lock and its unlock land on different sessions."""
    pooled = place_of(pooler.through(dsn))

    with pytest.raises((DatabaseUnusable, psycopg.OperationalError), match=r"pooler|startup parameter"):
        await probe(pooled)
    assert await reaches_pooler(pooled.dsn, timedelta(seconds=5), same_as=await probe(place)) is True


async def test_holds_of_many_graphs_live_side_by_side(places: Places, onlooker: Onlooker):
    """Each on a session of its own: C7's stacking of locks in one session cannot happen."""
    graphs = [f"graph{n}" for n in range(8)]
    async with AsyncExitStack() as stack:
        holds = [await stack.enter_async_context(sole_writer(graph, places("a"))) for graph in graphs]
        assert all(holds)
        assert {key for _, _, key in onlooker.locks()} == {lock_key(graph) for graph in graphs}
        assert len({pid for pid, *_ in onlooker.locks()}) == 8

        async with sole_writer(graphs[3], places("a")) as again:
            assert not again
            assert isinstance(again.holder, Holder)

    assert onlooker.locks() == []
