"""The pool of connections that are not locks, which notices a link that has died without a word.

A pooled connection may have been cut off while it lay idle, and nobody is told: the first statement on it would wait for
as long as the kernel repeats its packets, a quarter of an hour. So a connection is checked before it is lent, with a
time-out; and where statements are short, the loan has one as well.
"""

import asyncio
import os
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool


# For a host that has vanished: the client's kernel gives its connections up after some 25 seconds.
KEEPALIVES: Mapping[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

# For how long one attempt to connect is repeated, after a second and after one more; the library would go on for five
# minutes, and wait twice as long each time.
RECONNECT_SECONDS = 2.0
# How long the end of a pool waits for connections that are being opened.
CLOSE_SECONDS = 1.0


class Pool(AsyncConnectionPool[Any]):
    """A pool whose connections were alive a moment before they are lent, and which is back as soon as its server is.

    `parameters` are asked for each new connection. `patience` bounds the wait for a connection, `check_within` the check
    of one that lay idle for longer than `trusted_for`, and the wait for each host while one is opened, unless the
    parameters have a `connect_timeout`. `loan`, where given, bounds the time for which a connection is lent: what is asked
    on it then fails as on a broken link.
    """

    def __init__(
        self,
        name: str,
        parameters: Callable[[], Awaitable[Mapping[str, Any]]],
        *,
        minimum: int,
        maximum: int,
        patience: timedelta,
        check_within: timedelta,
        trusted_for: timedelta = timedelta(0),
        loan: timedelta | None = None,
    ) -> None:
        # libpq takes whole seconds, and no less than two.
        connect_timeout = max(2, round(check_within.total_seconds()))

        async def connect_with() -> dict[str, Any]:
            return {"connect_timeout": connect_timeout, **KEEPALIVES, **await parameters()}

        self._check_within = check_within
        self._trusted_for = trusted_for.total_seconds()
        self._loan = loan
        self._returned: WeakKeyDictionary[AsyncConnection[Any], float] = WeakKeyDictionary()
        self._asking = 0
        super().__init__(
            kwargs=connect_with,
            min_size=minimum,
            max_size=maximum,
            timeout=patience.total_seconds(),
            reset=self._note_return,
            reconnect_timeout=RECONNECT_SECONDS,
            reconnect_failed=self._try_anew,
            open=False,
            name=name,
        )

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[AsyncConnection[Any]]:  # noqa: ASYNC109  # the pool's own signature
        """Lend a connection, for as long as the loan may last."""
        async with super().connection(timeout) as connection:
            with _within(connection, self._loan):
                yield connection

    async def getconn(self, timeout: float | None = None) -> AsyncConnection[Any]:  # noqa: ASYNC109  # the pool's own signature
        """Lend a connection that is alive; raises PoolTimeout, or psycopg.Error when even new ones end at once.

        Not by the pool's own `check`: after the second connection that fails it, that waits for 1, 2, 4, ... seconds, and a
        restart of the server ends every idle one.
        """
        until = time.monotonic() + (self.timeout if timeout is None else timeout)
        failures = 0
        while True:
            self._asking += 1
            try:
                connection: AsyncConnection[Any] = await super().getconn(until - time.monotonic())
            finally:
                self._asking -= 1
            try:
                await self._check_alive(connection)
            except BaseException as error:
                await connection.close()
                await self.putconn(connection)
                failures += 1
                if not isinstance(error, psycopg.Error | OSError) or failures > self.max_size:
                    raise
            else:
                return connection

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:  # noqa: ASYNC109  # the pool's own signature
        """Close every connection; one that is being opened at that moment, maybe to a dead host, holds nobody up."""
        await super().close(timeout)

    async def _check_alive(self, connection: AsyncConnection[Any]) -> None:
        """Refuse a connection that has ended; without this, each one fails a checkpoint after a restart.

        One that has just been in use is only asked when there is something to read: an idle connection has nothing to
        say but its end. It has to be asked even so, for the pool takes back what psycopg has not seen fail.
        """
        look = select.poll()
        look.register(connection.fileno(), select.POLLIN)
        idle = time.monotonic() - self._returned.get(connection, 0.0)
        if idle > self._trusted_for or look.poll(0):
            with _within(connection, self._check_within):
                await self.check_connection(connection)

    async def _try_anew(self, _: AsyncConnectionPool[Any]) -> None:
        """Try for a connection again, after the pool has given an attempt up, as long as anybody waits for one.

        The pool itself tries for whoever comes, and not for those who are there. It opens one at a time then, and never
        more than there may be.
        """
        if self._asking:
            await self.check()

    async def _note_return(self, connection: AsyncConnection[Any]) -> None:
        self._returned[connection] = time.monotonic()


@contextmanager
def _within(connection: AsyncConnection[Any], limit: timedelta | None) -> Iterator[None]:
    """Shut the connection's socket down at the limit, which ends whatever is waited for on it at once.

    To cancel the statement would not help: psycopg then asks the server first, over another connection to the same host.
    """
    if limit is None:
        yield
        return
    handle = asyncio.get_running_loop().call_later(limit.total_seconds(), shut_down, connection)
    try:
        yield
    finally:
        handle.cancel()


def shut_down(connection: AsyncConnection[Any]) -> None:
    """End whatever is waited for on the connection; it is of no use after that."""
    # A duplicate descriptor, because libpq owns the connection's: shutting down acts on the socket behind both.
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)
