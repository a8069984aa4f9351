"""A replica with as few rights as a container platform leaves it: unknown user, no home, nothing to write to."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replicas import ROOT, Fleet, Replica, python_path
from tests.witness import GRAPHS, Witness


pytestmark = pytest.mark.chaos

UID = "12345"
# In a mount namespace of its own, so that nothing is left mounted: the working directory becomes read-only.
READ_ONLY = 'mount --bind "$PWD" "$PWD" && mount -o remount,ro,bind "$PWD" && cd "$PWD" && exec "$@"'


def everyone_may_enter(path: Path) -> bool:
    """Say whether an unknown user can reach a path."""
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents] if parent.is_dir())


def as_nobody(dsn: str, **env: str) -> list[str]:
    """Return the command prefix that takes all rights away, and the environment with them."""
    prefix = [
        *([] if os.geteuid() == 0 else ["sudo", "-n"]),
        "unshare",
        "--mount",
        "sh",
        "-c",
        READ_ONLY,
        "sh",
    ]
    prefix += ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    if not all(map(everyone_may_enter, [ROOT, Path(sys.prefix), Path(sys.base_prefix)])):
        # The clone, or Python, lies in somebody's private folder. The right to read it is no right to write anything.
        prefix += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    bare = {
        "PATH": os.environ["PATH"],
        **python_path(ROOT),
        "TICKD_DATABASE_URL": dsn,
        "TICKD_REPLICA": "a",
        **env,
    }
    return [*prefix, "env", "-i", *(f"{key}={value}" for key, value in bare.items())]


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A folder that anybody may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="tickd-home-") as name:
        home = Path(name)
        home.chmod(0o755)
        yield home


@pytest.fixture
def public_fleet(open_home: Path, dsn: str, witness: Witness) -> Iterator[Fleet]:  # noqa: ARG001  # its graphs bear witness
    """A fleet whose schedule anybody may read."""
    with Fleet(open_home, dsn) as fleet:
        yield fleet


def start(fleet: Fleet, dsn: str, **env: str) -> Replica:
    """Start a replica without rights."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s"}})
    return fleet.start("a", schedule, prefix=as_nobody(dsn, **env))


def test_a_replica_needs_no_user_no_home_and_no_place_to_write(public_fleet: Fleet, admin_dsn: str):
    """F6: Platforms give containers a random uid and a read-only root; a look-up of the user's name would fail there."""
    before = set(public_fleet.home.iterdir())
    replica = start(public_fleet, public_fleet.dsn, WITNESS_DSN=admin_dsn)

    replica.wait_for("tick.ran")

    assert set(public_fleet.home.iterdir()) - before == {public_fleet.home / "schedule-0.yaml"}
    assert "Traceback" not in replica.said()


def test_a_url_without_a_user_is_refused_in_words(public_fleet: Fleet, dsn: str):
    """Left to itself, libpq would look the user up in the system and complain of `local user with ID 12345`."""
    replica = start(public_fleet, "postgresql://" + dsn.partition("@")[2])

    assert replica.wait() == 2
    assert "names no user" in replica.stderr
    assert "Traceback" not in replica.said()
