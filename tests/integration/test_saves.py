"""What one run saves, and when it goes out: with what it is followed by, late, at the end, or not at all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.errors import GraphDrained
from langgraph.func import entrypoint
from langgraph.graph import START, StateGraph
from langgraph.runtime import RunControl
from langgraph.types import interrupt
from psycopg import AsyncConnection, OperationalError
from psycopg_pool import AsyncConnectionPool

from tests.fences import (
    GATE,
    GRAPH,
    PARKED,
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
)
from tests.onlooker import Onlooker
from tests.turns import turn
from tickd import saves
from tickd.fence import is_refused
from tickd.group_commit import GroupCommit
from tickd.saves import GroupedSaver


# What one transaction has written has its number, whatever the table.
TRANSACTIONS = """
SELECT array_agg(kind ORDER BY kind) FROM (
    SELECT xmin::text AS number, 'step ' || (metadata ->> 'step') FROM checkpoints
    UNION SELECT xmin::text, 'blobs' FROM checkpoint_blobs
    UNION SELECT xmin::text, 'writes' FROM checkpoint_writes
) AS written (number, kind)
GROUP BY number ORDER BY number::bigint
"""
STEPS = "SELECT (metadata ->> 'step')::int FROM checkpoints ORDER BY 1"
WRITES = "SELECT channel, blob IS NOT NULL FROM checkpoint_writes"
TOP: Any = {"configurable": {"thread_id": THREAD, "checkpoint_ns": ""}}


class Place:
    """A thread under hold 5, its saver, and an onlooker's connection."""

    def __init__(self, dsn: str, pool: AsyncConnectionPool[Any], look: AsyncConnection[Any]) -> None:
        self.dsn = dsn
        self.look = look
        self.saver = GroupedSaver(pool, GroupCommit(pool), space=SPACE, graph=GRAPH, token=5)

    async def run(self, builder: Any, given: Any = None, **options: Any) -> Any:
        """Run a graph to its end as a run does it."""
        compiled = builder.compile(checkpointer=self.saver)
        async with asyncio.timeout(20), self.saver.to_the_end():
            given = {"seen": ["input"]} if given is None else given
            return await compiled.ainvoke(given, config(), durability="sync", **options)

    async def enter(self, function: Any) -> Any:
        """Run an entrypoint to its end as a run does it."""
        async with self.saver.to_the_end():
            return await entrypoint(checkpointer=self.saver)(function).ainvoke(1, config(), durability="sync")

    async def put_input(self, saver: GroupedSaver | None = None) -> Any:
        """Save the checkpoint of an input, by the saver or by this clone of it."""
        checkpoint: Any = empty_checkpoint() | {
            "channel_values": {"seen": [1]},
            "channel_versions": {"seen": "1"},
        }
        async with asyncio.timeout(20):
            saver = saver or self.saver
            return await saver.aput(TOP, checkpoint, {"source": "input", "step": -1}, {"seen": "1"})

    def clone(self) -> GroupedSaver:
        """Return the saver as LangGraph gives it to a subgraph when LANGGRAPH_STRICT_MSGPACK is set."""
        self.saver.serde = JsonPlusSerializer(allowed_msgpack_modules=None)
        clone = self.saver.with_allowlist([("tests", "State")])
        assert isinstance(clone, GroupedSaver)
        assert clone is not self.saver
        return clone

    async def put_step(self) -> None:
        """Save the checkpoint of a step."""
        await self.saver.aput(TOP, empty_checkpoint(), {"source": "loop", "step": 0}, {})

    def told(self) -> list[str]:
        """Return a list that tells from now on when something is sent and when it is written."""
        story: list[str] = []
        commit: Any = self.saver._group_commit
        save = commit.save

        async def tell(*what: Any) -> None:
            story.append("sent")
            await save(*what)
            story.append("written")

        commit.save = tell
        return story

    def fail_once(self) -> None:
        """Let the next that is sent fail."""
        commit: Any = self.saver._group_commit
        save = commit.save

        async def fail(*_: Any) -> None:
            commit.save = save
            raise OperationalError("no link")

        commit.save = fail

    async def steps(self) -> list[int]:
        """Return the steps whose checkpoints another connection sees."""
        return [step for (step,) in await (await self.look.execute(STEPS)).fetchall()]

    async def transactions(self) -> list[list[str]]:
        """Return what each transaction has written, in their order."""
        return [kinds for (kinds,) in await (await self.look.execute(TRANSACTIONS)).fetchall()]

    async def until_seen(self, query: str) -> list[Any]:
        """Return what another connection sees as soon as it sees anything."""
        async with asyncio.timeout(10):
            while not (found := await (await self.look.execute(query)).fetchall()):
                await self.look.execute("SELECT pg_sleep(0.005)")
            return found

    @asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Let what is saved be parked in Postgres for as long as the block."""
        async with await connect(self.dsn) as gate:
            await gate.execute(GATE)
            yield


def step_of(*nodes: Any) -> Any:
    """Return the builder of one step of these nodes."""
    builder: Any = StateGraph(State)
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(START, node.__name__)
    return builder


@pytest.fixture
async def place(dsn: str):
    """The thread, admitted."""
    await prepare(dsn)
    async with open_pool(dsn) as pool, await connect(dsn) as look:
        await admit(look, 5)
        yield Place(dsn, pool, look)


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch):
    """What is kept is kept until something comes for it."""
    monkeypatch.setattr(saves, "TURNS", 10**9)


@pytest.mark.usefixtures("never_late")
async def test_a_run_of_one_node_is_two_transactions(place: Place):
    """What it saves before its node, and what it saves after it."""
    await place.run(graph(1))

    assert await place.transactions() == [
        ["blobs", "step -1", "step 0", "writes"],
        ["blobs", "step 1", "writes"],
    ]


@pytest.mark.usefixtures("never_late")
async def test_the_first_node_begins_when_all_that_comes_before_it_is_on_the_disk(place: Place):
    """As `durability: sync` promises."""
    seen: list[list[int]] = []

    async def node(_state: State) -> State:
        seen.append(await place.steps())
        return {"seen": ["node"]}

    await place.run(step_of(node))

    assert seen == [[-1, 0]]


async def test_an_input_that_no_step_follows_is_saved_all_the_same(place: Place):
    """An entrypoint has no step of its own before it works, maybe for hours."""

    async def work(given: int) -> int:
        assert await place.until_seen(STEPS) == [(-1,)]
        return given + 1

    assert await place.enter(work) == 2
    assert await place.steps() == [-1, 0]


async def test_what_a_task_wrote_is_saved_while_its_siblings_are_at_work(place: Place):
    """Another attempt does not do it again."""

    async def quick(_state: State) -> State:
        return {"seen": ["quick"]}

    async def slow(_state: State) -> State:
        await place.until_seen("SELECT FROM checkpoint_writes WHERE channel = 'seen'")
        return {"seen": ["slow"]}

    result = await place.run(step_of(quick, slow))

    assert result == {"seen": ["input", "quick", "slow"]}


async def test_what_a_checkpoint_waits_for_after_all_is_saved(place: Place):
    """A DeltaChannel is read from what the tasks wrote, so its step's checkpoint comes after that."""

    class Deltas(TypedDict):
        seen: Annotated[list[str], DeltaChannel(lambda state, writes: [*state, *chain(*writes)])]

    async def node(_state: Any) -> Any:
        return {"seen": ["node"]}

    builder: Any = StateGraph(Deltas)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    assert await place.run(builder) == {"seen": ["input", "node"]}
    found = await builder.compile(checkpointer=place.saver).aget_state(config())
    assert found.values == {"seen": ["input", "node"]}


@pytest.mark.usefixtures("never_late")
async def test_an_error_is_not_kept(place: Place):
    """The end of its run waits for it."""

    async def fail(_state: State) -> State:
        raise RuntimeError("no stock")

    with pytest.raises(RuntimeError, match="no stock"):
        await place.run(step_of(fail))

    assert ("__error__", True) in await place.until_seen(WRITES)


@pytest.mark.usefixtures("never_late")
async def test_a_question_is_not_kept(place: Place):
    """The end of its run waits for it."""

    async def ask(_state: State) -> State:
        return {"seen": [interrupt("go on?")]}

    result = await place.run(step_of(ask))

    assert result["__interrupt__"][0].value == "go on?"
    assert ("__interrupt__", True) in await place.until_seen(WRITES)


@pytest.mark.usefixtures("never_late")
async def test_what_is_kept_is_written_before_anything_is_read(place: Place):
    """A saver finds what it has saved."""
    saved = await place.put_input()
    assert await place.steps() == []

    found = await place.saver.aget_tuple(config())

    assert found is not None
    assert found.config["configurable"] == saved["configurable"]
    assert await place.steps() == [-1]


@pytest.mark.usefixtures("never_late")
async def test_what_is_kept_does_not_come_after_it_was_deleted(place: Place):
    """In the order in which it was asked for."""
    await place.put_input()
    await place.saver.adelete_thread(THREAD)

    async with place.saver.to_the_end():
        pass
    assert await rows(place.look) == []


@pytest.mark.usefixtures("never_late")
async def test_a_run_that_is_drained_before_its_first_step_leaves_its_input(place: Place):
    """An operator sees what it was given."""
    control = RunControl()
    control.request_drain("a stop")
    with pytest.raises(GraphDrained):
        await place.run(graph(1), control=control)

    assert await place.steps() == [-1]


@pytest.mark.usefixtures("never_late")
async def test_a_run_that_fails_with_its_input_still_kept_leaves_it(place: Place):
    """And tells its own error, not what became of the save."""

    async def work() -> None:
        async with place.saver.to_the_end():
            await place.put_input()
            raise RuntimeError("no route")

    with pytest.raises(RuntimeError, match="no route"):
        await work()

    assert await place.steps() == [-1]


@pytest.mark.usefixtures("never_late")
async def test_a_run_whose_hold_is_over_hears_of_it_at_its_end(place: Place):
    """Nothing waited for the input's save, and it was refused: such a run has not finished."""
    await admit(place.look, 6)
    with pytest.raises(Exception, match="held under token 6") as caught:
        async with place.saver.to_the_end():
            await place.put_input()

    assert is_refused(caught.value)
    assert await rows(place.look) == []


async def test_after_a_save_that_failed_late_comes_no_other(place: Place):
    """A step's checkpoint refers to what the input's brought, and would be one that nobody can read."""
    failed = asyncio.Event()

    async def work(given: int) -> int:
        async with asyncio.timeout(10):
            await failed.wait()
        await admit(place.look, 5)
        return given + 1

    saver: Any = place.saver
    write = saver._write

    async def noticed(*what: Any) -> None:
        try:
            await write(*what)
        except Exception:
            failed.set()
            raise

    saver._write = noticed
    await admit(place.look, 6)
    with pytest.raises(Exception, match="held under token 6"):
        await place.enter(work)

    assert await rows(place.look) == []


async def test_a_step_is_saved_after_an_input_that_was_sent_late(place: Place, onlooker: Onlooker):
    """If the input's save fails in the end, nothing refers to it."""
    async with place.parked():
        await place.put_input()
        await onlooker.until(lambda: onlooker.rows(PARKED))
        step = asyncio.create_task(place.put_step())
        await asyncio.wait({step}, timeout=0.1)
        assert len(onlooker.rows(PARKED)) == 1
    await step

    assert await place.steps() == [-1, 0]


async def test_a_run_that_is_cancelled_writes_nothing_after_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """Its lock goes to somebody else then."""
    monkeypatch.setattr(saves, "TURNS", 50)

    async def work() -> None:
        async with place.saver.to_the_end():
            await place.put_input()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    async with asyncio.timeout(10):
        while place.saver._box.kept is None:
            await turn()
    task.cancel()
    await asyncio.wait({task})
    for _ in range(100):
        await turn()

    assert task.cancelled()
    assert place.saver._box.last is None
    assert await rows(place.look) == []


async def test_a_run_that_is_cancelled_waits_for_what_was_sent_late(place: Place, onlooker: Onlooker):
    """It is written when the run has ended, or it is not written at all."""

    async def work() -> None:
        async with place.saver.to_the_end():
            await place.put_input()
            await asyncio.Event().wait()

    async with place.parked():
        task = asyncio.create_task(work())
        await onlooker.until(lambda: onlooker.rows(PARKED))
        task.cancel()
        await asyncio.wait({task})

        assert task.cancelled()
        assert place.saver._box.last is not None
        assert place.saver._box.last.done()
        await onlooker.until(lambda: not onlooker.rows(PARKED))
    assert await rows(place.look) == []


@pytest.mark.parametrize("turns", range(saves.TURNS + 4))
async def test_whenever_a_run_ends_what_is_kept_is_sent_once(place: Place, turns: int):
    """In the very turn, too, in which it was about to be sent late; a second time it would be told as the run's failure."""
    sent = place.told()
    async with place.saver.to_the_end():
        await place.put_input()
        for _ in range(turns):
            await turn()

    assert sent == ["sent", "written"]
    assert await place.steps() == [-1]


@pytest.mark.usefixtures("never_late")
async def test_a_step_is_saved_after_an_input_that_a_read_has_sent(place: Place):
    """In a group with those of others it may be there before, and refer to what never comes."""
    sent = place.told()
    await place.put_input()
    read = asyncio.create_task(place.saver.aget_tuple(config()))
    await turn()
    await place.put_step()
    await read

    assert sent == ["sent", "written", "sent", "written"]


@pytest.mark.usefixtures("never_late")
async def test_a_step_is_saved_after_an_input_that_a_read_sends_while_it_waits(place: Place):
    """Several subgraphs save and read by turns on one saver."""
    await place.put_input()
    await place.saver.aget_tuple(config())
    await place.put_input()
    sent = place.told()
    step = asyncio.create_task(place.put_step())
    read = asyncio.create_task(place.saver.aget_tuple(config()))
    await step
    await read

    assert sent == ["sent", "written"] * (len(sent) // 2)
    assert await place.steps() == [-1, -1, 0]


@pytest.mark.usefixtures("never_late")
async def test_an_input_that_was_lost_with_another_subgraphs_checkpoint_fails_the_run(place: Place):
    """LangGraph takes it for written, and whoever saved the checkpoint may know how to go on without."""

    async def work() -> None:
        async with place.saver.to_the_end():
            await place.put_input()
            place.fail_once()
            with suppress(OperationalError):
                await place.put_step()
            with pytest.raises(OperationalError, match="no link"):
                await place.put_step()

    with pytest.raises(OperationalError, match="no link"):
        await work()

    assert await place.steps() == []


@pytest.mark.usefixtures("never_late")
async def test_a_save_that_failed_and_was_waited_for_does_not_keep_the_next_one_out(place: Place):
    """A node of LangGraph may be tried again."""
    async with place.saver.to_the_end():
        place.fail_once()
        with pytest.raises(OperationalError, match="no link"):
            await place.put_step()
        await place.put_step()

    assert await place.steps() == [0]


@pytest.mark.usefixtures("never_late")
async def test_a_subgraph_that_is_cancelled_takes_nobody_elses_input_with_it(
    place: Place, onlooker: Onlooker
):
    """The input goes out with the checkpoint of whoever comes first."""
    async with place.parked():
        await place.put_input()
        step = asyncio.create_task(place.put_step())
        await onlooker.until(lambda: onlooker.rows(PARKED))
        step.cancel()
        await asyncio.wait({step})
    async with place.saver.to_the_end():
        pass

    assert step.cancelled()
    assert await place.steps() == [-1, 0]


async def test_what_langgraph_abandons_is_not_written_after_the_end(place: Place, onlooker: Onlooker):
    """It is cancelled while it waits for its saves, and leaves them where they are."""
    left = asyncio.Event()

    async def node(_state: State) -> State:
        left.set()
        return {"seen": ["node"]}

    compiled = step_of(node).compile(checkpointer=place.saver)

    async def work() -> None:
        async with place.saver.to_the_end():
            await compiled.ainvoke({"seen": ["input"]}, config(), durability="async")

    async with place.parked():
        task = asyncio.create_task(work())
        await left.wait()
        await onlooker.until(lambda: onlooker.rows(PARKED))
        for _ in range(20):
            await turn()
        task.cancel()
        await asyncio.wait({task})
        await onlooker.until(lambda: not onlooker.rows(PARKED))
    for _ in range(100):
        await turn()

    assert task.cancelled()
    assert await rows(place.look) == []


async def test_nothing_is_saved_after_the_end(place: Place):
    """Whoever still tries is told."""
    async with place.saver.to_the_end():
        pass

    with pytest.raises(RuntimeError, match="after the end of its run"):
        await place.put_step()


@pytest.mark.usefixtures("never_late")
async def test_what_a_subgraph_s_clone_of_the_saver_has_kept_is_written_at_the_end(place: Place):
    """It belongs to the same run. Sent late, it would come when its hold is over, and nobody would hear that it failed."""
    async with place.saver.to_the_end():
        await place.put_input(place.clone())

    assert await place.steps() == [-1]


async def test_an_input_that_a_clone_of_the_saver_lost_fails_the_run(place: Place):
    """LangGraph takes it for written."""

    async def work() -> None:
        async with place.saver.to_the_end():
            place.fail_once()
            await place.put_input(place.clone())

    with pytest.raises(OperationalError, match="no link"):
        await work()


async def test_nothing_is_saved_by_a_clone_after_the_end(place: Place):
    """A cancelled run's subgraph may come round once more."""
    clone = place.clone()
    async with place.saver.to_the_end():
        pass

    with pytest.raises(RuntimeError, match="after the end of its run"):
        await place.put_input(clone)


@pytest.mark.usefixtures("never_late")
@pytest.mark.parametrize("when", ["kept", "sent"])
async def test_what_waits_for_a_save_that_never_began_is_cancelled_with_its_run(place: Place, when: str):
    """What a task wrote, say: it would wait for ever."""
    where: Any = {"configurable": TOP["configurable"] | {"checkpoint_id": "1"}}
    writing = asyncio.create_task(place.saver.aput_writes(where, [("seen", 1)], "task"))
    async with asyncio.timeout(10):
        while place.saver._box.kept is None:
            await turn()
        if when == "sent":
            place.saver._send(place.saver._box.kept)
        await place.saver._end()
        await asyncio.wait({writing})

    assert writing.cancelled()
    assert await rows(place.look) == []
