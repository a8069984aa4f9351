"""Admissions: the statements that take a graph's lock and admit a tick under it.

The lock says that nobody else writes now; it does not say that nobody has. A run that is shorter than the replicas'
clocks are apart frees its lock before the last of them tries, and the tick would run again. So every tick has one row
in the ledger, inserted under the lock: whoever finds it there skips (I2).

`hold_and_admit` is one statement, hence one round trip: it looks, tries the lock, takes the next token, inserts the row
and moves the thread's fence. What it has seen is of a moment before it got the lock. So it takes the next token only
after the one that it has seen; where another hold came or ended with a hand-off in between, it lets go and looks again.
It is right under READ COMMITTED only, which the lock session sets for itself: ON CONFLICT then sees rows that were
committed after the statement's snapshot, and the lock's order is the rows' order. A tick that
is in the ledger already is not locked at all, for a replica that holds a lock only to learn that it has nothing to do
would make others skip the graph's next tick.

On a session whose ledger is another one (`LockSession.ledger`), the lock is taken first, and the statement on that one
asks whether it is held.
"""

import uuid
from collections.abc import Coroutine, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, LiteralString, NamedTuple, Self

import psycopg

from tickd.batch import Question
from tickd.lock import LockSession
from tickd.tick import Outcome, SkipReason, Tick, lock_key


# `superseded`: whoever gets the lock knows that what an earlier hold still writes is late, though its thread is not the new
# tick's. The guard's trigger does the same for every other statement that moves a token; here it is told to stand back,
# for a new backend would load a language for it, which is a quarter of what its admission costs. It comes after all of
# `fenced`, for which it is sorted: a thread that passes from one graph of a batch to another is the latter's.
# A tick is admitted a moment before it is due, and runs from then on: that is since when its holder is said to have it.
# `next` goes through its graphs in one order, for a replica that starts registers its graphs in the same; and `fenced` through
# its threads, for graphs may share threads, and two replicas' batches would wait for each other.
_ADMIT: LiteralString = """
WITH due AS (DUE), tried AS MATERIALIZED (
    SELECT due.space, due.graph, due.key, due.fire_time, due.thread_id, due.run_id, due.number,
           known.graph IS NOT NULL AS known, known.outcome IS NOT NULL AS ended, known.replica AS known_replica,
           coalesce(kept.token, 0) AS last_token,
           CASE WHEN kept.paused_at IS NOT NULL THEN 'paused' ELSE barring.outcome END AS barred,
           barring.replica AS barring_replica, barring.admitted_at AS barring_since, barring.fire_time AS barring_tick,
           CASE WHEN known.outcome IS NULL AND kept.paused_at IS NULL AND barring.outcome IS NULL
                THEN pg_try_advisory_lock(%(space)s::int, due.key) END AS held
    FROM due
    LEFT JOIN tickd.ticks AS known
      ON known.space = due.space AND known.graph = due.graph AND known.fire_time = due.fire_time
    LEFT JOIN tickd.graphs AS kept ON kept.space = due.space AND kept.graph = due.graph
    LEFT JOIN LATERAL (
        SELECT outcome, replica, admitted_at, fire_time
        FROM tickd.ticks
        WHERE space = due.space AND graph = due.graph AND outcome IN ('handed_off', 'interrupted')
          AND (outcome = 'handed_off' OR due.heed_interrupt AND thread_id = due.thread_id)
        ORDER BY outcome = 'interrupted' DESC
        LIMIT 1
    ) AS barring ON true
), next AS (
    INSERT INTO tickd.graphs (space, graph, key, token)
    SELECT space, graph, key, last_token + 1
    FROM tried
    WHERE held AND NOT known AND set_config('tickd.supersedes', 'itself', true) IS NOT NULL
    ORDER BY graph
    ON CONFLICT (space, graph) DO UPDATE SET token = EXCLUDED.token
    WHERE graphs.token = EXCLUDED.token - 1 AND graphs.paused_at IS NULL
    RETURNING graph, token
), admitted AS (
    INSERT INTO tickd.ticks (space, graph, fire_time, attempt, token, replica, thread_id, run_id, admitted_at)
    SELECT space, graph, fire_time, 1, token, %(replica)s::text, thread_id, run_id,
           GREATEST(clock_timestamp(), fire_time)
    FROM next JOIN tried USING (graph)
    ON CONFLICT (space, graph, fire_time) DO NOTHING
    RETURNING space, graph, token, attempt, thread_id
), fenced AS (
    INSERT INTO tickd.threads (thread_id, space, graph, token)
    SELECT thread_id, space, graph, token FROM admitted ORDER BY thread_id
    ON CONFLICT (thread_id) DO UPDATE
    SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token, held_at = clock_timestamp()
    RETURNING thread_id, space, graph
), superseded AS (
    UPDATE tickd.threads
    SET token = 0
    FROM (SELECT thread_id, space, graph FROM fenced ORDER BY thread_id) AS fenced
    WHERE threads.space = fenced.space AND threads.graph = fenced.graph AND threads.token > 0
      AND threads.thread_id <> fenced.thread_id
)
SELECT tried.number, tried.held, admitted.token, admitted.attempt, tried.known, tried.ended, tried.known_replica,
       tried.barred, tried.barring_replica, tried.barring_since, tried.barring_tick,
       running.replica, running.admitted_at, running.fire_time
FROM tried
LEFT JOIN admitted USING (graph)
LEFT JOIN LATERAL (
    SELECT replica, admitted_at, fire_time
    FROM tickd.ticks
    WHERE NOT tried.held AND space = tried.space AND graph = tried.graph AND outcome IS NULL AND token IS NOT NULL
    ORDER BY token DESC
    LIMIT 1
) AS running ON true
"""
_ONE_DUE: LiteralString = """
    SELECT 1 AS number, %(space)s::int AS space, %(graph)s::text AS graph, %(key)s::int AS key, %(fire_time)s::timestamptz AS fire_time,
           %(thread_id)s::text AS thread_id, %(run_id)s::uuid AS run_id, %(heed_interrupt)s::bool AS heed_interrupt
"""
_MANY_DUE: LiteralString = """
    SELECT %(space)s::int AS space, *
    FROM unnest((SELECT %(graph)b::text[]), (SELECT %(key)b::int[]), (SELECT %(fire_time)b::timestamptz[]),
                (SELECT %(thread_id)b::text[]), (SELECT %(run_id)b::uuid[]), (SELECT %(heed_interrupt)b::bool[]))
      WITH ORDINALITY AS due (graph, key, fire_time, thread_id, run_id, heed_interrupt, number)
    OFFSET 0
"""
HOLD_AND_ADMIT = Question(
    one=_ADMIT.replace("DUE", _ONE_DUE).replace("SELECT tried.number, ", "SELECT "),
    many=_ADMIT.replace("DUE", _MANY_DUE),
    apart="thread_id",
    locks=True,
)
WARM = "EXPLAIN " + HOLD_AND_ADMIT.one
# The same over another session than the lock's, when that has the lock. `pg_locks` is read live, so it was held after the
# statement's snapshot. If the lock goes to somebody else after that, one of the two admissions is the first to move the
# token, and the other gets none.
LOCKS: LiteralString = """
WITH locks AS MATERIALIZED (
    SELECT pid, classid::bigint::bit(32)::int AS space, objid::bigint::bit(32)::int AS key
    FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
)"""
IS_HELD: LiteralString = (
    "EXISTS (SELECT FROM locks WHERE locks.pid = due.pid AND locks.space = due.space AND locks.key = due.key)"
)
_ADMIT_HELD: LiteralString = _ADMIT.replace("pg_try_advisory_lock(%(space)s::int, due.key)", IS_HELD).replace(
    "\nWITH", f"{LOCKS},"
)
ADMIT_HELD = Question(
    one=_ADMIT_HELD.replace("DUE", f"{_ONE_DUE}, %(pid)s::int AS pid").replace(
        "SELECT tried.number, ", "SELECT "
    ),
    many=_ADMIT_HELD.replace(
        "DUE",
        _MANY_DUE.replace("bool[]))", "bool[]), (SELECT %(pid)b::int[]))").replace(
            "interrupt, number", "interrupt, pid, number"
        ),
    ),
    apart="thread_id",
)
NO_RUN = uuid.UUID(int=0)
# What was handed off in claim mode is claimed again, under a lease. What was handed off waits while its graph is paused, also
# where that happened after the look: to move the token is to see the graph's row as it is then. Who answers an interrupt
# has asked for this one tick.
HOLD_AND_RESUME = """
WITH waiting AS MATERIALIZED (
    SELECT replica FROM tickd.ticks
    WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND outcome = %(outcome)s
      AND (
        outcome <> 'handed_off'
        OR mode = 'skip' AND NOT EXISTS (
          SELECT FROM tickd.graphs WHERE space = %(space)s AND graph = %(graph)s AND paused_at IS NOT NULL
        )
      )
), try AS MATERIALIZED (
    SELECT CASE WHEN EXISTS (SELECT FROM waiting)
           THEN pg_try_advisory_lock(%(space)s::int, %(key)s::int) END AS held
), next AS (
    UPDATE tickd.graphs SET token = graphs.token + 1
    FROM try
    WHERE try.held AND graphs.space = %(space)s AND graphs.graph = %(graph)s
      AND (graphs.paused_at IS NULL OR %(outcome)s <> 'handed_off')
    RETURNING graphs.token
), resumed AS (
    UPDATE tickd.ticks
    SET attempt = attempt + 1, token = next.token, replica = %(replica)s,
        admitted_at = clock_timestamp(), finished_at = NULL, outcome = NULL
    FROM next
    WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND outcome = %(outcome)s
    RETURNING ticks.token, attempt, thread_id
), fenced AS (
    INSERT INTO tickd.threads (thread_id, space, graph, token)
    SELECT thread_id, %(space)s::int, %(graph)s::text, token FROM resumed
    ON CONFLICT (thread_id) DO UPDATE
    SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token, held_at = clock_timestamp()
)
SELECT try.held, resumed.token, resumed.attempt, resumed.thread_id, waiting.replica
FROM try LEFT JOIN resumed ON true LEFT JOIN waiting ON true
"""
# For whoever has the lock and has asked for an admission without an answer: a row of one's own without an outcome is that
# admission, and nothing has run under it. The sweep that calls it abandoned asks for the old token.
ADMIT_AGAIN = """
WITH next AS (
    UPDATE tickd.graphs SET token = graphs.token + 1
    WHERE space = %(space)s AND graph = %(graph)s AND paused_at IS NULL
    RETURNING token
), again AS (
    UPDATE tickd.ticks
    SET token = next.token, admitted_at = GREATEST(clock_timestamp(), fire_time)
    FROM next
    WHERE space = %(space)s AND graph = %(graph)s AND fire_time = %(fire_time)s AND mode = 'skip' AND outcome IS NULL
      AND replica = %(replica)s
    RETURNING ticks.token, attempt, thread_id
), fenced AS (
    INSERT INTO tickd.threads (thread_id, space, graph, token)
    SELECT thread_id, %(space)s::int, %(graph)s::text, token FROM again
    ON CONFLICT (thread_id) DO UPDATE
    SET space = EXCLUDED.space, graph = EXCLUDED.graph, token = EXCLUDED.token, held_at = clock_timestamp()
)
SELECT token, attempt, thread_id FROM again
"""
UNFINISHED = """
SELECT replica, admitted_at, fire_time
FROM tickd.ticks
WHERE space = %s AND graph = %s AND outcome IS NULL AND token IS NOT NULL
ORDER BY token DESC
LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Admission:
    """The ledger has accepted the tick for this replica: its token, which attempt it is, and the thread it runs on.

    `last_holder` is the replica that had the tick before, if any had.
    """

    token: int
    attempt: int
    thread_id: str
    last_holder: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The ledger does not want the tick run: it has it already, from `replica`, or the graph is barred for now."""

    reason: SkipReason
    replica: str | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A graph's admitted tick that has not come to its end: it runs, or it has been handed off and waits."""

    replica: str
    since: datetime
    fire_time: datetime


class _Answer(NamedTuple):
    """What the admission's statement says of one tick."""

    held: bool | None
    token: int | None = None
    attempt: int = 0
    known: bool = False
    ended: bool = False
    replica: str | None = None
    barred: str | None = None
    barring: tuple[Any, ...] = (None, None, None)
    running: tuple[Any, ...] = (None, None, None)

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """Make one of a row: the last six columns are which tick bars the graph, and which runs."""
        held, token, attempt, known, ended, replica, barred, *others = row
        return cls(held, token, attempt, known, ended, replica, barred, tuple(others[:3]), tuple(others[3:]))

    @property
    def looked_too_early(self) -> bool:
        """Say whether somebody held the graph, or paused it, after the statement's snapshot and before its try."""
        return bool(self.held) and self.token is None and not self.known


async def hold_and_admit(
    session: LockSession,
    tick: Tick,
    *,
    thread_id: str,
    run_id: uuid.UUID,
    heed_interrupt: bool = True,
    tell_running: bool = False,
    unanswered: MutableMapping[Tick, Exception] | None = None,
) -> tuple[bool | None, Admission | Refusal | Unfinished | None]:
    """Try the graph's lock and admit the tick under it: whether the lock was taken, and what the ledger says.

    (True, Admission): run it. (_, Refusal): it has been admitted before. (None, Unfinished): an earlier tick of the
    graph has been handed off and comes first. (False, None): another session holds the lock; with `tell_running`, (False,
    Unfinished) where the ledger knows already for which tick. `heed_interrupt`: an earlier tick that waits on an interrupt
    keeps others from its thread. `unanswered` are the ticks whose admission this replica has asked for before and heard
    nothing, each with the error; one that turns out to have been admitted is admitted to it again.
    """
    values = {"thread_id": thread_id, "run_id": run_id, "heed_interrupt": heed_interrupt} | _tick_values(tick)
    unanswered = {} if unanswered is None else unanswered
    try:
        answer = await _hold_and_admit(session, tick, values, unanswered)
        again = await _admit_again(session, values, answer) if tick in unanswered else None
    except Exception as error:
        unanswered[tick] = error
        raise
    if again is not None:
        return True, again
    if answer.held is not False and not answer.known:
        unanswered.pop(tick, None)  # what had no answer has come to nothing, and this is one
    if answer.token is not None:
        return True, Admission(answer.token, answer.attempt, thread_id)
    if answer.held is False:
        return False, _unfinished(*answer.running) if tell_running and answer.running[0] is not None else None
    if answer.ended or answer.barred is None:
        return answer.held, Refusal(SkipReason.ALREADY_RAN, answer.replica)
    if answer.barred == Outcome.HANDED_OFF:
        return None, _unfinished(*answer.barring)
    return None, Refusal(SkipReason(answer.barred))


async def _admit_again(session: LockSession, values: dict[str, Any], answer: _Answer) -> Admission | None:
    """Admit the tick once more if the answer is that it has been admitted to this replica; else None."""
    if not (answer.held and answer.known and answer.replica == session.place.replica):
        return None
    again = await admit(session, session.fetch(ADMIT_AGAIN, session.common_values() | values))
    return None if again is None else Admission(*again)


async def _hold_and_admit(
    session: LockSession, tick: Tick, values: dict[str, Any], unanswered: MutableMapping[Tick, Exception]
) -> _Answer:
    """Return the answer, once it is not of a moment before the lock was taken."""
    graph = tick.graph
    if session.ledger is not session:
        try:
            return await _hold_then_admit(session, graph, values)
        except (psycopg.Error, TimeoutError) as error:
            unanswered[tick] = error
        # That session is gone, which says nothing of this one.
        session.ledger = session
        await session.unlock(graph)
    while True:
        answer = _Answer.of(await admit(session, session.ask(HOLD_AND_ADMIT, values)))
        if not answer.looked_too_early:
            return answer
        if await session.unlock(graph) is None:
            # Session locks stack: a second try would succeed on a lock that is still there, and one unlock would leave it.
            raise psycopg.OperationalError(f"the lock of {graph} could not be let go, to be tried again")


async def _hold_then_admit(session: LockSession, graph: str, values: dict[str, Any]) -> _Answer:
    """Take the lock on its session, and admit over the other one, together with what others ask of that."""
    if not await session.try_lock(graph):
        return _Answer(held=False)
    values |= {"pid": session.connection.info.backend_pid}
    while True:
        answer = _Answer.of(await admit(session.ledger, session.ledger.ask(ADMIT_HELD, values)))
        if not answer.looked_too_early:
            break
    if not answer.held:
        await session.unlock(graph)
    return answer


async def warm(session: LockSession, tick: Tick) -> None:
    """Let the session's backend load what the admission needs and plan it, without running anything.

    A new backend spends some milliseconds on that, and there is time for it before the tick is due.
    """
    nothing = {"thread_id": "", "run_id": NO_RUN, "heed_interrupt": True}
    await session.fetch(WARM, session.common_values() | _tick_values(tick) | nothing)


async def hold_and_resume(
    session: LockSession, tick: Tick, *, outcome: Outcome = Outcome.HANDED_OFF
) -> tuple[bool | None, Admission | None]:
    """Try the graph's lock and go on with a tick that has this outcome, as its next attempt; None when it has not."""
    values = session.common_values() | _tick_values(tick) | {"outcome": outcome.value}
    held, token, attempt, thread_id, last_holder = await admit(
        session, session.fetch(HOLD_AND_RESUME, values)
    )
    return held, None if token is None else Admission(token, attempt, thread_id, last_holder)


async def admit(session: LockSession, admission: Coroutine[Any, Any, Any]) -> Any:
    """Await a statement that moves a thread to this session's hold, and end stale writers that keep it waiting."""
    return await session.stale_writers.past(admission)


def _tick_values(tick: Tick) -> dict[str, Any]:
    return {"key": lock_key(tick.graph), "graph": tick.graph, "fire_time": tick.fire_time}


async def unfinished(session: LockSession, graph: str) -> Unfinished | None:
    """Return the graph's newest tick that is admitted and has no outcome."""
    row = await session.fetch(UNFINISHED, (session.place.space, graph))
    return _unfinished(*row) if row else None


def _unfinished(replica: str, since: datetime, fire_time: datetime) -> Unfinished:
    return Unfinished(replica, since.astimezone(UTC), fire_time.astimezone(UTC))
