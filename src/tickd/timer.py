"""The timer: APScheduler, reduced to calling `fire` in time and dropping nothing.

APScheduler never tells a function its fire time, and by default it drops what is late, merges what has piled up and
refuses what still runs. So there is one entry in it for the whole schedule, whose trigger merges all series and whose
executor hands the fire times on. One entry also keeps its wake-up short: with one entry per graph, 10,000 due at the
same instant hold the event loop for more than half a second.

`fire` is called `lead` ahead of the fire times, so that a connection can be open when they come; APScheduler's own
lateness of a few milliseconds disappears in the lead. It sleeps by this host's clock, fire times are of the database's:
the trigger adds the difference, as measured at the time.
"""

import bisect
import heapq
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger

from tickd.calendar import Series
from tickd.clock import DatabaseClock
from tickd.tick import Tick


ENTRY = "schedule"


class Timer:
    """Calls `fire` with all ticks of one instant or of several that passed together, in fire-time order."""

    def __init__(self, clock: DatabaseClock, *, lead: timedelta, fire: Callable[[list[Tick]], None]) -> None:
        self._clock = clock
        self._lead = lead
        self._calendar = _Calendar(clock, lead)
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._scheduler.add_executor(_HandOver(self._calendar, fire), ENTRY)

    def start(self, series: Mapping[str, Series], *, after: Mapping[str, datetime]) -> None:
        """Begin with the first fire time of each graph strictly after its instant."""
        self._calendar.fill(series, after)
        self._scheduler.add_job(
            lambda: None,
            self._calendar,
            id=ENTRY,
            executor=ENTRY,
            misfire_grace_time=None,
            coalesce=False,
            max_instances=1,
        )
        self._scheduler.start()

    def follow_clock(self) -> None:
        """Work out the next wake-up again, after a jump of this host's clock."""
        if self._scheduler.get_job(ENTRY) is not None:  # gone when no graph has a fire time left
            self._scheduler.reschedule_job(ENTRY, trigger=self._calendar)

    def overdue(self) -> timedelta:
        """Return how far past its next wake-up the timer is; zero while it sleeps as it should.

        By the database's clock, which a step of this host's does not move: a timer is not dead because it is another hour.
        """
        instant = self._calendar.upcoming()
        if instant is None:
            return timedelta(0)
        return max(timedelta(0), self._clock.now() - (instant - self._lead))

    def stop(self) -> None:
        """Fire nothing any more; what has been fired is not touched."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


class _Calendar(BaseTrigger):
    """All series merged: instants on this host's clock for APScheduler, ticks for the executor."""

    def __init__(self, clock: DatabaseClock, lead: timedelta) -> None:
        self._clock = clock
        self._lead = lead
        self._series: Mapping[str, Series] = {}
        self._next: list[tuple[datetime, str]] = []
        # Instants that APScheduler has been told of and that are not taken yet, with the graphs due at each.
        self._instants: list[datetime] = []
        self._due: dict[datetime, list[str]] = {}
        self._told: dict[datetime, datetime] = {}

    def fill(self, series: Mapping[str, Series], after: Mapping[str, datetime]) -> None:
        self._series = series
        self._next = [
            (first, graph) for graph, one in series.items() if (first := one.after(after[graph])) is not None
        ]
        heapq.heapify(self._next)

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime | None:  # noqa: ARG002  # APScheduler's signature
        # APScheduler asks the same question more than once, so an instant is only forgotten when it is taken.
        instant = self._first_after(self._told.get(previous) if previous is not None else None)
        if instant is None:
            return None
        wake = instant + self._clock.skew() - self._lead
        self._told[wake] = instant
        return wake

    def upcoming(self) -> datetime | None:
        """Return the earliest instant that APScheduler has been told of and that has not been taken."""
        return self._instants[0] if self._instants else None

    def take(self, wakes: Iterable[datetime]) -> list[Tick]:
        """Return the ticks of every instant up to the last of these, and forget them."""
        last = max(self._told[wake] for wake in wakes)
        count = bisect.bisect_right(self._instants, last)
        taken, self._instants = self._instants[:count], self._instants[count:]
        # The newest is kept as the `previous` of APScheduler's next question.
        self._told = {wake: instant for wake, instant in self._told.items() if instant >= last}
        return [Tick(graph, instant) for instant in taken for graph in self._due.pop(instant)]

    def _first_after(self, instant: datetime | None) -> datetime | None:
        position = 0 if instant is None else bisect.bisect_right(self._instants, instant)
        if position == len(self._instants) and not self._extend():
            return None
        return self._instants[position]

    def _extend(self) -> bool:
        """Move the next instant of all series, with all graphs due at it, to the instants told."""
        if not self._next:
            return False
        instant = self._next[0][0]
        graphs = self._due.setdefault(instant, [])
        while self._next and self._next[0][0] == instant:
            graph = self._next[0][1]
            graphs.append(graph)
            following = self._series[graph].after(instant)
            if following is None:
                heapq.heappop(self._next)
            else:
                heapq.heapreplace(self._next, (following, graph))
        self._instants.append(instant)
        return True


class _HandOver(BaseExecutor):
    """Passes fire times on instead of running anything."""

    def __init__(self, calendar: _Calendar, fire: Callable[[list[Tick]], None]) -> None:
        super().__init__()
        self._calendar = calendar
        self._fire = fire

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        self._fire(self._calendar.take(run_times))
        self._run_job_success(job.id, [])
