"""The password from a file or a command: read anew for each connection, and never shown."""

import os
from pathlib import Path

import psycopg
import pytest

from tickd.dsn import Dsn, parse_dsn


def from_file(file: Path) -> Dsn:
    """Return a DSN whose password is in a file."""
    return parse_dsn("postgresql://tickd:old@db/tickd", setting="X", password_file=file)


def from_command(command: str) -> Dsn:
    """Return a DSN whose password a command prints."""
    return parse_dsn("postgresql://tickd:old@db/tickd", setting="X", password_command=command)


async def password(dsn: Dsn) -> str:
    """Return the password of the next connection."""
    given: str = (await dsn.connection_parameters())["password"]
    return given


async def test_a_password_file_is_read_for_each_connection(tmp_path: Path):
    """The password may be rotated under a running replica."""
    file = tmp_path / "password"
    dsn = from_file(file)

    read = []
    for text in ("first\n", "second\r\n", " third "):
        file.write_bytes(text.encode())
        read.append(await password(dsn))

    assert read == ["first", "second", " third "]


@pytest.mark.parametrize("content", [None, b"\xff\xfeZq8x"])
async def test_a_password_file_that_cannot_be_read_is_trouble_with_the_connection(
    tmp_path: Path, content: bytes | None
):
    """It may be in the middle of being replaced, so the attempt is repeated like any other."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(
        psycopg.OperationalError, match=r"the password file .*/password cannot be read"
    ) as failed:
        await password(from_file(file))

    assert "Zq8x" not in str(failed.value)


async def test_a_password_command_is_run_for_each_connection(tmp_path: Path):
    """Tokens of cloud providers live for minutes."""
    counter = tmp_path / "counter"
    counter.write_text("1")
    dsn = from_command(f"sh -c 'cat {counter}; printf 2 > {counter}; echo'")

    assert [await password(dsn), await password(dsn)] == ["1", "2"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo Zq8x; exit 3'", "ended with exit code 3"),
        ("/no/such/program", "cannot be started: No such file or directory"),
        (r"printf 'Zq8x\377'", "printed something that is not UTF-8"),
    ],
)
async def test_a_password_command_that_fails_is_trouble_with_the_connection(command: str, said: str):
    """What it printed is not shown: it may be half a password."""
    with pytest.raises(psycopg.OperationalError, match=said) as failed:
        await password(from_command(command))

    assert "Zq8x" not in str(failed.value)


async def test_a_password_command_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One stuck helper must not hold up every tick, nor leave a process behind per attempt."""
    monkeypatch.setattr("tickd.dsn.COMMAND_SECONDS", 0.2)
    pid = tmp_path / "pid"
    hangs = tmp_path / "hangs.sh"
    hangs.write_text(f"echo $$ > {pid}\nmkfifo {tmp_path}/fifo\nexec cat {tmp_path}/fifo\n")

    with pytest.raises(psycopg.OperationalError, match=r"no answer within 0\.2 s"):
        await password(from_command(f"sh {hangs}"))

    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
