"""Lock sessions of replicas that a test plays itself, on a migrated database."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

from tickd.dsn import parse_dsn
from tickd.lock import LockPlace, LockSession, closing, open_session
from tickd.migrations import migrate_at
from tickd.policy import TrustWindows
from tickd.shared import open_shared


SPACE = 7301
MIGRATION_SECONDS = 20

Open = Callable[..., Awaitable[LockSession]]


def place_of(
    dsn: str,
    replica: str = "a",
    *,
    space: int = SPACE,
    windows: TrustWindows | None = None,
    **timeouts: timedelta,
) -> LockPlace:
    """Return where the replica of this name takes its locks."""
    address = parse_dsn(dsn, setting="TICKD_LOCK_DATABASE_URL")
    return LockPlace(address, replica, space, windows=windows or TrustWindows(), **timeouts)


@asynccontextmanager
async def sessions(dsn: str, *, kind: str = "dedicated") -> AsyncIterator[Open]:
    """Migrate the database and open sessions on it by the replica's name; all are closed at the end.

    One that is `shared` is for many holds; one whose ledger is `apart` writes to it over one that is shared.
    """
    await migrate_at(place_of(dsn), deadline=time.monotonic() + MIGRATION_SECONDS)
    async with AsyncExitStack() as stack:

        async def open_as(
            replica: str, *, space: int = SPACE, options: str = "", windows: TrustWindows | None = None
        ) -> LockSession:
            address = f"{dsn}?options={options}" if options else dsn
            place = place_of(address, replica, space=space, windows=windows)
            if kind == "dedicated":
                return await stack.enter_async_context(closing(await open_session(place)))
            together = await open_shared(place, lambda: 0)
            stack.push_async_callback(together.end)
            if kind == "shared":
                return together
            own = await stack.enter_async_context(closing(await open_session(place)))
            own.ledger = together
            return own

        yield open_as
