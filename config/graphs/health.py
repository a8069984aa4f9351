"""Looks after the tables of the database it runs on: which are bloated, and whose statistics are stale.

It reads Postgres' own counters (pg_stat_user_tables) and needs no tables of its own. What it finds is one warning in
the log, and the `findings` of its final state.

    START ── read_tables ── judge ──(findings?)── report ── END
"""

import logging
import os
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from psycopg import AsyncConnection
from psycopg.rows import dict_row


class Health(TypedDict, total=False):
    """The state. The input sets the limits: shares of a table's rows, and the rows below which a table is too small."""

    dead_share: float
    changed_share: float
    least_rows: int
    tables: list[dict[str, Any]]
    findings: list[str]


TABLES = """
SELECT schemaname || '.' || relname AS name,
       n_live_tup AS live,
       n_dead_tup AS dead,
       n_mod_since_analyze AS changed,
       coalesce(last_analyze, last_autoanalyze) IS NOT NULL AS analysed
FROM pg_stat_user_tables
ORDER BY n_dead_tup DESC, name
"""


async def read_tables(state: Health) -> Health:
    """Read the counters of every table."""
    async with await AsyncConnection.connect(
        os.environ["TICKD_DATABASE_URL"], row_factory=dict_row
    ) as connection:
        return {"tables": await (await connection.execute(TABLES)).fetchall()}


async def judge(state: Health) -> Health:
    """Compare each table with the limits."""
    findings = [finding for table in state["tables"] for finding in findings_of(table, state)]
    return {"findings": findings}


async def report(state: Health) -> None:
    """Say what was found; the line reaches tickd's log."""
    logging.getLogger("table_health").warning("%s", "; ".join(state["findings"]))


def findings_of(table: dict[str, Any], limits: Health) -> list[str]:
    """Return what is wrong with a table."""
    rows = table["live"] + table["dead"]
    if rows < limits.get("least_rows", 100):
        return []
    findings = []
    if table["dead"] > limits.get("dead_share", 0.2) * rows:
        findings.append(f"{table['name']} is bloated: {table['dead'] / rows:.0%} of {rows} rows are dead")
    if not table["analysed"]:
        findings.append(f"{table['name']} has {rows} rows and was never analysed")
    elif table["changed"] > limits.get("changed_share", 0.2) * rows:
        findings.append(f"{table['name']} has stale statistics: {table['changed']} changes since ANALYZE")
    return findings


def next_step(state: Health) -> str:
    """Report only what there is to report."""
    return "report" if state["findings"] else END


builder = StateGraph(Health)
builder.add_node("read_tables", read_tables)
builder.add_node("judge", judge)
builder.add_node("report", report)
builder.add_edge(START, "read_tables")
builder.add_edge("read_tables", "judge")
builder.add_conditional_edges("judge", next_step, ["report", END])
builder.add_edge("report", END)
graph = builder.compile()
