"""The shared session: one dedicated, unpooled lock session that holds the keys of many runs of a replica.

For replicas with more runs at a time than Postgres has connections (`hold: shared`). Everything that is true of a
session of one's own stays true, but for two things. Its loss is the loss of every hold on it, and all of them hear of it
at once. And it is not closed after a run, so a try or an unlock with an unknown end cannot be undone by closing it:
the key is unlocked instead, and if even that has no answer, the session is ended with all that it holds.

Session locks stack, and a second try of the same key on the same session would succeed. The runner attempts and runs one
tick of a graph at a time, and the session refuses a key that it is at already.

Statements take turns, and what several holds ask in the same words goes to the server as one of them (`tickd.batch`).
All others wait behind one that waits for a row, so it does not wait for long, and then everybody in it asks alone: only those
whose row it is fail. Between statements the watch waits for the session's own descriptor to become readable, which is what a
session that has ended is, and asks the server at the interval for links that died without a word.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg

from tickd.batch import Batch, Question
from tickd.lock import PROBE, UNLOCK, LockPlace, LockSession, Loss, Probe, open_session
from tickd.turns import SharedTry, Turns


T = TypeVar("T")

# Where what was asked this recently has been answered, the session's end cannot have lain unread for longer, nor can the
# process have stood still for longer.
JUST_ASKED = 0.02
# How long a statement waits for a row that another session has locked: time enough to end a stale writer
# (`tickd.stale_writers.PATIENCE`, and a connection to do it over).
ROW_WAIT = timedelta(seconds=2)
# What ends a statement and not the session, and is mostly the matter of one of those who ask in it.
FAILS_FOR_ONE = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.QueryCanceled,
)


class SharedSession(LockSession):
    """A lock session that several holds share; `end` closes it, `close` leaves it to the other holds."""

    shared = True

    def __init__(self, session: LockSession, newest_timeline: Callable[[], int]) -> None:
        super().__init__(session.connection, session.place)
        session.forget_link()
        self._turns = Turns()
        self._lent = 0
        self._graphs: set[str] = set()
        self._gathering: dict[Question, Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._loss: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.ensure_future(self._watch_session(newest_timeline))

    @property
    def lost(self) -> bool:
        """Say whether the session is gone, and with it every hold that was on it."""
        return self._loss.done()

    @property
    def idle(self) -> bool:
        """Say whether it holds nothing, no tick waits with it until it is due, and nothing is asked of it."""
        return not (self._graphs or self._lent) and all(sending.done() for sending in self._sending)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Note for the length of a block that a tick has the session, or waits with it until it is due."""
        self._lent += 1
        try:
            yield
        finally:
            self._lent -= 1

    def enter(self, graph: str) -> None:
        """Note that a try of the graph's key begins; a key that the session is at already raises ValueError."""
        if graph in self._graphs:
            raise ValueError(f"the shared session is at the key of {graph} already, and session locks stack")
        self._graphs.add(graph)

    async def leave(self, graph: str, *, doubtful: bool) -> None:
        """Note that the graph's hold is over; what has an unknown end is undone by an unlock."""
        if not doubtful:
            self._graphs.discard(graph)
            return
        # However often its tick is cancelled: no end of the session follows that would free the key.
        undoing = asyncio.ensure_future(self._undo(graph))
        self._sending.add(undoing)
        undoing.add_done_callback(self._sending.discard)
        # Not its result: where the session is closed meanwhile, its cancellation is not the tick's.
        await asyncio.wait({undoing})

    async def _undo(self, graph: str) -> None:
        undone = False
        try:
            undone = await self.unlock(graph) is not None
        finally:
            if not undone:
                self._lose(Loss("session_ended", "nobody knows what the session holds, so it was ended"))
            self._graphs.discard(graph)

    async def watch(self, newest_timeline: Callable[[], int] = lambda: 0, probe: Probe = (PROBE, ())) -> Loss:
        """Return when the hold is lost: with the session, or, where the probe asks about more than it, alone."""
        # The session's own watch compares it, and asks what is asked of the session alone.
        del newest_timeline
        interval = self.place.windows.probe_interval.total_seconds()
        asked, values = probe
        while isinstance(asked, Question):
            done, _ = await asyncio.wait({self._loss}, timeout=interval)
            if done:
                break
            # What fails is asked again: of the session itself its own watch tells.
            with suppress(psycopg.Error, TimeoutError):
                if await self.ask(asked, values) is None:
                    return Loss("superseded", "the ledger has a newer token for this tick")
        return await asyncio.shield(self._loss)

    def in_doubt(self) -> bool:
        """Say whether there may be news of the session's end that nobody has read yet; from any thread, at once.

        What can be read is mostly the answer to another hold, and no run is to wait for each of those.
        """
        return self.lost or (time.monotonic() - self._confirmed > JUST_ASKED and super().in_doubt())

    async def close(self) -> None:
        """Leave the session to the other holds."""

    async def end(self) -> None:
        """Close the connection, which frees whatever it still holds."""
        ending = {self._watching, *self._sending}
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        await super().close()

    async def _watch_session(self, newest_timeline: Callable[[], int]) -> None:
        interval = self.place.windows.probe_interval.total_seconds()
        asked = time.monotonic()
        while not self.lost:
            patience = max(0.0, asked + interval - time.monotonic())
            if await self._readable(patience) or time.monotonic() >= asked + interval:
                asked = time.monotonic()
                loss = await self._ask(newest_timeline)
                if loss is not None:
                    self._lose(loss)

    async def _ask(self, newest_timeline: Callable[[], int]) -> Loss | None:
        if time.monotonic() - self._confirmed > self.place.windows.server.total_seconds():
            return Loss(
                "not_confirmed",
                "this process did not run for longer than Postgres keeps a silent client's lock",
            )
        try:
            (timeline,) = await self._within(self._fetch(PROBE, ()), self.place.windows.probe_timeout)
        except TimeoutError as error:
            return Loss("no_answer", str(error))
        except psycopg.Error as error:
            return Loss("session_ended", str(error).strip())
        if timeline < newest_timeline():
            newest = newest_timeline()
            return Loss("failover", f"the lock is on timeline {timeline}, and the primary on {newest}")
        return None

    async def _readable(self, patience: float) -> bool:
        """Wait until the server has said something while no statement was under way; False when the patience is over."""
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        # A descriptor of our own: psycopg watches its one while a statement is under way.
        loop.add_reader(self._link.fileno(), heard.set)
        try:
            async with asyncio.timeout(patience):
                await heard.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._link.fileno())
        async with self._turns.turn():
            return super().in_doubt()

    def _lose(self, loss: Loss) -> None:
        if not self._loss.done():
            self._loss.set_result(loss)
            # Whatever the server still thinks is held must not outlive our trust in it.
            self._shut_down()

    async def ask(self, question: Question, values: Mapping[str, Any]) -> Any:
        """Ask together with all who ask the same before the session is free for it.

        Whoever is cancelled meanwhile does not wait for the answer: what they undo takes its turn after it.
        """
        batch = self._gathering.get(question)
        if batch is None or not batch.takes(values):
            batch = self._gathering[question] = Batch(question)
            sending = asyncio.ensure_future(self._send(batch))
            self._sending.add(sending)
            sending.add_done_callback(partial(self._sent, batch))
        try:
            return await batch.add(values)
        except FAILS_FOR_ONE:
            if batch.alone:
                raise
        if question.locks:
            # What the statement had locked before it failed is locked still, and session locks stack.
            await self.ask(UNLOCK, {"key": values["key"]})
        return await self._ask_alone(question, values)

    async def _ask_alone(self, question: Question, values: Mapping[str, Any]) -> Any:
        """Ask for one hold in a turn of its own, after those in a hurry: it may be the one that waits until it fails."""
        statement = self._fetch(question.one, {**self.common_values(), **values})
        return await self._within(statement, self.place.answer_timeout, hurried=False)

    async def _send(self, batch: Batch) -> None:
        question = batch.question
        try:
            async with self._turns.turn(hurried=question.hurried):
                if self._gathering.get(question) is batch:
                    del self._gathering[question]
                values = batch.close()
                if values:
                    statement = self._fetch_all(question.many, self.common_values() | values)
                    place = self.place
                    limit = place.windows.probe_timeout if question.probe else place.answer_timeout
                    batch.answer(await self._answered(statement, limit))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for those who wait for the answer
            batch.fail(error)

    def _sent(self, batch: Batch, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if sending.cancelled():  # maybe before it began, or before its turn
            # Whoever asks from now on must not join those: nobody sends for them any more.
            if self._gathering.get(batch.question) is batch:
                del self._gathering[batch.question]
            batch.fail(psycopg.OperationalError("the shared session was closed"))

    async def _within(
        self, statement: Coroutine[Any, Any, T], limit: timedelta, *, hurried: bool = True
    ) -> T:
        try:
            async with self._turns.turn(hurried=hurried):
                return await self._answered(statement, limit)
        finally:
            statement.close()  # where it had no turn; else this does nothing

    async def _answered(self, statement: Coroutine[Any, Any, T], limit: timedelta) -> T:
        """Have the statement's turn: its answer says that the session was there after this moment, like a probe's.

        The moment before it was sent, and not that of the answer, which may have lain unread while the process stood still.
        """
        sent = time.monotonic()
        try:
            # The probe waits behind it, and has to be in time for all other holds.
            answer = await super()._within(statement, min(limit, self.place.windows.answer))
        except FAILS_FOR_ONE:
            self._confirmed = sent  # an answer as well
            raise
        self._confirmed = sent
        return answer


async def open_shared(place: LockPlace, newest_timeline: Callable[[], int]) -> SharedSession:
    """Open a session for many holds; raises like `open_session`."""
    # Postgres has to end the wait before this side gives the whole session up.
    row_wait = min(ROW_WAIT, 0.9 * min(place.answer_timeout, place.windows.probe_timeout))
    return SharedSession(await open_session(place, row_wait=row_wait), newest_timeline)


class SharedHolds:
    """The shared session of one replica: opened when the first run needs it, and again after a loss."""

    def __init__(self, place: LockPlace, newest_timeline: Callable[[], int]) -> None:
        self._place = place
        self._newest_timeline = newest_timeline
        self._opening = SharedTry()
        self._session: SharedSession | None = None

    async def session(self) -> SharedSession:
        """Return the session; raises like `open_session` when there is none to be had."""
        async with self._opening.turn():
            if self._session is not None and self._session.lost:
                lost, self._session = self._session, None
                await lost.end()
            if self._session is None:
                self._session = await open_shared(self._place, self._newest_timeline)
            return self._session

    async def give_way(self) -> None:
        """Close a session that is idle, for somebody wants a connection and there is none; it is opened again when needed."""
        if self._session is not None and self._session.idle:
            idle, self._session = self._session, None
            await idle.end()

    async def end(self) -> None:
        """Close the session, if there is one."""
        if self._session is not None:
            await self._session.end()
            self._session = None
