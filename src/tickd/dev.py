"""`tickd dev`: an embedded Postgres and several replicas of one schedule, in one terminal.

The replicas are what production runs: processes of `tickd run`, told apart by their environment alone. They write JSON,
and this process turns it into lines for people. Nothing here decides about a tick.

Whatever ends the session (Ctrl-C, SIGTERM, the terminal going away, Postgres or the last replica ending by itself) goes
the same way: the replicas are asked to stop and then made to, and after them the server. The second Ctrl-C makes
them at once. What happens when this process is killed is in `children`.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import string
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psycopg
from psycopg.sql import SQL, Identifier
from rich.console import Console
from rich.text import Text

from tickd import embedded
from tickd.children import Children, Step, end
from tickd.console import Fold, plain, render
from tickd.errors import DatabaseUnusable, Unusable


NAMES = string.ascii_lowercase
STYLES = ("cyan", "magenta", "blue", "bright_green", "bright_cyan", "bright_magenta")
RUN = (sys.executable, "-m", "tickd", "run")
DATABASE = "tickd"
# A replica's own drain time-out ends it sooner; this is for one that does not answer.
STOP: tuple[Step, ...] = ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0))
DRAIN_TIMEOUT = "5s"
# Said by `introduce` already, once for all replicas.
UNSHOWN = {"daemon.started", "schedule.loaded"}
LAST_WORDS_SECONDS = 1.0
FORCED = 130


def develop(schedule: Path, *, replicas: int, as_json: bool, command: Sequence[str] = RUN) -> int:
    """Run `command` with the schedule so many times on an embedded Postgres, until something ends it.

    Returns the exit code: 0 after a stop that was asked for, FORCED after the second Ctrl-C, 1 if Postgres died, and if
    all replicas ended by themselves the highest of their codes. Raises Unusable and DatabaseUnusable.
    """
    return asyncio.run(Session(schedule.absolute(), NAMES[:replicas], Screen(as_json=as_json), command).run())


class Session:
    """One `tickd dev`: its children, and what has been asked of it."""

    def __init__(self, schedule: Path, names: str, screen: "Screen", command: Sequence[str]) -> None:
        self.schedule = schedule
        self.names = names
        self.screen = screen
        self.command = command
        self.children = Children()
        self.stop = asyncio.Event()
        self.forced = False
        self.alive = list(names)
        self.worst_code = 0
        self.code = 0

    async def run(self) -> int:
        """Start everything, wait for the end of the session, stop everything; return the exit code."""
        programs = embedded.programs_directory()
        home = embedded.home_of(self.schedule.parent)
        with embedded.sole_user(home), _signals(self.on_signal):
            self.screen.say("tickd dev: starting Postgres")
            try:
                async with embedded.serving(home, programs, self.children) as server:
                    await ensure_database(server, self.schedule.parent / "seed.sql")
                    await self.run_replicas(server)
            except (DatabaseUnusable, psycopg.Error):
                if not self.forced:  # else we killed the server ourselves while it was starting
                    raise
        self.screen.say("tickd dev: everything has stopped")
        return FORCED if self.forced else self.code

    def on_signal(self, number: signal.Signals) -> None:
        """Stop at the first signal; force it at a Ctrl-C that comes while we stop.

        Not at any second signal: a terminal that closes can send SIGHUP twice.
        """
        if not self.stop.is_set():
            self.screen.say("tickd dev: stopping; a second Ctrl-C does not wait")
            self.stop.set()
        elif number == signal.SIGINT:
            self.forced = True
            self.children.kill()

    def introduce(self, server: embedded.Server) -> None:
        """Say what runs here, how to look inside, and how to stop it."""
        psql = "psql" if shutil.which("psql") else server.programs / "psql"
        self.screen.say(
            f"tickd dev: replicas {', '.join(self.names)} of {self.schedule}\n"
            f"  database  export TICKD_DATABASE_URL='{server.url(DATABASE)}'\n"
            f'            {psql} "$TICKD_DATABASE_URL"\n'
            f"  data      {server.home}, until you delete it\n"
            f"  stop      Ctrl-C\n",
            style="",
        )

    async def run_replicas(self, server: embedded.Server) -> None:
        """Run the replicas until the session is to end, and stop them."""
        if self.stop.is_set():
            return
        self.introduce(server)
        environment = replica_environment(server.url(DATABASE))
        processes = {
            name: await self.children.start(
                *(*self.command, str(self.schedule)),
                env={**environment, "TICKD_REPLICA": name},
                stdout=PIPE,
                stderr=PIPE,
                last_signal=signal.SIGKILL,
            )
            for name in self.names
        }
        async with asyncio.TaskGroup() as tasks:
            for name, style in zip(self.names, itertools.cycle(STYLES), strict=False):
                tasks.create_task(self.follow(name, processes[name], style))
            watch = tasks.create_task(self.watch(server))
            await self.stop.wait()
            await asyncio.gather(*(end(process, *STOP) for process in processes.values()))
            watch.cancel()

    async def follow(self, name: str, process: Process, style: str) -> None:
        """Show what a replica says until it has ended, and say so if nobody asked it to."""
        async with asyncio.TaskGroup() as tasks:
            readers = [
                tasks.create_task(self.read(stream, name, style, is_log=stream is process.stdout))
                for stream in (process.stdout, process.stderr)
                if stream is not None
            ]
            code = await process.wait()
            # What the replica has started may hold its pipes open for longer than it lived.
            await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
            for reader in readers:
                reader.cancel()
        if not self.stop.is_set():
            self.bury(name, code)

    async def read(self, stream: asyncio.StreamReader, name: str, style: str, *, is_log: bool) -> None:
        """Show each line of a replica's stdout (its log) or stderr."""
        async for raw in stream:
            if is_log:
                self.screen.show_event(name, style, raw)
            else:
                self.screen.show_raw(name, style, raw)
            if self.screen.gone:
                self.stop.set()

    def bury(self, name: str, code: int) -> None:
        """Say that a replica died; with the last one the session ends."""
        self.alive.remove(name)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        rest = f"still here: {', '.join(self.alive)}" if self.alive else "no replica is left"
        self.screen.say(f"tickd dev: replica {name} {how}; {rest}", style="bold red")
        self.worst_code = max(self.worst_code, code if code >= 0 else 1)
        if not self.alive:
            self.code = self.worst_code
            self.stop.set()

    async def watch(self, server: embedded.Server) -> None:
        """End the session when Postgres ends by itself."""
        await server.process.wait()
        if self.stop.is_set():  # the second Ctrl-C has ended it
            return
        self.screen.say(f"tickd dev: Postgres has ended by itself; see {server.log}", style="bold red")
        self.code = 1
        self.stop.set()


class Screen:
    """Where the lines go: readable ones, or with `as_json` the replicas' own, with remarks of ours on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self.gone = False
        self._as_json = as_json
        self._fold = Fold()
        self._remarks = sys.stderr if as_json else sys.stdout
        self._console = Console(file=self._remarks, highlight=False, soft_wrap=True)

    def show_event(self, replica: str, style: str, raw: bytes) -> None:
        """Show one line of a replica's log."""
        if self._as_json:
            self._write(raw.decode(errors="replace"), sys.stdout)
            return
        try:
            line = json.loads(raw)
            if line["event"] not in UNSHOWN:
                for one in self._fold.shown(line):
                    self._print(render(one, replica_style=style))
        except (ValueError, TypeError, KeyError):  # not one of its events: show it as it is
            self.show_raw(replica, style, raw)

    def show_raw(self, replica: str, style: str, raw: bytes) -> None:
        """Show one line of what a replica, its libraries or its graphs wrote to stderr."""
        text = Text(f"          {replica}  ", style=style)
        text.append(plain(raw.decode(errors="replace").rstrip()), style="default")
        self._print(text)

    def say(self, remark: str, style: str = "bold") -> None:
        """Say something of `tickd dev` itself."""
        self._print(Text(remark, style=style))

    def _print(self, text: Text) -> None:
        # Captured and written by hand, because rich answers a broken pipe with SystemExit, in the middle of a task.
        with self._console.capture() as capture:
            self._console.print(text)
        self._write(capture.get(), self._remarks)

    def _write(self, text: str, stream: TextIO) -> None:
        """Write, and find out whether anybody is left to read it."""
        if self.gone:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            self.gone = True
            # The interpreter flushes stdout once more at its end, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


async def ensure_database(server: embedded.Server, seed: Path) -> None:
    """Make the replicas' database, with the SQL of the seed file if there is one; do nothing if it exists.

    It is filled under another name and then renamed, so that it exists with its seed or not at all. Unusable if the SQL
    fails.
    """
    async with await psycopg.AsyncConnection.connect(server.url("postgres"), autocommit=True) as admin:
        exists = await admin.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE])
        if exists.rowcount:
            return
        await admin.execute("DROP DATABASE IF EXISTS seeding")
        await admin.execute("CREATE DATABASE seeding")
        async with await psycopg.AsyncConnection.connect(server.url("seeding")) as seeding:
            try:
                await seeding.execute(_contents(seed))
            except psycopg.Error as error:
                raise Unusable(f"{seed}: {error}") from None
        await admin.execute(SQL("ALTER DATABASE seeding RENAME TO {}").format(Identifier(DATABASE)))


def _contents(seed: Path) -> bytes:
    return seed.read_bytes() if seed.exists() else b""


def replica_environment(url: str) -> dict[str, str]:
    """Return the environment of the replicas: this one, with everything that must come from here."""
    return {
        "TICKD_DRAIN_TIMEOUT": DRAIN_TIMEOUT,
        **os.environ,
        "TICKD_DATABASE_URL": url,
        # Set, because a lock database in the user's environment or `.env` would be another one.
        "TICKD_LOCK_DATABASE_URL": url,
        # Empty, and before any other: the embedded server asks for none, and the user's is not to be fetched for it.
        "TICKD_DATABASE_PASSWORD_FILE": os.devnull,
        "TICKD_LOG_FORMAT": "json",
        # Whatever address the user has set, only one of several replicas could listen there.
        "TICKD_HTTP": "127.0.0.1:0",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def _signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand SIGINT, SIGTERM and SIGHUP to the handler, except those that `nohup` or a shell has switched off."""
    loop = asyncio.get_running_loop()
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
