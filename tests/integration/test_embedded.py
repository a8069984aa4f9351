"""The embedded Postgres itself: where it lives, and what it says when it cannot."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.sessions import Session, forget
from tickd import embedded
from tickd.children import Children
from tickd.embedded import Cluster, home_of, programs_directory, sole_user
from tickd.errors import DatabaseUnusable, Unusable


def test_a_user_finds_the_data_beside_the_schedule(monkeypatch, tmp_path):
    """It belongs to the project, and goes with it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert home_of(tmp_path) == tmp_path / ".tickd" / "dev"


def test_root_keeps_the_data_of_each_directory_where_another_account_can_reach_it(monkeypatch):
    """Postgres refuses to run as root, and /root is closed to everybody else; two projects may have one name."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    here, there = home_of(Path("/srv/one/config")), home_of(Path("/srv/two/config"))

    assert here.parent == there.parent == Path("/var/lib/tickd-dev")
    assert here.name.startswith("config-")
    assert here != there


def test_a_path_too_long_for_a_socket_gets_a_private_place_for_it():
    """The kernel's 107 bytes are soon used up by a home directory and a project's name."""
    short, long = (Cluster(Path(name), Path(), None, Children()) for name in ("/home/x", "/home/" + "x" * 90))

    with short.socket_directory() as beside, long.socket_directory() as elsewhere:
        assert beside == Path("/home/x/data")
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    assert not elsewhere.exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    """A schedule in a read-only place is usual, and a traceback is no answer to it."""
    (tmp_path / "file").touch()

    with (
        pytest.raises(Unusable, match=r"cannot keep its files in .*/file/dev: Not a directory"),
        sole_user(tmp_path / "file" / "dev"),
    ):
        pass


def test_the_copy_for_another_account_runs_and_is_made_once(monkeypatch, tmp_path):
    """The wheel was installed by root, perhaps with a umask that lets nobody in."""
    monkeypatch.setattr(embedded, "ROOTS_HOME", tmp_path)

    copy = embedded._readable_copy(programs_directory())
    made = copy.stat().st_ctime_ns

    assert embedded._readable_copy(programs_directory()) == copy
    assert copy.stat().st_ctime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == [copy.relative_to(tmp_path).parts[0]]
    assert all(path.stat().st_mode & 0o005 == 0o005 for path in copy.rglob("*"))
    assert "PostgreSQL" in subprocess.check_output([copy / "postgres", "--version"], text=True)


async def test_an_initdb_that_fails_is_quoted_and_leaves_nothing_to_start_from(tmp_path):
    """A full disk is said by initdb, not by a guess of ours; and what it left must not be taken for a database."""
    (tmp_path / "initdb").write_text("#!/bin/sh\necho no space left; exit 1\n")
    (tmp_path / "initdb").chmod(0o755)
    cluster = Cluster(tmp_path, tmp_path, None, Children())

    with pytest.raises(DatabaseUnusable, match="no space left"):
        await cluster.create()

    assert not cluster.data.exists()


def test_a_server_that_does_not_start_is_quoted_with_what_to_do(tmp_path):
    """A power cut, or another version of Postgres, leaves data that the server refuses."""
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text("graphs: {a: {graph: 'm:g', every: 1d}}")
    (home_of(tmp_path) / "data").mkdir(parents=True)
    try:
        with Session(schedule) as session:
            assert session.wait() == 3
            assert "postgres.log ends with:" in session.said()
            assert f"delete {home_of(tmp_path)} to start afresh" in session.said()
    finally:
        forget(tmp_path)
