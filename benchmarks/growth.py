"""Growth: what tickd's statements cost on an empty ledger and on one of millions of ticks.

The rows come in the order of time, as they would in years of operation, so every graph's rows are spread over the whole
table. Each statement runs in a transaction that is rolled back, often enough for Postgres to go over to a generic plan.
"""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from benchmarks.quantiles import quantile
from benchmarks.server import Database, Server
from tickd import admissions, claim, ledger, operation, retention
from tickd.tick import lock_key


SPACE = 7301
GRAPHS = 10_000
BATCH = 500_000
LAST = datetime(2026, 5, 4, 10, tzinfo=UTC)
ROUNDS = 40
SCAN = re.compile("Seq Scan on (ticks|threads)")
# One tick in a hundred did not simply run; what is open is a handful, at the end.
FILL = """
INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, token, replica, thread_id, run_id, ready_at,
                         admitted_at, finished_at, outcome)
SELECT %(space)s, graph, fire_time, CASE WHEN n %% 10 = 0 THEN 'claim' ELSE 'skip' END, 1, n / %(graphs)s + 1, 'r1',
       graph || '/' || fire_time, gen_random_uuid(), fire_time, fire_time, fire_time + interval '2 s',
       CASE WHEN n %% 100 = 0 THEN 'failed' ELSE 'ran' END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
CROSS JOIN LATERAL (
    SELECT 'old_' || lpad((n %% %(graphs)s)::text, 5, '0') AS graph,
           %(end)s::timestamptz - (%(rows)s - n) / %(graphs)s * interval '1 minute' AS fire_time
) AS made
"""
FILL_THREADS = """
INSERT INTO tickd.threads (thread_id, space, graph, token, held_at)
SELECT 'old_' || lpad((n %% %(graphs)s)::text, 5, '0') || '/' || n, %(space)s,
       'old_' || lpad((n %% %(graphs)s)::text, 5, '0'), n / %(graphs)s + 1, clock_timestamp()
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n
"""
FILL_GRAPHS = """
INSERT INTO tickd.graphs (space, graph, key, token)
SELECT %(space)s, 'old_' || lpad(n::text, 5, '0'), n, 2000000 FROM generate_series(0, %(graphs)s - 1) AS n
"""
# Fifty ticks that run, five that were handed off, and a hundred that wait for somebody's answer.
OPEN = """
INSERT INTO tickd.ticks (space, graph, fire_time, mode, attempt, token, replica, thread_id, run_id, admitted_at, outcome)
SELECT %(space)s, 'old_' || lpad(n::text, 5, '0'), %(end)s::timestamptz + interval '1 minute',
       CASE WHEN n %% 5 = 0 THEN 'claim' ELSE 'skip' END, 1, 2000000, 'r1', 'open/' || n, gen_random_uuid(),
       %(end)s::timestamptz, CASE WHEN n < 50 THEN NULL WHEN n < 55 THEN 'handed_off' ELSE 'interrupted' END
FROM generate_series(0, 154) AS n
"""


def fill(database: Database, rows: int) -> None:
    """Make a ledger of so many ticks and threads, in the order of time, vacuumed as a server at rest has it."""
    facts: dict[str, Any] = {"space": SPACE, "graphs": GRAPHS, "rows": rows, "end": LAST}
    with database.server.admin(database.name) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(FILL_GRAPHS, facts)
        for first in range(1, rows + 1, BATCH):
            chunk = facts | {"first": first, "last": min(rows, first + BATCH - 1)}
            connection.execute(FILL, chunk)
            connection.execute(FILL_THREADS, chunk)
        connection.execute(OPEN, facts)
        connection.execute("VACUUM (ANALYZE) tickd.ticks, tickd.threads, tickd.graphs")


def migrate(database: Database) -> None:
    """Make tickd's tables."""
    environment = {**os.environ, "TICKD_DATABASE_URL": database.dsn}
    command = [sys.executable, "-m", "tickd", "migrate"]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def statements() -> Iterator[tuple[str, Any, Any]]:
    """Return each statement that a replica or an operator sends again and again, with its parameters."""
    graph, new = "old_00777", LAST + timedelta(days=1)
    tick = {"space": SPACE, "graph": graph, "key": lock_key(graph), "replica": "r1", "fire_time": new}
    thread = {"thread_id": f"{graph}/new", "run_id": uuid.UUID(int=1), "heed_interrupt": True}
    outcome = {"outcome": "ran", "error_type": None, "error": None, "attempt": 1, "token": 7}
    claimed = tick | {"graph": "old_00010", "key": 10, "lease": timedelta(seconds=15)}
    names = [f"old_{number:05}" for number in range(200)]
    yield "ADMITTED", ledger.ADMITTED, (names, [LAST] * 200, SPACE)
    yield "HOLD_AND_ADMIT", admissions.HOLD_AND_ADMIT.one, tick | thread
    yield "HOLD_AND_ADMIT, ran already", admissions.HOLD_AND_ADMIT.one, tick | thread | {"fire_time": LAST}
    yield "HOLD_AND_RESUME", admissions.HOLD_AND_RESUME, tick | {"outcome": "handed_off"}
    yield "UNFINISHED", admissions.UNFINISHED, (SPACE, graph)
    yield "RECORD", ledger.RECORD.one, tick | outcome
    yield "WAITING", ledger.WAITING, [SPACE]
    yield "SUSPECTS", ledger.SUSPECTS, [SPACE]
    yield "ANY_OPEN", ledger.ANY_OPEN, [SPACE]
    yield "WORK", claim.WORK, claimed
    due = {
        "graphs": [graph],
        "keys": [1],
        "fire_times": [new],
        "thread_ids": ["t"],
        "run_ids": [uuid.UUID(int=1)],
    }
    limits = {"most": [100], "refusals": ["backlog_full"], "heed_interrupts": [True]}
    yield "ENQUEUE", claim.ENQUEUE, {"space": SPACE} | due | limits
    yield "CLAIM", claim.CLAIM, claimed
    yield "HAS_READY", claim.HAS_READY, {"space": SPACE, "graph": graph}
    renewal = {"lease": timedelta(seconds=15), "space": SPACE, "graph": graph, "fire_time": LAST, "token": 7}
    yield "RENEW", claim.RENEW.one, renewal
    yield "STATUS", operation.STATUS, [SPACE]
    yield "BACKLOG", operation.BACKLOG, [SPACE, None, None]
    yield "HISTORY", operation.HISTORY, [SPACE, graph, None, None, 20]
    batch = {"space": SPACE, "graph": graph, "keep": timedelta(days=3650), "batch": 500}
    yield "FORGET_THREADS, nothing old", retention.FORGET_THREADS, batch
    yield "DELETE_TICKS, nothing old", retention.DELETE_TICKS, batch


def timings(database: Database) -> dict[str, dict[str, Any]]:
    """Return, for each statement, its median in milliseconds and how its plan reads the ledger."""
    found: dict[str, dict[str, Any]] = {}
    with psycopg.connect(database.dsn) as connection:
        for name, query, parameters in statements():
            rounds = []
            for _ in range(3 if name == "STATUS" else ROUNDS):
                began = time.perf_counter()
                connection.execute(query, parameters)
                rounds.append((time.perf_counter() - began) * 1000)
                connection.rollback()
                connection.execute("SELECT pg_advisory_unlock_all()")
            plan = explain(connection, query, parameters)
            # On few rows a scan is the right plan; what counts is whether there is another one.
            connection.execute("SET LOCAL enable_seqscan = off")
            scans = [line for line in explain(connection, query, parameters) if SCAN.search(line)]
            connection.rollback()
            found[name] = {"p50_ms": quantile(sorted(rounds), 0.5), "plan": plan, "scans": scans}
    return found


def explain(connection: psycopg.Connection[Any], query: str, parameters: Any) -> list[str]:
    """Return the lines of a statement's plan."""
    return [row[0] for row in connection.execute(b"EXPLAIN " + query.encode(), parameters)]


def grow(server: Server, rows: int) -> tuple[Database, dict[str, Any]]:
    """Measure a ledger with little in it, then a grown one; return the grown database and the figures."""
    small, large = server.new_database(), server.new_database()
    try:
        migrate(small)
        fill(small, GRAPHS)
        before = timings(small)
    finally:
        small.drop()
    migrate(large)
    began = time.monotonic()
    fill(large, rows)
    filled_s = time.monotonic() - began
    after = timings(large)
    return large, {
        "rows": rows,
        "filled_s": filled_s,
        "statements": {
            name: {
                "small_ms": before[name]["p50_ms"],
                "grown_ms": after[name]["p50_ms"],
                "scans": after[name]["scans"],
                "plan": after[name]["plan"],
            }
            for name in after
        },
    }
