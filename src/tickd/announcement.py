"""Announcements: what replicas tell each other of a tick, over the database's LISTEN and NOTIFY.

They only save time. What is true is in the ledger, and sweeps find what nobody has heard of.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from psycopg import AsyncConnection

from tickd.lock import LockSession
from tickd.tick import Tick, instant_text, parse_instant


LISTEN = "LISTEN tickd"
ANNOUNCE = "SELECT pg_notify('tickd', %s)"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one replica told the others: a tick that was handed off, or one that earlier ones are to make room for."""

    handed_off: Tick | None = None
    displacing: Tick | None = None


async def displace(session: LockSession, tick: Tick) -> None:
    """Ask whoever runs an earlier tick of the graph to make room for this one."""
    await session.fetch(ANNOUNCE, [_announcement(session.place.space, "displacing", tick)])


async def announce(
    connection: AsyncConnection[Any], space: int, tick: Tick, what: Literal["handed_off", "displacing"]
) -> None:
    """Tell every listening replica of the tick: that it has been handed off, or that earlier ones are to make room for it."""
    await connection.execute(ANNOUNCE, [_announcement(space, what, tick)])


def _announcement(space: int, what: str, tick: Tick) -> str:
    return json.dumps(
        {"space": space, "what": what, "graph": tick.graph, "fire_time": instant_text(tick.fire_time)}
    )


def announced(payload: str, space: int) -> Announcement | None:
    """Read an announcement; None when it is of another lock space, or nothing that tickd sent: anybody may send."""
    try:
        match json.loads(payload):
            case {"space": of_space} if of_space != space:
                return None
            case {"space": int(), "what": str(what), "graph": str(graph), "fire_time": str(fire_time)}:
                tick = Tick(graph, parse_instant(fire_time))
                return {
                    "handed_off": Announcement(handed_off=tick),
                    "displacing": Announcement(displacing=tick),
                }.get(what)
    except (ValueError, RecursionError):
        pass
    return None
