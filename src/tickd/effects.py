"""Effects: what a node does to the world outside, done once though the node is run again.

A lock and a fence keep two runs from writing the same checkpoint. They cannot take back a mail. A node that was cut off
is run again, by the next attempt or another replica, and only the other side, or a note of what was done, can keep the
mail from going out twice. So:

- `idempotency_key` is the same whenever the same node of the same tick is run again, and different for everything else.
  Hand it to an interface that knows such keys, and you are done.
- `once` notes the intent, does it, and notes the receipt. A node that is run again gets the receipt, without doing it. If
  it finds an intent without a receipt, nobody knows: the run before was cut off in between. Then `once` asks `look_up`,
  or does it again where that is harmless (`repeatable`), or raises AmbiguousEffect.
- An intent is accepted under the present hold only. A holder that stood still and goes on begins no effect any more.

What makes a place in a run: the node, LangGraph's number of its super-step, and which of several calls it is, in a
fan-out. Those come out the same if the run begins anew. In a subgraph they are not enough, for a subgraph counts its
steps from the start each time: there the calling node's task counts too, and that is the same only if its checkpoint
was saved before, which durability `sync` ensures.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, LiteralString, TypeVar
from weakref import WeakKeyDictionary

from langchain_core.runnables import RunnableConfig
from langgraph.runtime import get_runtime
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from tickd.errors import AmbiguousEffect, StaleHold
from tickd.fence import FencedSaver
from tickd.tick import instant_text, parse_instant


T = TypeVar("T")

# Fixed for ever: a key that was handed out has to be the same in every later version.
KEY_NAMESPACE = uuid.UUID("0b0c7a57-51a5-5d0c-8f0e-2c9f3f1d6f6e")
# Names of LangGraph's that are private, if old. Without the first, `once` says that it has no saver of tickd's; without the
# second, keys are refused in subgraphs.
CHECKPOINTER = "__pregel_checkpointer"
DURABILITY = "__pregel_durability"
NOTE_SECONDS = 5

INTEND = """
WITH hold AS MATERIALIZED (
    SELECT FROM tickd.graphs
    WHERE space = %(space)s AND graph = %(held)s AND token = %(token)s
    FOR SHARE
), intended AS (
    INSERT INTO tickd.effects (space, key, graph, fire_time, node, name, token, attempt, replica)
    SELECT %(space)s, %(key)s, %(graph)s, %(fire_time)s, %(node)s, %(name)s, %(token)s, %(attempt)s, %(replica)s
    FROM hold
    ON CONFLICT (space, key) DO NOTHING
    RETURNING true
)
SELECT EXISTS (SELECT FROM hold), EXISTS (SELECT FROM intended)
"""
FIND = """
SELECT received_at IS NOT NULL, receipt, attempt, replica, intended_at
FROM tickd.effects
WHERE space = %(space)s AND key = %(key)s
"""
INTEND_AGAIN = """
WITH hold AS MATERIALIZED (
    SELECT FROM tickd.graphs
    WHERE space = %(space)s AND graph = %(held)s AND token = %(token)s
    FOR SHARE
)
UPDATE tickd.effects
SET token = %(token)s, attempt = %(attempt)s, replica = %(replica)s, intended_at = clock_timestamp()
FROM hold
WHERE space = %(space)s AND key = %(key)s AND received_at IS NULL
RETURNING true
"""
# Not bound to the hold: it was done, and whoever holds the graph now has to know.
RECEIVE = """
UPDATE tickd.effects
SET receipt = %(receipt)s, received_at = clock_timestamp()
WHERE space = %(space)s AND key = %(key)s AND received_at IS NULL
"""
WITHDRAW = """
DELETE FROM tickd.effects
WHERE space = %(space)s AND key = %(key)s AND token = %(token)s AND received_at IS NULL
"""

# Which effects each run of a node has begun, per saver: two of one name would be taken for one.
_begun: WeakKeyDictionary[FencedSaver, set[tuple[Any, ...]]] = WeakKeyDictionary()


def idempotency_key(config: RunnableConfig, *name: str | int) -> str:
    """Return the key of an effect: a UUID, the same whenever this node of this tick is run again.

    `name` tells several effects of one node apart, for instance `"mail", customer`. Raises RuntimeError outside of tickd,
    and ValueError in a subgraph whose durability is not `sync`.
    """
    return str(_Place.of(config, name).key)


async def once(
    config: RunnableConfig,
    *name: str | int,
    action: Callable[[str], Awaitable[Any]],
    look_up: Callable[[str], Awaitable[Any]] | None = None,
    repeatable: bool = False,
    not_done: tuple[type[BaseException], ...] = (),
) -> Any:
    """Do something to the world outside once, however often its node is run, and return its receipt.

    `action` is given the idempotency key, does it, and returns a receipt that JSON can say. If an earlier run of the node
    was cut off before the receipt was noted, `look_up` is given the key and returns the receipt, or None when it was not
    done. Without `look_up`, a `repeatable` action is done again under the same key, for an interface that knows such keys;
    any other raises AmbiguousEffect, until somebody has settled it. `not_done` are the exceptions by which the action says
    that nothing has happened, so that a later run may try.

    Raises StaleHold when the graph has a newer hold, and ValueError for two effects of one name in one run of a node.
    """
    effect = _Effect.of(config, name)
    with effect.alone():
        note = await effect.intend()
        if note is not None and not note.received:
            found = await look_up(effect.key) if look_up is not None else None
            note = await effect.settle(note, found, repeatable=repeatable or look_up is not None)
        if note is not None:
            return note.receipt
        try:
            receipt = await action(effect.key)
        except not_done:
            await effect.withdraw()
            raise
        return await effect.receive(receipt)


def once_sync(
    config: RunnableConfig,
    *name: str | int,
    action: Callable[[str], Any],
    look_up: Callable[[str], Any] | None = None,
    repeatable: bool = False,
    not_done: tuple[type[BaseException], ...] = (),
) -> Any:
    """Do the same as `once` from a node that is not a coroutine, with an action that is none either.

    Raises RuntimeError in a coroutine on the graph's own event loop, which it would block for ever.
    """
    effect = _Effect.of(config, name)
    effect.refuse_own_loop()
    with effect.alone():
        note = effect.wait(effect.intend())
        if note is not None and not note.received:
            found = look_up(effect.key) if look_up is not None else None
            note = effect.wait(effect.settle(note, found, repeatable=repeatable or look_up is not None))
        if note is not None:
            return note.receipt
        try:
            receipt = action(effect.key)
        except not_done:
            effect.wait(effect.withdraw())
            raise
        return effect.wait(effect.receive(receipt))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in which tick an effect is: all that has to be equal for two to be the same."""

    graph: str
    fire_time: str
    node: str
    name: str
    key: uuid.UUID

    @classmethod
    def of(cls, config: RunnableConfig, name: tuple[str | int, ...]) -> "_Place":
        metadata = config.get("metadata", {})
        if not {"tickd_graph", "tickd_fire_time", "langgraph_node"} <= metadata.keys():
            raise RuntimeError(
                "effects belong to a tick: call this from a node that tickd runs (or tickd.sole_writer's config), and pass "
                "it the config that LangGraph gave to the node"
            )
        graph, fire_time = metadata["tickd_graph"], metadata["tickd_fire_time"]
        node, step, path = (metadata[f"langgraph_{part}"] for part in ("node", "step", "path"))
        callers = _callers(metadata["langgraph_checkpoint_ns"], path)
        if callers and config.get("configurable", {}).get(DURABILITY) != "sync":
            raise ValueError(
                f"node {node} is in a subgraph, and there the key of an effect is only the same in the next run if the "
                "calling node's checkpoint was saved before: set `durability: sync` for the graph"
            )
        place = [graph, fire_time, callers, path, step, *name]
        key = uuid.uuid5(KEY_NAMESPACE, json.dumps(place, ensure_ascii=False, separators=(",", ":")))
        where = "/".join([*callers, node])
        return cls(graph, fire_time, f"{where}@{step}", "/".join(map(str, name)), key)


def _callers(namespace: str, path: tuple[Any, ...]) -> list[str]:
    """Return the tasks of the graphs around this one, outermost first; a task that @task made has its caller in its path."""
    calls = 0
    while len(path) > 1 and isinstance(path[1], tuple):
        path, calls = path[1], calls + 1
    return namespace.split("|")[: -1 - calls]


@dataclass(frozen=True, slots=True)
class _Note:
    """What an earlier run of the node left: its receipt, or just the intent."""

    received: bool
    receipt: Any
    attempt: int
    replica: str
    intended_at: datetime


@dataclass(frozen=True, slots=True)
class _Effect:
    """One effect of one run: its place, the hold that it is begun under, and its row."""

    place: _Place
    saver: FencedSaver
    attempt: int
    replica: str

    @classmethod
    def of(cls, config: RunnableConfig, name: tuple[str | int, ...]) -> "_Effect":
        place = _Place.of(config, name)
        saver = config.get("configurable", {}).get(CHECKPOINTER)
        if not isinstance(saver, FencedSaver):
            raise RuntimeError(  # noqa: TRY004  # it is called in the wrong place, not with a wrong value
                "effects are noted in tickd's ledger: run the graph with the checkpointer that tickd gives"
            )
        metadata = config["metadata"]
        return cls(place, saver, metadata["tickd_attempt"], metadata["tickd_replica"])

    @property
    def key(self) -> str:
        """Return the idempotency key as the action gets it."""
        return str(self.place.key)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raise ValueError when this run of the node has begun an effect of this name before."""
        run = get_runtime().execution_info
        assert run is not None  # noqa: S101  # a node has one
        mark = (run.task_id, run.node_first_attempt_time, run.node_attempt, self.key)
        begun = _begun.setdefault(self.saver, set())
        if mark in begun:
            raise ValueError(
                f"node {self.place.node} has two effects named {self.place.name!r}, and the second would be taken for the "
                "first: give each a name of its own, such as the customer's number"
            )
        begun.add(mark)
        try:
            yield
        except BaseException:
            begun.discard(mark)
            raise

    async def intend(self) -> _Note | None:
        """Note the intent; return what was there already, or None if nothing was."""
        held, intended = (await self._run(INTEND))[0]
        if not held:
            raise StaleHold(self._stale())
        if intended:
            return None
        return _Note(*(await self._run(FIND))[0])

    async def settle(self, note: _Note, found: Any, *, repeatable: bool) -> _Note | None:
        """Make of an intent without receipt what can be made of it: a receipt, or None for "do it again"."""
        if found is not None:
            receipt = await self.receive(found)
            return replace(note, received=True, receipt=receipt)
        if not repeatable:
            raise AmbiguousEffect(self._ambiguous(note))
        if not await self._run(INTEND_AGAIN):
            raise StaleHold(self._stale())
        return None

    async def receive(self, receipt: Any) -> Any:
        """Note the receipt and return it as a later run will find it; a cancelled run notes it all the same."""
        try:
            text = json.dumps(receipt)
        except TypeError as error:
            raise TypeError(
                f"{self.place.name or 'the effect'} of node {self.place.node} was done, but its receipt is not what JSON "
                f"can say ({error}): let the action return a text, a number or a mapping of such"
            ) from error
        noting = asyncio.ensure_future(self._run(RECEIVE, receipt=Jsonb(json.loads(text))))
        try:
            await asyncio.shield(noting)
        except asyncio.CancelledError:
            await asyncio.wait({noting}, timeout=NOTE_SECONDS)
            raise
        return json.loads(text)

    async def withdraw(self) -> None:
        """Take the intent back: nothing has happened."""
        await self._run(WITHDRAW)

    def refuse_own_loop(self) -> None:
        """Raise RuntimeError on the saver's loop: to wait there for what only that loop can do would stop every graph."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return  # a thread without a loop, as a node that is not a coroutine has it
        if running is self.saver.loop:
            raise RuntimeError(
                f"node {self.place.node} called once_sync on the event loop of its graph, which would wait for itself: "
                "write `await once(...)` in an async node, or call what uses once_sync by `await asyncio.to_thread(...)`"
            )

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the saver's loop, from a thread that is not the loop's."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.saver.loop).result()

    async def _run(self, query: LiteralString, **more: Any) -> list[Any]:
        parameters = {
            "space": self.saver.space,
            "held": self.saver.graph,
            "token": self.saver.token,
            "key": self.place.key,
            "graph": self.place.graph,
            "fire_time": parse_instant(self.place.fire_time),
            "node": self.place.node,
            "name": self.place.name,
            "attempt": self.attempt,
            "replica": self.replica,
            **more,
        }
        async with (
            self.saver.pool.connection() as connection,
            connection.cursor(row_factory=tuple_row) as cursor,
        ):
            await cursor.execute(query, parameters)
            return await cursor.fetchall() if cursor.description else []

    def _stale(self) -> str:
        return (
            f"graph {self.saver.graph} has a newer hold than this run's (token {self.saver.token}): it must not begin "
            f"{self.place.name or 'an effect'} of node {self.place.node} any more"
        )

    def _ambiguous(self, note: _Note) -> str:
        since = instant_text(note.intended_at.astimezone(UTC))
        return (
            f"nobody knows whether {self.place.name or 'the effect'} of node {self.place.node} of "
            f"{self.place.graph}/{self.place.fire_time} took place: attempt {note.attempt} on {note.replica} began it at "
            f"{since} and noted no receipt. Find out, and settle its row of tickd.effects, key {self.key}: if it was done, "
            "set received_at and receipt; if not, delete the row. Then run the tick again"
        )
