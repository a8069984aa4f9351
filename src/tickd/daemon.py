"""The daemon: one replica from start to stop. It wires the parts, waits for the database, and drains at the end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from importlib.metadata import version
from typing import Any, NoReturn

from tickd import collector
from tickd.absence import Absence, account_for_absence
from tickd.backlog import Backlog
from tickd.clock import DatabaseClock
from tickd.database import DatabaseStart
from tickd.ends import milliseconds
from tickd.entry import Entry
from tickd.fleet import Fleet
from tickd.graph_thread import GraphThread, PoolSize
from tickd.graphs import LoadedGraph, Reference, resolve_all
from tickd.http import serving
from tickd.lock import LockPlace, closing, open_session
from tickd.log import Log
from tickd.policy import fires_after, in_own_order
from tickd.pool import Pool
from tickd.runner import LEAD, Limits, Runner
from tickd.schedule import Schedule
from tickd.settings import Settings
from tickd.stop import Stop
from tickd.tick import Tick
from tickd.timer import Timer
from tickd.upkeep import Upkeep


# What is left for the lines of runs that could not be stopped.
LAST_WORDS = timedelta(seconds=1)
# A timer that is this late has stopped firing, whatever else still moves.
OVERDUE = timedelta(seconds=60)
FORCED = 130


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
            settings.lock_database(),
            settings.replica,
            settings.lock_space,
            settings.connect_timeout,
            windows=settings.windows(),
        )
        self._through_pooler = False
        self._runner: Runner | None = None
        self._timer: Timer | None = None
        self._left_open: str | None = None

    async def serve(self) -> int:
        """Run until asked to stop; return the exit code. Raises Unusable or DatabaseUnusable when it cannot start."""
        self._listen_to_signals()
        # From the beginning: a start that waits for the database is alive, and not ready.
        async with serving(self._settings.http, {"/live": self._alive, "/ready": self._ready}):
            return self._stopped(await self._start_and_fire())

    async def _start_and_fire(self) -> int:
        self._log.info(
            "daemon.started",
            version=version("tickd"),
            pid=os.getpid(),
            lock_space=self._place.space,
            database=self._database.describe(),
        )
        self._announce_schedule()
        references = [Reference.of(entry) for entry in self._entries.values()]
        await asyncio.to_thread(resolve_all, references, self._directory)
        start = DatabaseStart(self._database, self._place, clock=self._clock, stop=self._stop, log=self._log)
        through_pooler = await start.wait(self._settings.database_deadline)
        if through_pooler is None:
            return 0
        self._through_pooler = through_pooler
        async with self._ledger_pool() as pool, self._graph_thread() as graphs:
            loaded = await self._loaded(graphs, references)
            if loaded is None:
                return 0
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
            backlog = Backlog(
                runner,
                entries=self._entries,
                pool=pool,
                place=self._place,
                clock=self._clock,
                stop=self._stop,
            )
            joined = await start.insist(lambda: self._join_anew(start), self._settings.database_deadline)
            if joined is None:
                return 0
            fleet, after = joined
            async with closing(fleet.session), AsyncExitStack() as last:
                last.push_async_callback(runner.end)
                return await self._fire_until_stopped(runner, backlog, fleet, graphs, pool, after=after)

    async def _loaded(
        self, graphs: GraphThread, references: Sequence[Reference]
    ) -> dict[str, LoadedGraph] | None:
        """Load every graph and say what is to be said of it; None when the stop came first, for a factory may never open."""
        loading = asyncio.ensure_future(graphs.load(references, self._directory, self._warn_of))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return None
            loaded = loading.result()
        finally:
            loading.cancel()
            stop.cancel()
            await asyncio.wait({loading, stop})
        for name, graph in loaded.items():
            for warning in graph.warnings:
                self._warn_of(name, warning)
        return loaded

    async def _join_anew(self, start: DatabaseStart) -> tuple[Fleet, dict[str, datetime]]:
        """Join on a fresh session, which is closed where that fails: what it had locked would be locked twice by another try.

        The slot that the preparation had may be somebody else's by now.
        """
        fleet = Fleet(await open_session(self._place))
        try:
            return fleet, await self._join(fleet, waited=start.waited)
        except BaseException:
            await fleet.session.close()
            raise

    async def _join(self, fleet: Fleet, *, waited: bool) -> dict[str, datetime]:
        """Become one of the replicas that fire, and return for each graph after which fire time this one does.

        The first one after all were down accounts for what nobody fired, before any other can begin.
        """
        first = await fleet.arrive(self._stop, waited=waited)
        # Before anything that may wait: whom this one has met may stop to fire in the next moment.
        now = self._clock.now()
        alive_at = await fleet.alive_at()
        await fleet.register({name: entry.calendar for name, entry in self._entries.items()})
        fires_since = await fleet.fires_since(self._entries)
        if first:
            if alive_at is not None:
                absence = Absence(alive_at, now)
                await account_for_absence(fleet, self._entries, fires_since, absence, self._log)
            await fleet.settle()
        return {
            name: fires_after(
                entry, now=now, since=fires_since.get(name), alive_at=None if first else alive_at
            )
            for name, entry in self._entries.items()
        }

    async def _fire_until_stopped(  # the parts of one replica
        self,
        runner: Runner,
        backlog: Backlog,
        fleet: Fleet,
        graphs: GraphThread,
        pool: Pool,
        *,
        after: Mapping[str, datetime],
    ) -> int:
        """Fire ticks until a stop is asked for, then let them end; return the exit code."""
        at_work: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:

            def begin(work: Coroutine[Any, Any, None], name: str) -> None:
                task = group.create_task(work, name=name)
                at_work.add(task)
                task.add_done_callback(at_work.discard)

            def fire(ticks: list[Tick]) -> None:
                for tick in in_own_order(ticks, self._place.replica):
                    claims = self._entries[tick.graph].mode == "claim"
                    begin((backlog if claims else runner).run_tick(tick), str(tick))

            def take_over(tick: Tick) -> None:
                if not self._stop.requested:
                    begin(backlog.take_over(tick), f"take over {tick}")

            def work_off(graph: str) -> None:
                if not self._stop.requested:
                    begin(backlog.work_off(graph), f"work off {graph}")

            timer = Timer(self._clock, lead=LEAD, fire=fire)
            upkeep = Upkeep(
                pool=pool,
                graphs=graphs,
                place=self._place,
                clock=self._clock,
                timer=timer,
                skew_limit=self._settings.skew_limit,
                take_over=take_over,
                work_off=work_off,
                displace=runner.occupancy.displace,
                unwritten_since=lambda: _unwritten_since(runner, backlog),
                fleet=fleet,
                entries=self._entries.values(),
                stop=self._stop,
                log=self._log,
            )
            series = {name: entry.series for name, entry in self._entries.items()}
            collector.freeze()
            timer.start(series, after=after)
            upkeep.start(group)
            self._timer, self._runner = timer, runner
            self._log.info("daemon.ready", graphs=len(self._entries), **self._link())
            await self._stop.wait()
            timer.stop()
            drain_ms = milliseconds(self._settings.drain_timeout)
            self._log.info("daemon.draining", running=runner.running, drain_timeout_ms=drain_ms)
            await self._drain(at_work)
        return 1 if runner.drain_ran_out or upkeep.failed else 0

    async def _drain(self, at_work: set[asyncio.Task[None]]) -> None:
        """Wait until every tick has ended, or leave with what cannot be ended.

        By then each has logged its line. Its hold is still there, and goes when the process does.
        """
        patience = self._settings.drain_timeout + self._place.windows.stop_allowance + LAST_WORDS
        if at_work and (await asyncio.wait(at_work, timeout=patience.total_seconds()))[1]:
            self._log.error(
                "daemon.stopped", exit_code=1, reason="a run could not be stopped; the process ends it"
            )
            os._exit(1)

    def _alive(self) -> tuple[bool, dict[str, Any]]:
        overdue = self._timer.overdue() if self._timer is not None else timedelta(0)
        return overdue < OVERDUE, {"timer_overdue_ms": milliseconds(overdue)}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        running = self._runner.running if self._runner is not None else 0
        ready = self._runner is not None and not self._stop.requested
        return ready, {"replica": self._place.replica, "running": running}

    def _link(self) -> dict[str, Any]:
        """Return what bounds the time that a lock outlives its holder."""
        if self._place.dsn.over_unix_socket():
            # The kernel tells each side of the other's end at once, and there is no link to die without a word.
            return {"lock_link": "unix_socket"}
        windows = self._place.windows
        return {
            "lock_link": "tcp",
            "client_window_ms": milliseconds(windows.client),
            "server_window_ms": milliseconds(windows.server),
        }

    def _announce_schedule(self) -> None:
        disabled = [name for name, entry in self._schedule.entries.items() if not entry.enabled]
        self._log.info(
            "schedule.loaded", file=self._schedule.path, graphs=len(self._entries), disabled=disabled
        )
        for warning in self._schedule.warnings:
            self._log.warning("schedule.warning", warning=str(warning))

    def _warn_of(self, graph: str, warning: str) -> None:
        self._log.warning("schedule.warning", graph=graph, warning=warning)

    @asynccontextmanager
    async def _ledger_pool(self) -> AsyncIterator[Pool]:
        """Two connections at most on the main loop, for looks and sweeps: never starved by what graphs do with theirs."""

        async def parameters() -> dict[str, Any]:
            return {
                **await self._database.connection_parameters(),
                "application_name": f"tickd/{self._place.replica}",
                "autocommit": True,
                "prepare_threshold": None if self._through_pooler else 5,
            }

        pool = Pool(
            "tickd-ledger",
            parameters,
            minimum=1,
            maximum=2,
            patience=self._settings.connect_timeout,
            check_within=self._settings.connect_timeout,
            loan=self._place.answer_timeout,
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
                self._settings.pool_min_size,
                self._settings.pool_max_size,
                self._settings.pool_timeout,
                self._settings.connect_timeout,
            ),
            through_pooler=self._through_pooler,
            max_running=self._settings.max_running,
        )
        await graphs.start()
        try:
            yield graphs
        finally:
            try:
                await graphs.close()
            except TimeoutError as error:
                self._left_open = str(error)

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
        if self._left_open is not None:
            reason = f"{self._left_open}; the process ends it"
            self._log.warning("daemon.stopped", exit_code=exit_code, reason=reason)
            # Python waits for its threads at the end, and a factory's exit may be stuck in one.
            os._exit(exit_code)
        self._log.info("daemon.stopped", exit_code=exit_code)
        return exit_code


def _unwritten_since(*parts: Runner | Backlog) -> datetime | None:
    """Return when the earliest tick came due that this replica has fired and that has no row yet, in either mode."""
    return min((since for part in parts if (since := part.unwritten_since) is not None), default=None)
