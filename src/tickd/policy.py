"""Pure decisions: whether a tick is due or too late, how long to back off, and when to stop trusting a hold."""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from tickd.entry import Entry, Retries
from tickd.errors import Unusable
from tickd.tick import Tick


TickT = TypeVar("TickT", bound=Tick)


@dataclass(frozen=True, slots=True)
class TrustWindows:
    """How long a hold is trusted on either side of a link that has died without a word.

    The client asks the server every `probe_interval` and waits `probe_timeout` for the answer; then it needs
    `stop_allowance` to end the run. The server learns of a vanished client by TCP keepalives, `server_idle` after the
    last packet and `server_count` probes of `server_interval` later, and only then frees the lock. The client's window
    is counted from before its last answered probe was sent, the server's from that probe's arrival, which is later.
    """

    probe_interval: timedelta = timedelta(seconds=3)
    probe_timeout: timedelta = timedelta(seconds=4)
    stop_allowance: timedelta = timedelta(seconds=10)
    server_idle: timedelta = timedelta(seconds=9)
    server_interval: timedelta = timedelta(seconds=5)
    server_count: int = 3
    lease: timedelta = timedelta(seconds=30)

    @property
    def client(self) -> timedelta:
        """Return the longest time from the last answered probe to the end of the run."""
        return self.probe_interval + self.probe_timeout + self.stop_allowance

    @property
    def server(self) -> timedelta:
        """Return the shortest time after which the server frees the lock of a client that it no longer hears."""
        return self.server_idle + self.server_count * self.server_interval

    @property
    def answer(self) -> timedelta:
        """Return how long any statement of a session may wait for its answer, for the next probe waits as long."""
        return max(self.probe_timeout, self.server - self.probe_interval - self.stop_allowance)

    def check(self) -> None:
        """Raise Unusable, with the arithmetic, unless the client gives up before the server or the lease does."""
        if self.client >= self.server:
            raise Unusable(
                "a replica that is cut off would still run when Postgres gives its lock away: the client needs "
                f"probe interval {_s(self.probe_interval)} + probe time-out {_s(self.probe_timeout)} + stop allowance "
                f"{_s(self.stop_allowance)} = {_s(self.client)}, and the server frees the lock after keepalive idle "
                f"{_s(self.server_idle)} + {self.server_count} x {_s(self.server_interval)} = {_s(self.server)}; the first "
                "sum has to be the smaller one. Shorten TICKD_PROBE_INTERVAL, TICKD_PROBE_TIMEOUT or TICKD_STOP_ALLOWANCE, "
                "or lengthen TICKD_KEEPALIVE_IDLE, TICKD_KEEPALIVE_INTERVAL or TICKD_KEEPALIVE_COUNT"
            )
        renewals = 3 * self.probe_interval + self.probe_timeout
        if self.lease < renewals or self.lease <= self.client:
            raise Unusable(
                f"TICKD_LEASE {_s(self.lease)} is too short: it has to outlast three renewals and one time-out, 3 x "
                f"{_s(self.probe_interval)} + {_s(self.probe_timeout)} = {_s(renewals)}, and the client's own window of "
                f"{_s(self.client)}, so that a holder has stopped before its tick is taken over"
            )


def _s(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def lateness(tick: Tick, *, delay: timedelta, now: datetime) -> timedelta:
    """Return how far `now` is past the instant at which the tick may start; negative while it is not due."""
    return now - (tick.fire_time + delay)


def fires_after(
    entry: Entry, *, now: datetime, since: datetime | None, alive_at: datetime | None
) -> datetime:
    """Return the instant after which a replica that begins now fires the graph.

    That is now, or a little earlier for a tick whose start jitter puts off past now. `since` is when the graph's calendar
    began, if it fires at all. `alive_at`, for a replica that joins others, is how far these had come for sure: in claim
    mode it fires what came due after that as well, for they may die before they have written it down, and a row that is
    there already stands.
    """
    after = entry.started_by(now)
    if alive_at is not None and entry.mode == "claim":
        after = min(after, entry.started_by(alive_at))
    return after if since is None else max(after, min(since, now))


@dataclass(frozen=True, slots=True)
class Unfired:
    """What becomes of fire times that no replica fired: run, coalesced into a later one, or missed; in fire-time order.

    `before` are the first and the last instant of a time too long ago to be looked at one by one.
    """

    run: tuple[datetime, ...] = ()
    coalesced: tuple[datetime, ...] = ()
    missed: tuple[datetime, ...] = ()
    before: tuple[datetime, datetime] | None = None


def unfired(
    after: Callable[[datetime], datetime | None],
    *,
    since: datetime,
    until: datetime,
    missed: str,
    catch_up: timedelta,
    most: int,
) -> Unfired:
    """Decide over the fire times in (since, until], given the series' `after`.

    `missed` is `skip`, `latest` or `all`. Nothing older than `catch_up`, and no more than the newest `most`, is looked at
    one by one: two weeks of five-second ticks come back as one stretch, not as 241,920 runs.
    """
    first = after(since)
    if first is None or first > until:
        return Unfired()
    kept = _newest(after, since=max(since, until - catch_up), until=until, most=most)
    before = None if kept and kept[0] == first else (first, kept[0] if kept else until)
    if missed == "all":
        return Unfired(run=kept, before=before)
    if missed == "latest":
        return Unfired(run=kept[-1:], coalesced=kept[:-1], before=before)
    return Unfired(missed=kept, before=before)


def _newest(
    after: Callable[[datetime], datetime | None], *, since: datetime, until: datetime, most: int
) -> tuple[datetime, ...]:
    """Return the newest fire times in (since, until], `most` of them or all that there are.

    A series goes forwards only, and to walk through two weeks of seconds takes a quarter of a minute, in which nothing
    else of a replica moves: so it is entered near the end, and twice as far back each time that this was not enough.
    """
    back = timedelta(seconds=1)
    while True:
        begin = max(since, until - back)
        newest: deque[datetime] = deque(maxlen=most)
        instant = after(begin)
        while instant is not None and instant <= until:
            newest.append(instant)
            instant = after(instant)
        if len(newest) == most or begin == since:
            return tuple(newest)
        back *= 2


def in_own_order(ticks: Sequence[TickT], replica: str) -> list[TickT]:
    """Return ticks that are due together in an order of this replica's own.

    Replicas that all began with the same graph would fight for each graph in turn; in different orders they meet less
    and the ticks spread over them. Ticks of one graph keep their fire-time order.
    """
    return sorted(ticks, key=lambda tick: (tick.fire_time, _digest(replica, tick.graph)))


def retry_pause(
    retries: Retries | None, *, failures: int, names: Collection[str], seed: str
) -> timedelta | None:
    """Return how long to wait before a failed tick is tried again; None when it has failed for good.

    `failures` counts this failure too; `names` are what the error may be called in `on`, its class and all its bases.
    """
    if retries is None or failures > retries.attempts:
        return None
    if retries.on and not set(retries.on) & set(names):
        return None
    return backoff(failures, first=retries.backoff, longest=retries.max_backoff, seed=seed)


def backoff(attempt: int, *, first: timedelta, longest: timedelta, seed: str) -> timedelta:
    """Return the pause after the given failed attempt (from 1): doubling, with up to a half taken off by the seed."""
    doubled = 2 ** min(attempt - 1, 30)
    # Not min(longest, first * doubled): the product may be more than a timedelta holds.
    full: timedelta = first * doubled if first < longest / doubled else longest
    return full * (1 - _digest(seed, str(attempt)) / 2**65)


def _digest(*parts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest())
