"""LangGraph's own conformance suite for savers, on the fenced saver and on the plain one beside it."""

from collections.abc import Callable
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import CapabilityReport
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import sql

from tests.fences import GRAPH, SPACE, connect, open_pool, prepare, saver
from tickd.guard import TABLES


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


async def test_a_stale_saver_fails_in_all_that_writes(pool, dsn):
    """If it passed, the suite above would prove nothing about the guard."""
    await protect_every_thread(dsn)
    stale = results(await report_on(lambda: saver(pool, 4)))

    assert {
        name: stale[name][1] for name in ("put", "put_writes", "delete_thread", "prune")
    } == dict.fromkeys(("put", "put_writes", "delete_thread", "prune"), False)
    assert (stale["put"][2], stale["put_writes"][2]) == (0, 0)
