"""Plans purchase orders: what to buy, from whom, so that nothing runs out.

It reads the stock, the open orders and the suppliers' feed, and writes one plan per tick. It works everything out from the
current state of its tables, so a tick that is skipped costs nothing: the next one sees the same and more. Writing replaces
the tick's own plan, so a tick that is run again (after a crash, from a checkpoint) leaves the same rows as a first run.

    START ─┬─ read_stock ──────────┬─ plan_orders ── write_plan ── END
           ├─ read_open_orders ────┤
           └─ read_supplier_feed ──┘
"""

import asyncio
import math
import os
from datetime import datetime
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row


class Restock(TypedDict, total=False):
    """The state: the entry's input first, then what each node adds."""

    feed_down: bool
    feed_pause_ms: int
    stock: list[dict[str, Any]]
    on_order: dict[str, int]
    offers: dict[str, list[dict[str, Any]]]
    orders: list[dict[str, Any]]
    short: list[str]
    total_cents: int


STOCK = """
SELECT sku, on_hand, counted_at, sold_per_hour, reorder_point, order_up_to
FROM warehouse.stock
ORDER BY sku
"""
OPEN_ORDERS = """
SELECT sku, sum(quantity)::int AS quantity
FROM warehouse.purchase_order
WHERE received_at IS NULL
GROUP BY sku
"""
SUPPLIERS = "SELECT DISTINCT supplier FROM warehouse.supplier_offer ORDER BY supplier"
OFFERS = """
SELECT sku, supplier, unit_cents, pack_size, available, lead_hours
FROM warehouse.supplier_offer
WHERE supplier = %s
ORDER BY sku
"""
FORGET_OWN_PLAN = "DELETE FROM warehouse.purchase_plan WHERE fire_time = %s"
FORGET_OLD_PLANS = "DELETE FROM warehouse.purchase_plan WHERE fire_time < %s::timestamptz - interval '1 hour'"
WRITE_ORDER = """
INSERT INTO warehouse.purchase_plan (fire_time, sku, supplier, quantity, unit_cents)
VALUES (%(fire_time)s, %(sku)s, %(supplier)s, %(quantity)s, %(unit_cents)s)
"""


async def read_stock(state: Restock) -> Restock:
    """Read what was counted, and how fast it sells."""
    async with await connect() as connection:
        rows = await (await connection.execute(STOCK)).fetchall()
    return {"stock": [{**row, "counted_at": row["counted_at"].isoformat()} for row in rows]}


async def read_open_orders(state: Restock) -> Restock:
    """Read what is on its way, by article."""
    async with await connect() as connection:
        rows = await (await connection.execute(OPEN_ORDERS)).fetchall()
    return {"on_order": {row["sku"]: row["quantity"] for row in rows}}


async def read_supplier_feed(state: Restock) -> Restock:
    """Read the offers, one supplier after the other, with a pause between: suppliers ask for that."""
    if state.get("feed_down"):
        raise RuntimeError("supplier feed down")
    offers: dict[str, list[dict[str, Any]]] = {}
    async with await connect() as connection:
        for row in await (await connection.execute(SUPPLIERS)).fetchall():
            for offer in await (await connection.execute(OFFERS, [row["supplier"]])).fetchall():
                offers.setdefault(offer["sku"], []).append(dict(offer))
            await asyncio.sleep(state.get("feed_pause_ms", 0) / 1000)  # noqa: TID251  # the pause is the point
    return {"offers": offers}


async def plan_orders(state: Restock, config: RunnableConfig) -> Restock:
    """Decide what to order as of the fire time."""
    now = datetime.fromisoformat(config["metadata"]["tickd_fire_time"])
    orders: list[dict[str, Any]] = []
    short: list[str] = []
    for item in state["stock"]:
        sku = item["sku"]
        offers = state["offers"].get(sku, [])
        missing = quantity_missing(item, state["on_order"].get(sku, 0), offers, now)
        if missing <= 0:
            continue
        order = cheapest(offers, missing)
        if order is None:
            short.append(sku)
        else:
            orders.append(order)
    total = sum(order["quantity"] * order["unit_cents"] for order in orders)
    return {"orders": orders, "short": short, "total_cents": total}


async def write_plan(state: Restock, config: RunnableConfig) -> None:
    """Replace the plan of this tick, in one transaction, and drop the plans of an hour ago."""
    fire_time = config["metadata"]["tickd_fire_time"]
    async with await connect() as connection, connection.cursor() as cursor:
        await cursor.execute(FORGET_OWN_PLAN, [fire_time])
        await cursor.executemany(
            WRITE_ORDER, [{**order, "fire_time": fire_time} for order in state["orders"]]
        )
        await cursor.execute(FORGET_OLD_PLANS, [fire_time])


def quantity_missing(item: dict[str, Any], on_order: int, offers: list[dict[str, Any]], now: datetime) -> int:
    """Return how many to order: 0 while the stock lasts until the slowest offer would arrive.

    Stock falls from its count at the rate of sale, and not below nothing.
    """
    hours = (now - datetime.fromisoformat(item["counted_at"])).total_seconds() / 3600
    hours += max((offer["lead_hours"] for offer in offers), default=0)
    left = max(0, item["on_hand"] - math.floor(item["sold_per_hour"] * hours)) + on_order
    return item["order_up_to"] - left if left < item["reorder_point"] else 0


def cheapest(offers: list[dict[str, Any]], missing: int) -> dict[str, Any] | None:
    """Return the cheapest order of whole packs that covers what is missing, or None if nobody has so many."""
    orders = [
        {
            "sku": offer["sku"],
            "supplier": offer["supplier"],
            "quantity": math.ceil(missing / offer["pack_size"]) * offer["pack_size"],
            "unit_cents": offer["unit_cents"],
        }
        for offer in offers
        if math.ceil(missing / offer["pack_size"]) * offer["pack_size"] <= offer["available"]
    ]
    return min(
        orders, key=lambda order: (order["quantity"] * order["unit_cents"], order["supplier"]), default=None
    )


async def connect() -> AsyncConnection[DictRow]:
    """Connect to the database that tickd itself uses; the tables are beside its own."""
    return await AsyncConnection.connect(os.environ["TICKD_DATABASE_URL"], row_factory=dict_row)


builder = StateGraph(Restock)
builder.add_node("read_stock", read_stock)
builder.add_node("read_open_orders", read_open_orders)
builder.add_node("read_supplier_feed", read_supplier_feed)
builder.add_node("plan_orders", plan_orders)
builder.add_node("write_plan", write_plan)
for reader in ("read_stock", "read_open_orders", "read_supplier_feed"):
    builder.add_edge(START, reader)
builder.add_edge(["read_stock", "read_open_orders", "read_supplier_feed"], "plan_orders")
builder.add_edge("plan_orders", "write_plan")
builder.add_edge("write_plan", END)
graph = builder.compile()
