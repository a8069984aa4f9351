"""The public way in: be the one writer of a graph from a web handler, a script or a notebook, by the daemon's own means.

`sole_writer` takes the lock that the replicas take, admits a tick of its own, gives a saver whose writes Postgres accepts
for as long as the hold lasts, records how it ended, and lets go. Nobody waits: who does not get the lock is told who has
it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from functools import partial
from typing import Any

import psycopg
from langchain_core.runnables import RunnableConfig
from psycopg import errors
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from tickd import admissions, ledger, lock
from tickd.admissions import Admission, Refusal
from tickd.dsn import Dsn
from tickd.errors import DatabaseUnusable, Unusable
from tickd.fence import FencedSaver, is_refused
from tickd.ledger import Finish
from tickd.lock import Attempt, Holder, LockPlace, LockSession, closing, open_session, pooler_complaint
from tickd.log import text_of
from tickd.settings import Settings, read_settings
from tickd.tick import Outcome, SkipReason, Tick, instant_text, run_id


NOW = "SELECT clock_timestamp()"
BACKEND = "SELECT pg_backend_pid()"
POOL_SIZE = 4
# What an attempt to go on is granted when there is nothing to go on with.
NOTHING_WAITS = object()


class LockLost(Exception):
    """The hold ended while its block was at work; what the block wrote after the next hold had begun has been refused."""


@dataclass(slots=True)
class WriterHold:
    """What `sole_writer` yields; true when this is the graph's one writer.

    When true: compile the graph with `saver`, invoke it with `config`, and set `outcome` to "interrupted" if the graph now
    waits on an interrupt. When false: `reason` says why, and `holder`, where
    it is known, who has the graph. `lost` is set at the moment when the hold ends before its block does.
    """

    tick: Tick
    holder: Holder | None = None
    reason: SkipReason | None = None
    token: int | None = None
    outcome: Outcome | str = Outcome.RAN
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _saver: FencedSaver | None = None
    _config: RunnableConfig | None = None

    def __bool__(self) -> bool:
        return self.token is not None

    @property
    def saver(self) -> FencedSaver:
        """The checkpointer to compile the graph with; asking a false hold for it raises RuntimeError."""
        if self._saver is None:
            raise RuntimeError(self._refusal())
        return self._saver

    @property
    def config(self) -> RunnableConfig:
        """The config to invoke the graph with: thread, run id and the tick in its metadata."""
        if self._config is None:
            raise RuntimeError(self._refusal())
        return self._config

    def _refusal(self) -> str:
        holder = f"; {self.holder.replica} has it" if self.holder else ""
        return f"{self.tick.graph} is not yours to write ({self.reason or 'it waits on no interrupt'}{holder}): look at the hold before you use it"


@asynccontextmanager
async def sole_writer(
    graph: str,
    *,
    thread_id: str | Callable[[Tick], str] | None = None,
    name: str = "sole_writer",
    settings: Settings | None = None,
) -> AsyncIterator[WriterHold]:
    """Be the one writer of the graph for the length of the block, or learn at once who is.

    `thread_id` is the thread to write to, or makes it from the tick: the graph's name for one with `thread: per_graph`; by
    default one of this tick's own. `name` is what others see as the holder. `settings` default to the environment: TICKD_DATABASE_URL and so on;
    where they are given, their `replica` is the name.

    An exception of the block ends the tick as failed and goes on its way; one that follows from a lost hold comes as
    LockLost. Raises DatabaseUnusable when Postgres cannot be reached or has no tables of tickd for this role, and when a
    pooler is in the way of the lock.
    """
    if not graph:
        raise Unusable("a graph needs a name: it is what the lock is taken on")
    settings = settings or read_settings(replica=name)
    async with _session(settings) as session:
        with _told(session.place.dsn):
            (now,) = await session.fetch(NOW)
        tick = Tick(graph, now.astimezone(UTC))
        thread = thread_id(tick) if callable(thread_id) else thread_id or str(tick)
        attempt = partial(admissions.hold_and_admit, tick=tick, thread_id=thread, run_id=run_id(tick))
        async with _writing(settings, session, tick, attempt) as hold:
            yield hold


@asynccontextmanager
async def continue_tick(
    tick: Tick, *, name: str = "resume-tick", settings: Settings | None = None
) -> AsyncIterator[WriterHold]:
    """Be the one writer that goes on with a tick which waits on an interrupt; false, without a reason, when it does not wait."""
    settings = settings or read_settings(replica=name)
    async with (
        _session(settings) as session,
        _writing(settings, session, tick, partial(_resume, tick=tick)) as hold,
    ):
        yield hold


async def _resume(session: LockSession, tick: Tick) -> tuple[bool | None, Any]:
    held, admission = await admissions.hold_and_resume(session, tick, outcome=Outcome.INTERRUPTED)
    return held, NOTHING_WAITS if held is None else admission


@asynccontextmanager
async def _session(settings: Settings) -> AsyncIterator[LockSession]:
    place = LockPlace(
        settings.lock_database(),
        settings.replica,
        settings.lock_space,
        settings.connect_timeout,
        windows=settings.windows(),
    )
    with _told(place.dsn):
        session = await open_session(place)
    async with closing(session):
        with _told(place.dsn):
            (backend,) = await session.fetch(BACKEND)
        # A pooler gives its client a pid of its own. Through one, lock and unlock may land on different backends.
        if backend != session.connection.info.backend_pid:
            raise DatabaseUnusable(pooler_complaint(place.dsn))
        yield session


@contextmanager
def _told(dsn: Dsn) -> Iterator[None]:
    """Say in one sentence, without a secret, why the database does not do what it is asked to before the block begins."""
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName):
        raise DatabaseUnusable(
            f"{dsn.describe()} has no tables of tickd, or older ones: start a replica, or run `tickd migrate`"
        ) from None
    except errors.InsufficientPrivilege as error:
        raise DatabaseUnusable(
            f"{dsn.describe()} refuses tickd: {error.diag.message_primary}; GRANT this role what it needs of the schema "
            "tickd and of the checkpointer's tables"
        ) from None
    except (psycopg.OperationalError, TimeoutError, OSError) as error:
        reason = dsn.redact(str(error)).strip() or type(error).__name__
        if "unsupported startup parameter" in reason:  # PgBouncer, which nobody has told to ignore them
            raise DatabaseUnusable(pooler_complaint(dsn)) from None
        raise DatabaseUnusable(f"the database {dsn.describe()} cannot be reached: {reason}") from None


@asynccontextmanager
async def _writing(
    settings: Settings, session: LockSession, tick: Tick, attempt: Attempt[Any]
) -> AsyncIterator[WriterHold]:
    """Try; yield a false hold, or a true one with all that belongs to it, and record how its block ended."""
    async with lock.sole_writer(
        tick.graph, session.place, attempt=_telling(attempt), session=session
    ) as hold:
        granted = hold.granted
        if not isinstance(granted, Admission):
            yield WriterHold(tick, holder=hold.holder, reason=_reason(granted))
            return
        async with _pool(settings) as pool:
            space = session.place.space
            saver = FencedSaver(pool, space=space, graph=tick.graph, token=granted.token)
            config = _config(tick, granted, session.place.replica)
            writer = WriterHold(tick, token=granted.token, _saver=saver, _config=config)
            watch = asyncio.ensure_future(_watch(session, writer))
            try:
                yield writer
                finish = Finish(Outcome(writer.outcome), granted.attempt)
            except BaseException as error:
                finish = Finish(Outcome.FAILED, granted.attempt, type(error).__name__, text_of(error))
                if is_refused(error):
                    raise LockLost(f"the hold on {tick.graph} ended while the block was at work") from error
                raise
            finally:
                watch.cancel()
                await asyncio.wait({watch})
                recorded = not writer.lost.is_set() and await _record(session, tick, granted.token, finish)
            if not recorded:
                raise LockLost(f"the hold on {tick.graph} ended while the block was at work")


def _telling(attempt: Attempt[Any]) -> Attempt[Any]:
    async def told(session: LockSession) -> tuple[bool | None, Any]:
        with _told(session.place.dsn):
            return await attempt(session)

    return told


def _reason(granted: Any) -> SkipReason | None:
    """Return why an attempt that was granted this, and no admission, makes nobody the writer."""
    if isinstance(granted, Refusal):
        return granted.reason
    return None if granted is NOTHING_WAITS else SkipReason.LOCK_HELD


async def _watch(session: LockSession, writer: WriterHold) -> None:
    await session.watch()
    writer.lost.set()


async def _record(session: LockSession, tick: Tick, token: int, finish: Finish) -> bool:
    try:
        return await ledger.record(session, tick, token=token, finish=finish)
    except (psycopg.Error, TimeoutError):
        return False


@asynccontextmanager
async def _pool(settings: Settings) -> AsyncIterator[AsyncConnectionPool[Any]]:
    dsn = settings.database()

    async def parameters() -> dict[str, Any]:
        return {
            **await dsn.connection_parameters(),
            "application_name": f"tickd/{settings.replica}",
            "autocommit": True,
            "row_factory": dict_row,
            # This pool is short-lived and may go through a transaction-mode pooler: preparing would gain nothing.
            "prepare_threshold": None,
        }

    async with AsyncConnectionPool(kwargs=parameters, min_size=0, max_size=POOL_SIZE, open=False) as pool:
        yield pool


def _config(tick: Tick, admission: Admission, replica: str) -> RunnableConfig:
    identity = run_id(tick)
    return {
        "configurable": {"thread_id": admission.thread_id, "run_id": str(identity)},
        "run_id": identity,
        "run_name": tick.graph,
        "tags": ["tickd"],
        "metadata": {
            "tickd_graph": tick.graph,
            "tickd_fire_time": instant_text(tick.fire_time),
            "tickd_attempt": admission.attempt,
            "tickd_replica": replica,
            "tickd_token": admission.token,
        },
    }
