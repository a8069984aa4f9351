"""The daemon: one replica from start to stop. It wires the parts, waits for the database, and drains at the end."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NoReturn

from psycopg_pool import AsyncConnectionPool

from tickd.clock import DatabaseClock
from tickd.ends import milliseconds
from tickd.errors import DatabaseUnusable
from tickd.graphs import Reference, resolve_all
from tickd.lock import LockPlace, open_session, pooler_complaint, probe, reaches_pooler, standby_complaint
from tickd.log import Log, text_of
from tickd.migrations import migrate
from tickd.policy import backoff, in_own_order
from tickd.runner import LEAD, Limits, Runner, Unreachable
from tickd.runs import GraphThread, PoolSize
from tickd.schedule import Entry, Schedule
from tickd.settings import Settings
from tickd.stop import Stop
from tickd.tick import Tick
from tickd.timer import Timer


FIRST_PAUSE = timedelta(milliseconds=200)
LONGEST_PAUSE = timedelta(seconds=5)
MEASURE_EVERY = timedelta(seconds=30)
CLOSE_SECONDS = 5
FORCED = 130
# libpq gives no SQLSTATE for a refused connection, so these are told by the server's own English words; anything else
# is taken for trouble that passes.
FINAL_REFUSALS = (
    ("password authentication failed", "the password is wrong"),
    ("no password supplied", "the server asks for a password, and none is set"),
    ("no pg_hba.conf entry", "the server's pg_hba.conf does not admit this host or user"),
    ("permission denied for database", "the role may not connect to this database"),
    ("does not exist", "the database or the role does not exist"),
    ("unsupported startup parameter", "a connection pooler is in the way"),
    ("session is read-only", "the server is a standby"),
)


class Daemon:
    """One replica."""

    def __init__(self, settings: Settings, schedule: Schedule, log: Log) -> None:
        self._settings = settings
        self._entries: dict[str, Entry] = {name: e for name, e in schedule.entries.items() if e.enabled}
        self._schedule = schedule
        self._directory = settings.schedule.resolve().parent
        self._log = log
        self._stop = Stop()
        self._clock = DatabaseClock()
        self._database = settings.database()
        self._place = LockPlace(
            settings.lock_database(), settings.replica, settings.lock_space, settings.connect_timeout
        )
        self._skewed = False
        self._through_pooler = False

    async def serve(self) -> int:
        """Run until asked to stop; return the exit code. Raises Unusable or DatabaseUnusable when it cannot start."""
        self._listen_to_signals()
        self._log.info(
            "daemon.started",
            version=version("tickd"),
            pid=os.getpid(),
            lock_space=self._place.space,
            database=self._database.describe(),
        )
        self._announce_schedule()
        await asyncio.to_thread(resolve_all, self._references(), self._directory)
        if not await self._wait_for_database():
            return self._stopped(0)
        async with self._ledger_pool() as pool, self._graph_thread() as graphs:
            loaded = await graphs.load(self._references(), self._directory)
            for name, graph in loaded.items():
                for warning in graph.warnings:
                    self._log.warning("schedule.warning", graph=name, warning=warning)
            runner = Runner(
                entries=self._entries,
                loaded=loaded,
                graphs=graphs,
                place=self._place,
                pool=pool,
                clock=self._clock,
                stop=self._stop,
                log=self._log,
                limits=Limits(
                    self._settings.max_running, self._settings.lock_attempts, self._settings.drain_timeout
                ),
            )
            await self._fire_until_stopped(runner, pool)
        return self._stopped(0)

    async def _fire_until_stopped(self, runner: Runner, pool: AsyncConnectionPool[Any]) -> None:
        async with asyncio.TaskGroup() as group:

            def fire(ticks: list[Tick]) -> None:
                for tick in in_own_order(ticks, self._place.replica):
                    group.create_task(runner.run_tick(tick), name=str(tick))

            timer = Timer(self._clock, lead=LEAD, fire=fire)
            timer.start(
                {name: entry.series for name, entry in self._entries.items()}, after=self._clock.now()
            )
            self._log.info("daemon.ready", graphs=len(self._entries))
            group.create_task(self._keep_measuring(pool), name="clock")
            await self._stop.wait()
            timer.stop()
            self._log.info(
                "daemon.draining",
                running=runner.running,
                drain_timeout_ms=milliseconds(self._settings.drain_timeout),
            )

    def _announce_schedule(self) -> None:
        disabled = [name for name, entry in self._schedule.entries.items() if not entry.enabled]
        self._log.info(
            "schedule.loaded", file=self._schedule.path, graphs=len(self._entries), disabled=disabled
        )
        for warning in self._schedule.warnings:
            self._log.warning("schedule.warning", warning=str(warning))

    def _references(self) -> list[Reference]:
        return [
            Reference(name, entry.graph, entry.input if isinstance(entry.input, str) else None)
            for name, entry in self._entries.items()
        ]

    async def _wait_for_database(self) -> bool:
        """Connect, migrate and probe, with one line per failed attempt; False when stopped meanwhile."""
        deadline = time.monotonic() + self._settings.database_deadline.total_seconds()
        tries = 0
        while True:
            tries += 1
            try:
                await self._prepare_database(deadline)
            except Unreachable as error:
                reason = self._place.dsn.redact(text_of(error).strip()) or type(error).__name__
                self._refuse_final(reason)
                pause = backoff(tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE, seed=self._place.replica)
                if time.monotonic() + pause.total_seconds() > deadline:
                    raise DatabaseUnusable(
                        f"the database {self._place.dsn.describe()} was not reachable within "
                        f"{self._settings.database_deadline.total_seconds():g} s: {reason}"
                    ) from error
                self._log.error(
                    "database.unreachable",
                    error_type=type(error).__name__,
                    error=reason,
                    tries=tries,
                    retry_in_ms=milliseconds(pause),
                )
                if await self._stop.wait(pause):
                    return False
            else:
                if tries > 1:
                    self._log.info("database.reachable", tries=tries)
                return True

    async def _prepare_database(self, deadline: float) -> None:
        session = await open_session(self._place)
        try:
            await self._clock.measure(session.connection)
            before, after = await migrate(session.connection, stop=self._stop, deadline=deadline)
        finally:
            await session.close()
        if before != after:
            self._log.info("database.migrated", ledger=after.ledger, saver=after.saver)
        identity = await probe(self._place)
        self._through_pooler = await reaches_pooler(
            self._database, self._place.connect_timeout, same_as=identity
        )
        self._note_skew()

    def _refuse_final(self, reason: str) -> None:
        """Raise DatabaseUnusable for a refusal that waiting does not change."""
        for words, meaning in FINAL_REFUSALS:
            if words in reason:
                complaint = {
                    "a connection pooler is in the way": pooler_complaint(self._place.dsn),
                    "the server is a standby": standby_complaint(self._place.dsn),
                }.get(
                    meaning,
                    f"the database {self._place.dsn.describe()} refuses tickd: {meaning}. Postgres says: {reason}",
                )
                raise DatabaseUnusable(complaint)

    @asynccontextmanager
    async def _ledger_pool(self) -> AsyncIterator[AsyncConnectionPool[Any]]:
        """Two connections at most on the main loop, for looks and sweeps: never starved by what graphs do with theirs."""

        async def parameters() -> dict[str, Any]:
            return {
                **await self._database.connection_parameters(),
                "application_name": f"tickd/{self._place.replica}",
                "autocommit": True,
                "prepare_threshold": None if self._through_pooler else 5,
            }

        pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
            kwargs=parameters,
            min_size=1,
            max_size=2,
            timeout=self._settings.connect_timeout.total_seconds(),
            check=AsyncConnectionPool.check_connection,
            open=False,
            name="tickd-ledger",
        )
        await pool.open()
        try:
            yield pool
        finally:
            await pool.close()

    @asynccontextmanager
    async def _graph_thread(self) -> AsyncIterator[GraphThread]:
        graphs = GraphThread(
            self._database,
            replica=self._place.replica,
            size=PoolSize(
                self._settings.pool_min_size, self._settings.pool_max_size, self._settings.pool_timeout
            ),
            through_pooler=self._through_pooler,
            max_running=self._settings.max_running,
        )
        await graphs.start()
        try:
            yield graphs
        finally:
            async with asyncio.timeout(CLOSE_SECONDS):
                await graphs.close()

    async def _keep_measuring(self, pool: AsyncConnectionPool[Any]) -> None:
        while not await self._stop.wait(MEASURE_EVERY):
            try:
                async with pool.connection() as connection:
                    await self._clock.measure(connection)
            except Unreachable:
                continue  # the last measurement is carried on; a tick that meets the same trouble says so
            self._note_skew()

    def _note_skew(self) -> None:
        """Warn when this host's clock crosses the limit, once per crossing."""
        skew = self._clock.skew()
        skewed = abs(skew) > self._settings.skew_limit
        if skewed and not self._skewed:
            self._log.warning(
                "clock.skewed", ahead_ms=milliseconds(skew), limit_ms=milliseconds(self._settings.skew_limit)
            )
        self._skewed = skewed

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.requested:
            self._force(number)
        self._stop.request()

    def _force(self, number: signal.Signals) -> NoReturn:
        """Leave at once: the sessions end with the process, and Postgres frees their locks."""
        self._log.warning("daemon.stopped", exit_code=FORCED, reason=f"second signal ({number.name})")
        os._exit(FORCED)

    def _stopped(self, exit_code: int) -> int:
        self._log.info("daemon.stopped", exit_code=exit_code)
        return exit_code
