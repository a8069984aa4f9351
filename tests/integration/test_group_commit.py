"""Group commit: what several runs save at one time, in one statement, and what becomes of each of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.base import empty_checkpoint
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tests.fences import (
    GATE,
    PARKED,
    SPACE,
    admit,
    asking,
    connect,
    open_pool,
    prepare,
    rows,
    run,
    saver,
)
from tests.onlooker import Onlooker
from tests.turns import turn
from tests.young_ledger import FEW, ROUNDS, grow
from tickd import group_commit
from tickd.fence import is_refused
from tickd.group_commit import LARGE, MOST_SAVES, TOGETHER, GroupCommit, Save
from tickd.saves import GroupedSaver
from tickd.stale_writers import StaleWriters


# All that one transaction has written has its number.
TRANSACTIONS = (
    "SELECT xmin::text, array_agg(DISTINCT thread_id ORDER BY thread_id) FROM checkpoints GROUP BY 1"
)
CONTENT = """
SELECT 'checkpoint', checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint::text, metadata::text
FROM checkpoints WHERE thread_id = %(thread)s
UNION ALL
SELECT 'blob', checkpoint_ns, channel, version, type, blob::text, '' FROM checkpoint_blobs WHERE thread_id = %(thread)s
UNION ALL
SELECT 'write', checkpoint_ns, checkpoint_id, concat_ws('/', task_id, task_path, idx), type, channel, blob::text
FROM checkpoint_writes WHERE thread_id = %(thread)s
ORDER BY 1, 2, 3, 4
"""


class Stage:
    """Three graphs under hold 5, each on a thread of its own, whose savers share one group commit."""

    def __init__(self, dsn: str, pool: AsyncConnectionPool[Any], look: AsyncConnection[Any]) -> None:
        self.dsn = dsn
        self.pool = pool
        self.look = look
        self.commit = GroupCommit(pool)

    def saver(self, graph: str, token: int = 5) -> GroupedSaver:
        """Make the saver of a hold."""
        return GroupedSaver(self.pool, self.commit, space=SPACE, graph=graph, token=token)

    async def put(self, graph: str, *, token: int = 5, **channels: Any) -> None:
        """Be a run that saves a checkpoint with these channels on the graph's thread; those that are lists become blobs."""
        versions = dict.fromkeys(channels, "1")
        checkpoint: Any = empty_checkpoint() | {"channel_values": channels, "channel_versions": versions}
        saver = self.saver(graph, token)
        async with saver.to_the_end():
            await saver.aput(place(graph), checkpoint, {"source": "loop", "step": 1}, dict(versions))

    @asynccontextmanager
    async def gathering(self, *saves: Awaitable[None]) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Let these gather behind a save that is under way for as long as the block."""
        gate = asyncio.Event()
        first = asyncio.create_task(self.commit.save(Save(""), gate.wait))
        await turn()
        tasks = [asyncio.ensure_future(save) for save in saves]
        async with asyncio.timeout(10):
            while len(self.commit._gathering) < len(tasks):
                await turn()
        try:
            yield tasks
        finally:
            gate.set()
        await first

    @asynccontextmanager
    async def parked(
        self, onlooker: Onlooker, *saves: Awaitable[None]
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Let these go out together and be parked in Postgres for as long as the block."""
        async with await connect(self.dsn) as gate:
            await gate.execute(GATE)
            async with self.gathering(*saves) as tasks:
                pass
            await onlooker.until(lambda: onlooker.rows(PARKED))
            yield tasks

    async def together(self, *saves: Awaitable[None]) -> list[BaseException | None]:
        """Let these go together, and return what each of them raised."""
        async with self.gathering(*saves) as tasks:
            pass
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def saved(self) -> dict[str, int]:
        """Return the graphs that have checkpoints, and how many."""
        cursor = await self.look.execute("SELECT thread_id, count(*) FROM checkpoints GROUP BY 1")
        return dict(await cursor.fetchall())

    async def transactions(self) -> list[list[str]]:
        """Return for each transaction that has written checkpoints the threads that it wrote to."""
        return sorted(threads for _, threads in await (await self.look.execute(TRANSACTIONS)).fetchall())


def place(graph: str) -> Any:
    """Return where the graph saves."""
    return {"configurable": {"thread_id": graph, "checkpoint_ns": ""}}


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch):
    """Nothing is overdue, so that what gathers is sent when the test says so."""
    monkeypatch.setattr(group_commit, "OVERDUE", timedelta(minutes=1))


@pytest.fixture
async def stage(dsn: str):
    """The stage, set."""
    await prepare(dsn)
    async with open_pool(dsn) as pool, await connect(dsn) as look:
        for graph in ("a", "b", "c"):
            await admit(look, 5, thread=graph, graph=graph)
        yield Stage(dsn, pool, look)


@pytest.mark.usefixtures("patience")
async def test_what_gathers_goes_out_as_one_statement(stage: Stage):
    """One round trip and one commit, whatever it is that each of them saves."""
    writes = stage.saver("c").aput_writes(
        {"configurable": {"thread_id": "c", "checkpoint_ns": "", "checkpoint_id": "1"}}, [("seen", 1)], "task"
    )
    assert await stage.together(stage.put("a", seen=["x"]), stage.put("b"), writes) == [None] * 3

    assert await stage.transactions() == [["a", "b"]]
    cursor = await stage.look.execute(
        "SELECT count(DISTINCT xmin::text) FROM"
        " (SELECT xmin FROM checkpoints UNION ALL SELECT xmin FROM checkpoint_blobs"
        " UNION ALL SELECT xmin FROM checkpoint_writes) AS all_of_it"
    )
    assert await cursor.fetchone() == (1,)


async def test_a_save_that_finds_nothing_under_way_goes_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """The first node of a lone run waits for it, and alone it is quicker."""
    groups: list[Any] = []
    monkeypatch.setattr(stage.commit, "_write", groups.append)
    await stage.put("a")
    await stage.put("b")

    assert groups == []
    assert await stage.saved() == {"a": 1, "b": 1}


@pytest.mark.usefixtures("patience")
async def test_one_that_gathers_by_itself_goes_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """A statement for many costs more than one for one."""
    groups: list[Any] = []
    monkeypatch.setattr(stage.commit, "_write", groups.append)
    assert await stage.together(stage.put("a")) == [None]

    assert groups == []
    assert await stage.saved() == {"a": 1}


@pytest.mark.usefixtures("patience")
async def test_together_the_same_is_written_as_alone(stage: Stage):
    """A reader cannot tell how it was saved: all three tables, all columns, with what is awkward in each."""
    channels: dict[str, Any] = {
        "text": 'quote " backslash \\ brace {a,b} null NULL snow ☃',
        "nothing": None,
        "list": [b"\x00\xff", "", None],
        "empty": [],
        "number": 0.1,
    }
    writes = [("list", [b"\x00"]), ("empty", []), ("nothing", None), ("quote\"'{},\\", {"k": {1, 2}})]
    versions: Any = {name: f"{name}.1" for name in channels}
    checkpoint: Any = empty_checkpoint() | {"channel_values": channels, "channel_versions": versions}
    metadata: Any = {"source": "loop", "step": 3, "note": "☃ \\ {}", "nested": {"a": [1]}}

    def saves(graph: str) -> tuple[Any, Any]:
        config: Any = {"configurable": place(graph)["configurable"] | {"checkpoint_id": "parent"}}
        writing = stage.saver(graph).aput_writes(config, writes, "task", "~path")
        return stage.saver(graph).aput(config, checkpoint, metadata, versions), writing

    for save in saves("a"):
        await save
    await stage.together(*saves("b"), *saves("c"))

    alone, *together = [
        await (await stage.look.execute(CONTENT, {"thread": graph})).fetchall() for graph in "abc"
    ]
    assert [row[0] for row in alone] == ["blob"] * 2 + ["checkpoint"] + ["write"] * 4
    assert together == [alone, alone]


@pytest.mark.usefixtures("patience")
async def test_one_that_is_cancelled_twice_takes_no_other_with_it(stage: Stage, onlooker: Onlooker):
    """A run that does not end is cancelled again each second; the others of its group are written, and told so."""
    async with stage.parked(onlooker, stage.put("a"), stage.put("b"), stage.put("c")) as (a, b, c):
        for _ in range(2):
            a.cancel()
            for _ in range(10):
                await turn()
        assert a.cancelled()
    await asyncio.wait({b, c})

    assert (b.exception(), c.exception()) == (None, None)
    assert await stage.saved() == {"a": 1, "b": 1, "c": 1}


@pytest.mark.usefixtures("patience")
async def test_each_is_written_under_its_own_hold(stage: Stage):
    """The one whose hold is over is refused by the guard, in the guard's words; the others do not hear of it."""
    await admit(stage.look, 6, thread="b", graph="b")
    a, b, c = await stage.together(stage.put("a", seen=["x"]), stage.put("b", seen=["x"]), stage.put("c"))

    assert (a, c) == (None, None)
    assert isinstance(b, psycopg.DatabaseError)
    assert is_refused(b)
    assert "held under token 6, this writer has token 5" in str(b)
    assert await stage.transactions() == [["a", "c"]]
    assert await rows(stage.look, "b") == []


@pytest.mark.usefixtures("patience")
async def test_of_two_holds_on_one_thread_the_present_one_is_written(stage: Stage):
    """A run that was cut off may still save when the thread's next run does."""
    await admit(stage.look, 6, thread="a", graph="a")
    late, present = await stage.together(stage.put("a"), stage.put("a", token=6))

    assert present is None
    assert is_refused(late or AssertionError())
    assert await stage.saved() == {"a": 1}


@pytest.mark.usefixtures("patience")
async def test_a_hold_of_another_graph_counts_as_none(stage: Stage):
    """Tokens are counted per graph."""
    saver = GroupedSaver(stage.pool, stage.commit, space=SPACE, graph="b", token=5)
    wrong = saver.aput(place("a"), empty_checkpoint(), {"source": "loop", "step": 1}, {})
    refused, fine = await stage.together(wrong, stage.put("c"))  # type: ignore[arg-type]

    assert fine is None
    assert is_refused(refused or AssertionError())


@pytest.mark.usefixtures("patience")
async def test_a_thread_without_protection_is_written_all_the_same(stage: Stage):
    """An operator who has given a thread up wants its runs to go on."""
    await stage.look.execute("DELETE FROM tickd.threads WHERE thread_id = 'a'")
    assert await stage.together(stage.put("a"), stage.put("b")) == [None, None]
    assert await stage.saved() == {"a": 1, "b": 1}


@pytest.mark.usefixtures("patience")
async def test_an_admission_under_way_holds_up_its_own_thread_alone(stage: Stage, dsn: str):
    """Whether that save is refused is known when the admission commits, and the others must not wait for it."""
    async with await connect(dsn) as admitting:
        async with stage.gathering(stage.put("a"), stage.put("b"), stage.put("c")) as (a, b, c):
            await admitting.execute("BEGIN")
            await admit(admitting, 6, thread="a", graph="a")
        done, _ = await asyncio.wait({a, b, c}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert done
        assert a not in done
        await asyncio.gather(b, c)
        await admitting.execute("COMMIT")
        with pytest.raises(psycopg.DatabaseError) as refusal:
            await a

    assert is_refused(refusal.value)
    assert await stage.saved() == {"b": 1, "c": 1}


@pytest.mark.usefixtures("patience")
async def test_a_take_over_waits_for_a_group_under_way(stage: Stage, dsn: str, onlooker: Onlooker):
    """What has passed the fence will be committed, so the new holder must not read before it is."""
    async with await connect(dsn) as admitting:
        async with stage.parked(onlooker, stage.put("a"), stage.put("b")) as saves:
            admission = asyncio.create_task(admit(admitting, 6, thread="a", graph="a"))
            waiting = admitting.info.backend_pid
            await onlooker.until(lambda: onlooker.value("SELECT pg_blocking_pids(%s)", waiting))
            assert not admission.done()
        await asyncio.gather(admission, *saves)

    assert await stage.saved() == {"a": 1, "b": 1}


@pytest.mark.usefixtures("patience")
async def test_an_admission_that_waits_too_long_ends_the_group_and_nobody_is_lost(
    stage: Stage, dsn: str, onlooker: Onlooker
):
    """The stale one is refused when it comes back alone; the others are written."""
    async with await connect(dsn) as admitting:
        async with stage.parked(onlooker, stage.put("a"), stage.put("b")) as saves, asyncio.timeout(20):
            await StaleWriters(admitting.info.backend_pid, asking(dsn)).past(
                admit(admitting, 6, thread="a", graph="a")
            )
        stale, other = await asyncio.gather(*saves, return_exceptions=True)

    assert isinstance(stale, psycopg.Error)
    assert is_refused(stale)
    assert other is None
    assert await stage.saved() == {"b": 1}


@pytest.mark.usefixtures("patience")
async def test_what_cannot_be_written_fails_its_own_save_alone(stage: Stage):
    """A character that Postgres does not store fails the statement, which was the others' as well."""
    fine, bad, also_fine = await stage.together(
        stage.put("a", note="fine"), stage.put("b", note="a\x00b"), stage.put("c", seen=["x"])
    )

    assert (fine, also_fine) == (None, None)
    assert isinstance(bad, psycopg.errors.UntranslatableCharacter)
    assert await stage.saved() == {"a": 1, "c": 1}


@pytest.mark.usefixtures("patience")
async def test_a_group_whose_connection_ends_is_written_one_by_one(stage: Stage, onlooker: Onlooker):
    """Nobody knows whether it was committed, and to write the same again does no harm."""
    async with stage.parked(onlooker, stage.put("a", seen=["x"]), stage.put("b")) as saves:
        ((pid,),) = onlooker.rows(PARKED)
        onlooker.terminate(pid)
        await onlooker.until(lambda: {(pid,)}.isdisjoint(onlooker.rows(PARKED)))
    await asyncio.gather(*saves)

    assert await stage.saved() == {"a": 1, "b": 1}


@pytest.mark.usefixtures("patience")
async def test_without_a_connection_nobody_tries_alone(dsn: str):
    """Each has waited for one as long as it may."""
    await prepare(dsn)
    async with open_pool(dsn) as pool, await connect(dsn) as look:
        stage = Stage(dsn, pool, look)
        pool.timeout = 0.1
        async with pool.connection(), pool.connection(), pool.connection(), pool.connection():
            results = await stage.together(stage.put("a"), stage.put("b"))

        assert pool.get_stats()["requests_errors"] == 1
    assert [type(result) for result in results] == [PoolTimeout, PoolTimeout]


@pytest.mark.usefixtures("patience")
async def test_cancelled_before_it_is_sent_nothing_is_written(stage: Stage):
    """And those with whom it would have gone are."""
    async with stage.gathering(stage.put("a"), stage.put("b"), stage.put("c")) as (a, b, c):
        a.cancel()
        with pytest.raises(asyncio.CancelledError):
            await a
    await asyncio.gather(b, c)

    assert await stage.saved() == {"b": 1, "c": 1}


@pytest.mark.usefixtures("patience")
async def test_cancelled_when_it_is_sent_it_ends_with_the_group(stage: Stage, onlooker: Onlooker):
    """A run that has ended writes nothing more, and this one has not: its rows come."""
    async with stage.parked(onlooker, stage.put("a"), stage.put("b")) as (a, b):
        a.cancel()
        for _ in range(5):
            await turn()
        assert not a.done()
    with pytest.raises(asyncio.CancelledError):
        await a
    assert "a" in await stage.saved()
    await b


@pytest.mark.usefixtures("patience")
async def test_where_the_event_loop_ends_so_do_those_who_wait(stage: Stage):
    """It cancels every task, maybe before it has begun, and waits for all of them."""
    async with stage.gathering(stage.put("a"), stage.put("b")) as saves:
        stage.commit._under_way.clear()
        stage.commit._send_next()
        for task in (*saves, *stage.commit._groups):
            task.cancel()
        done, _ = await asyncio.wait(saves, timeout=10)

    assert done == set(saves)
    assert all(task.cancelled() for task in saves)
    assert await stage.saved() == {}


async def test_what_takes_long_keeps_nobody_waiting(stage: Stage, dsn: str):
    """One save may wait for a lock, or for a slow disk; those behind it go out beside it."""
    async with await connect(dsn) as admitting:
        await admitting.execute("BEGIN")
        await admit(admitting, 6, thread="a", graph="a")
        slow = asyncio.create_task(stage.put("a"))
        async with asyncio.timeout(10):
            while not stage.commit._under_way:
                await turn()
        quick = {asyncio.create_task(stage.put("b")), asyncio.create_task(stage.put("c"))}
        done, _ = await asyncio.wait(quick, timeout=10)
        assert done == quick
        assert not slow.done()
        await admitting.execute("ROLLBACK")
        await slow

    assert await stage.saved() == {"a": 1, "b": 1, "c": 1}


@pytest.mark.usefixtures("patience")
async def test_a_large_save_does_not_wait_for_company(stage: Stage):
    """It would gain nothing, and hold the others up."""
    async with stage.gathering(stage.put("b"), stage.put("c")) as small:
        async with asyncio.timeout(10):
            await stage.put("a", seen=["x" * LARGE])
        assert await stage.saved() == {"a": 1}
    await asyncio.gather(*small)


@pytest.mark.usefixtures("patience")
async def test_a_large_save_keeps_nobody_waiting(stage: Stage, dsn: str, onlooker: Onlooker):
    """Where such saves overlap without end, small ones would never find nothing under way."""
    async with await connect(dsn) as admitting:
        await admitting.execute("BEGIN")
        await admit(admitting, 6, thread="a", graph="a")
        async with stage.gathering(stage.put("b"), stage.put("c")) as small:
            large = asyncio.create_task(stage.put("a", seen=["x" * LARGE]))
            waiting = (
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            await onlooker.until(lambda: onlooker.rows(waiting))
        done, _ = await asyncio.wait(small, timeout=10)
        assert done == set(small)
        assert not large.done()
        await admitting.execute("ROLLBACK")
        await large


@pytest.mark.usefixtures("patience")
async def test_a_statement_carries_so_many_and_the_rest_goes_next(stage: Stage):
    """It holds the graph loop up while it is put together."""
    graphs = [f"g{number:03}" for number in range(MOST_SAVES + 2)]
    for graph in graphs:
        await admit(stage.look, 5, thread=graph, graph=graph)
    assert await stage.together(*(stage.put(graph) for graph in graphs)) == [None] * len(graphs)

    assert await stage.transactions() == [graphs[:MOST_SAVES], graphs[MOST_SAVES:]]


@pytest.mark.usefixtures("patience")
async def test_all_that_a_run_saves_can_go_together(stage: Stage):
    """A saver of a later version that words a statement otherwise would be right, and slow, without a word."""
    saves: list[Save] = []

    class Noted(GroupCommit):
        async def save(self, save: Save, alone: Any) -> None:
            assert save.gather() is not None
            saves.append(save)
            await super().save(save, alone)

    stage.commit = Noted(stage.pool)
    await run(stage.saver("a"), "a")

    assert {query for save in saves for query, _, _ in save.statements} == set(TOGETHER)


async def test_what_a_group_reads_does_not_grow_with_the_ledger(dsn: str, admin_dsn: str):
    """Plans are kept from when the tables were tiny, and autovacuum's first ANALYZE may be long in coming."""
    await prepare(dsn)
    async with open_pool(dsn, options="-c statement_timeout=0") as pool, await connect(dsn) as look:
        stage = Stage(dsn, pool, look)
        graphs = [f"g{number}" for number in range(5)]
        for graph in graphs:
            await admit(look, 5, thread=graph, graph=graph)

        async def some_groups() -> None:
            for _ in range(ROUNDS):
                assert await stage.together(*(stage.put(graph) for graph in graphs)) == [None] * 5

        await some_groups()
        grow(admin_dsn, graph="g0", mode="skip")
        before = await _threads_read(pool, look)
        await some_groups()
        after = await _threads_read(pool, look)

    assert after - before < FEW


async def _threads_read(pool: AsyncConnectionPool[Any], look: AsyncConnection[Any]) -> int:
    """Return how many rows of tickd.threads have been read by all of the pool's connections so far."""
    for connection in list(pool._pool):
        await connection.execute("SELECT pg_stat_force_next_flush()")
    await look.execute("SELECT pg_stat_clear_snapshot()")
    cursor = await look.execute(
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relid = 'tickd.threads'::regclass"
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.usefixtures("patience")
async def test_a_plain_saver_reads_what_a_group_has_written(stage: Stage):
    """The state of a thread is LangGraph's, whoever saved it and how."""
    async with stage.gathering(run(stage.saver("a"), "a"), run(stage.saver("b"), "b")) as runs:
        pass
    results = await asyncio.gather(*runs)

    for graph, result in zip("ab", results, strict=True):
        found: Any = await saver(stage.pool, 1).aget_tuple(place(graph))
        assert found.checkpoint["channel_values"] == result
