"""The example graphs in config/, on a real Postgres."""

import importlib.util
import logging
from pathlib import Path

import psycopg
import pytest


CONFIG = Path(__file__).parent.parent.parent / "config"
FIRE_TIME = "2026-05-04T12:00:00Z"
TICK = {"metadata": {"tickd_fire_time": FIRE_TIME}}
PLAN = "SELECT sku, supplier, quantity FROM warehouse.purchase_plan WHERE fire_time = %s ORDER BY sku"


def load(name):
    """Load an example as tickd does: from its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", CONFIG / "graphs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def connection(dsn, monkeypatch):
    """The test's database, which the graphs find in the environment as they do in a replica."""
    monkeypatch.setenv("TICKD_DATABASE_URL", dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def warehouse(connection):
    """The seeded tables, counted two hours before the tick."""
    connection.execute((CONFIG / "seed.sql").read_bytes())
    connection.execute(
        "UPDATE warehouse.stock SET counted_at = %s::timestamptz - interval '2 hours'", [FIRE_TIME]
    )
    return connection


async def plan(warehouse, tick=TICK, **state):
    """Run restock_plan for a tick; return its final state and the rows of its plan."""
    result = await load("restock").graph.ainvoke(state, config=tick)
    return result, warehouse.execute(PLAN, [FIRE_TIME]).fetchall()


async def test_what_falls_below_its_reorder_point_is_ordered_in_whole_packs(warehouse):
    """The plan follows from stock, rate of sale, open orders and offers, and from nothing else."""
    result, rows = await plan(warehouse)

    # Not among them: what lasts until a delivery (cable-5m, lamp-led), and what is on its way (bolt-m6, filler, tape-50).
    assert rows == [
        ("bolt-m8", "northbolt", 1600),
        ("drill-4", "abrasives", 500),
        ("gloves-l", "allround", 300),
        ("nut-m6", "northbolt", 2500),
        ("sand-120", "abrasives", 1000),
        ("washer-6", "northbolt", 3000),
    ]
    assert result["total_cents"] == 1600 * 8 + 500 * 105 + 300 * 210 + 2500 * 3 + 1000 * 22 + 3000 * 2


async def test_an_order_nobody_can_deliver_is_reported_short(warehouse):
    """A plan that silently leaves an article out would look complete: 48 are missing, and 20 are to be had."""
    result, rows = await plan(warehouse)

    assert result["short"] == ["paint-w"]
    assert "paint-w" not in {sku for sku, *_ in rows}


async def test_the_dearer_supplier_is_taken_when_the_cheaper_one_has_too_few(warehouse):
    """The cheapest offer that cannot be met is no offer."""
    warehouse.execute("UPDATE warehouse.supplier_offer SET available = 475 WHERE supplier = 'abrasives'")

    _, rows = await plan(warehouse)

    assert ("drill-4", "allround", 500) in rows


async def test_a_tick_that_runs_again_leaves_the_plan_of_one_run(warehouse):
    """After a crash a tick may run twice; what it planned first must not stay beside what it plans then."""
    await plan(warehouse)
    warehouse.execute("UPDATE warehouse.stock SET on_hand = order_up_to, sold_per_hour = 0")
    warehouse.execute("UPDATE warehouse.stock SET on_hand = 0 WHERE sku = 'lamp-led'")

    _, rows = await plan(warehouse)

    assert rows == [("lamp-led", "allround", 100)]


async def test_plans_of_more_than_an_hour_ago_are_dropped(warehouse):
    """An example that runs every five seconds must not fill the disk."""
    warehouse.execute(
        "INSERT INTO warehouse.purchase_plan SELECT %s::timestamptz - age, 'filler', 'allround', 6, 340"
        " FROM unnest(ARRAY[interval '61 minutes', interval '59 minutes']) AS age",
        [FIRE_TIME],
    )

    await plan(warehouse)

    others = warehouse.execute(
        "SELECT count(*) FROM warehouse.purchase_plan WHERE fire_time < %s", [FIRE_TIME]
    )
    assert others.fetchone() == (1,)


async def test_a_feed_that_is_down_fails_the_tick_and_writes_nothing(warehouse):
    """Half a plan is worse than none."""
    with pytest.raises(RuntimeError, match="supplier feed down"):
        await plan(warehouse, feed_down=True)

    assert warehouse.execute(PLAN, [FIRE_TIME]).fetchall() == []


@pytest.fixture
def table(connection):
    """A table of 1000 rows that autovacuum leaves alone."""
    connection.execute("CREATE TABLE pallets (id integer, shelf text) WITH (autovacuum_enabled = false)")
    connection.execute("INSERT INTO pallets SELECT n, 'a' FROM generate_series(1, 1000) AS n")
    count(connection)
    return connection


def count(connection):
    """Have the session's counters published now; Postgres would take up to a second."""
    connection.execute("SELECT pg_stat_force_next_flush()")


async def findings(connection):
    """Run table_health on counters that are up to date, and return what it finds."""
    count(connection)
    return (await load("health").graph.ainvoke({}))["findings"]


async def test_a_table_that_was_never_analysed_is_reported(table):
    """The planner knows nothing about it."""
    assert await findings(table) == ["public.pallets has 1000 rows and was never analysed"]


async def test_bloat_is_reported_with_its_share(table, caplog):
    """Dead rows are read and paid for by every scan until somebody vacuums; the log has to say so."""
    table.execute("ANALYZE pallets")
    table.execute("DELETE FROM pallets WHERE id <= 400")

    with caplog.at_level(logging.WARNING, "table_health"):
        found = await findings(table)

    assert "public.pallets is bloated: 40% of 1000 rows are dead" in found
    assert "40% of 1000 rows are dead" in caplog.text


async def test_statistics_that_have_aged_are_reported(table):
    """After many changes the planner plans for a table that no longer exists."""
    table.execute("ANALYZE pallets")
    table.execute("INSERT INTO pallets SELECT n, 'b' FROM generate_series(1, 500) AS n")

    assert await findings(table) == ["public.pallets has stale statistics: 500 changes since ANALYZE"]


async def test_a_healthy_database_is_left_unmentioned(table, caplog):
    """A warning per tick about nothing teaches people not to read warnings."""
    table.execute("ANALYZE pallets")

    assert await findings(table) == []
    assert caplog.text == ""
