"""HTTP: what a client that does not do everything at once is answered."""

import asyncio
import socket

import pytest

from tests.cluster import free_port
from tickd.http import serving


LINE, REST = b"GET /live HTTP/1.1\r\n", b"Host: x\r\n\r\n"


def connect(port: int) -> socket.socket:
    """Return a connection to the port of the loopback."""
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def ask(port: int, *parts: bytes) -> bytes:
    """Send the parts and return everything that is answered."""
    with connect(port) as link:
        for part in parts:
            link.sendall(part)
        return b"".join(iter(lambda: link.recv(4096), b""))


async def test_a_client_is_answered_when_it_has_said_everything():
    """One that sends its headers by themselves found the link closed, and called a healthy replica dead."""
    port = free_port()

    def in_two_parts() -> bytes:
        with connect(port) as link:
            link.sendall(LINE)
            ask(port, LINE + REST)  # by then the server has read the line
            link.settimeout(0)
            with pytest.raises(BlockingIOError):
                link.recv(1)
            link.settimeout(10)
            link.sendall(REST)
            return b"".join(iter(lambda: link.recv(4096), b""))

    async with serving(f"127.0.0.1:{port}", {"/live": lambda: (True, {})}):
        assert (await asyncio.to_thread(in_two_parts)).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("said", [LINE, LINE + b"Cookie: " + b"c" * 10_000 + b"\r\n\r\n"])
async def test_a_client_that_does_not_finish_is_answered_all_the_same(said: bytes):
    """A person with netcat is one, and a proxy with large headers another."""
    port = free_port()
    async with serving(f"127.0.0.1:{port}", {"/live": lambda: (True, {})}):
        assert (await asyncio.to_thread(ask, port, said)).startswith(b"HTTP/1.1 200 OK")
