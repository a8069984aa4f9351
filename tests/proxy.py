"""A TCP proxy on the loopback that can lose, stall and cut the connections going through it."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


CHUNK = 65536
# SO_LINGER on, for no time at all: close() then sends a reset instead of an orderly end.
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes connections on to a port of the loopback, until told otherwise.

    Frozen, it is a half-open link: whoever connects is accepted, nothing moves, nothing is closed, not even a
    connection that the other end has closed. The kernels at both ends still acknowledge each other's packets, so
    only a query with a time-out can tell.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self._flows = threading.Event()
        self._flows.set()
        self._closed = threading.Event()
        self._delay = 0.0
        self._word: bytes | None = None
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def freeze(self) -> None:
        """Let nothing through any more, in either direction, and close nothing."""
        self._flows.clear()

    def freeze_at(self, word: bytes) -> None:
        """Freeze as soon as somebody says this, before it has been passed on."""
        self._word = word

    def frozen(self) -> bool:
        """Say whether nothing gets through."""
        return not self._flows.is_set()

    def thaw(self) -> None:
        """Let everything through again, what was held back first."""
        self._flows.set()

    def delay(self, seconds: float) -> None:
        """Keep each new connection waiting this long before it is passed on."""
        self._delay = seconds

    def cut(self, *, reset: bool = False) -> None:
        """End the connections there are, in order or with a reset; new ones are passed on."""
        with self._lock:
            taken, self._sockets = self._sockets, set()
        for each in taken:
            _end(each, reset=reset)

    def close(self) -> None:
        """Stop listening, end everything and wait for the threads."""
        self._closed.set()
        _end(self._listener)
        self.thaw()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        # accept() ends with an OSError when close() shuts the listener down.
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._spawn(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        self._add(client)
        if self._closed.wait(self._delay):
            self._drop(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream))
        except OSError:
            self._drop(client)
            return
        self._add(server)
        self._spawn(self._pump, client, server)
        self._spawn(self._pump, server, client)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        # A connection that was cut answers with an OSError, on whichever side.
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK):
                if self._word is not None and self._word in chunk:
                    self.freeze()
                self._flows.wait()
                target.sendall(chunk)
        self._flows.wait()
        self._drop(source)
        self._drop(target)

    def _add(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.add(each)
        if self._closed.is_set():
            self._drop(each)

    def _drop(self, each: socket.socket) -> None:
        with self._lock:
            if each not in self._sockets:
                return
            self._sockets.remove(each)
        _end(each)


def _end(each: socket.socket, *, reset: bool = False) -> None:
    if reset:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    # close() alone would not wake the thread that blocks in the socket, nor take effect before it has returned. To
    # shut the writing side would send the orderly end that a reset must not have. An error: the other end has gone.
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
    each.close()
