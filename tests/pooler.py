"""PgBouncer in transaction mode before a database server, as many deployments have it."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from tests.cluster import free_port, server_user


# The defaults are left alone on purpose: a start-up parameter that PgBouncer does not know is an error to it.
CONFIG = """\
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
pool_mode = transaction
default_pool_size = 4
max_client_conn = 100
auth_type = scram-sha-256
auth_file = {home}/userlist.txt
auth_user = {user}
logfile = {home}/log
"""


class Pooler:
    """One PgBouncer on a free port of the loopback, before the server of `admin` (a superuser's conninfo)."""

    def __init__(self, admin: str) -> None:
        self.port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix="tickd-pooler-"))
        server: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 5432,
            "password": "",
            **conninfo_to_dict(admin),
        }
        config = CONFIG.format(home=self.home, listen_port=self.port, **server)
        (self.home / "pgbouncer.ini").write_text(config)
        (self.home / "userlist.txt").write_text(f'"{server["user"]}" "{server["password"]}"\n')
        self.process: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            for path in [self.home, *self.home.iterdir()]:
                os.chown(path, account.pw_uid, account.pw_gid)

    def start(self) -> None:
        """Start it and return when it answers."""
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise RuntimeError("no pgbouncer: run scripts/install-debian")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", program, "-q", str(self.home / "pgbouncer.ini")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **server_user(),
        )
        for _ in range(200):
            if self._answers():
                return
            try:
                self.process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            break
        raise RuntimeError(f"pgbouncer did not start:\n{(self.home / 'log').read_text()}")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def through(self, dsn: str) -> str:
        """Return the URL that leads to the same database through the pooler."""
        parts = conninfo_to_dict(dsn)
        return f"postgresql://{parts['user']}:{parts['password']}@127.0.0.1:{self.port}/{parts['dbname']}"

    def remove(self) -> None:
        """Stop it and delete what it wrote."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
        shutil.rmtree(self.home)
