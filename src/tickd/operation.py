"""What an operator asks of the ledger and orders through it: who runs what, what waits, what became of a tick; pause, resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from tickd.tick import Tick


PAUSE = """
UPDATE tickd.graphs
SET paused_at = COALESCE(paused_at, clock_timestamp())
WHERE space = %s AND graph = %s
RETURNING paused_at
"""
# No fire time of the pause is made up for; what a graph that is not paused has missed is.
RESUME = """
UPDATE tickd.graphs
SET paused_at = NULL, fires_since = CASE WHEN paused_at IS NULL THEN fires_since ELSE clock_timestamp() END
WHERE space = %s AND graph = %s
RETURNING fires_since
"""
GRAPHS = "SELECT graph FROM tickd.graphs WHERE space = %s ORDER BY graph"
STATUS = """
SELECT g.graph, g.token, g.paused_at, t.fire_time, t.outcome, t.replica, t.attempt, t.admitted_at, t.finished_at,
       t.error_type,
       (
         SELECT count(*)
         FROM tickd.ticks AS o
         WHERE o.space = g.space AND o.graph = g.graph AND (o.outcome IS NULL OR o.outcome = 'handed_off')
       ) AS open
FROM tickd.graphs AS g
LEFT JOIN LATERAL (
    SELECT *
    FROM tickd.ticks AS l
    WHERE l.space = g.space AND l.graph = g.graph AND l.admitted_at IS NOT NULL
    ORDER BY l.fire_time DESC
    LIMIT 1
) AS t ON true
WHERE g.space = %s
ORDER BY g.graph
"""
BACKLOG = """
SELECT graph, fire_time, attempt, failures, replica, admitted_at, error_type, error, ready_at,
       CASE
         WHEN outcome IS NOT NULL THEN outcome
         WHEN lease_until < clock_timestamp() THEN 'lease_expired'
         WHEN lease_until IS NOT NULL OR mode = 'skip' THEN 'running'
         WHEN ready_at > clock_timestamp() THEN 'retrying'
         ELSE 'waiting'
       END AS state
FROM tickd.ticks
WHERE space = %s AND (outcome IS NULL OR outcome IN ('handed_off', 'interrupted'))
  AND (%s::text IS NULL OR graph = %s)
ORDER BY graph, fire_time
"""
HISTORY = """
SELECT graph, fire_time, mode, attempt, failures, token, replica, thread_id, run_id, admitted_at, finished_at, outcome,
       error_type, error
FROM tickd.ticks
WHERE space = %s AND graph = %s AND (%s::timestamptz IS NULL OR fire_time = %s)
ORDER BY fire_time DESC
LIMIT %s
"""


@dataclass(frozen=True, slots=True)
class Operation:
    """The ledger of one lock space, as its operator sees it. Rows come back as mappings with aware UTC instants."""

    connection: AsyncConnection[Any]
    space: int

    async def pause(self, graph: str) -> datetime | None:
        """Let no replica run the graph until it is resumed; return since when, None for a graph that nobody knows."""
        return await self._instant(PAUSE, graph)

    async def resume(self, graph: str) -> datetime | None:
        """Let the graph run again, from now on; return that instant, None for a graph that nobody knows."""
        return await self._instant(RESUME, graph)

    async def graphs(self) -> list[str]:
        """Return every graph that a replica has ever had in its schedule."""
        return [row["graph"] for row in await self._rows(GRAPHS, [self.space])]

    async def status(self) -> list[dict[str, Any]]:
        """Return each graph with its newest run and how many of its ticks are open."""
        return await self._rows(STATUS, [self.space])

    async def backlog(self, graph: str | None) -> list[dict[str, Any]]:
        """Return every tick that has not come to its end: what it waits for, since when, which attempt, who had it last."""
        return await self._rows(BACKLOG, [self.space, graph, graph])

    async def history(self, graph: str, *, count: int) -> list[dict[str, Any]]:
        """Return the graph's newest ticks."""
        return await self._rows(HISTORY, [self.space, graph, None, None, count])

    async def tick(self, tick: Tick) -> dict[str, Any] | None:
        """Return the tick's row, if there is one."""
        rows = await self._rows(HISTORY, [self.space, tick.graph, tick.fire_time, tick.fire_time, 1])
        return rows[0] if rows else None

    async def _instant(self, statement: Any, graph: str) -> datetime | None:
        row = await (await self.connection.execute(statement, (self.space, graph))).fetchone()
        instant: datetime | None = row and row[0].astimezone(UTC)
        return instant

    async def _rows(self, statement: Any, parameters: Sequence[Any]) -> list[dict[str, Any]]:
        async with self.connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(statement, parameters)
            return [
                {
                    key: value.astimezone(UTC) if isinstance(value, datetime) else value
                    for key, value in row.items()
                }
                for row in await cursor.fetchall()
            ]
