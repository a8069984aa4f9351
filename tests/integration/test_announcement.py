"""Announcements: what replicas tell each other of a tick, and what they take for one."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.lock_sessions import Open, sessions
from tickd import announcement
from tickd.announcement import Announcement
from tickd.tick import Tick


TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)


def tick(second: int = 0) -> Tick:
    """Return the tick of so many seconds after ten."""
    return Tick("restock_plan", TEN + timedelta(seconds=second))


@pytest.fixture(params=["dedicated", "shared"])
async def open_as(dsn: str, request: pytest.FixtureRequest):
    """Opens a lock session for a replica's name, for one hold and for many."""
    async with sessions(dsn, kind=request.param) as open_as:
        yield open_as


@pytest.mark.migrated
async def test_what_one_replica_announces_the_others_hear(open_as: Open, admin_dsn: str):
    """It saves them a sweep's time; of another lock space they hear nothing."""
    a, b = await open_as("a"), await open_as("b")
    await b.change(announcement.LISTEN)
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as pooled:
        await announcement.announce(pooled, 7301, tick(), "handed_off")
    await announcement.displace(a, tick(60))

    payloads = [notice.payload async for notice in b.connection.notifies(timeout=5, stop_after=2)]

    assert [announcement.announced(payload, 7301) for payload in payloads] == [
        Announcement(handed_off=tick()),
        Announcement(displacing=tick(60)),
    ]
    assert [announcement.announced(payload, 7302) for payload in payloads] == [None, None]


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "x",
        "7",
        "[]",
        "null",
        "{}",
        '{"what": "handed_off"}',
        "[" * 7999,
        '{"space": 7301}',
        '{"space": 7301, "what": "handed_off", "graph": "a"}',
        '{"space": 7301, "what": "handed_off", "graph": "a", "fire_time": "soon"}',
        '{"space": 7301, "what": "handed_off", "graph": "a", "fire_time": 3}',
        '{"space": 7301, "what": "handed_off", "graph": ["a"], "fire_time": "2026-05-04T10:00:00Z"}',
        '{"space": 7301, "what": "handed_off", "graph": "a", "fire_time": "0001-01-01T00:00:00+14:00"}',
        '{"space": 7301, "what": "displacing", "graph": "a", "fire_time": "9999-12-31T23:00:00-14:00"}',
        '{"space": 7301, "what": "news", "graph": "a", "fire_time": "2026-05-04T10:00:00Z"}',
    ],
)
def test_what_others_send_on_our_channel_is_no_announcement(payload: str):
    """Anybody who may connect may send; it must not end the listening."""
    assert announcement.announced(payload, 7301) is None
