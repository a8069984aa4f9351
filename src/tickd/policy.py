"""Pure decisions: whether a tick is due or too late, how long to back off, and when to stop trusting a hold."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

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

    @property
    def client(self) -> timedelta:
        """Return the longest time from the last answered probe to the end of the run."""
        return self.probe_interval + self.probe_timeout + self.stop_allowance

    @property
    def server(self) -> timedelta:
        """Return the shortest time after which the server frees the lock of a client that it no longer hears."""
        return self.server_idle + self.server_count * self.server_interval

    def check(self) -> None:
        """Raise Unusable, with the arithmetic, unless the client gives up before the server does."""
        if self.client >= self.server:
            raise Unusable(
                "a replica that is cut off would still run when Postgres gives its lock away: the client needs "
                f"probe interval {_s(self.probe_interval)} + probe time-out {_s(self.probe_timeout)} + stop allowance "
                f"{_s(self.stop_allowance)} = {_s(self.client)}, and the server frees the lock after keepalive idle "
                f"{_s(self.server_idle)} + {self.server_count} x {_s(self.server_interval)} = {_s(self.server)}; the first "
                "sum has to be the smaller one. Shorten TICKD_PROBE_INTERVAL, TICKD_PROBE_TIMEOUT or TICKD_STOP_ALLOWANCE, "
                "or lengthen TICKD_KEEPALIVE_IDLE, TICKD_KEEPALIVE_INTERVAL or TICKD_KEEPALIVE_COUNT"
            )


def _s(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def lateness(tick: Tick, *, delay: timedelta, now: datetime) -> timedelta:
    """Return how far `now` is past the instant at which the tick may start; negative while it is not due."""
    return now - (tick.fire_time + delay)


def in_own_order(ticks: Sequence[TickT], replica: str) -> list[TickT]:
    """Return ticks that are due together in an order of this replica's own.

    Replicas that all began with the same graph would fight for each graph in turn; in different orders they meet less
    and the ticks spread over them. Ticks of one graph keep their fire-time order.
    """
    return sorted(ticks, key=lambda tick: (tick.fire_time, _digest(replica, tick.graph)))


def backoff(attempt: int, *, first: timedelta, longest: timedelta, seed: str) -> timedelta:
    """Return the pause after the given failed attempt (from 1): doubling, with up to a half taken off by the seed."""
    full: timedelta = min(longest, first * 2 ** min(attempt - 1, 30))
    return full * (1 - _digest(seed, str(attempt)) / 2**65)


def _digest(*parts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest())
