"""The continuation: a tick that another replica handed off in skip mode, from its hand-off to its line here.

Every replica hears of it and tries; the row makes one of them the next holder, which goes on at the next super-step.
"""

from collections.abc import Mapping
from functools import partial

from tickd import admissions
from tickd.clock import DatabaseClock
from tickd.ends import End
from tickd.entry import Entry
from tickd.places import Room
from tickd.runner import Runner, Unreachable
from tickd.stop import Stop
from tickd.tick import Outcome, Tick


class Continuation:
    """Goes on with what other replicas handed off."""

    def __init__(
        self, runner: Runner, *, entries: Mapping[str, Entry], clock: DatabaseClock, stop: Stop
    ) -> None:
        self._runner = runner
        self._entries = entries
        self._clock = clock
        self._stop = stop
        self._taking_over: set[Tick] = set()

    async def take_over(self, tick: Tick) -> None:
        """Continue the tick, or say nothing if it is not ours to run; what fails here is tried again at the next sweep."""
        entry = self._entries.get(tick.graph)
        if entry is None or tick in self._taking_over:
            return
        self._taking_over.add(tick)
        try:
            await self._runner.conclude(tick, self._end_of(entry, tick))
        finally:
            self._taking_over.discard(tick)

    async def _end_of(self, entry: Entry, tick: Tick) -> End | None:
        async with self._runner.room(self._clock.now() + entry.grace) as room:
            if room.reason is not None:
                return None
            try:
                end = await self._end_of_resumed(entry, tick, room)
            except Unreachable as error:
                # The tick waits still, or another replica runs it. If it was admitted here without an answer, a sweep tells.
                self._runner.note_unreachable(error)
                return None
            return None if end is None or end.outcome is Outcome.SKIPPED else end

    async def _end_of_resumed(self, entry: Entry, tick: Tick, room: Room) -> End | None:
        """Try to go on with the tick; None when this replica is to try nothing now."""
        session = await self._runner.open_session(entry)
        if self._stop.requested or self._runner.occupancy.of(tick.graph) is not None:
            await session.close()
            return None
        attempt = partial(admissions.hold_and_resume, tick=tick)
        return await self._runner.run_if_held(entry, tick, session, attempt, room)
