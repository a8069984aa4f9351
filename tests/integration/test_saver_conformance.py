"""LangGraph's own conformance suite for savers, on the fenced saver and on the plain one beside it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import CapabilityReport
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import sql

from tests.fences import GRAPH, SPACE, connect, open_pool, prepare, saver
from tests.turns import turn
from tickd.group_commit import Gathered, GroupCommit, Save
from tickd.guard import TABLES
from tickd.saves import GroupedSaver


# The suite makes up its threads as it goes. Each is put under hold 5 before its first row is looked at by the guard, so
# that whatever passes has passed the guard. Triggers fire in the order of their names.
ADMIT_ALL = f"""
CREATE FUNCTION admit_all() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tickd.threads VALUES (NEW.thread_id, {SPACE}, '{GRAPH}', 5) ON CONFLICT DO NOTHING;
    RETURN NEW;
END $$
"""
ADMIT_ALL_TRIGGER = """
CREATE TRIGGER aa_admit_all BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION admit_all()
"""

COMPANY = ("company", "", "1", "task", "", 0, "seen", "null", b"")


class Accompanied(GroupCommit):
    """Lets nobody save without company: another save, of another thread, goes with it."""

    in_company = 0

    async def save(self, save: Save, alone: Callable[[], Awaitable[object]]) -> None:
        """Hold both up until they have gathered. A thread's first save goes alone all the same: it is not admitted yet."""
        gate = asyncio.Event()
        other = Save(save.hold)
        await other.executemany(AsyncPostgresSaver.INSERT_CHECKPOINT_WRITES_SQL, [COMPANY])
        saves = [super().save(Save(""), gate.wait), super().save(other, gate.wait), super().save(save, alone)]
        tasks = [asyncio.ensure_future(each) for each in saves]
        await turn()
        gate.set()
        await asyncio.gather(*tasks)

    async def _write(self, group: list[Gathered]) -> set[tuple[str, str]]:
        """Count what is written in company."""
        written = await super()._write(group)
        self.in_company += len(written)
        return written


@pytest.fixture
async def pool(dsn: str):
    """A pool of a database with the guard."""
    await prepare(dsn)
    async with open_pool(dsn) as pool:
        yield pool


async def protect_every_thread(dsn: str) -> None:
    """Put each thread under hold 5 as soon as it has a row."""
    async with await connect(dsn) as connection:
        await connection.execute(ADMIT_ALL)
        for table in TABLES:
            await connection.execute(sql.SQL(ADMIT_ALL_TRIGGER).format(table=sql.Identifier(table)))


async def report_on(make: Callable[[], BaseCheckpointSaver[Any]]) -> CapabilityReport:
    """Run the whole suite, with a saver of its own for each capability."""

    @checkpointer_test(name="tickd")
    async def registered():
        yield make()

    return await validate(registered)


def results(report: CapabilityReport) -> dict[str, tuple[bool, bool | None, int, int]]:
    """Return for each capability whether the saver has it, whether it passed, and how many tests did and did not."""
    return {
        name: (result.detected, result.passed, result.tests_passed, result.tests_failed)
        for name, result in report.results.items()
    }


async def test_the_fenced_saver_passes_all_that_the_plain_one_passes(pool, dsn):
    """Whatever LangGraph expects of a saver, a graph under tickd gets."""
    plain = await report_on(lambda: AsyncPostgresSaver(pool))
    await protect_every_thread(dsn)
    fenced = await report_on(lambda: saver(pool, 5))

    assert fenced.passed_all(), fenced.to_dict()
    assert results(fenced) == results(plain)
    assert {name for name, (detected, *_) in results(fenced).items() if detected} >= {
        "put",
        "put_writes",
        "get_tuple",
        "list",
        "delete_thread",
        "prune",
    }


async def test_the_grouped_saver_passes_all_that_the_plain_one_passes(pool, dsn):
    """And what it saves, it saves in company: the suite by itself never does two things at one time."""
    plain = await report_on(lambda: AsyncPostgresSaver(pool))
    await protect_every_thread(dsn)
    commit = Accompanied(pool)
    grouped = await report_on(lambda: GroupedSaver(pool, commit, space=SPACE, graph=GRAPH, token=5))

    assert grouped.passed_all(), grouped.to_dict()
    assert results(grouped) == results(plain)
    assert commit.in_company > 50


async def test_a_stale_saver_fails_in_all_that_writes(pool, dsn):
    """If it passed, the suite above would prove nothing about the guard."""
    await protect_every_thread(dsn)
    stale = results(await report_on(lambda: saver(pool, 4)))

    assert {
        name: stale[name][1] for name in ("put", "put_writes", "delete_thread", "prune")
    } == dict.fromkeys(("put", "put_writes", "delete_thread", "prune"), False)
    assert (stale["put"][2], stale["put_writes"][2]) == (0, 0)
