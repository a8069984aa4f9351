"""`sole_writer`, the session-level advisory lock of one graph, and the watch on it.

A lock lives on a connection of its own: opened for one attempt, never one of a pool, closed whatever happens. From a
pool, the session would come back still holding the lock, and every later tick would skip; through a transaction-mode
pooler, lock and unlock land on different sessions. The lock dies with its session, so a killed process frees it at once.

What can go wrong, and what happens:

- Another session holds the lock: the hold is false and names its holder. Losing is a value, not an error.
- The server ends the session (terminated, restarted): psycopg's `closed` and `broken` stay False until the next query.
  The watch sits in `notifies()`, which hears of it within milliseconds, and returns the loss.
- The link dies without a word: nobody is told. The watch asks the server at an interval and gives up after a time-out;
  the server's own keepalives, set by this session for itself, free the lock later than that (`policy.TrustWindows`).
- A statement is stuck on such a link: cancelling it would make psycopg open another connection to the dead host first.
  `_within` shuts the socket down instead, which ends the statement at once.
- The unlock finds a dead session: that is a fact about the hold (`unlocked` is None) and never hides the run's own end.
- A role's `idle_session_timeout` or `statement_timeout` would end the session in mid-run: switched off for the session
  (`tickd.session_settings`).
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any, Generic, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection

from tickd import session_settings
from tickd.batch import Question
from tickd.dsn import Dsn
from tickd.errors import DatabaseUnusable
from tickd.policy import TrustWindows
from tickd.stale_writers import PATIENCE, StaleWriters
from tickd.tick import lock_key


T = TypeVar("T")
# What a watch asks at the interval, and its values: a question, where it asks about more than the session.
Probe = tuple[LiteralString | Question, Any]

APPLICATION = "tickd/"
# How long a session's server is waited for at its end.
EXIT = timedelta(seconds=1)
TRY_LOCK = "SELECT pg_try_advisory_lock(%s::int, %s::int)"
UNLOCK = Question(
    one="SELECT pg_advisory_unlock(%(space)s::int, %(key)s::int)",
    many="""
SELECT number, pg_advisory_unlock(%(space)s::int, key)
FROM unnest((SELECT %(key)b::int[])) WITH ORDINALITY AS held (key, number)
""",
    apart="key",
)
PROBE = "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int"
# pg_locks shows the two signed int4 as unsigned oids; the name is what `sole_writer` gave its session.
HOLDER = """
SELECT a.application_name, l.pid, a.backend_start
FROM pg_locks AS l
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %s::bigint::oid AND l.objid = %s::bigint::oid
"""
# Which server and database this is, whatever name it was reached by.
IDENTITY = """
SELECT pg_backend_pid(), (SELECT system_identifier FROM pg_control_system()),
       (SELECT oid::bigint FROM pg_database WHERE datname = current_database())
"""
INSPECT = "SELECT pg_is_in_recovery(), current_setting('idle_session_timeout') = '0'"


@dataclass(frozen=True, slots=True)
class LockPlace:
    """Where and as whom locks are taken: the same for every attempt of a replica."""

    dsn: Dsn
    replica: str
    space: int
    connect_timeout: timedelta = timedelta(seconds=5)
    answer_timeout: timedelta = timedelta(seconds=10)
    windows: TrustWindows = field(default_factory=TrustWindows)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which database this is: the cluster's system identifier and the database's oid in it."""

    system: int
    database: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock: the replica's name (or another session's application name), its backend and since when."""

    replica: str
    pid: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Loss:
    """How a hold ended under its run, and the error that told.

    The cause is one of: `session_ended` (the server said so, or this side had to end it), `no_answer` (a probe ran out of
    time), `not_confirmed` (this process stood still for longer than a silent client's lock is kept), `failover` (the lock is
    on a server that is not the primary any more), `superseded` (the ledger has a newer token), `fenced` (Postgres refused a
    checkpoint, because the thread is under a newer hold), or `row_locked` (the lock was held all along, but another session
    kept the tick's row locked, so that the run's end could not be written under it).
    """

    cause: str
    error: str


@dataclass(slots=True)
class Hold(Generic[T]):
    """An attempt's result; true while it holds the lock. `granted` is what the attempt's own statement returned."""

    graph: str
    held: bool
    granted: T
    holder: Holder | None
    session: "LockSession"
    unlocked: bool | None = (
        None  # True: freed by us; False: Postgres said it was not held; None: the session was gone
    )

    def __bool__(self) -> bool:
        return self.held


Attempt = Callable[["LockSession"], Awaitable[tuple[bool | None, T]]]


class LockSession:
    """One fresh connection for locks; at most one hold at a time."""

    # A session of several holds' (`tickd.shared`) is not closed with one of them.
    shared = False

    def __init__(self, connection: AsyncConnection[Any], place: LockPlace) -> None:
        self.connection = connection
        self.place = place
        # The session over which the ledger is written to for this one's holds.
        self.ledger: LockSession = self
        self.warm = False
        self._confirmed = time.monotonic()
        self._last_words: str | None = None
        connection.add_notice_handler(self._heed)
        # A descriptor of our own, because libpq closes its one when it finds the session ended.
        self._link = socket.socket(fileno=os.dup(connection.fileno()))

    @cached_property
    def stale_writers(self) -> StaleWriters:
        """Those in the way of this session's admissions: all that wait on it share the connection over which they are ended."""
        return StaleWriters(self.connection.info.backend_pid, partial(_ask_beside, self.place))

    async def fetch(self, query: Any, parameters: Any = ()) -> Any:
        """Run one statement and return its first row; no answer within the time-out raises OperationalError."""
        return await self._within(self._fetch(query, parameters), self.place.answer_timeout)

    async def fetch_all(self, query: Any, parameters: Any = ()) -> list[Any]:
        """Run one statement and return all its rows."""
        return await self._within(self._fetch_all(query, parameters), self.place.answer_timeout)

    async def change(self, query: Any, parameters: Any = ()) -> int:
        """Run one statement and return how many rows it changed."""
        return await self._within(self._change(query, parameters), self.place.answer_timeout)

    async def ask(self, question: Question, values: Mapping[str, Any]) -> Any:
        """Ask a question for one hold, and return the answer's row or None; errors are those of `fetch`."""
        return await self.fetch(question.one, {**self.common_values(), **values})

    def common_values(self) -> dict[str, Any]:
        """Return the values of a question that are the same for all holds of this session."""
        return {"space": self.place.space, "replica": self.place.replica}

    async def holder(self, graph: str) -> Holder | None:
        """Look up who has the graph's lock; None when it has been freed meanwhile."""
        row = await self.fetch(HOLDER, (self.place.space & 0xFFFFFFFF, lock_key(graph) & 0xFFFFFFFF))
        if row is None:
            return None
        name, pid, since = row
        return Holder(
            (name or "another role's session").removeprefix(APPLICATION), pid, since and since.astimezone(UTC)
        )

    async def watch(self, newest_timeline: Callable[[], int] = lambda: 0, probe: Probe = (PROBE, ())) -> Loss:
        """Return when the hold is lost; cancel to end the watch.

        `probe` is what is asked at the interval: it answers with the server's timeline, or with no row when what is held
        has passed to somebody else.

        A session on the old primary stays healthy after a failover, so its server's timeline is compared with the newest
        one that anybody here has seen.

        The trust window is counted on the monotonic clock from before each probe was sent, so a slow answer never
        stretches it, and a process that was stopped for longer than the window knows it when it goes on.
        """
        interval = self.place.windows.probe_interval.total_seconds()
        # Nobody asked before the watch: until the tick was due, or through the pause of a retry. Ask now.
        silent = time.monotonic() - self._confirmed > interval
        loss: Loss | None = None
        while loss is None:
            try:
                loss = None if silent else await self._listen(interval)
                silent = False
                loss = loss or await self._ask_probe(probe, newest_timeline)
            except TimeoutError as error:
                return Loss("no_answer", str(error))
            except psycopg.Error as error:
                return Loss("session_ended", self._last_words or str(error).strip())
        return loss

    def _heed(self, notice: psycopg.errors.Diagnostic) -> None:
        """Take the server at its word: it says why it ends the session, and frees the lock when it has exited."""
        if notice.severity_nonlocalized in ("FATAL", "PANIC"):
            self._last_words = notice.message_primary
            self._shut_down()  # whoever listens hears of it now

    async def _listen(self, seconds: float) -> Loss | None:
        """Wait so long, unless the server ends the session; having stood still, the process does not trust its hold."""
        async for _ in self.connection.notifies(timeout=seconds):
            pass
        if time.monotonic() - self._confirmed > self.place.windows.server.total_seconds():
            return Loss(
                "not_confirmed",
                "this process did not run for longer than Postgres keeps a silent client's lock",
            )
        return None

    async def _ask_probe(self, probe: Probe, newest_timeline: Callable[[], int]) -> Loss | None:
        sent = time.monotonic()
        asked, values = probe
        if isinstance(asked, Question):
            asked, values = asked.one, {**self.common_values(), **values}
        row = await self._within(self._fetch(asked, values), self.place.windows.probe_timeout)
        if row is None:
            return Loss("superseded", "the ledger has a newer token for this tick")
        timeline = row[0]
        if timeline < newest_timeline():
            newest = newest_timeline()
            return Loss("failover", f"the lock is on timeline {timeline}, and the primary on {newest}")
        self._confirmed = sent
        return None

    def in_doubt(self) -> bool:
        """Say whether the server has sent something that nobody has read yet; from any thread, at once.

        The answer to a probe is read in a moment. The end of the session can be read for ever, and is no less an end when
        this side has closed the link: a run that shared the session may still be ending.
        """
        link = self._link.fileno()
        if link < 0:
            return True
        look = select.poll()
        look.register(link, select.POLLIN)
        return bool(look.poll(0))

    async def try_lock(self, graph: str) -> bool:
        """Take the graph's lock if it is free, and say whether that was done."""
        row = await self.fetch(TRY_LOCK, (self.place.space, lock_key(graph)))
        return bool(row[0])

    async def unlock(self, graph: str) -> bool | None:
        """Free the graph's lock: True, or False when Postgres says it was not held, or None when the session is gone."""
        try:
            row = await self.ask(UNLOCK, {"key": lock_key(graph)})
        except (psycopg.Error, TimeoutError):
            return None
        return bool(row[0])

    def lent(self) -> AbstractContextManager[None]:
        """Note for the length of a block that a tick has the session, or waits with it until it is due."""
        return nullcontext()

    def enter(self, graph: str) -> None:
        """Note that a try of the graph's key begins."""

    async def leave(self, graph: str, *, doubtful: bool) -> None:  # closing undoes whatever was done
        """Note that the graph's hold is over; `doubtful` says that nobody knows whether it still has the lock."""

    def forget_link(self) -> None:
        """Close the descriptor of one's own, for another object has taken the connection over."""
        self._link.close()

    async def close(self) -> None:
        """Close the connection, which frees whatever it still holds, and wait for the server's end of it.

        A backend is at its exit for longer than its client is at its farewell. Where one session follows another, they
        would be more at a time than anybody has counted.
        """
        if self._link.fileno() < 0:  # closed before
            return
        try:
            await self.connection.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT.total_seconds()):
                    await self._hear_the_end()
        finally:
            self._link.close()

    async def _hear_the_end(self) -> None:
        """Return when the server has closed its end of the link, or the link has failed."""
        # By number: asyncio prints a socket that it does not know yet, with two system calls.
        loop, link = asyncio.get_running_loop(), self._link.fileno()
        ended = asyncio.Event()

        def read() -> None:
            try:
                if self._link.recv(4096, socket.MSG_DONTWAIT):
                    return  # its last words
            except BlockingIOError:
                return
            except OSError:
                pass  # a link that died: nobody will say more
            ended.set()

        loop.add_reader(link, read)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(link)

    async def _fetch(self, query: Any, parameters: Any) -> Any:
        cursor = await self.connection.execute(query, parameters)
        return await cursor.fetchone()

    async def _fetch_all(self, query: Any, parameters: Any) -> list[Any]:
        return await (await self.connection.execute(query, parameters)).fetchall()

    async def _change(self, query: Any, parameters: Any) -> int:
        return (await self.connection.execute(query, parameters)).rowcount

    async def _within(self, statement: Coroutine[Any, Any, T], limit: timedelta) -> T:
        """Await the statement for at most `limit`, then end it by shutting its socket down and raise TimeoutError.

        A statement that is cancelled from outside is awaited first: a session must not be left in the middle of one.
        """
        task = asyncio.ensure_future(statement)
        try:
            done, _ = await asyncio.wait({task}, timeout=limit.total_seconds())
            if done:
                return task.result()
            self._shut_down()
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if not (await asyncio.wait({task}, timeout=limit.total_seconds()))[0]:
                self._shut_down()
                await asyncio.wait({task})
            task.cancelled() or task.exception()  # retrieved, so that asyncio does not report it
            raise
        task.exception()
        raise TimeoutError(f"Postgres gave no answer within {limit.total_seconds():g} s")

    def _shut_down(self) -> None:
        # Acts on the socket behind all its descriptors. An error: the other end was quicker.
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)


async def open_session(place: LockPlace, *, row_wait: timedelta | None = None) -> LockSession:
    """Open a fresh connection for locks; raises psycopg.OperationalError or TimeoutError when there is none to be had.

    `row_wait` bounds how long a statement waits for a row that another session has locked; by default by the time that the
    statement has for its answer.
    """
    row_wait = place.answer_timeout * 0.9 if row_wait is None else row_wait
    parameters = session_settings.connection_arguments(
        await place.dsn.connection_parameters(),
        application=APPLICATION + place.replica,
        connect_timeout=place.connect_timeout,
        windows=place.windows,
        row_wait=row_wait,
    )
    try:
        async with asyncio.timeout(place.connect_timeout.total_seconds()):
            connection = await AsyncConnection.connect(**parameters, autocommit=True)
    except TimeoutError:
        raise TimeoutError(
            f"no connection to {place.dsn.describe()} within {place.connect_timeout.total_seconds():g} s"
        ) from None
    return LockSession(connection, place)


@asynccontextmanager
async def sole_writer(
    graph: str,
    place: LockPlace,
    *,
    attempt: Attempt[T] | None = None,
    session: LockSession | None = None,
    spare: Callable[[LockSession], bool] | None = None,
) -> AsyncIterator[Hold[Any]]:
    """Try to be the one writer of the graph, without waiting; yields a hold that is true or false.

    `attempt` replaces the bare try by a statement that tries and does more in the same round trip; it returns whether
    the lock was taken (None: not even tried), and a fact for `Hold.granted`. `session` is one that was opened ahead; it
    is closed here all the same, unless its try lost and `spare` takes it over. Errors of the database are raised on the
    way in, never on the way out.
    """
    session = session or await open_session(place)
    spared = False
    doubtful = True
    session.enter(graph)
    try:
        held, granted = await attempt(session) if attempt else (await session.try_lock(graph), None)
        doubtful = False
        # Asked only where the attempt has not learnt of anybody: the answer costs more than the attempt.
        holder = await session.holder(graph) if held is False and granted is None else None
        hold: Hold[Any] = Hold(graph, bool(held), granted, holder, session)
        try:
            yield hold
        finally:
            if held:
                doubtful = True
                hold.unlocked = await session.unlock(graph)
                hold.held = False
                doubtful = hold.unlocked is None
        spared = not held and spare is not None and spare(session)
    finally:
        # A cancelled try may have taken the lock all the same, and an unlock that failed may have left it: the end of the
        # session frees it.
        await session.leave(graph, doubtful=doubtful)
        if not spared:
            await session.close()


@asynccontextmanager
async def closing(session: LockSession) -> AsyncIterator[LockSession]:
    """Close the session at the end, whatever happens in between."""
    try:
        yield session
    finally:
        await session.close()


async def _ask_beside(place: LockPlace, statement: LiteralString, values: Sequence[Any]) -> None:
    """Ask over a fresh connection, which a server that is slow does not keep for longer than a moment."""
    async with closing(await open_session(replace(place, answer_timeout=PATIENCE))) as other:
        await other.fetch(statement, values)


async def probe(place: LockPlace) -> Identity:
    """Check that locks taken at this place exclude anybody, and return where they are.

    Raises DatabaseUnusable, with what to do, when the connection goes through a pooler or reaches a standby.
    """
    session = await open_session(place)
    try:
        standby, settings_kept = await session.fetch(INSPECT)
        identity, pooled = await _identity(session)
    finally:
        await session.close()
    if pooled or not settings_kept:
        raise DatabaseUnusable(pooler_complaint(place.dsn))
    if standby:
        raise DatabaseUnusable(standby_complaint(place.dsn))
    return identity


async def reaches_pooler(dsn: Dsn, within: timedelta, *, same_as: Identity) -> bool:
    """Say whether the DSN goes through a pooler; raises DatabaseUnusable unless it reaches the database `same_as`."""
    async with asyncio.timeout(within.total_seconds()):
        connection = await AsyncConnection.connect(**await dsn.connection_parameters(), autocommit=True)
    place = LockPlace(dsn, "", 0, connect_timeout=within, answer_timeout=within)
    async with closing(LockSession(connection, place)) as session:
        identity, pooled = await _identity(session)
    if identity != same_as:
        raise DatabaseUnusable(
            "TICKD_DATABASE_URL and TICKD_LOCK_DATABASE_URL reach different databases. A lock excludes nobody outside its "
            "own database, so both have to name the database that holds the checkpoints."
        )
    return pooled


async def _identity(session: LockSession) -> tuple[Identity, bool]:
    pid, system, database = await session.fetch(IDENTITY)
    # A pooler gives its client a cancel key of its own, so the pid of the handshake is not that of the backend.
    return Identity(system, database), pid != session.connection.info.backend_pid


def pooler_complaint(dsn: Dsn) -> str:
    """Say that a pooler is in the way, and what to do."""
    return (
        f"the lock connection to {dsn.describe()} goes through a connection pooler. In transaction mode, lock and unlock "
        "land on different server sessions, and a lock excludes nobody. Set TICKD_LOCK_DATABASE_URL to the address of the "
        "Postgres server itself; TICKD_DATABASE_URL may stay on the pooler."
    )


def standby_complaint(dsn: Dsn) -> str:
    """Say that the server is a standby, and what to do."""
    return (
        f"the lock connection to {dsn.describe()} reaches a read-only server (a hot standby, or "
        "default_transaction_read_only is on). A lock there excludes nobody. Point TICKD_LOCK_DATABASE_URL at the primary."
    )
