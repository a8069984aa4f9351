"""Effects on the world outside: done once, though the node is run again by whoever holds the graph next."""

import asyncio
import json
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from tests.fences import GRAPH, SPACE, THREAD, State, connect, open_pool, prepare, saver
from tests.pages import DOCS, blocks
from tickd.effects import idempotency_key, once, once_sync
from tickd.errors import AmbiguousEffect, StaleHold
from tickd.fence import is_refused
from tickd.retention import BatchSize, remove_old_ticks
from tickd.schedule import parse


HOLD = """
INSERT INTO tickd.graphs (space, graph, key, token) VALUES (%s, %s, 0, %s)
ON CONFLICT (space, graph) DO UPDATE SET token = EXCLUDED.token
"""
ADMIT = """
INSERT INTO tickd.threads (thread_id, space, graph, token) VALUES (%s, %s, %s, %s)
ON CONFLICT (thread_id) DO UPDATE SET token = EXCLUDED.token
"""
EFFECTS = "SELECT name, token, received_at IS NOT NULL, receipt FROM tickd.effects ORDER BY name"

NOTING = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%UPDATE tickd.effects%'
) AS waits
"""


class World:
    """The world outside, which counts what is done to it, and may break down before or after it was done."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.breaks: dict[str, str] = {}

    def charge(self, key: str, what: str = "charge") -> dict[str, Any]:
        """Do it, and say so."""
        if self.breaks.get(what) == "before":
            raise ConnectionError("no route to the bank")
        if self.breaks.get(what) == "declined":
            raise PermissionError("declined")
        self.done[what] += 1
        if "after" in (self.breaks.get(what), self.breaks.get("*")):
            raise ConnectionResetError("the answer got lost")
        return {"charge": what, "key": key, "number": self.done.total()}

    async def acharge(self, key: str, what: str = "charge") -> dict[str, Any]:
        """Do it as a coroutine."""
        return self.charge(key, what)


class Stage:
    """A graph under hold 5, that other holds may take."""

    def __init__(self, pool: Any, connection: Any) -> None:
        self.pool = pool
        self.connection = connection
        self.world = World()

    async def hold(self, token: int) -> None:
        """Take the graph, as an admission does."""
        await self.connection.execute(HOLD, [SPACE, GRAPH, token])
        await self.connection.execute(ADMIT, [THREAD, SPACE, GRAPH, token])

    async def run(self, builder: Any, token: int, given: Any = None, *, durability: Any = "sync") -> Any:
        """Run or continue a graph under a token."""
        graph = builder.compile(checkpointer=saver(self.pool, token))
        return await graph.ainvoke(given, run_config(token), durability=durability)

    async def effects(self) -> Any:
        """Return the ledger's rows."""
        return await (await self.connection.execute(EFFECTS)).fetchall()


def run_config(token: int = 5, fire_time: str = "2026-05-04T10:00:00Z", graph: str = GRAPH) -> Any:
    """Return the config that tickd gives to a run."""
    metadata = {
        "tickd_graph": graph,
        "tickd_fire_time": fire_time,
        "tickd_attempt": token - 4,
        "tickd_replica": f"replica-{token}",
        "tickd_token": token,
    }
    return {"configurable": {"thread_id": THREAD}, "metadata": metadata}


@pytest.fixture
async def stage(dsn: str):
    """The stage, with hold 5 on it."""
    await prepare(dsn)
    async with await connect(dsn) as connection, open_pool(dsn) as pool:
        stage = Stage(pool, connection)
        await stage.hold(5)
        yield stage


def one_node(node: Any, **options: Any) -> Any:
    """Return the builder of a graph with one node."""
    builder: Any = StateGraph(State)
    builder.add_node("pay", node, **options)
    builder.add_edge(START, "pay")
    return builder


class Broken(Exception):
    """A node broke after its effect."""


def charging(stage: Stage, name: str = "charge", **options: Any) -> Any:
    """Return a node that charges once."""

    async def node(_: State, config: RunnableConfig) -> State:
        receipt = await once(config, name, action=stage.world.acharge, **options)
        return {"seen": [json.dumps(receipt)]}

    return node


async def test_a_node_that_is_run_again_finds_its_receipt(stage):
    """The customer has paid once, and the graph goes on with the same receipt as if nothing had happened."""
    receipts = []

    async def node(_: State, config: RunnableConfig) -> State:
        receipts.append(await once(config, "charge", action=stage.world.acharge))
        if len(receipts) == 1:
            raise Broken
        return {"seen": []}

    with pytest.raises(Broken):
        await stage.run(one_node(node), 5, {"seen": []})
    await stage.hold(6)
    await stage.run(one_node(node), 6)

    assert stage.world.done == {"charge": 1}
    assert receipts[0] == receipts[1]
    assert await stage.effects() == [("charge", 5, True, receipts[0])]


async def test_a_sync_node_has_the_same(stage):
    """Most graphs are written without async."""
    receipts = []

    def node(_: State, config: RunnableConfig) -> State:
        receipts.append(once_sync(config, "charge", action=stage.world.charge))
        if len(receipts) == 1:
            raise Broken
        return {"seen": []}

    with pytest.raises(Broken):
        await stage.run(one_node(node), 5, {"seen": []})
    await stage.run(one_node(node), 5)

    assert stage.world.done == {"charge": 1}
    assert receipts[0] == receipts[1]


async def test_an_async_node_that_calls_the_sync_way_is_refused_and_told_the_other(stage):
    """It waited on the graph loop for that loop, and no graph of the replica went on until it was killed."""

    async def node(_: State, config: RunnableConfig) -> State:
        return {"seen": [str(once_sync(config, "charge", action=stage.world.charge))]}

    async def node_with_a_thread(_: State, config: RunnableConfig) -> State:
        receipt = await asyncio.to_thread(once_sync, config, "charge", action=stage.world.charge)
        return {"seen": [receipt["key"]]}

    with pytest.raises(RuntimeError, match=r"node pay@1 .* write `await once\(\.\.\.\)` in an async node"):
        await stage.run(one_node(node), 5, {"seen": []})
    assert stage.world.done == {}
    assert await stage.effects() == []

    await stage.run(one_node(node_with_a_thread), 5)
    assert stage.world.done == {"charge": 1}


@pytest.mark.parametrize("sync", [False, True])
async def test_an_effect_that_was_cut_off_is_ambiguous(stage, sync):
    """The bank may or may not have heard; tickd does not guess, and says who began it and what to do."""
    stage.world.breaks["charge"] = "after"

    def sync_node(_: State, config: RunnableConfig) -> State:
        return {"seen": [once_sync(config, "charge", action=stage.world.charge)["key"]]}

    builder = one_node(sync_node if sync else charging(stage))
    with pytest.raises(ConnectionResetError):
        await stage.run(builder, 5, {"seen": []})
    stage.world.breaks.clear()
    await stage.hold(6)

    with pytest.raises(AmbiguousEffect):
        await stage.run(builder, 6)
    with pytest.raises(AmbiguousEffect) as caught:
        await stage.run(builder, 6)

    assert stage.world.done == {"charge": 1}
    said = (
        f"charge of node pay@1 of {GRAPH}/2026-05-04T10:00:00Z took place: attempt 1 on replica-5 began it at"
    )
    assert said in str(caught.value)
    assert await stage.effects() == [("charge", 5, False, None)]
    assert not is_refused(caught.value)


@pytest.mark.parametrize("was_done", [True, False])
async def test_a_person_settles_what_is_ambiguous(stage, was_done):
    """What the message says to do has to work."""
    stage.world.breaks["charge"] = "after" if was_done else "before"
    with pytest.raises(ConnectionError):
        await stage.run(one_node(charging(stage)), 5, {"seen": []})
    stage.world.breaks.clear()
    if was_done:
        await stage.connection.execute(
            "UPDATE tickd.effects SET received_at = now(), receipt = '\"by hand\"'"
        )
    else:
        await stage.connection.execute("DELETE FROM tickd.effects")

    result = await stage.run(one_node(charging(stage)), 5)

    assert stage.world.done == {"charge": 1}
    assert ("by hand" in result["seen"][0]) is was_done


@pytest.mark.parametrize("broken", ["before", "after"])
@pytest.mark.parametrize("sync", [False, True])
async def test_the_other_side_is_asked_what_became_of_it(stage, broken, sync):
    """Most interfaces can be asked for what was done under a key."""
    stage.world.breaks["charge"] = broken

    def found(key: str) -> Any:
        return {"found": key} if stage.world.done else None

    async def look_up(key: str) -> Any:
        return found(key)

    def sync_node(_: State, config: RunnableConfig) -> State:
        receipt = once_sync(config, "charge", action=stage.world.charge, look_up=found)
        return {"seen": [json.dumps(receipt)]}

    builder = one_node(sync_node if sync else charging(stage, look_up=look_up))
    with pytest.raises(ConnectionError):
        await stage.run(builder, 5, {"seen": []})
    stage.world.breaks.clear()
    await stage.hold(6)
    result = await stage.run(builder, 6)

    assert stage.world.done == {"charge": 1}
    assert ("found" in result["seen"][0]) is (broken == "after")
    [(_, token, received, _)] = await stage.effects()
    assert received
    assert token == (5 if broken == "after" else 6)


async def test_a_person_is_asked_in_the_graph(stage):
    """`interrupt` in `look_up`: the tick waits for an answer, and goes on with it."""
    stage.world.breaks["charge"] = "after"

    async def ask(_: str) -> Any:
        return interrupt("Was it paid? Answer with the receipt, or None.")

    builder = one_node(charging(stage, look_up=ask))
    with pytest.raises(ConnectionError):
        await stage.run(builder, 5, {"seen": []})
    stage.world.breaks.clear()
    waiting = await stage.run(builder, 5)
    result = await stage.run(builder, 5, Command(resume={"paid": True}))

    assert "Was it paid?" in str(waiting["__interrupt__"])
    assert result["seen"] == ['{"paid": true}']
    assert stage.world.done == {"charge": 1}


async def test_what_is_harmless_is_done_again_under_the_same_key(stage):
    """An interface that knows idempotency keys sees to it itself."""
    keys = []

    async def pay(key: str) -> Any:
        keys.append(key)
        if len(keys) == 1:
            raise ConnectionResetError
        return "paid"

    async def node(_: State, config: RunnableConfig) -> State:
        assert idempotency_key(config, "charge") == (keys or [idempotency_key(config, "charge")])[0]
        return {"seen": [await once(config, "charge", action=pay, repeatable=True)]}

    with pytest.raises(ConnectionResetError):
        await stage.run(one_node(node), 5, {"seen": []})
    await stage.hold(6)
    await stage.run(one_node(node), 6)

    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert await stage.effects() == [("charge", 6, True, "paid")]


@pytest.mark.parametrize("sync", [False, True])
async def test_what_has_certainly_not_happened_is_not_ambiguous(stage, sync):
    """A declined card is an answer; the next run may try again."""
    stage.world.breaks["charge"] = "declined"
    not_done = (PermissionError,)

    def sync_node(_: State, config: RunnableConfig) -> State:
        return {"seen": [str(once_sync(config, "charge", action=stage.world.charge, not_done=not_done))]}

    builder = one_node(sync_node if sync else charging(stage, not_done=not_done))
    with pytest.raises(PermissionError):
        await stage.run(builder, 5, {"seen": []})
    assert await stage.effects() == []
    stage.world.breaks.clear()
    await stage.run(builder, 5)

    assert stage.world.done == {"charge": 1}


@pytest.mark.parametrize("sync", [False, True])
async def test_a_stale_holder_begins_nothing(stage, sync):
    """It stood still, went on, and is about to pay what the next holder has paid already or is going to."""

    def sync_node(_: State, config: RunnableConfig) -> State:
        return {"seen": [str(once_sync(config, "charge", action=stage.world.charge))]}

    async def node(state: State, config: RunnableConfig) -> Any:
        await stage.hold(6)
        return await (asyncio.to_thread(sync_node, state, config) if sync else charging(stage)(state, config))

    with pytest.raises(StaleHold, match="newer hold than this run's") as caught:
        await stage.run(one_node(node), 5, {"seen": []})

    assert is_refused(caught.value)
    assert stage.world.done == {}
    assert await stage.effects() == []


async def test_a_stale_holder_does_not_repeat_either(stage):
    """Between finding the intent and doing it again, the graph may go to somebody else."""
    stage.world.breaks["charge"] = "before"
    with pytest.raises(ConnectionError):
        await stage.run(one_node(charging(stage)), 5, {"seen": []})
    stage.world.breaks.clear()

    async def look_up(_: str) -> None:
        await stage.hold(6)

    with pytest.raises(StaleHold):
        await stage.run(one_node(charging(stage, look_up=look_up)), 5)
    assert stage.world.done == {}


async def test_a_stale_holder_still_notes_what_it_has_done(stage):
    """It was done; the next holder must find the receipt rather than a doubt."""

    async def pay(key: str) -> Any:
        await stage.hold(6)
        return await stage.world.acharge(key)

    async def node(_: State, config: RunnableConfig) -> State:
        await once(config, "charge", action=pay)
        return {"seen": []}

    with pytest.raises(Exception, match="tickd refused"):
        await stage.run(one_node(node), 5, {"seen": []})
    await stage.run(one_node(charging(stage)), 6)

    assert stage.world.done == {"charge": 1}


async def test_a_run_that_is_cancelled_notes_what_it_has_done(stage):
    """A time-out or a drain in the very moment between the deed and its receipt would leave a doubt for nothing."""

    async def pay(key: str) -> Any:
        # The row is locked, so that noting the receipt takes as long as the test wants.
        await stage.connection.execute("BEGIN")
        await stage.connection.execute("SELECT FROM tickd.effects FOR UPDATE")
        return await stage.world.acharge(key)

    async def node(_: State, config: RunnableConfig) -> State:
        return {"seen": [str(await once(config, "charge", action=pay))]}

    running = asyncio.create_task(stage.run(one_node(node), 5, {"seen": []}))
    async with stage.pool.connection() as onlooker, asyncio.timeout(20):
        while not (await (await onlooker.execute(NOTING)).fetchone())["waits"]:
            pass
        running.cancel()
        # Each answer is a turn of the loop: the node has long been told.
        for _ in range(50):
            await onlooker.execute(NOTING)
    await stage.connection.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await running

    [(_, _, received, _)] = await stage.effects()
    assert received


async def test_two_effects_of_one_name_are_refused(stage):
    """In a loop over customers, the second would get the first one's receipt and never be charged."""

    async def node(_: State, config: RunnableConfig) -> State:
        for customer in ("ada", "bob"):
            await once(config, "charge", action=partial(stage.world.acharge, what=customer))
        return {"seen": []}

    with pytest.raises(ValueError, match="give each a name of its own"):
        await stage.run(one_node(node), 5, {"seen": []})
    assert stage.world.done == {"ada": 1}


async def test_effects_with_names_of_their_own_are_told_apart(stage):
    """And the ones that were done are found one by one."""
    stage.world.breaks["bob"] = "declined"

    async def node(_: State, config: RunnableConfig) -> State:
        for customer in ("ada", "bob", "cy"):
            await once(
                config,
                "charge",
                customer,
                action=partial(stage.world.acharge, what=customer),
                not_done=(PermissionError,),
            )
        return {"seen": []}

    with pytest.raises(PermissionError):
        await stage.run(one_node(node), 5, {"seen": []})
    stage.world.breaks.clear()
    await stage.run(one_node(node), 5)

    assert stage.world.done == {"ada": 1, "bob": 1, "cy": 1}
    assert [(name, received) for name, _, received, _ in await stage.effects()] == [
        ("charge/ada", True),
        ("charge/bob", True),
        ("charge/cy", True),
    ]


async def test_langgraphs_own_retries_find_the_receipt(stage):
    """A node with a retry policy is run again within the same run."""
    tries = []

    async def node(_: State, config: RunnableConfig) -> State:
        receipt = await once(config, "charge", action=stage.world.acharge)
        tries.append(receipt)
        if len(tries) < 3:
            raise Broken
        return {"seen": []}

    policy = RetryPolicy(max_attempts=3, initial_interval=0.001, retry_on=Broken)
    await stage.run(one_node(node, retry_policy=policy), 5, {"seen": []})

    assert len(tries) == 3
    assert stage.world.done == {"charge": 1}


async def test_an_answer_after_the_effect_does_not_look_like_a_second_effect(stage):
    """A node that pays and then asks is run again, with one saver where somebody holds the graph by hand."""
    held = saver(stage.pool, 5)

    async def node(_: State, config: RunnableConfig) -> State:
        await once(config, "charge", action=stage.world.acharge)
        return {"seen": [interrupt("ship it?")]}

    graph = one_node(node).compile(checkpointer=held)
    await graph.ainvoke({"seen": []}, run_config(), durability="sync")
    result = await graph.ainvoke(Command(resume="yes"), run_config(), durability="sync")

    assert result["seen"] == ["yes"]
    assert stage.world.done == {"charge": 1}


async def test_a_receipt_that_json_cannot_say_is_an_error_that_says_so(stage):
    """The deed is done then, so the message must not sound as if it were not."""

    async def pay(_: str) -> Any:
        return object()

    async def node(_: State, config: RunnableConfig) -> State:
        await once(config, "charge", action=pay)
        return {"seen": []}

    with pytest.raises(TypeError, match="was done, but its receipt is not what JSON can say"):
        await stage.run(one_node(node), 5, {"seen": []})


async def test_no_receipt_is_a_receipt_too(stage):
    """An action that returns nothing has still been done."""
    mails, tries = [], []

    async def mail(key: str) -> None:
        mails.append(key)

    async def node(_: State, config: RunnableConfig) -> State:
        assert await once(config, "mail", action=mail) is None
        tries.append(1)
        if len(tries) == 1:
            raise Broken
        return {"seen": []}

    with pytest.raises(Broken):
        await stage.run(one_node(node), 5, {"seen": []})
    await stage.run(one_node(node), 5)

    assert len(tries) == 2
    assert len(mails) == 1


async def test_without_tickds_saver_nothing_is_done(stage):
    """Noted nowhere, it would be done each time."""
    graph = one_node(charging(stage)).compile(checkpointer=InMemorySaver())
    with pytest.raises(RuntimeError, match="the checkpointer that tickd gives"):
        await graph.ainvoke({"seen": []}, run_config())
    assert stage.world.done == {}


async def test_a_subgraph_notes_through_the_same_saver(stage):
    """A subgraph has no saver of its own; it inherits the run's."""
    outer: Any = StateGraph(State)
    outer.add_node("inner", one_node(charging(stage)).compile())
    outer.add_edge(START, "inner")

    await stage.run(outer, 5, {"seen": []})

    assert [received for _, _, received, _ in await stage.effects()] == [True]


OLD_TICK = """
INSERT INTO tickd.ticks (space, graph, fire_time, attempt, thread_id, run_id, outcome)
SELECT space, graph, fire_time, 1, 't', key, 'handed_off' FROM tickd.effects WHERE name = %s
"""


async def test_effects_are_forgotten_with_their_ticks(stage):
    """A tick that is still in the ledger may be run again, and must find what it did; rows without one only take room."""
    for name, fire_time in (
        ("of a tick that is gone", "2026-05-04T10:00:00Z"),
        ("of a tick that is there", "2026-05-04T10:05:00Z"),
    ):
        graph = one_node(charging(stage, name)).compile(checkpointer=saver(stage.pool, 5))
        await graph.ainvoke({"seen": []}, run_config(fire_time=fire_time))
    await stage.connection.execute(OLD_TICK, ["of a tick that is there"])
    entry = parse(SCHEDULE, path="s.yaml", environment={}).entries[GRAPH]

    await remove_old_ticks(stage.connection, SPACE, entry, BatchSize(), timedelta(seconds=9))

    assert [name for name, *_ in await stage.effects()] == ["of a tick that is there"]


SCHEDULE = f"""
graphs:
  {GRAPH}: {{graph: "a:b", every: 1m, keep: {{ticks: 1d}}}}
"""


async def test_the_pages_nodes_run(stage):
    """An example that does not work costs a reader's trust, and this one is about money."""
    key, mails, ask = (block for block in blocks(DOCS / "effects.md", "python"))
    names: dict[str, Any] = {"State": State, "interrupt": interrupt}
    exec(key, names)
    exec(mails, names)
    sent: list[tuple[str, str]] = []
    paid: list[str] = []

    class Bank:
        async def charge(self, amount: int, *, idempotency_key: str) -> Any:
            paid.append(idempotency_key)
            return SimpleNamespace(id=amount)

    async def send_mail(to: str, *, message_id: str) -> None:
        sent.append((to, message_id))

    names |= {"bank": Bank(), "send_mail": send_mail}

    async def node(_: State, config: RunnableConfig) -> State:
        assert await names["pay"]({"amount": 7}, config) == {"charge": 7}
        await names["notify"]({"customers": ["ada", "bob"]}, config)
        return {"seen": []}

    await stage.run(one_node(node), 5, {"seen": []})

    assert len(paid) == 1
    assert [to for to, _ in sent] == ["ada", "bob"]
    assert len({key for _, key in sent}) == 2
    assert "look_up=ask" in ask


async def test_the_pages_ways_of_settling_a_doubt_work(stage):
    """It is SQL on tickd's own table, and the table may change."""
    stage.world.breaks["*"] = "after"
    for name in ("done", "not done"):
        with pytest.raises(ConnectionError):
            await stage.run(one_node(charging(stage, name)), 5, {"seen": []})
    (page,) = blocks(DOCS / "effects.md", "sql")
    find, done, not_done = (part.strip() for part in page.split(";")[:3])

    doubts = await (await stage.connection.execute(find)).fetchall()
    keys = {name: str(key) for _, _, _, name, key, _, _ in doubts}
    await stage.connection.execute(done.replace("…", keys["done"]))
    await stage.connection.execute(not_done.replace("…", keys["not done"]))

    assert await stage.effects() == [("done", 5, True, "by hand")]
