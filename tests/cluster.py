"""Throwaway Postgres clusters: initdb, start, stop and restart, with Debian's server binaries and without residue."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from psycopg.conninfo import make_conninfo


StopMode = Literal["smart", "fast", "immediate"]

START_SECONDS = 20.0
STOP_SECONDS = 20.0
STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

# A session in Chatham time (UTC+12:45, with a summer time of its own) shows every place that takes the server's
# local time for UTC. What a crash of the machine would lose does not matter here, so nothing is synced to disk.
SETTINGS: Mapping[str, str] = {
    "timezone": "Pacific/Chatham",
    "log_timezone": "UTC",
    "max_connections": "200",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "listen_addresses": "127.0.0.1",
}

# The superuser is trusted, so that a test can always get in; everybody else proves a password, as in production.
HBA = """\
local all         all                   trust
host  all         postgres 127.0.0.1/32 trust
host  replication postgres 127.0.0.1/32 trust
host  all         all      127.0.0.1/32 scram-sha-256
"""


def server_binary(name: str) -> str:
    """Return the path of a Postgres server program; its absence is an error, never a reason to skip."""
    homes = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda home: int(home.parent.name), reverse=True
    )
    found = shutil.which(name, path=os.pathsep.join([*map(str, homes), os.environ.get("PATH", "")]))
    if found:
        return found
    raise RuntimeError(f"no {name!r}: run scripts/install-debian, or name a server in TICKD_TEST_DSN")


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_user() -> dict[str, Any]:
    """Return how subprocess must change user: Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


class Cluster:
    """One Postgres data directory with its server, on a Unix socket and a free port of the loopback."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        # Not pytest's tmp_path: the user postgres may not enter it, and a socket's path must stay short.
        self.home = Path(tempfile.mkdtemp(prefix="tickd-pg-"))
        self.data = self.home / "data"
        self.log = self.home / "log"
        self.port = free_port()
        self.settings = {**SETTINGS, **(settings or {})}
        self.process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(self.home, account.pw_uid, account.pw_gid)

    def init(self) -> None:
        """Make an empty cluster with the superuser `postgres`."""
        self.run(
            "initdb",
            "-D",
            str(self.data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        )
        (self.data / "pg_hba.conf").write_text(HBA)

    def init_standby(self, primary: "Cluster") -> None:
        """Make a hot standby that streams from `primary`."""
        self.run(
            "pg_basebackup",
            "-D",
            str(self.data),
            "-d",
            primary.admin_dsn("postgres"),
            "-R",
            "-c",
            "fast",
            "--no-sync",
        )

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        options = [part for key, value in self.settings.items() for part in ("-c", f"{key}={value}")]
        # The server dies with us, even if we are killed: no run of the tests leaves one behind.
        command = [
            "setpriv",
            "--pdeathsig",
            "QUIT",
            server_binary("postgres"),
            "-D",
            str(self.data),
            "-p",
            str(self.port),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "-k", str(self.home), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
                **server_user(),
            )
        self._wait_ready(self.process)

    def _wait_ready(self, process: "subprocess.Popen[bytes]") -> None:
        for _ in range(int(START_SECONDS / 0.05)):
            ready = [server_binary("pg_isready"), "-q", "-h", str(self.home), "-p", str(self.port)]
            if subprocess.run(ready, check=False).returncode == 0:
                return
            try:
                process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            break
        raise RuntimeError(f"the Postgres server did not start:\n{self.log.read_text()[-2000:]}")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server, if it runs, and return when it is gone."""
        if self.process is None:
            return
        self.process.send_signal(STOP_SIGNALS[mode])
        self.process.wait(timeout=STOP_SECONDS)
        self.process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start the server on the same port."""
        self.stop(mode)
        self.start()

    def remove(self) -> None:
        """Stop the server at once and delete everything it wrote."""
        self.stop("immediate")
        shutil.rmtree(self.home)

    def dsn(self, user: str, password: str, database: str) -> str:
        """Return the URL of a database over TCP."""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def admin_dsn(self, database: str) -> str:
        """Return the conninfo of a database as superuser, over TCP."""
        return make_conninfo(host="127.0.0.1", port=self.port, user="postgres", dbname=database)

    def run(self, program: str, *arguments: str) -> None:
        """Run one of the server's programs as the server's user; a failure shows what it said."""
        done = subprocess.run(
            [server_binary(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.home,
            check=False,
            **server_user(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{done.stdout}{done.stderr}")
