"""A network namespace on a link of its own to a Postgres cluster: a host that can vanish without a word."""

import secrets
import subprocess
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.cluster import Cluster
from tests.database import Database, Server


# The range that is set aside for network tests, so that it collides with nobody's own.
NETWORK = "198.18"
HBA = "host all all {network}.0/24 scram-sha-256\n"


class Link:
    """A namespace with one virtual cable to this host, where `cluster` listens at the other end.

    Needs root. Unix sockets do not care for network namespaces, so the witness still speaks after the cut.
    """

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.namespace = f"tickd-{tag}"
        self.outer, self.inner = f"tko{tag}", f"tki{tag}"
        network = f"{NETWORK}.{secrets.randbelow(256)}"
        self.here, self.there = f"{network}.1", f"{network}.2"
        self.cluster = Cluster({"listen_addresses": f"127.0.0.1,{self.here}"})
        self.hba = HBA.format(network=network)

    def __enter__(self) -> Self:
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.namespace)
        _ip("address", "add", f"{self.here}/24", "dev", self.outer)
        _ip("link", "set", self.outer, "up")
        _ip("-n", self.namespace, "address", "add", f"{self.there}/24", "dev", self.inner)
        _ip("-n", self.namespace, "link", "set", self.inner, "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.cluster.init()
        with (self.cluster.data / "pg_hba.conf").open("a") as hba:
            hba.write(self.hba)
        self.cluster.start()
        server = Server(self.cluster.admin_dsn("postgres"))
        server.make_owner()
        self.database = Database(server)
        self.database.create()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.database.connection.close()
        self.cluster.remove()
        _ip("netns", "delete", self.namespace)

    @property
    def prefix(self) -> list[str]:
        """The command that runs another command inside."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def dsn(self) -> str:
        """The database's URL as it is reached from inside."""
        return self.database.dsn.replace("127.0.0.1", self.here)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a replica inside needs for its witness to reach the database over the Unix socket."""
        home = self.cluster.home
        return {
            "WITNESS_DSN": f"host={home} port={self.cluster.port} user=postgres dbname={self.database.name}"
        }

    def cut(self) -> None:
        """Take the link down: whatever is sent from now on is lost, and neither end is told."""
        _ip("-n", self.namespace, "link", "set", self.inner, "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _ip("-n", self.namespace, "link", "set", self.inner, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
