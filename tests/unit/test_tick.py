"""A tick's names and keys: what every replica, and every later version, has to agree on."""

import uuid
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickd.tick import Outcome, SkipReason, Tick, instant_text, lock_key, parse_instant, run_id


TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("graph", "key"),
    [
        ("restock_plan", 904759473),
        ("pack_audit", -1595116280),
        # Different names with one checksum: the schedule has to refuse them together.
        ("evening_churn_trim", 1416145555),
        ("core_ticket_export_v2", 1416145555),
        ("plumless", -841282523),
        ("buckeroo", -841282523),
    ],
)
def test_the_lock_key_of_a_name_never_changes(graph: str, key: int):
    """Replicas of two versions run side by side during a roll-out, and must exclude each other."""
    assert lock_key(graph) == key


@given(st.text())
def test_every_lock_key_fits_an_int4(graph: str):
    """C10: Half of all names have a checksum of 2**31 and more, for which Postgres has no such function."""
    assert -(2**31) <= lock_key(graph) < 2**31


def test_the_run_id_of_a_tick_never_changes():
    """A later version finds the checkpoint of an earlier attempt by it."""
    assert run_id(Tick("restock_plan", TEN)) == uuid.UUID("573a8c8d-ad01-5085-ad58-c1b9a32bcd12")


def test_each_tick_has_a_run_id_of_its_own():
    """On a thread that all ticks share, an equal run id would resume the tick before."""
    ids = {run_id(Tick(graph, TEN + timedelta(seconds=s))) for graph in ("a", "b") for s in range(3)}

    assert len(ids) == 6


@pytest.mark.parametrize(
    ("instant", "text"),
    [
        (TEN, "2026-05-04T10:00:00Z"),
        (TEN + timedelta(milliseconds=250), "2026-05-04T10:00:00.250000Z"),
        (datetime(2026, 5, 4, 12, tzinfo=timezone(timedelta(hours=2))), "2026-05-04T10:00:00Z"),
    ],
)
def test_an_instant_is_written_in_utc(instant: datetime, text: str):
    """Thread ids hang on this text: two writings of one instant would be two threads."""
    assert instant_text(instant) == text


def test_a_tick_reads_as_its_thread_id():
    """The text of a tick is the default thread id, which is documented."""
    assert str(Tick("restock_plan", TEN)) == "restock_plan/2026-05-04T10:00:00Z"


@given(st.datetimes(timezones=st.sampled_from([UTC, ZoneInfo("Europe/Oslo"), ZoneInfo("Pacific/Apia")])))
def test_a_written_instant_is_read_back(instant: datetime):
    """Also in the repeated hour of an autumn night, where two instants share one wall time."""
    # Equality of datetimes is unreliable in a repeated hour; the UTC reading is the identity.
    try:
        utc = instant.astimezone(UTC)
    except OverflowError:  # the year 1 or 9999 on the other side of midnight
        return

    assert parse_instant(instant_text(instant)) == utc


@pytest.mark.parametrize(
    "text", ["2026-05-04T12:00:00+02:00", "2026-05-04 10:00Z", " 2026-05-04T10:00:00.000Z "]
)
def test_an_instant_is_read_into_utc(text: str):
    """Comparing and grouping by wall time goes wrong in any other zone."""
    read = parse_instant(text)

    assert (read, read.tzinfo) == (TEN, UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-05-04T10:00:00",
        "2026-05-04",
        "20260504T100000Z",
        "2026-W19-1T10:00:00Z",
        "2026-05-04T10:00:00.1234567Z",
        "2026-13-04T10:00:00Z",
        "2026-05-04T25:00:00Z",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:00:00-14:00",
        "now",
        "",
    ],
)
def test_what_is_not_an_instant_is_refused(text: str):
    """An instant without an offset would mean another one on each host."""
    with pytest.raises(ValueError, match=r"instant|month|hour|year"):
        parse_instant(text)


def test_ticks_sort_by_graph_and_fire_time():
    """Ticks are compared in heaps and sets."""
    late, early = Tick("a", TEN + timedelta(seconds=1)), Tick("a", TEN)

    assert sorted([Tick("b", TEN), late, early]) == [early, late, Tick("b", TEN)]
    assert len({early, Tick("a", TEN)}) == 1


def test_the_words_of_outcomes_and_reasons_are_the_documented_ones():
    """They are event names and field values that people's alerts hang on: closed lists."""
    assert {str(outcome) for outcome in Outcome} == {
        "ran",
        "failed",
        "timed_out",
        "interrupted",
        "skipped",
        "missed",
        "lock_lost",
        "handed_off",
        "abandoned",
        "error",
    }
    assert {str(reason) for reason in SkipReason} == {
        "lock_held",
        "queued",
        "already_ran",
        "paused",
        "draining",
        "disabled",
        "coalesced",
        "backlog_full",
        "interrupted",
    }
