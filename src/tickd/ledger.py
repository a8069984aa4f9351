"""The ledger: every SQL statement on tickd's own tables.

The lock says that nobody else writes now; it does not say that nobody has. A run that is shorter than the replicas'
clocks are apart frees its lock before the last of them tries, and the tick would run again. So every tick has one row,
inserted under the lock on the lock's own connection: whoever finds it there skips (I2).

`hold_and_admit` is one statement, hence one round trip: it looks, tries the lock, takes the next token, inserts the row
and moves the thread's fence. It is right under READ COMMITTED only, which the lock session sets for itself: ON CONFLICT
then sees rows that were committed after the statement's snapshot, and the lock's order is the rows' order. A tick that
is in the ledger already is not locked at all, for a replica that holds a lock only to learn that it has nothing to do
would make others skip the graph's next tick.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncConnection

from tickd.lock import LockSession
from tickd.tick import Outcome, Tick, lock_key


HOLD_AND_ADMIT = """
WITH known AS MATERIALIZED (
    SELECT replica, outcome
    FROM tickd.ticks
    WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s
), try AS MATERIALIZED (
    SELECT CASE WHEN NOT EXISTS (SELECT FROM known WHERE outcome IS NOT NULL)
           THEN pg_try_advisory_lock(%(space)s::int, %(key)s::int) END AS held
), next AS (
    INSERT INTO tickd.graphs (space, graph, token)
    SELECT %(space)s::int, %(graph)s::text, 1 FROM try WHERE held AND NOT EXISTS (SELECT FROM known)
    ON CONFLICT (space, graph) DO UPDATE SET token = graphs.token + 1
    RETURNING token
), admitted AS (
    INSERT INTO tickd.ticks (space, graph, fire_time, attempt, token, replica, thread_id, run_id)
    SELECT %(space)s::int, %(graph)s::text, %(fire_time)s::timestamptz, 1, token,
           %(replica)s::text, %(thread_id)s::text, %(run_id)s::uuid
    FROM next
    ON CONFLICT (space, graph, fire_time) DO NOTHING
    RETURNING token, attempt
), fenced AS (
    INSERT INTO tickd.threads (thread_id, space, graph, token)
    SELECT %(thread_id)s::text, %(space)s::int, %(graph)s::text, token FROM admitted
    ON CONFLICT (thread_id) DO UPDATE SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token
)
SELECT try.held, admitted.token, admitted.attempt, known.replica
FROM try LEFT JOIN admitted ON true LEFT JOIN known ON true
"""
RECORD = """
UPDATE tickd.ticks
SET outcome = %(outcome)s, error_type = %(error_type)s, error = %(error)s, finished_at = clock_timestamp()
WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND token = %(token)s AND outcome IS NULL
"""
ADMITTED = """
SELECT t.graph, t.fire_time, t.replica
FROM unnest(%s::text[], %s::timestamptz[]) AS due (graph, fire_time)
JOIN tickd.ticks AS t ON t.space = %s AND t.graph = due.graph AND t.fire_time = due.fire_time
WHERE t.outcome IS NOT NULL
"""
UNFINISHED = """
SELECT replica, admitted_at
FROM tickd.ticks
WHERE space = %s AND graph = %s AND outcome IS NULL
ORDER BY token DESC
LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Admission:
    """The ledger has accepted the tick for this replica: its token, and which attempt of the tick this is."""

    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The ledger has the tick already; `replica` admitted it."""

    replica: str | None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a tick ended, for its row."""

    outcome: Outcome
    error_type: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A graph's admitted tick that has no outcome yet."""

    replica: str
    since: datetime


async def hold_and_admit(
    session: LockSession, tick: Tick, *, thread_id: str, run_id: uuid.UUID
) -> tuple[bool, Admission | Refusal | None]:
    """Try the graph's lock and admit the tick under it: whether the lock was taken, and what the ledger says.

    (True, Admission): run it. (_, Refusal): it has been admitted before. (False, None): another session holds the lock.
    """
    place = session.place
    held, token, attempt, replica = await session.fetch(
        HOLD_AND_ADMIT,
        {
            "space": place.space,
            "key": lock_key(tick.graph),
            "graph": tick.graph,
            "fire_time": tick.fire_time,
            "replica": place.replica,
            "thread_id": thread_id,
            "run_id": run_id,
        },
    )
    if token is not None:
        return True, Admission(token, attempt)
    if held is False:
        return False, None
    return bool(held), Refusal(replica)


async def record(session: LockSession, tick: Tick, *, token: int, finish: Finish) -> bool:
    """Write how the tick ended, under the hold; False when the row is no longer this token's to finish."""
    return await session.change(RECORD, _record_parameters(session.place.space, tick, token, finish)) == 1


async def record_without_hold(
    connection: AsyncConnection[Any], space: int, tick: Tick, *, token: int, finish: Finish
) -> bool:
    """Write how the tick ended when its hold is gone; the token in the row still decides whether that is ours to say."""
    return (await connection.execute(RECORD, _record_parameters(space, tick, token, finish))).rowcount == 1


def _record_parameters(space: int, tick: Tick, token: int, finish: Finish) -> dict[str, Any]:
    return {
        "space": space,
        "graph": tick.graph,
        "fire_time": tick.fire_time,
        "token": token,
        "outcome": finish.outcome.value,
        "error_type": finish.error_type,
        "error": finish.error and finish.error.replace("\0", "\\0"),
    }


async def unfinished(session: LockSession, graph: str) -> Unfinished | None:
    """Return the graph's newest tick that is admitted and has no outcome."""
    row = await session.fetch(UNFINISHED, (session.place.space, graph))
    return Unfinished(row[0], row[1].astimezone(UTC)) if row else None


async def admitted(connection: AsyncConnection[Any], space: int, ticks: Iterable[Tick]) -> dict[Tick, str]:
    """Return which of the ticks have ended already, each with the replica that ran it: one query for all."""
    ticks = list(ticks)
    cursor = await connection.execute(
        ADMITTED, ([t.graph for t in ticks], [t.fire_time for t in ticks], space)
    )
    return {
        Tick(graph, fire_time.astimezone(UTC)): replica
        for graph, fire_time, replica in await cursor.fetchall()
    }
