"""A ledger that has grown before Postgres has any statistics of it, and how many of its rows have been read.

Plans are kept from when the tables were tiny: what reads whole tables then is slower with each tick, until the first
ANALYZE.
"""

from typing import Any

import psycopg

from tickd.lock import LockSession


# By then a connection's plans are generic, and kept.
ROUNDS = 15
FEW = 1000
READ = """
SELECT COALESCE(sum(seq_tup_read + COALESCE(idx_tup_fetch, 0)), 0)::int
FROM pg_stat_user_tables WHERE schemaname = 'tickd'
"""
GROW = """
WITH ticks AS (
    INSERT INTO tickd.ticks (space, graph, fire_time, attempt, token, replica, thread_id, run_id, outcome, mode)
    SELECT 7301, CASE n %% 4 WHEN 0 THEN %(graph)s ELSE 'old-' || n %% 5000 END,
           timestamptz '2026-01-01T00:00Z' + n * interval '1 s', 1, n, 'a', 'old-' || n, gen_random_uuid(), 'ran', %(mode)s
    FROM generate_series(1, 20000) AS n
    RETURNING graph, thread_id
), graphs AS (
    INSERT INTO tickd.graphs (space, graph, key) SELECT 7301, graph, 0 FROM ticks ON CONFLICT DO NOTHING
)
INSERT INTO tickd.threads (thread_id, space, graph, token) SELECT thread_id, 7301, graph, 0 FROM ticks
"""


def grow(admin_dsn: str, *, graph: str, mode: str) -> None:
    """Put 20,000 ticks that have ended into the ledger, a quarter of them of this graph."""
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(GROW, {"graph": graph, "mode": mode})


async def rows_read(session: LockSession, admin_dsn: str) -> Any:
    """Return how many rows of tickd's tables everybody has read so far, this session to its last statement."""
    await session.fetch("SELECT pg_stat_force_next_flush()")
    async with await psycopg.AsyncConnection.connect(admin_dsn, autocommit=True) as connection:
        row = await (await connection.execute(READ)).fetchone()
    assert row is not None
    return row[0]
