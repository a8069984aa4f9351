"""The books of an absence on a real Postgres: which rows and lines there are after it, and that there is one of each."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.inside import entries_of
from tests.integration.conftest import Places
from tests.logbook import Logbook
from tests.onlooker import Onlooker
from tickd.absence import BATCH, Absence, account_for_absence
from tickd.fleet import Fleet
from tickd.lock import closing, open_session
from tickd.log import Log
from tickd.tick import Tick, instant_text, run_id


pytestmark = pytest.mark.migrated

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LONG_AGO = NOON - timedelta(days=30)

Account = Callable[..., Any]


@pytest.fixture
async def account(places: Places, log: Log) -> AsyncIterator[Account]:
    """Do the books for graphs that fire every five seconds, from a second after noon for so long."""
    async with closing(await open_session(places("a"))) as session:

        async def account(
            graphs: dict[str, Any] | None = None,
            *,
            seconds: float = 20,
            fires_since: dict[str, datetime] | None = None,
            **keys: Any,
        ) -> Absence:
            entry = {"graph": "./a.py:graph", "every": "5s"}
            entries = entries_of(
                {name: {**entry, **own} for name, own in (graphs or {"restock": keys}).items()}
            )
            absence = Absence(NOON + SECOND, NOON + seconds * SECOND)
            since = dict.fromkeys(entries, LONG_AGO) if fires_since is None else fires_since
            await account_for_absence(Fleet(session), entries, since, absence, log)
            return absence

        yield account


@pytest.fixture
def rows(onlooker: Onlooker) -> Callable[[], list[Any]]:
    """Return what the ledger says of every tick: seconds after noon, mode, outcome, reason."""

    def rows() -> list[Any]:
        return [
            ((fire_time - NOON) // SECOND, *rest)
            for fire_time, *rest in onlooker.rows(
                "SELECT fire_time, mode, outcome, error_type FROM tickd.ticks ORDER BY graph, fire_time"
            )
        ]

    return rows


def lines(book: Logbook, *fields: str) -> list[tuple[Any, ...]]:
    """Return the event of each line, and these fields of it."""
    return [(line["event"], *(line.get(field) for field in fields)) for line in book.lines]


def at(seconds: float) -> str:
    """Return the instant so many seconds after noon, as lines have it."""
    return instant_text(NOON + seconds * SECOND)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", [(n, "skip", "missed", "down") for n in (5, 10, 15, 20)]),
        (
            "latest",
            [*((n, "skip", "skipped", "coalesced") for n in (5, 10, 15)), (20, "claim", None, None)],
        ),
        ("all", [(n, "claim", None, None) for n in (5, 10, 15, 20)]),
    ],
)
async def test_each_fire_time_has_a_row_by_the_graphs_policy(
    account: Account, rows: Callable[[], list[Any]], missed: str, expected: list[Any]
):
    """What is made up for is claimed, whatever the graph's own mode: it must not be lost a second time."""
    await account(missed=missed)

    assert rows() == expected


async def test_what_is_not_run_is_told_with_the_time_in_which_nobody_was_there(
    account: Account, book: Logbook
):
    """B4: never silence. A tick that is to be run has its lines when it runs."""
    absence = await account({"never": {"missed": "skip"}, "once": {"missed": "latest"}}, seconds=10)

    assert lines(book, "graph", "fire_time", "reason") == [
        ("tick.missed", "never", at(5), "down"),
        ("tick.missed", "never", at(10), "down"),
        ("tick.skipped", "once", at(5), "coalesced"),
    ]
    bounds = {(line["down_since"], line["down_until"]) for line in book.lines}
    assert bounds == {(instant_text(absence.since), instant_text(absence.until))}


async def test_what_is_too_long_ago_is_one_line_and_no_row(
    account: Account, book: Logbook, rows: Callable[[], list[Any]]
):
    """Two weeks of five-second ticks are neither 241,920 runs nor as many lines."""
    fortnight = 14 * 86_400
    await account(seconds=fortnight, missed="all", catch_up="10s")

    assert [row[0] for row in rows()] == [fortnight - 5, fortnight]
    assert lines(book, "fire_time", "before", "reason") == [("tick.missed", at(5), at(fortnight - 5), "down")]


async def test_no_more_than_the_backlogs_limit_is_made_up_for(
    account: Account, book: Logbook, rows: Callable[[], list[Any]]
):
    """The newest count."""
    await account(seconds=60, missed="all", max_backlog=3)

    assert [row[0] for row in rows()] == [50, 55, 60]
    assert lines(book, "fire_time", "before") == [("tick.missed", at(5), at(50))]


async def test_a_long_absence_is_written_in_batches(account: Account, onlooker: Onlooker, book: Logbook):
    """Each of them once, with none lost where two batches meet."""
    await account({f"graph_{n}": {"max_backlog": 900} for n in range(5)}, seconds=3600, fires_since=None)

    count = onlooker.value("SELECT count(*) FROM tickd.ticks WHERE outcome = 'missed'")
    assert count == 5 * 720
    assert count > BATCH
    told = [(line["graph"], line["fire_time"]) for line in book.find("tick.missed")]
    assert len(set(told)) == len(told) == count


async def test_books_that_are_done_twice_change_nothing(
    account: Account, book: Logbook, rows: Callable[[], list[Any]]
):
    """A first that was killed in the middle left some of them, and the next one begins anew."""
    await account(missed="latest", seconds=15)
    done, told = rows(), len(book.lines)

    await account(missed="skip", seconds=15)

    assert rows() == done
    assert len(book.lines) == told


async def test_a_row_that_a_replica_wrote_in_time_stands(account: Account, onlooker: Onlooker, book: Logbook):
    """The old fleet's word is a little behind what it did."""
    tick = Tick("restock", NOON + 5 * SECOND)
    onlooker.connection.execute(
        "INSERT INTO tickd.ticks (space, graph, fire_time, attempt, thread_id, run_id, outcome)"
        " VALUES (7301, %s, %s, 1, 't', %s, 'ran')",
        [tick.graph, tick.fire_time, run_id(tick)],
    )

    await account(seconds=10)

    assert lines(book, "fire_time") == [("tick.missed", at(10))]
    assert onlooker.rows("SELECT outcome FROM tickd.ticks ORDER BY fire_time") == [("ran",), ("missed",)]


async def test_a_graph_is_made_up_for_since_its_calendar_began(
    account: Account, rows: Callable[[], list[Any]], book: Logbook
):
    """A new, renamed, resumed or edited graph owes nothing for the time before; a paused one owes nothing at all."""
    graphs: dict[str, Any] = {name: {"missed": "all"} for name in ("edited", "paused", "old")}

    await account(graphs, fires_since={"edited": NOON + 12 * SECOND, "old": LONG_AGO})

    assert [row[0] for row in rows()] == [15, 20, 5, 10, 15, 20]
    assert book.lines == []


async def test_a_tick_that_was_put_off_belongs_to_whoever_is_there_at_its_start(
    account: Account, rows: Callable[[], list[Any]]
):
    """Its fire time is the old fleet's, and its start fell into the absence; the last one's start falls after it."""
    keys = {"missed": "all", "jitter": "5s"}
    entry = entries_of({"restock": {"graph": "./a.py:graph", "every": "5s", **keys}})["restock"]
    starts = {
        n: n + entry.start_delay(Tick("restock", NOON + n * SECOND)) / SECOND for n in range(-10, 30, 5)
    }

    await account(**keys, seconds=20)

    assert [row[0] for row in rows()] == [n for n, start in starts.items() if 1 < start <= 20]
    assert [row[0] for row in rows()] != [5, 10, 15, 20]


async def test_rows_carry_what_a_run_needs(account: Account, onlooker: Onlooker):
    """The thread by the entry's own template, and the run id of the tick, so that a resume finds its checkpoint."""
    await account(missed="all", seconds=5, thread="{graph}/{fire_date}")

    tick = Tick("restock", NOON + 5 * SECOND)
    found = onlooker.rows("SELECT space, thread_id, run_id, attempt, token FROM tickd.ticks")
    assert found == [(7301, "restock/2026-05-04", run_id(tick), 0, None)]
