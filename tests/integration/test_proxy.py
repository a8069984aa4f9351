"""The proxy itself: each fault is the one it claims to be."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while chunk := connection.recv(1024):
                    connection.sendall(chunk)
            except OSError:
                return

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=[connection], daemon=True).start()
        except OSError:
            return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    """A proxy before the echo."""
    with Proxy(echo) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    """Return a client's end."""
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def ask(client: socket.socket) -> bytes:
    """Say something and return the answer."""
    client.sendall(b"hello")
    return client.recv(1024)


def test_it_passes_everything_on(proxy: Proxy):
    """A fault must come from the test, never from the proxy."""
    with connect(proxy) as client:
        assert ask(client) == b"hello"


def test_a_frozen_link_says_nothing_and_closes_nothing(proxy: Proxy):
    """A link that ended would be noticed at once: half-open is the hard case."""
    with connect(proxy) as client:
        ask(client)
        proxy.freeze()
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ask(client)
        client.settimeout(5)
        proxy.thaw()
        assert client.recv(1024) == b"hello"


def test_a_frozen_link_accepts_new_connections(proxy: Proxy):
    """A connect time-out that stops at the TCP handshake would never fire."""
    proxy.freeze()
    with connect(proxy) as client:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ask(client)


def test_a_cut_link_ends(proxy: Proxy):
    """The orderly end: what a server that shuts down sends."""
    with connect(proxy) as client:
        ask(client)
        proxy.cut()
        assert client.recv(1024) == b""
    with connect(proxy) as client:
        assert ask(client) == b"hello"


def test_a_reset_link_raises(proxy: Proxy):
    """What a crashed host or a firewall sends."""
    with connect(proxy) as client:
        ask(client)
        proxy.cut(reset=True)
        with pytest.raises(ConnectionResetError):
            client.recv(1024)


def test_a_delayed_link_connects_late(proxy: Proxy):
    """The order of two replicas' attempts is turned round with this."""
    proxy.delay(0.3)
    before = time.monotonic()
    with connect(proxy) as client:
        assert ask(client) == b"hello"
    assert time.monotonic() - before >= 0.3
