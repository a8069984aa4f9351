"""The oracle of exclusion: reads what the witnessed graphs wrote, and says in SQL what went wrong.

The nodes of `tests/graphs/witnessed.py` write the rows. A *run* here is what one replica did of one tick under one
token: the span from its first node's begin to its last node's end.
"""

import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg.rows import namedtuple_row


GRAPHS = Path(__file__).parent / "graphs" / "witnessed.py"

SCHEMA = """
CREATE SCHEMA witness;
CREATE TABLE witness.node_run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    graph text NOT NULL,
    fire_time timestamptz NOT NULL,
    attempt int NOT NULL,
    replica text NOT NULL,
    token bigint NOT NULL,
    thread_id text NOT NULL,
    node text NOT NULL,
    pid int NOT NULL,
    entered timestamptz,
    began timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended timestamptz
);
CREATE FUNCTION witness.tell() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NOTIFY witness; RETURN NULL; END';
CREATE TRIGGER tell AFTER INSERT OR UPDATE ON witness.node_run EXECUTE FUNCTION witness.tell();
LISTEN witness;
CREATE VIEW witness.run AS
SELECT graph, fire_time, attempt, replica, token, thread_id, pid,
       min(began) AS began, max(coalesce(ended, 'infinity')) AS ended
FROM witness.node_run
GROUP BY graph, fire_time, attempt, replica, token, thread_id, pid
"""

OVERLAPS = """
SELECT one.graph, one.fire_time, one.replica, other.fire_time AS other_fire_time, other.replica AS other_replica
FROM witness.run AS one
JOIN witness.run AS other
  ON one.graph = other.graph
 AND (one.began, one.fire_time, one.replica, one.token) < (other.began, other.fire_time, other.replica, other.token)
 AND other.began < one.ended
ORDER BY one.began
"""

REPEATS = """
SELECT graph, fire_time, count(*) AS runs
FROM witness.run
GROUP BY graph, fire_time
HAVING count(*) > 1
ORDER BY fire_time
"""

GAPS = """
SELECT expected AS fire_time
FROM (SELECT min(fire_time) AS first, max(fire_time) AS last FROM witness.run WHERE graph = %(graph)s) AS seen,
     generate_series(first, last, %(every)s::interval) AS expected
WHERE NOT EXISTS (SELECT FROM witness.run WHERE graph = %(graph)s AND fire_time = expected)
ORDER BY expected
"""

RUNS = """
SELECT graph, fire_time, attempt, replica, token, thread_id, pid, began, nullif(ended, 'infinity') AS ended
FROM witness.run
WHERE graph = coalesce(%(graph)s, graph)
ORDER BY began
"""
NODES = "SELECT * FROM witness.node_run WHERE graph = coalesce(%(graph)s, graph) ORDER BY began, id"

BEGUN = """
SELECT * FROM witness.node_run
WHERE graph = %(graph)s AND node = %(node)s AND id > %(after)s
ORDER BY id
LIMIT 1
"""

# A killed process never writes its end, yet it ended with the kill; open for ever it would overlap whoever follows.
BURY = "UPDATE witness.node_run SET ended = greatest(began, %(at)s) WHERE replica = %(replica)s AND ended IS NULL"


class Witness:
    """The oracle of one database."""

    def __init__(self, admin_dsn: str) -> None:
        self.dsn = admin_dsn
        self.connection = psycopg.connect(admin_dsn, autocommit=True, row_factory=namedtuple_row)
        self.connection.execute(SCHEMA)

    def close(self) -> None:
        """Leave the database."""
        self.connection.close()

    def overlaps(self) -> list[Any]:
        """Return the pairs of runs of one graph that went on at the same time (I1)."""
        return self._rows(OVERLAPS)

    def repeats(self) -> list[Any]:
        """Return the ticks that were run more than once, with the count (I2)."""
        return self._rows(REPEATS)

    def gaps(self, graph: str, every: timedelta) -> list[datetime]:
        """Return the fire times between the first and the last run of a graph that nobody ran (I5)."""
        return [row.fire_time for row in self._rows(GAPS, graph=graph, every=every)]

    def runs(self, graph: str | None = None) -> list[Any]:
        """Return every run, in the order of their beginnings; one that goes on has no end."""
        return self._rows(RUNS, graph=graph)

    def nodes(self, graph: str | None = None) -> list[Any]:
        """Return every node's row, in the order of their beginnings."""
        return self._rows(NODES, graph=graph)

    def wait_for_node(self, node: str, *, count: int = 1, timeout: float = 15) -> Any:
        """Return the row of the first node with this name (or of the `count`-th), once it has begun."""
        deadline = time.monotonic() + timeout
        while len(found := [row for row in self.nodes() if row.node == node]) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{node} has not begun: {self.nodes()}"
            list(self.connection.notifies(timeout=left, stop_after=1))
        return found[count - 1]

    def wait_for_begin(self, graph: str, node: str, *, after: int = 0, timeout: float = 15) -> Any:
        """Return the first row of the graph's node with an id above `after`, once it has begun."""
        deadline = time.monotonic() + timeout
        while not (rows := self._rows(BEGUN, graph=graph, node=node, after=after)):
            left = deadline - time.monotonic()
            assert left > 0, f"{node} of {graph} has not begun after row {after}: {self.nodes(graph)}"
            list(self.connection.notifies(timeout=left, stop_after=1))
        return rows[0]

    def last(self) -> int:
        """Return the id of the newest row, for `wait_for_begin` to wait for a later one."""
        return max((row.id for row in self.nodes()), default=0)

    def now(self) -> datetime:
        """Return the database's time, to tell `bury` when a process was killed."""
        (row,) = self._rows("SELECT clock_timestamp() AS now")
        now: datetime = row.now
        return now

    def bury(self, replica: str, at: datetime) -> None:
        """End the open rows of a replica that was killed at this instant."""
        self.connection.execute(BURY, {"replica": replica, "at": at})

    def query(self, statement: LiteralString, **parameters: Any) -> list[Any]:
        """Return the rows of any other query, as superuser."""
        return self._rows(statement, **parameters)

    def _rows(self, statement: LiteralString, **parameters: Any) -> list[Any]:
        return list[NamedTuple](self.connection.execute(statement, parameters).fetchall())
