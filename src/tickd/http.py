"""Health over HTTP for orchestrators: `GET /live` and `GET /ready`, and nothing else.

Two fixed answers do not earn a web framework in every replica; what a request may do here is be one line that names one
of two paths.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from tickd.errors import Unusable


PATIENCE = 5.0
HEAD_PATIENCE = 1.0
LONGEST_LINE = 4096

# A check returns whether all is well, and facts to show beside it.
Check = Callable[[], tuple[bool, Mapping[str, Any]]]


@asynccontextmanager
async def serving(address: str | None, checks: Mapping[str, Check]) -> AsyncIterator[None]:
    """Answer `GET` of the checks' paths at `host:port` while the context lasts: 200 when well, 503 when not."""
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                line = await reader.readline()
                await _read_to_blank_line(reader)
                writer.write(_response(line, checks))
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # a client that went away, or that never sent a line
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    try:
        server = await asyncio.start_server(answer, host.strip("[]") or None, int(port), limit=LONGEST_LINE)
    except (OSError, OverflowError) as error:
        raise Unusable(f"TICKD_HTTP={address}: cannot listen there: {error}") from None
    async with server:
        yield


async def _read_to_blank_line(reader: asyncio.StreamReader) -> None:
    """Let the client finish: one that still writes when the link is closed finds it broken, and may miss the answer."""
    with suppress(
        TimeoutError, ValueError
    ):  # who sends no blank line, or one that is too long, is answered all the same
        async with asyncio.timeout(HEAD_PATIENCE):
            while (await reader.readline()).strip():
                pass


def _response(request_line: bytes, checks: Mapping[str, Check]) -> bytes:
    words = request_line.decode("latin-1").split()
    path = words[1].partition("?")[0] if len(words) > 1 and words[0] in ("GET", "HEAD") else ""
    if path not in checks:
        return _message("404 Not Found", {"paths": sorted(checks)}, head=False)
    well, facts = checks[path]()
    status = "200 OK" if well else "503 Service Unavailable"
    return _message(status, {"ok": well, **facts}, head=words[0] == "HEAD")


def _message(status: str, facts: Mapping[str, Any], *, head: bool) -> bytes:
    body = json.dumps(facts).encode() + b"\n"
    headers = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return headers.encode() + (b"" if head else body)
