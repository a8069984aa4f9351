"""The ledger: how ticks ended, which of them have been admitted, and which have lost their holder.

Each tick has one row in `tickd.ticks`. It is inserted by an admission (`admissions`), finished here under its token, and
found here by whoever looks before an attempt, takes over what was handed off, or sweeps.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection

from tickd.admissions import IS_HELD, LOCKS
from tickd.batch import Question
from tickd.lock import LockSession
from tickd.tick import Outcome, Tick, lock_key


RECORD = Question(
    one="""
UPDATE tickd.ticks
SET outcome = %(outcome)s, error_type = %(error_type)s, error = %(error)s, attempt = %(attempt)s,
    lease_until = NULL, finished_at = clock_timestamp()
WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND token = %(token)s
  AND (outcome IS NULL OR outcome = %(outcome)s)
RETURNING token, graph
""",
    many="""
UPDATE tickd.ticks AS t
SET outcome = ended.outcome, error_type = ended.error_type, error = ended.error, attempt = ended.attempt,
    lease_until = NULL, finished_at = clock_timestamp()
FROM (
    SELECT %(space)s::int AS space, *
    FROM unnest((SELECT %(graph)b::text[]), (SELECT %(fire_time)b::timestamptz[]), (SELECT %(token)b::bigint[]),
                (SELECT %(outcome)b::text[]), (SELECT %(error_type)b::text[]), (SELECT %(error)b::text[]),
                (SELECT %(attempt)b::int[]))
      WITH ORDINALITY AS due (graph, fire_time, token, outcome, error_type, error, attempt, number)
    OFFSET 0
) AS ended
WHERE t.space = ended.space AND t.graph = ended.graph AND t.fire_time = ended.fire_time AND t.token = ended.token
  AND (t.outcome IS NULL OR t.outcome = ended.outcome)
RETURNING number, t.token, t.graph
""",
    apart="graph",
    hurried=False,
)
# The same over another session than the lock's, when that has the lock.
_STILL_HELD: LiteralString = f"AND {IS_HELD}\nRETURNING"
RECORD_HELD = Question(
    one=LOCKS
    + RECORD.one.replace(
        "RETURNING",
        _STILL_HELD.replace("due.pid", "%(pid)s")
        .replace("due.space", "%(space)s")
        .replace("due.key", "%(key)s"),
    ),
    many=LOCKS
    + RECORD.many.replace("RETURNING", _STILL_HELD.replace("due.", "ended."))
    .replace(
        "(SELECT %(attempt)b::int[]))",
        "(SELECT %(attempt)b::int[]), (SELECT %(key)b::int[]), (SELECT %(pid)b::int[]))",
    )
    .replace("error, attempt, number)", "error, attempt, key, pid, number)"),
    apart="graph",
    hurried=False,
)
# The graph's token moves, so that an admission which looked before the hand-off and has got the lock after it looks again.
_HAND_OFF: LiteralString = """
WITH recorded AS (RECORDED), moved AS (
    UPDATE tickd.graphs SET token = graphs.token + 1
    FROM (SELECT graph FROM recorded ORDER BY graph) AS recorded
    WHERE graphs.space = %(space)s AND graphs.graph = recorded.graph
)
SELECT NUMBER token FROM recorded
"""
HAND_OFF = Question(
    one=_HAND_OFF.replace("RECORDED", RECORD.one).replace("NUMBER ", ""),
    many=_HAND_OFF.replace("RECORDED", RECORD.many).replace("NUMBER", "number,"),
    apart="graph",
    hurried=False,
)
# Whether an UPDATE of the row would have to wait.
IS_LOCKED = """
WITH free AS MATERIALIZED (
    SELECT FROM tickd.ticks WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT NOT EXISTS (SELECT FROM free) AND EXISTS (
    SELECT FROM tickd.ticks WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s
)
"""
# A sweep may have been quicker to call the tick abandoned than its own replica was to say what became of it.
RECORD_WITHOUT_HOLD = """
UPDATE tickd.ticks
SET outcome = %(outcome)s, error_type = %(error_type)s, error = %(error)s, attempt = %(attempt)s,
    finished_at = clock_timestamp()
WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND token = %(token)s AND mode = 'skip'
  AND (outcome IS NULL OR outcome = 'abandoned')
"""
# The arrays stand in sub-selects for the reason that `tickd.batch` gives.
ADMITTED = """
SELECT t.graph, t.fire_time, t.replica, t.outcome IS NOT NULL, t.admitted_at
FROM unnest((SELECT %b::text[]), (SELECT %b::timestamptz[])) AS due (graph, fire_time)
CROSS JOIN LATERAL (
    SELECT *
    FROM tickd.ticks
    WHERE space = %s AND graph = due.graph AND fire_time = due.fire_time
    LIMIT 1
) AS t
"""
ANY_OPEN = """
SELECT EXISTS (SELECT FROM tickd.ticks WHERE space = %s AND (outcome IS NULL OR outcome = 'handed_off'))
"""
WAITING = """
SELECT t.graph, t.fire_time
FROM tickd.ticks AS t
WHERE t.space = %s AND t.mode = 'skip' AND t.outcome = 'handed_off'
  AND NOT EXISTS (
    SELECT FROM tickd.graphs AS g WHERE g.space = t.space AND g.graph = t.graph AND g.paused_at IS NOT NULL
  )
ORDER BY t.fire_time
"""
# Without an outcome, and either a later hold has been granted since, or nobody has the graph's lock. pg_locks is read
# live and the rows are of the statement's snapshot, so a tick that is being recorded at this moment may show up here by
# mistake.
SUSPECTS = """
SELECT t.graph, t.fire_time, t.token
FROM tickd.ticks AS t
JOIN tickd.graphs AS g ON g.space = t.space AND g.graph = t.graph
WHERE t.space = %s AND t.mode = 'skip' AND t.outcome IS NULL
  AND (
    t.token < g.token
    OR (t.space, g.key) NOT IN (
      SELECT l.classid::bigint::bit(32)::int, l.objid::bigint::bit(32)::int
      FROM pg_locks AS l
      WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
  )
"""
# A holder records before it unlocks. So a row that has no outcome in a snapshot taken *after* its lock was seen to be
# free has lost its holder, and the update makes one replica the one that says so.
# Neither a row that somebody has locked nor a write that is under way is waited for: no sweep would get on to what comes
# after this. The one is closed by a later sweep; the other keeps its thread, which else goes to no hold (no token is 0).
ABANDON = """
WITH unlocked AS MATERIALIZED (
    SELECT t.graph, t.fire_time
    FROM unnest(%(graphs)b::text[], %(fire_times)b::timestamptz[], %(tokens)b::bigint[])
      AS suspect (graph, fire_time, token)
    JOIN tickd.ticks AS t USING (graph, fire_time, token)
    WHERE t.space = %(space)s AND t.outcome IS NULL
    FOR NO KEY UPDATE OF t SKIP LOCKED
), abandoned AS (
    UPDATE tickd.ticks AS t
    SET outcome = 'abandoned', finished_at = clock_timestamp()
    FROM unlocked
    WHERE t.space = %(space)s AND t.graph = unlocked.graph AND t.fire_time = unlocked.fire_time
    RETURNING t.graph, t.fire_time, t.token, t.attempt, t.replica, t.admitted_at, t.thread_id
), free AS MATERIALIZED (
    SELECT thread_id
    FROM tickd.threads JOIN abandoned USING (thread_id, graph, token)
    WHERE space = %(space)s
    FOR UPDATE OF threads SKIP LOCKED
), orphaned AS (
    UPDATE tickd.threads SET token = 0 FROM free WHERE threads.thread_id = free.thread_id
)
SELECT graph, fire_time, token, attempt, replica, admitted_at FROM abandoned
"""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A tick has a row; `replica` runs it, or has run it, since an instant."""

    replica: str
    ended: bool
    since: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """How a tick ended, for its row."""

    outcome: Outcome
    attempt: int
    error_type: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A tick that was admitted and whose holder is gone."""

    tick: Tick
    token: int
    attempt: int
    replica: str
    since: datetime


async def record(session: LockSession, tick: Tick, *, token: int, finish: Finish) -> bool:
    """Write how the tick ended, under the hold; False when the row is no longer this token's to finish."""
    values = _finish_values(session.connection, tick, token, finish)
    if finish.outcome is Outcome.HANDED_OFF:
        return await session.ask(HAND_OFF, values) is not None
    if session.ledger is not session:
        held_by = {"key": lock_key(tick.graph), "pid": session.connection.info.backend_pid}
        with suppress(psycopg.Error, TimeoutError):
            if await session.ledger.ask(RECORD_HELD, values | held_by) is not None:
                return True
        # Either the hold is gone or that session is: this one tells.
    return await session.ask(RECORD, values) is not None


async def is_locked(session: LockSession, tick: Tick) -> bool:
    """Say whether another session has the tick's row locked at this moment; does not wait for it."""
    values = {"space": session.place.space, "graph": tick.graph, "fire_time": tick.fire_time}
    (locked,) = await session.fetch(IS_LOCKED, values)
    return bool(locked)


async def record_without_hold(
    connection: AsyncConnection[Any], space: int, tick: Tick, *, token: int, finish: Finish
) -> bool:
    """Write how the tick ended when its hold is gone; the token in the row still decides whether that is ours to say."""
    cursor = await connection.execute(
        RECORD_WITHOUT_HOLD, {"space": space} | _finish_values(connection, tick, token, finish)
    )
    return cursor.rowcount == 1


def _finish_values(
    connection: AsyncConnection[Any], tick: Tick, token: int, finish: Finish
) -> dict[str, Any]:
    return {
        "graph": tick.graph,
        "fire_time": tick.fire_time,
        "token": token,
        "outcome": finish.outcome.value,
        "attempt": finish.attempt,
        "error_type": finish.error_type and storable(finish.error_type, connection),
        "error": finish.error and storable(finish.error, connection),
    }


def storable(text: str, connection: AsyncConnection[Any]) -> str:
    """Return the text as this database can keep it, whatever a graph's error has.

    That is without lone surrogates and zero bytes; and in ASCII, unless every character is known on the way there.
    """
    info = connection.info
    in_full = info.encoding == "utf-8" and info.parameter_status("server_encoding") == "UTF8"
    return text.encode("utf-8" if in_full else "ascii", "backslashreplace").decode().replace("\0", "\\0")


async def admitted(
    connection: AsyncConnection[Any], space: int, ticks: Iterable[Tick]
) -> dict[Tick, Admitted]:
    """Return which of the ticks have a row already, each with the replica that runs or ran it: one query for all."""
    ticks = list(ticks)
    cursor = await connection.execute(
        ADMITTED, ([t.graph for t in ticks], [t.fire_time for t in ticks], space)
    )
    return {
        Tick(graph, fire_time.astimezone(UTC)): Admitted(replica, ended, since and since.astimezone(UTC))
        for graph, fire_time, replica, ended, since in await cursor.fetchall()
    }


async def any_open(connection: AsyncConnection[Any], space: int) -> bool:
    """Say whether any tick is open, which is what a sweep is for."""
    row = await (await connection.execute(ANY_OPEN, [space])).fetchone()
    return bool(row and row[0])


async def waiting(connection: AsyncConnection[Any], space: int) -> list[Tick]:
    """Return the ticks that were handed off and that may be taken over now, the earliest first."""
    cursor = await connection.execute(WAITING, [space])
    return [Tick(graph, fire_time.astimezone(UTC)) for graph, fire_time in await cursor.fetchall()]


async def abandon(connection: AsyncConnection[Any], space: int) -> list[Abandoned]:
    """Close the rows of ticks whose holder is gone, and return those that this call closed: each once over all replicas."""
    cursor = await connection.execute(SUSPECTS, [space])
    suspects = await cursor.fetchall()
    if not suspects:
        return []
    graphs, fire_times, tokens = (list(column) for column in zip(*suspects, strict=True))
    suspected = {"graphs": graphs, "fire_times": fire_times, "tokens": tokens, "space": space}
    cursor = await connection.execute(ABANDON, suspected)
    return [
        Abandoned(Tick(graph, fire_time.astimezone(UTC)), token, attempt, replica, since.astimezone(UTC))
        for graph, fire_time, token, attempt, replica, since in await cursor.fetchall()
    ]
