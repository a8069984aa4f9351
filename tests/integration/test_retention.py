"""Retention: what is older than its graph's `keep` goes from every table, and nothing else does."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import tickd
from tests.fences import config, graph, prepare
from tickd.entry import Entry
from tickd.retention import BATCH, BatchSize, Removed, remove_old_threads, remove_old_ticks
from tickd.schedule import parse
from tickd.settings import read_settings
from tickd.tick import Outcome


TABLES = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
EFFECTS = """
INSERT INTO tickd.effects (space, key, graph, fire_time, node, name, token, attempt, replica)
SELECT space, gen_random_uuid(), graph, fire_time, 'pay', number::text, token, attempt, replica
FROM tickd.ticks CROSS JOIN generate_series(1, %(each)s) AS number
"""
WHOSE_EFFECTS = """
SELECT thread_id, count(*)
FROM tickd.effects LEFT JOIN tickd.ticks USING (space, graph, fire_time)
GROUP BY thread_id
"""


def entry(keep: str) -> Entry:
    """Return the entry of a graph with this `keep`."""
    text = f"graphs:\n  restock:\n    graph: a:b\n    every: 1h\n    keep: {keep}\n"
    return parse(text, path="schedule.yaml", environment={}).entries["restock"]


def threads(connection: psycopg.Connection[Any]) -> Mapping[str, set[str]]:
    """Return the threads that each of the saver's tables has rows of."""
    return {
        table: {row[0] for row in connection.execute(f"SELECT DISTINCT thread_id FROM {table}".encode())}
        for table in TABLES
    }


async def remove_batch(
    connection: psycopg.AsyncConnection[Any], one: Entry, *, batch: int = BATCH
) -> Removed:
    """Remove a batch, a whole one unless told otherwise, with time enough."""
    size, within = BatchSize(batch), timedelta(seconds=9)
    of_ticks = await remove_old_ticks(connection, 7301, one, size, within)
    of_threads = await remove_old_threads(connection, 7301, one, size, within)
    return Removed(of_threads.threads, of_ticks.ticks, more=of_threads.more or of_ticks.more)


async def age(dsn: str, thread: str, by: timedelta, *, ticks: bool = True) -> None:
    """Make a thread, and its ticks, older."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(
            "UPDATE tickd.threads SET held_at = held_at - %s WHERE thread_id = %s", (by, thread)
        )
        if not ticks:
            return
        await connection.execute(
            "UPDATE tickd.ticks SET fire_time = fire_time - %s WHERE thread_id = %s", (by, thread)
        )


async def test_old_threads_go_from_all_tables_and_running_young_and_foreign_ones_stay(dsn: str):
    """A one-node run leaves eight rows: 11,520 a day for a graph each minute (D15)."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    for thread in ("old", "young", "waiting"):
        async with tickd.sole_writer("restock", thread_id=thread, settings=settings) as hold:
            await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
            if thread == "waiting":
                hold.outcome = Outcome.INTERRUPTED
    async with tickd.sole_writer("audit", thread_id="of another graph", settings=settings) as hold:
        await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
    for thread in ("old", "waiting", "of another graph"):
        await age(dsn, thread, timedelta(days=2))

    async with (
        tickd.sole_writer("restock", thread_id="running", settings=settings) as hold,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
        await age(dsn, "running", timedelta(days=2), ticks=False)
        removed = await remove_batch(connection, entry("{threads: 1d}"))
        again = await remove_batch(connection, entry("{threads: 1d}"))

    assert (removed.threads, removed.ticks, removed.more) == (1, 0, False)
    assert again.threads == 0
    with psycopg.connect(dsn) as look:
        kept = {"young", "waiting", "running", "of another graph"}
        assert threads(look) == dict.fromkeys(TABLES, kept)
        assert {row[0] for row in look.execute("SELECT thread_id FROM tickd.threads")} == kept


async def test_old_ticks_go_and_open_ones_stay(dsn: str):
    """The ledger is a record for people, and people look back a month, not a decade."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    for thread, outcome in (("old", Outcome.RAN), ("waits", Outcome.INTERRUPTED), ("young", Outcome.RAN)):
        async with tickd.sole_writer("restock", thread_id=thread, settings=settings) as hold:
            hold.outcome = outcome
        if thread != "young":
            await age(dsn, thread, timedelta(days=40))

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        removed = await remove_batch(connection, entry("{ticks: 30d}"))

    assert removed.ticks == 1
    with psycopg.connect(dsn) as look:
        left = {row[0] for row in look.execute("SELECT thread_id FROM tickd.ticks")}
    assert left == {"waits", "young"}


async def test_effects_go_after_their_tick_however_many_there_are(dsn: str):
    """Where each tick has more effects than a batch, one batch each minute would never come to an end."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    for thread in ("old", "waits"):
        async with tickd.sole_writer("restock", thread_id=thread, settings=settings) as hold:
            hold.outcome = Outcome.RAN if thread == "old" else Outcome.INTERRUPTED
        await age(dsn, thread, timedelta(days=40))

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(EFFECTS, {"each": 5})
        passes = [await remove_batch(connection, entry("{ticks: 30d}"), batch=2) for _ in range(3)]

    assert [(one.ticks, one.more) for one in passes] == [(1, True), (0, True), (0, False)]
    with psycopg.connect(dsn) as look:
        assert look.execute(WHOSE_EFFECTS).fetchall() == [("waits", 5)]


@pytest.mark.parametrize("keep", ["{ticks: 1s}", "1s"])
async def test_a_short_keep_does_not_let_a_tick_run_twice(dsn: str, keep: str):
    """The row is what tells a late replica that the tick has run; it outlives every grace and catch-up."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    async with tickd.sole_writer("restock", thread_id="t", settings=settings):
        pass
    await age(dsn, "t", timedelta(minutes=30))

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        removed = await remove_batch(connection, entry(keep))

    assert removed.ticks == 0


async def test_a_thread_that_goes_piece_by_piece_is_whole_and_protected_until_it_is_gone(dsn: str):
    """A tick may come for it in between: half a state would be worse than none, and its hold has to be the only one."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    async with tickd.sole_writer("restock", thread_id="t", settings=settings) as hold:
        await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
    await age(dsn, "t", timedelta(days=2))
    piece = BatchSize(size=1, piece=1)

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        one = await remove_old_threads(connection, 7301, entry("1d"), piece, timedelta(seconds=9))
        with psycopg.connect(dsn, autocommit=True) as other, pytest.raises(psycopg.Error) as refused:
            other.execute("DELETE FROM checkpoints")
        async with tickd.sole_writer("restock", thread_id="t", settings=settings) as hold:
            result = await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
        young = await remove_old_threads(connection, 7301, entry("1d"), piece, timedelta(seconds=9))
        await age(dsn, "t", timedelta(days=2))
        passes = [one]
        while passes[-1].more:
            passes.append(
                await remove_old_threads(connection, 7301, entry("1d"), piece, timedelta(seconds=9))
            )

    assert (one, young) == (Removed(more=True), Removed())
    assert refused.value.sqlstate == "TK001"
    assert result["seen"] == ["n0", "n1", "n0", "n1"]
    assert passes[-2:] == [Removed(1, more=True), Removed()]
    with psycopg.connect(dsn) as look:
        assert threads(look) == {table: set() for table in TABLES}


async def test_a_removed_thread_is_free_for_others(dsn: str):
    """What tickd does not know any more is none of its business."""
    await prepare(dsn)
    settings = read_settings(database_url=dsn, replica="a")
    async with tickd.sole_writer("restock", thread_id="t", settings=settings) as hold:
        await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
    await age(dsn, "t", timedelta(days=2))
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await remove_batch(connection, entry("1d"))

    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver  # noqa: PLC0415  # only here

    async with AsyncPostgresSaver.from_conn_string(dsn) as plain:
        result = await graph().compile(checkpointer=plain).ainvoke({"seen": []}, config("t"))

    assert result["seen"] == ["n0", "n1"]
