"""The fenced saver and the guard: who may write to which thread, and what is left behind by whom."""

import asyncio
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import START, StateGraph
from psycopg import AsyncConnection

from tests.fences import (
    GRAPH,
    SPACE,
    THREAD,
    State,
    admit,
    config,
    connect,
    graph,
    open_pool,
    prepare,
    rows,
    run,
    saver,
)
from tests.pooler import Pooler
from tickd.fence import CARRIERS, is_refused


WRITE_ONE = """
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type) VALUES (%s, '', 'c', '1', 'empty')
"""


@pytest.fixture
async def connection(dsn: str):
    """A connection of an onlooker, to a database with the guard."""
    await prepare(dsn)
    async with await connect(dsn) as connection:
        yield connection


@pytest.fixture
async def pool(connection: AsyncConnection[Any], dsn: str):
    """The pool that the savers of a test share."""
    assert not connection.closed
    async with open_pool(dsn) as pool:
        yield pool


async def refusal(coroutine: Any) -> psycopg.Error:
    """Return the guard's refusal of what is awaited; fail if it went through."""
    with pytest.raises(Exception, match="tickd refused") as caught:
        await coroutine
    assert is_refused(caught.value)
    assert isinstance(caught.value, psycopg.Error)
    return caught.value


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_the_holder_writes_and_reads_back(connection, pool, durability):
    """The fence must be invisible to whoever holds the lock."""
    await admit(connection, 5)
    result = await run(saver(pool, 5), steps=3, durability=durability)

    found = await saver(pool, 5).aget_tuple(config())

    assert found is not None
    assert found.checkpoint["channel_values"] == result == {"seen": ["input", "n0", "n1", "n2"]}


async def test_a_plain_saver_is_refused_on_a_thread_of_tickd_and_passes_on_others(connection, pool):
    """A script that never took the lock must not write next to the holder; what is not tickd's is none of its business."""
    await admit(connection, 5)
    plain = AsyncPostgresSaver(pool)

    error = await refusal(run(plain))

    assert await rows(connection) == []
    assert error.diag.message_primary == (
        f"tickd refused a write to thread {THREAD}: graph {GRAPH} (lock space {SPACE}) is held under token 5, "
        "this writer has none"
    )
    assert "tickd.sole_writer" in (error.diag.message_hint or "")
    await run(plain, "somebody/else")
    assert len(await rows(connection, "somebody/else")) > 5


async def test_a_stale_holder_is_refused_with_both_tokens_in_the_message(connection, pool):
    """Whoever reads the error has to see at once that a newer hold exists."""
    await admit(connection, 5)
    stale = saver(pool, 5)
    await run(stale)
    before = await rows(connection)
    await admit(connection, 6)

    error = await refusal(run(stale))

    assert "held under token 6, this writer has token 5" in str(error)
    assert await rows(connection) == before


async def test_an_equal_token_of_another_graph_or_lock_space_opens_nothing(connection, pool):
    """Tokens are counted per graph, so two graphs often stand at the same number."""
    await admit(connection, 5)

    other_graph = await refusal(run(saver(pool, 5, graph="pack_audit")))
    other_space = await refusal(run(saver(pool, 5, space=SPACE + 1)))

    assert f"the token of another graph, {SPACE}/pack_audit/5" in str(other_graph)
    assert f"{SPACE + 1}/{GRAPH}/5" in str(other_space)
    assert await rows(connection) == []


async def test_an_earlier_holder_is_refused_on_its_own_thread_too(connection, pool):
    """Each tick has a thread of its own by default: the next hold is on another one, and the run before is stale all the same."""
    await admit(connection, 5, thread="restock/1")
    stale = saver(pool, 5)
    await run(stale, "restock/1")
    before = await rows(connection, "restock/1")
    await admit(connection, 6, thread="restock/2")

    error = await refusal(run(stale, "restock/1"))
    await refusal(stale.adelete_thread("restock/1"))

    assert (
        f"thread restock/1: graph {GRAPH} (lock space {SPACE}) is held under token 6 on another thread"
        in str(error)
    )
    assert "this writer has token 5" in str(error)
    assert await rows(connection, "restock/1") == before
    await run(saver(pool, 6), "restock/2")
    await refusal(run(saver(pool, 6), "restock/1"))
    await admit(connection, 7, thread="restock/1")
    await run(saver(pool, 7), "restock/1")


async def test_other_graphs_and_lock_spaces_keep_their_holds(connection, pool):
    """An admission takes the threads of its own graph, and nobody else's."""
    await admit(connection, 5, thread="a")
    await admit(connection, 5, thread="b", graph="pack_audit")
    await admit(connection, 5, thread="c", space=SPACE + 1)
    await admit(connection, 6, thread="d")

    await run(saver(pool, 5, graph="pack_audit"), "b")
    await run(saver(pool, 5, space=SPACE + 1), "c")
    await refusal(run(saver(pool, 5), "a"))


async def test_a_holder_may_write_to_threads_that_are_not_of_tickd(connection, pool):
    """A node may run another graph on a thread of its own choice, with the saver that it inherits."""
    await admit(connection, 5)

    await run(saver(pool, 5), "somebody/else")

    assert await rows(connection, "somebody/else") != []


@pytest.mark.parametrize("strategy", ["keep_latest", "delete"])
async def test_prune_is_for_the_holder_alone(connection, pool, strategy):
    """Pruning runs transactions of its own, in two isolation levels, and must name its hold in each."""
    await admit(connection, 5)
    await run(saver(pool, 5))
    before = await rows(connection)

    await refusal(AsyncPostgresSaver(pool).aprune([THREAD], strategy=strategy))
    await refusal(saver(pool, 4).aprune([THREAD], strategy=strategy))
    assert await rows(connection) == before

    await saver(pool, 5).aprune([THREAD], strategy=strategy)
    assert len(await rows(connection)) < len(before)


async def test_deleting_a_thread_is_for_the_holder_alone(connection, pool):
    """A deletion takes the holder's state away as surely as a write does."""
    await admit(connection, 5)
    await run(saver(pool, 5))
    before = await rows(connection)

    await refusal(AsyncPostgresSaver(pool).adelete_thread(THREAD))
    await refusal(saver(pool, 4).adelete_thread(THREAD))
    assert await rows(connection) == before

    await saver(pool, 5).adelete_thread(THREAD)
    assert await rows(connection) == []


async def test_the_synchronous_methods_are_fenced_too(connection, pool):
    """A sync node that calls its checkpointer goes through the same writes."""
    await admit(connection, 5)
    held, stale = saver(pool, 5), saver(pool, 4)
    await run(held)
    found = await held.aget_tuple(config())
    assert found is not None
    at = found.config
    arguments = (at, [("seen", ["late"])], "task")

    await asyncio.to_thread(held.put_writes, *arguments)
    await refusal(asyncio.to_thread(stale.put_writes, *arguments))
    await asyncio.to_thread(held.put, at, {**found.checkpoint, "id": "0"}, found.metadata, {})
    await refusal(asyncio.to_thread(stale.put, at, {**found.checkpoint, "id": "1"}, found.metadata, {}))
    await refusal(asyncio.to_thread(stale.prune, [THREAD]))
    await refusal(asyncio.to_thread(stale.delete_thread, THREAD))
    await asyncio.to_thread(held.prune, [THREAD], strategy="delete")
    assert await rows(connection) == []


async def test_subgraphs_write_under_the_same_hold(connection, pool):
    """A subgraph's checkpoints are rows of the same thread, under a namespace of their own."""
    await admit(connection, 5)
    builder = StateGraph(State)
    builder.add_node("inner", graph(2).compile())
    builder.add_edge(START, "inner")
    outer = builder.compile(checkpointer=(held := saver(pool, 5)))

    await outer.ainvoke({"seen": []}, config(), durability="sync")

    namespaces = {namespace for kind, namespace, *_ in await rows(connection) if kind == "checkpoint"}
    assert len(namespaces) == 2
    assert held.steps == 1
    await admit(connection, 6)
    before = await rows(connection)
    await refusal(outer.ainvoke({"seen": []}, config(), durability="sync"))
    assert await rows(connection) == before


async def test_nothing_of_a_hold_stays_on_the_pools_connections(connection, pool):
    """The next user of a connection would write under a hold that is not its own."""
    await admit(connection, 5)
    held = saver(pool, 5)
    await run(held)
    await held.aprune([THREAD])
    await held.adelete_thread(THREAD)
    await refusal(run(saver(pool, 4)))

    async with pool.connection() as one, pool.connection() as two, pool.connection() as three:
        for each in (one, two, three):
            row = await (await each.execute("SELECT current_setting('tickd.token', true) AS hold")).fetchone()
            assert not row["hold"]
            await refusal(each.execute(WRITE_ONE, [THREAD]))


def test_every_statement_of_a_super_step_carries_its_hold():
    """A saver of a later version whose statements look otherwise is still right, but slower; this says so."""
    assert CARRIERS.keys() == {
        AsyncPostgresSaver.UPSERT_CHECKPOINTS_SQL,
        AsyncPostgresSaver.UPSERT_CHECKPOINT_BLOBS_SQL,
        AsyncPostgresSaver.UPSERT_CHECKPOINT_WRITES_SQL,
        AsyncPostgresSaver.INSERT_CHECKPOINT_WRITES_SQL,
    }


async def test_a_statement_of_another_shape_is_preceded_by_one_that_names_the_hold(
    connection, pool, monkeypatch
):
    """The saver's SQL is not ours: what cannot carry the hold must still be written under it."""
    monkeypatch.setattr("tickd.fence.CARRIERS", {})
    await admit(connection, 5)

    await run(saver(pool, 5))

    assert len(await rows(connection)) > 5
    await refusal(run(saver(pool, 4)))


async def test_without_libpqs_pipelines_the_hold_is_named_in_a_transaction(connection, pool):
    """With a libpq before version 14, psycopg has no pipeline mode and the saver uses a real transaction."""
    await admit(connection, 5)
    held, stale = saver(pool, 5), saver(pool, 4)
    held.supports_pipeline = stale.supports_pipeline = False

    await run(held)
    before = await rows(connection)

    assert len(before) > 5
    await refusal(run(stale))
    await refusal(stale.adelete_thread(THREAD))
    assert await rows(connection) == before
    await held.adelete_thread(THREAD)
    assert await rows(connection) == []


async def test_behind_a_transaction_mode_pooler_holds_do_not_mix(connection, dsn, admin_dsn):
    """The pooler hands each transaction to any server session; a setting of the session would end up with others."""
    threads = [f"graph{i}/thread" for i in range(6)]
    for i, thread in enumerate(threads):
        await admit(connection, 5, thread=thread, graph=f"graph{i}")
    pooler = Pooler(admin_dsn)
    try:
        pooler.start()
        through = {"prepare_threshold": None}
        async with (
            open_pool(pooler.through(dsn), **through) as one,
            open_pool(pooler.through(dsn), **through) as two,
        ):
            savers = [saver((one, two)[i % 2], 5, graph=f"graph{i}") for i in range(6)]
            await asyncio.gather(*(run(s, t, steps=5) for s, t in zip(savers, threads, strict=True)))
            for i, thread in enumerate(threads):
                assert len(await rows(connection, thread)) > 15
                await refusal(run(savers[i - 1], thread))
                await refusal(AsyncPostgresSaver(one).adelete_thread(thread))
            await savers[0].aprune([threads[0]])
            await savers[0].adelete_thread(threads[0])
            assert await rows(connection, threads[0]) == []
            async with one.connection() as a, one.connection() as b, two.connection() as c:
                await asyncio.gather(*(refusal(each.execute(WRITE_ONE, [threads[1]])) for each in (a, b, c)))
    finally:
        pooler.remove()


async def test_a_refusal_is_found_wherever_it_is_wrapped(connection, pool):
    """A graph may catch and re-raise; a run that wrote stale is fenced all the same."""
    await admit(connection, 5)
    error = await refusal(run(AsyncPostgresSaver(pool)))

    caused = RuntimeError("node failed")
    caused.__cause__ = error
    in_context = RuntimeError("while cleaning up")
    in_context.__context__ = caused
    in_context.__suppress_context__ = True
    circular = RuntimeError("round")
    circular.__cause__ = RuntimeError("and round")
    circular.__cause__.__cause__ = circular

    assert is_refused(error)
    assert is_refused(in_context)
    assert is_refused(ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [in_context])]))
    assert not is_refused(circular)
    assert not is_refused(psycopg.OperationalError("gone"))
