"""The outlet: whatever becomes of stdout, a line of the log is lost at most."""

import os
from collections.abc import Iterator

import pytest

from tests.replicas import strict_json
from tickd.log import configure_stream
from tickd.outlet import Outlet


PIPE_BYTES = 65536


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe; the test may close them."""
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def fill(descriptor: int) -> None:
    """Leave no room in a pipe."""
    os.write(descriptor, b"." * (PIPE_BYTES - 1) + b"\n")


def test_a_line_is_written_at_once_and_whole(pipe: tuple[int, int]):
    """Nothing waits in a buffer for a process that may be killed, and a traceback is longer than a pipe takes at a time."""
    reader, writer = pipe
    outlet = Outlet(writer)

    outlet.write("é\udc80" + "x" * 20_000 + "\n")

    assert os.read(reader, PIPE_BYTES) == "é\\udc80".encode() + b"x" * 20_000 + b"\n"
    assert outlet.lost == 0


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(
    pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
):
    """An exception here would end the run whose line it was, and the replica with it."""
    reader, writer = pipe
    os.close(reader)
    outlet = Outlet(writer)

    outlet.write("one\n")
    outlet.write("two\n")

    assert outlet.lost == 2
    assert capfd.readouterr().err.count("stdout takes no log lines (Broken pipe)") == 1


def test_a_full_disk_costs_lines_and_nothing_else():
    """The volume of the logs is full far more often than the database is down."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(descriptor)

    outlet.write("one\n")

    assert outlet.lost == 1
    os.close(descriptor)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stands_still_does_not_hold_up_the_replica(pipe: tuple[int, int], *, blocking: bool):
    """Ctrl-S in a terminal, a log shipper that hangs: the locks of this replica's runs would be held for as long."""
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    fill(writer)
    outlet = Outlet(writer, patience=0.01)

    outlet.write("one\n")
    outlet.write("two\n")
    assert outlet.lost == 2

    os.read(reader, PIPE_BYTES)
    outlet.write("three\n")
    assert os.read(reader, PIPE_BYTES) == b"three\n"
    assert outlet.lost == 0


def test_a_line_that_was_cut_off_does_not_spoil_the_next(pipe: tuple[int, int]):
    """Two halves in one line would be two lines that nobody can parse."""
    reader, writer = pipe
    outlet = Outlet(writer, patience=0.01)

    outlet.write("x" * (PIPE_BYTES + 10) + "\n")
    os.read(reader, PIPE_BYTES)
    outlet.write("whole\n")

    assert os.read(reader, PIPE_BYTES) == b"\nwhole\n"


def test_the_first_line_that_comes_through_says_how_many_did_not(pipe: tuple[int, int]):
    """Whoever counts ticks by their lines has to know that some are missing."""
    reader, writer = pipe
    outlet = Outlet(writer, patience=0.01)
    log = configure_stream(outlet, replica="a", as_console=False, level="info")  # type: ignore[arg-type]  # see configure
    fill(writer)
    log.info("tick.ran", graph="g")
    log.info("tick.ran", graph="g")
    os.read(reader, PIPE_BYTES)

    log.info("tick.ran", graph="g")
    log.info("tick.ran", graph="g")

    first, second = map(strict_json, os.read(reader, PIPE_BYTES).splitlines(keepends=True))
    assert first["lines_lost"] == 2
    assert "lines_lost" not in second
