"""The database at the start: waited for, migrated, and probed for whether locks taken there exclude anybody."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from tickd.clock import DatabaseClock
from tickd.dsn import Dsn
from tickd.ends import milliseconds
from tickd.errors import DatabaseUnusable
from tickd.lock import (
    LockPlace,
    LockSession,
    closing,
    open_session,
    pooler_complaint,
    probe,
    reaches_pooler,
    standby_complaint,
)
from tickd.log import Log, text_of
from tickd.migrations import Versions, migrate
from tickd.policy import backoff
from tickd.pool import shut_down
from tickd.runner import Unreachable
from tickd.stop import Stop


T = TypeVar("T")

FIRST_PAUSE = timedelta(milliseconds=200)
LONGEST_PAUSE = timedelta(seconds=5)
# libpq gives no SQLSTATE for a refused connection, so these are told by the server's own English words; anything else
# is taken for trouble that passes.
POOLER = "a connection pooler is in the way"
STANDBY = "the server is a standby"
FINAL_REFUSALS = (
    ("password authentication failed", "the password is wrong"),
    ("no password supplied", "the server asks for a password, and none is set"),
    ("no pg_hba.conf entry", "the server's pg_hba.conf does not admit this host or user"),
    ("permission denied for database", "the role may not connect to this database"),
    ("does not exist", "the database or the role does not exist"),
    ("unsupported startup parameter", POOLER),
    ("session is read-only", STANDBY),
)


class DatabaseStart:
    """Brings the database of one replica to where the daemon can begin."""

    def __init__(
        self, database: Dsn, place: LockPlace, *, clock: DatabaseClock, stop: Stop, log: Log
    ) -> None:
        self._database = database
        self._place = place
        self._clock = clock
        self._stop = stop
        self._log = log
        self.waited = False  # the database was out of reach at some time

    async def wait(self, patience: timedelta) -> bool | None:
        """Connect, migrate and probe; return whether the pool's way leads through a pooler. See `insist`."""
        deadline = time.monotonic() + patience.total_seconds()
        return await self.insist(lambda: self._prepare(deadline), patience)

    async def insist(self, attempt: Callable[[], Awaitable[T]], patience: timedelta) -> T | None:
        """Attempt again and again, with one line per failure, and return the result.

        None when a stop was asked for meanwhile. Raises DatabaseUnusable at the end of the patience, and at once for a
        refusal that waiting does not change.
        """
        deadline = time.monotonic() + patience.total_seconds()
        tries = 0
        while True:
            tries += 1
            try:
                result = await attempt()
            except Unreachable as error:
                self.waited = True
                reason = self._place.dsn.redact(text_of(error).strip()) or type(error).__name__
                self._refuse_final(reason)
                pause = backoff(tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seed=self._place.replica)
                if time.monotonic() + pause.total_seconds() > deadline:
                    raise DatabaseUnusable(
                        f"the database {self._place.dsn.describe()} was not reachable within "
                        f"{patience.total_seconds():g} s (TICKD_DATABASE_DEADLINE): {reason}"
                    ) from error
                facts = {"error_type": type(error).__name__, "error": reason, "tries": tries}
                self._log.error("database.unreachable", **facts, retry_in_ms=milliseconds(pause))
                if await self._stop.wait(pause):
                    return None
            else:
                if tries > 1:
                    self._log.info("database.reachable", tries=tries)
                return result

    async def _prepare(self, deadline: float) -> bool | None:
        async with closing(await open_session(self._place)) as session:
            await self._clock.measure(session.fetch)
            before, after = await self._migrate(session, deadline)
        if self._stop.requested:
            return None
        if before != after:
            self._log.info("database.migrated", ledger=after.ledger, saver=after.saver)
        identity = await probe(self._place)
        return await reaches_pooler(self._database, self._place.connect_timeout, same_as=identity)

    async def _migrate(self, session: LockSession, deadline: float) -> tuple[Versions, Versions]:
        """Migrate, for as long as it takes; after a stop no longer than a statement may.

        An index may take hours, so nothing here has a time-out, and a link that has died without a word would keep a replica
        from ending. The server finishes what it is at.
        """
        migrating = asyncio.ensure_future(migrate(session.connection, stop=self._stop, deadline=deadline))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({migrating, stop}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({migrating}, timeout=self._place.answer_timeout.total_seconds())
            if not migrating.done():
                shut_down(session.connection)
            return await migrating
        finally:
            stop.cancel()

    def _refuse_final(self, reason: str) -> None:
        """Raise DatabaseUnusable for a refusal that waiting does not change."""
        meaning = next((meaning for words, meaning in FINAL_REFUSALS if words in reason), None)
        if meaning is None:
            return
        if meaning == POOLER:
            raise DatabaseUnusable(pooler_complaint(self._place.dsn))
        if meaning == STANDBY:
            raise DatabaseUnusable(standby_complaint(self._place.dsn))
        raise DatabaseUnusable(
            f"the database {self._place.dsn.describe()} refuses tickd: {meaning}. Postgres says: {reason}"
        )
