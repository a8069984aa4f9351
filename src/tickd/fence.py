"""The fenced saver: every write names the hold that it is made under, and Postgres refuses it when that hold is over.

A lock excludes those who ask for it. A holder that stood still while its lock went to somebody else does not ask again,
and neither does a script with a saver of its own. So each thread that tickd runs on has a row in `tickd.threads`, which
every admission moves to the new hold in the statement that admits, taking the graph's other threads from the hold
before. The guard (`tickd.guard`) lets a row of the saver's tables pass only if its writer names the thread's hold. What
follows from this:

- A take-over waits for the writes under way: they hold the thread's row FOR SHARE until they commit. A write that comes
  later is refused, even one that was sent before: it waits for the row, and then reads the new token.
- A writer that was stopped with its transaction open would make the take-over wait as long. Whoever admits has the
  graph's lock, so such a writer is one of the past, and its session is ended (`tickd.stale_writers`).
- A refusal (`TK001`) undoes the writer's transaction. Of a checkpoint, either all rows are there or none.
- A thread without a row passes, whoever writes. So does a write that is under way at the moment when tickd takes up a
  thread for the very first time, for there is no row yet that the admission could wait for.

A hold is named in the setting `tickd.token`, for one transaction at a time, so it neither stays on the pool's connection
nor gets lost behind a transaction-mode pooler. The statements that every super-step sends carry it within themselves: a
statement of its own costs more than the guard. All others are preceded by one in their pipeline or transaction. What
went out without it would be refused, so a saver of a later version fails loudly where this module does not know it.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.serde.base import SerializerProtocol
from psycopg import AsyncCursor, Error
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from tickd.errors import StaleHold
from tickd.steps import StepCount


# The guard's SQLSTATE.
REFUSED = "TK001"
NAME_HOLD = "SELECT pg_catalog.set_config('tickd.token', %s, true)"
WRITES = ("INSERT", "UPDATE", "DELETE", "WITH", "MERGE")


def _carrying(statement: str) -> str | None:
    """Return the saver's statement with the name of the hold as one more parameter, before the others.

    The guard's trigger runs when the row's values have been computed, so a value may do the naming in passing. None when
    the statement has not the shape that this needs.
    """
    head, values, rest = statement.partition("VALUES (%s,")
    if not values or "VALUES" in rest:
        return None
    return f"{head}VALUES (CASE WHEN pg_catalog.set_config('tickd.token', %s, true) IS NULL THEN NULL ELSE %s END,{rest}"


CARRIERS: Mapping[str, str] = {
    statement: carrier
    for statement in (
        AsyncPostgresSaver.UPSERT_CHECKPOINTS_SQL,
        AsyncPostgresSaver.UPSERT_CHECKPOINT_BLOBS_SQL,
        AsyncPostgresSaver.UPSERT_CHECKPOINT_WRITES_SQL,
        AsyncPostgresSaver.INSERT_CHECKPOINT_WRITES_SQL,
    )
    if (carrier := _carrying(statement)) is not None
}


def hold_name(*, space: int, graph: str, token: int) -> str:
    """Return the name of a hold as the guard compares it: tokens are counted per graph, so alone they name nothing."""
    return f"{space}/{graph}/{token}"


def is_refused(error: BaseException) -> bool:
    """Say whether this error is the guard's refusal or a StaleHold, or comes from one: as cause, context or in a group."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, StaleHold) or (isinstance(one, Error) and one.sqlstate == REFUSED):
            return True
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    return False


class FencedSaver(AsyncPostgresSaver):
    """LangGraph's saver, writing under one hold; `steps` is how many super-steps it has seen being saved.

    One is made per run, over a pool that several share. Reading needs no hold. A write after the hold is over raises
    psycopg's error of the guard, see `is_refused`.

    LangGraph does not always tell that a write failed: where an interrupt or a drain leaves a subgraph, that takes the
    error's place. So it is noted, and `raise_lost` tells it of a run that comes to such an end.
    """

    def __init__(
        self,
        pool: AsyncConnectionPool[Any],
        *,
        space: int,
        graph: str,
        token: int,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(pool, serde=serde)
        self.pool = pool
        self.space = space
        self.graph = graph
        self.token = token
        self.hold = hold_name(space=space, graph=graph, token=token)
        self._count = StepCount()
        self._counts_thread: str | None = None
        # A list, so that a clone (`with_allowlist`) that LangGraph gives a subgraph notes in the same one.
        self._lost: list[Exception] = []

    @property
    def steps(self) -> int:
        """Return how many super-steps of the run, subgraphs' left out, have been checkpointed."""
        return self._count.steps

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Read a checkpoint; the first one that is read is where the run sets out from."""
        found = await super().aget_tuple(config)
        if self._counts_thread is None and _is_top_level(config):
            self._count.set_out_from(found)
        return found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Write a checkpoint under the hold, and count it when it is the graph's own and not a subgraph's."""
        with self._noting_loss():
            written = await super().aput(config, checkpoint, metadata, new_versions)
        thread_id = config["configurable"]["thread_id"]
        if _is_top_level(config) and self._counts_thread in (None, thread_id):
            self._counts_thread = thread_id
            run_id = get_checkpoint_metadata(config, metadata).get("run_id")
            self._count.add(checkpoint, metadata, run_id)
        return written

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Write what a task wrote under the hold."""
        with self._noting_loss():
            await super().aput_writes(config, writes, task_id, task_path)

    def raise_lost(self) -> None:
        """Raise what became of the first write that failed, though the graph may know nothing of it."""
        if self._lost:
            raise self._lost[0]

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._lost.append(error)
            raise

    @asynccontextmanager
    async def _cursor(self, *, pipeline: bool = False) -> AsyncIterator[AsyncCursor[DictRow]]:
        # The one private name of the saver that is relied on: whatever it sends goes through a cursor from here.
        async with (
            super()._cursor(pipeline=pipeline) as plain,
            _FencedCursor(plain.connection, row_factory=dict_row) as cursor,
        ):
            cursor.hold = self.hold
            cursor.format = plain.format
            yield cursor


class _FencedCursor(AsyncCursor[DictRow]):
    """A cursor that names the hold with each statement that writes."""

    hold: str

    async def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Self:
        if carrier := _carrier(query):
            query, params = carrier, (self.hold, *params)
        elif _writes(query):
            await super().execute(NAME_HOLD, (self.hold,))
        return await super().execute(query, params, prepare=prepare, binary=binary)

    async def executemany(self, query: Any, params_seq: Iterable[Any], *, returning: bool = False) -> None:
        if carrier := _carrier(query):
            query, params_seq = carrier, [(self.hold, *params) for params in params_seq]
        elif _writes(query):
            await super().execute(NAME_HOLD, (self.hold,))
        await super().executemany(query, params_seq, returning=returning)


def _carrier(query: Any) -> str | None:
    return CARRIERS.get(query) if isinstance(query, str) else None


def _writes(query: Any) -> bool:
    return not isinstance(query, str) or query.lstrip()[:6].upper().startswith(WRITES)


def _is_top_level(config: RunnableConfig) -> bool:
    return not config["configurable"].get("checkpoint_ns")
