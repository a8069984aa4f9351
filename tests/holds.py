"""The holds of a test's database, seen and ended from outside as an administrator would."""

from datetime import datetime
from typing import Any

from tests.witness import Witness
from tickd.tick import lock_key


SPACE = 7301
HOLD = """
SELECT l.pid, a.application_name
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = %(space)s::bigint::oid AND l.objid = %(key)s::bigint::oid
"""
# The instant is taken before the signal is sent, so whatever is measured from it is at least as long as it was.
TERMINATE = "SELECT clock_timestamp() AS at, pg_terminate_backend(%(pid)s)"
OUTCOMES = (
    "SELECT fire_time, attempt, replica, outcome FROM tickd.ticks WHERE graph = %(graph)s ORDER BY fire_time"
)
WRITTEN = """
SELECT 'checkpoint ' || checkpoint_id AS written FROM checkpoints WHERE thread_id = %(thread_id)s
UNION ALL SELECT 'blob ' || channel || ' ' || version FROM checkpoint_blobs WHERE thread_id = %(thread_id)s
UNION ALL SELECT 'write ' || checkpoint_id || ' ' || task_id || ' ' || idx FROM checkpoint_writes
WHERE thread_id = %(thread_id)s
"""


def holder(witness: Witness, graph: str) -> Any | None:
    """Return the session that has the graph's lock (`pid`, `application_name`); None when nobody has."""
    rows = witness.query(HOLD, space=SPACE, key=lock_key(graph) & 0xFFFFFFFF)
    return rows[0] if rows else None


def terminate(witness: Witness, graph: str) -> datetime:
    """End the session that has the graph's lock; return the database's time just before."""
    session = holder(witness, graph)
    assert session is not None, f"nobody holds {graph}"
    (row,) = witness.query(TERMINATE, pid=session.pid)
    at: datetime = row.at
    return at


def written(witness: Witness, thread_id: str) -> set[str]:
    """Return everything that the saver has written for the thread, in any of its tables."""
    return {row.written for row in witness.query(WRITTEN, thread_id=thread_id)}


def outcomes(witness: Witness, graph: str) -> list[Any]:
    """Return the ledger's rows of a graph: `fire_time`, `attempt`, `replica`, `outcome`."""
    return witness.query(OUTCOMES, graph=graph)
