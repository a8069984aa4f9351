"""Claims: the ticks of graphs whose work must not be lost, as durable rows under a lease.

Every replica inserts the due tick's row; the one that did so tries the graph's lock and takes the earliest row that is
ready, and where that does not come to anything, whoever sees the row in a sweep. The advisory lock, the token and the fence are those of skip mode; the row adds that the tick outlives its
holder:

- The holder dies: its lock dies with its session, and the next replica that gets the lock finds the row without an
  outcome and goes on, at its last super-step.
- The holder stands still, or its host is cut off, and the server does not know: its lease expires, by the database's
  clock, and its session says nothing for as long. Then another replica ends the session that has the lock, and takes the
  row over. A session that speaks is left alone: its holder cannot renew while somebody else has the row locked, nor could
  anybody take it over; and on a shared session every other hold would be lost with it.
- The holder is slow, and alive: it renews with the probe of its hold. A renewal that finds another token in the row is a
  lost hold.

Whoever has the lock may take any row of the graph without an outcome: a holder records before it unlocks. The row is
locked with SKIP LOCKED and looked at again after that, so a row that was finished after this statement's snapshot is
passed over.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

from psycopg import AsyncConnection

from tickd.admissions import Admission, admit
from tickd.batch import Question
from tickd.ledger import storable
from tickd.lock import APPLICATION, LockSession
from tickd.tick import Outcome, Tick, lock_key


# In the order of their keys, so that two replicas that insert the same rows never wait for each other.
ENQUEUE = """
WITH due AS MATERIALIZED (
    SELECT *
    FROM unnest(
        %(graphs)b::text[], %(keys)b::int[], %(fire_times)b::timestamptz[], %(thread_ids)b::text[], %(run_ids)b::uuid[],
        %(most)b::bigint[], %(refusals)b::text[], %(heed_interrupts)b::bool[]
    ) AS due (graph, key, fire_time, thread_id, run_id, most, refusal, heed_interrupt)
), enqueued AS (
    INSERT INTO tickd.ticks
        (space, graph, fire_time, mode, attempt, thread_id, run_id, outcome, error_type, finished_at)
    SELECT %(space)s, due.graph, due.fire_time, 'claim', 0, due.thread_id, due.run_id,
           CASE WHEN refused IS NOT NULL THEN 'skipped' END, refused,
           CASE WHEN refused IS NOT NULL THEN clock_timestamp() END
    FROM due CROSS JOIN LATERAL (
        SELECT CASE
            WHEN EXISTS (
                SELECT FROM tickd.graphs AS g
                WHERE g.space = %(space)s AND g.graph = due.graph AND g.paused_at IS NOT NULL
            ) THEN 'paused'
            WHEN due.heed_interrupt AND EXISTS (
                SELECT FROM tickd.ticks AS t
                WHERE t.space = %(space)s AND t.graph = due.graph AND t.outcome = 'interrupted'
                  AND t.thread_id = due.thread_id
            ) THEN 'interrupted'
            WHEN due.most <= (
                SELECT count(*)
                FROM tickd.ticks AS t
                WHERE t.space = %(space)s AND t.graph = due.graph
                  AND t.mode = 'claim' AND (t.outcome IS NULL OR t.outcome = 'handed_off')
            ) THEN due.refusal
        END AS refused
    ) AS backlog
    ORDER BY due.graph, due.fire_time
    ON CONFLICT (space, graph, fire_time) DO NOTHING
    RETURNING graph, fire_time, outcome, error_type
), holder AS MATERIALIZED (
    SELECT l.objid::bigint::bit(32)::int AS key, min(coalesce(a.application_name, '')) AS name
    FROM pg_locks AS l
    LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid::bigint::bit(32)::int = %(space)s
    GROUP BY l.objid
)
SELECT due.graph, due.fire_time, new.graph IS NOT NULL, holder.name, coalesce(new.graph, old.graph) IS NOT NULL,
       coalesce(new.outcome, old.outcome), coalesce(new.error_type, old.error_type),
       old.replica, old.admitted_at, (old.lease_until IS NOT NULL OR old.mode = 'skip') IS TRUE
FROM due
LEFT JOIN enqueued AS new ON new.graph = due.graph AND new.fire_time = due.fire_time
LEFT JOIN LATERAL (
    SELECT *
    FROM tickd.ticks
    WHERE space = %(space)s AND graph = due.graph AND fire_time = due.fire_time
    LIMIT 1
) AS old ON true
LEFT JOIN holder ON holder.key = due.key
"""
CLAIM = """
WITH ready AS MATERIALIZED (
    SELECT FROM tickd.ticks
    WHERE space = %(space)s AND graph = %(graph)s AND ready_at <= clock_timestamp()
      AND mode = 'claim' AND (outcome IS NULL OR outcome = 'handed_off')
      AND NOT EXISTS (
        SELECT FROM tickd.graphs WHERE space = %(space)s AND graph = %(graph)s AND paused_at IS NOT NULL
      )
    LIMIT 1
), try AS MATERIALIZED (
    SELECT CASE WHEN EXISTS (SELECT FROM ready)
           THEN pg_try_advisory_lock(%(space)s::int, %(key)s::int) END AS held
), next AS MATERIALIZED (
    SELECT space, graph, fire_time, replica AS last_holder, lease_until IS NOT NULL AND outcome IS NULL AS left_behind
    FROM tickd.ticks
    WHERE (SELECT held FROM try)
      AND space = %(space)s AND graph = %(graph)s AND ready_at <= clock_timestamp()
      AND mode = 'claim' AND (outcome IS NULL OR outcome = 'handed_off')
    ORDER BY fire_time
    LIMIT 1
    FOR UPDATE SKIP LOCKED
), token AS (
    INSERT INTO tickd.graphs (space, graph, key, token)
    SELECT %(space)s::int, %(graph)s::text, %(key)s::int, 1 FROM next
    ON CONFLICT (space, graph) DO UPDATE SET token = graphs.token + 1 WHERE graphs.paused_at IS NULL
    RETURNING token
), claimed AS (
    UPDATE tickd.ticks AS t
    SET attempt = t.attempt + 1, failures = t.failures + next.left_behind::int, token = token.token,
        replica = %(replica)s, admitted_at = clock_timestamp(), finished_at = NULL, outcome = NULL,
        lease_until = clock_timestamp() + %(lease)s
    FROM next, token
    WHERE t.space = next.space AND t.graph = next.graph AND t.fire_time = next.fire_time
    RETURNING t.fire_time, t.token, t.attempt, t.thread_id, t.failures, next.last_holder
), fenced AS (
    INSERT INTO tickd.threads (thread_id, space, graph, token)
    SELECT thread_id, %(space)s::int, %(graph)s::text, token FROM claimed
    ON CONFLICT (thread_id) DO UPDATE
    SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token, held_at = clock_timestamp()
)
SELECT try.held, claimed.fire_time, claimed.token, claimed.attempt, claimed.thread_id, claimed.last_holder, claimed.failures,
       EXISTS (
         SELECT FROM tickd.ticks AS t
         WHERE t.space = %(space)s AND t.graph = %(graph)s AND t.outcome = 'interrupted'
           AND t.thread_id = claimed.thread_id
       )
FROM try LEFT JOIN claimed ON true
"""
# The probe of a claimed run's hold: it answers with the server's timeline, or with no row when the row is not ours. It does
# not wait for a row that somebody has locked, for all others wait with it: that one is ours still, and renewed the next time.
_RENEW: LiteralString = """
WITH due AS (DUE), free AS MATERIALIZED (
    SELECT due.lease, t.space, t.graph, t.fire_time
    FROM due JOIN tickd.ticks AS t USING (space, graph, fire_time, token)
    WHERE t.outcome IS NULL
    FOR UPDATE OF t SKIP LOCKED
), renewed AS (
    UPDATE tickd.ticks AS t
    SET lease_until = clock_timestamp() + free.lease
    FROM free
    WHERE t.space = free.space AND t.graph = free.graph AND t.fire_time = free.fire_time
)
SELECT due.number, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
FROM due JOIN tickd.ticks AS t USING (space, graph, fire_time, token)
WHERE t.outcome IS NULL
"""
_ONE_LEASE: LiteralString = """
    SELECT %(space)s::int AS space, %(graph)s::text AS graph, %(fire_time)s::timestamptz AS fire_time,
           %(token)s::bigint AS token, %(lease)s::interval AS lease
"""
_MANY_LEASES: LiteralString = """
    SELECT %(space)s::int AS space, *
    FROM unnest((SELECT %(graph)b::text[]), (SELECT %(fire_time)b::timestamptz[]), (SELECT %(token)b::bigint[]),
                (SELECT %(lease)b::interval[]))
      WITH ORDINALITY AS due (graph, fire_time, token, lease, number)
"""
RENEW = Question(
    one=_RENEW.replace("DUE", _ONE_LEASE).replace("SELECT due.number, ", "SELECT "),
    many=_RENEW.replace("DUE", _MANY_LEASES),
    apart="graph",
    probe=True,
)
PUT_BACK = """
UPDATE tickd.ticks
SET lease_until = NULL, failures = failures + 1, ready_at = clock_timestamp() + %(pause)s,
    error_type = %(error_type)s, error = %(error)s
WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND token = %(token)s AND outcome IS NULL
"""
LOOK_UP = """
SELECT outcome, error_type, replica, admitted_at, lease_until IS NOT NULL OR mode = 'skip'
FROM tickd.ticks
WHERE space = %s AND graph = %s AND fire_time = %s
"""
HAS_READY = """
SELECT EXISTS (
    SELECT FROM tickd.ticks
    WHERE space = %(space)s AND graph = %(graph)s AND ready_at <= clock_timestamp()
      AND mode = 'claim' AND (outcome IS NULL OR outcome = 'handed_off')
      AND NOT EXISTS (
        SELECT FROM tickd.graphs WHERE space = %(space)s AND graph = %(graph)s AND paused_at IS NOT NULL
      )
)
"""
# A lease that has run out concerns the hold that made the claim: the graph's newest, for a later one has a newer token,
# on a session that was open by then, for tokens are of this statement's snapshot and pg_locks is read live.
# When the session last spoke stays unknown where the server does not track that (`track_activities`): the lease decides there.
WORK = """
SELECT t.graph, bool_or(t.ready_at <= clock_timestamp() AND g.paused_at IS NULL AND holder.pid IS NULL),
       bool_or(t.lease_until < clock_timestamp() AND t.token = g.token AND holder.since <= t.admitted_at
               AND holder.spoke_at < clock_timestamp() - %(lease)s)
FROM tickd.ticks AS t
JOIN tickd.graphs AS g ON g.space = t.space AND g.graph = t.graph
LEFT JOIN (
    SELECT l.classid::bigint::bit(32)::int AS space, l.objid::bigint::bit(32)::int AS key, l.pid,
           a.backend_start AS since, coalesce(a.state_change, a.backend_start) AS spoke_at
    FROM pg_locks AS l
    LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
) AS holder ON holder.space = g.space AND holder.key = g.key
WHERE t.space = %(space)s AND t.mode = 'claim' AND (t.outcome IS NULL OR t.outcome = 'handed_off')
GROUP BY t.graph
"""
END_HOLDER = """
SELECT count(pg_terminate_backend(l.pid))
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(classid)s::bigint::oid AND l.objid = %(objid)s::bigint::oid
  AND coalesce(a.state_change, a.backend_start) < clock_timestamp() - %(lease)s
  AND EXISTS (
    SELECT FROM tickd.ticks AS t
    JOIN tickd.graphs AS g ON g.space = t.space AND g.graph = t.graph AND g.token = t.token
    WHERE t.space = %(space)s AND t.graph = %(graph)s AND t.outcome IS NULL AND t.lease_until < clock_timestamp()
      AND a.backend_start <= t.admitted_at
  )
"""


@dataclass(frozen=True, slots=True)
class Due:
    """A tick that has come due, with what its row is to say, and when the ledger is to refuse it: with `most` open."""

    tick: Tick
    thread_id: str
    run_id: uuid.UUID
    most: int
    refusal: str
    heed_interrupt: bool = True


@dataclass(frozen=True, slots=True)
class Claimed:
    """A tick that this replica has taken, and on how many attempts of it the run failed or its holder was lost.

    `interrupted`: another tick waits for an answer on the same thread.
    """

    tick: Tick
    admission: Admission
    failures: int
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Row:
    """What the ledger says of one tick: its outcome, why it was skipped, who has or had it last, since when.

    `claimed`: somebody has taken it; so has whoever admitted a tick in skip mode, before its graph's mode was edited.
    """

    outcome: str | None
    reason: str | None
    replica: str | None
    since: datetime | None
    claimed: bool

    @property
    def waits(self) -> bool:
        """Say whether the tick is there to be claimed, now or after a pause."""
        return self.outcome == Outcome.HANDED_OFF or (self.outcome is None and not self.claimed)


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A due tick that has a row: whether it is new, what it says, and who has the lock of its graph."""

    tick: Tick
    new: bool
    row: Row
    holder: str | None


@dataclass(frozen=True, slots=True)
class Work:
    """A graph with open ticks: whether one could be claimed now, and whether its holder has let a lease run out in silence."""

    graph: str
    ready: bool
    expired: bool


async def enqueue(connection: AsyncConnection[Any], space: int, dues: Sequence[Due]) -> list[Enqueued]:
    """Insert a row for each due tick that no replica has enqueued yet; at most one of each graph in a call.

    The row of a paused graph is skipped, as is one with `most` of its graph's open, and, if heeded, one on whose thread
    an earlier tick waits for an answer.
    """
    parameters = {
        "space": space,
        "graphs": [due.tick.graph for due in dues],
        "keys": [lock_key(due.tick.graph) for due in dues],
        "fire_times": [due.tick.fire_time for due in dues],
        "thread_ids": [due.thread_id for due in dues],
        "run_ids": [due.run_id for due in dues],
        "most": [due.most for due in dues],
        "refusals": [due.refusal for due in dues],
        "heed_interrupts": [due.heed_interrupt for due in dues],
    }
    cursor = await connection.execute(ENQUEUE, parameters)
    found = []
    for graph, fire_time, new, holder, seen, *columns in await cursor.fetchall():
        tick = Tick(graph, fire_time.astimezone(UTC))
        # Another replica's row may have been committed after this statement's snapshot, and the next statement sees it.
        row = (None if seen else await look_up(connection, space, tick)) or _row(*columns)
        found.append(Enqueued(tick, new, row, None if holder is None else holder.removeprefix(APPLICATION)))
    return found


async def claim(session: LockSession, *, graph: str, lease: timedelta) -> tuple[bool | None, Claimed | None]:
    """Try the graph's lock and take its earliest ready tick under it, if there is one; every attempt takes a new token."""
    values = {"graph": graph, "key": lock_key(graph), "lease": lease}
    held, fire_time, token, attempt, thread_id, last_holder, failures, interrupted = await admit(
        session, session.fetch(CLAIM, {**session.common_values(), **values})
    )
    if token is None:
        return held, None
    tick = Tick(graph, fire_time.astimezone(UTC))
    return True, Claimed(tick, Admission(token, attempt, thread_id, last_holder), failures, interrupted)


def renewal(tick: Tick, token: int, lease: timedelta) -> tuple[Question, Mapping[str, Any]]:
    """Return the question that renews the lease, for the watch to ask as its probe."""
    return RENEW, {"graph": tick.graph, "fire_time": tick.fire_time, "token": token, "lease": lease}


async def put_back(
    session: LockSession,
    tick: Tick,
    *,
    token: int,
    pause: timedelta,
    error_type: str | None,
    error: str | None,
) -> bool:
    """Give a failed tick back, to be claimed again after the pause; False when it is no longer this token's."""
    parameters = {
        "space": session.place.space,
        "graph": tick.graph,
        "fire_time": tick.fire_time,
        "token": token,
        "pause": pause,
        "error_type": error_type and storable(error_type, session.connection),
        "error": error and storable(error, session.connection),
    }
    return await session.change(PUT_BACK, parameters) == 1


async def look_up(connection: AsyncConnection[Any], space: int, tick: Tick) -> Row | None:
    """Return the tick's row, if there is one."""
    row = await (await connection.execute(LOOK_UP, (space, tick.graph, tick.fire_time))).fetchone()
    return _row(*row) if row else None


def _row(*columns: Any) -> Row:
    outcome, error_type, replica, since, claimed = columns
    return Row(outcome, error_type, replica, since and since.astimezone(UTC), claimed)


async def has_ready(connection: AsyncConnection[Any], space: int, graph: str) -> bool:
    """Say whether a tick of the graph waits to be claimed, or is being worked on; not while the graph is paused."""
    row = await (await connection.execute(HAS_READY, {"space": space, "graph": graph})).fetchone()
    return bool(row and row[0])


async def work(connection: AsyncConnection[Any], space: int, lease: timedelta) -> list[Work]:
    """Return every graph that has open ticks; a holder has expired when its session was silent for the lease as well."""
    cursor = await connection.execute(WORK, {"space": space, "lease": lease})
    return [Work(graph, bool(ready), bool(expired)) for graph, ready, expired in await cursor.fetchall()]


async def end_holder(connection: AsyncConnection[Any], space: int, graph: str, lease: timedelta) -> bool:
    """End the session that has the graph's lock, while its lease has run out and it says nothing; True if there was one."""
    parameters = {
        "space": space,
        "graph": graph,
        "lease": lease,
        "classid": space & 0xFFFFFFFF,
        "objid": lock_key(graph) & 0xFFFFFFFF,
    }
    row = await (await connection.execute(END_HOLDER, parameters)).fetchone()
    return bool(row and row[0])
