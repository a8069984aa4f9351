"""The database restarts, fails over, changes its password or is overloaded: the daemon lives, and says what it cost."""

from collections import Counter
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.cluster import Cluster
from tests.database import Database
from tests.proxy import Proxy
from tests.replicas import Fleet
from tests.witness import GRAPHS, Witness
from tickd.tick import parse_instant


pytestmark = pytest.mark.chaos

SECOND = timedelta(seconds=1)
LEDGER = "SELECT fire_time, replica, outcome FROM tickd.ticks WHERE graph = 'restock' ORDER BY fire_time"

END_OTHERS = """
SELECT count(pg_terminate_backend(pid)) AS ended FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'tickd/%%'
"""


def test_fast_restarts_under_load_cost_what_was_running_and_nothing_else(
    fleet: Fleet, private_cluster: Cluster, private_database: Database, witness: Witness
):
    """Without a check, the pool would hand out one dead connection after the other; a lost run must not say `ran`."""
    fleet.dsn = private_database.dsn
    restock = {"graph": f"{GRAPHS}:steps", "every": "1s", "grace": "10s"}
    schedule = fleet.schedule(
        {
            "restock": {**restock, "input": {"seconds": 0.3, "steps": 5}},
            "pack_audit": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "10s"},
        }
    )
    for name in "ab":
        fleet.start(name, schedule)
    for replica in fleet.replicas:
        replica.wait_for("daemon.ready")
    after = 0
    struck = []
    for _ in range(2):
        node = witness.wait_for_begin("restock", "step_2", after=after)
        struck.append((node.replica, node.token))
        private_cluster.restart("fast")
        after = witness.last()
        following = witness.wait_for_begin("restock", "step_5", after=after)
        assert following.token > node.token
    assert fleet.stop() == [0, 0]

    for name, token in struck:
        (end,) = [line for line in fleet.named(name).terminal_lines("restock") if line.get("token") == token]
        assert end["event"] in {"tick.lock_lost", "tick.failed"}
    for graph in ("restock", "pack_audit"):
        for replica in fleet.replicas:
            seconds = sorted(parse_instant(line["fire_time"]) for line in replica.terminal_lines(graph))
            assert seconds == [seconds[0] + n * SECOND for n in range(len(seconds))], replica.said()
    assert fleet.lines("tick.error") == []
    assert (witness.overlaps(), witness.repeats()) == ([], [])
    with psycopg.connect(private_database.admin_dsn) as connection:
        rows = connection.execute(LEDGER).fetchall()
    ran = {
        (parse_instant(line["fire_time"]), line["replica"])
        for line in fleet.lines("tick.ran", graph="restock")
    }
    assert {(fire_time, replica) for fire_time, replica, outcome in rows if outcome == "ran"} == ran


def test_a_hold_on_a_primary_that_is_no_more_is_lost_though_its_session_lives(
    fleet: Fleet, private_database: Database, standby: Cluster, witness: Witness
):
    """The old primary still answers. Nothing but its timeline tells that the lock there excludes nobody any more."""
    port = int(conninfo_to_dict(private_database.admin_dsn)["port"] or 5432)
    restock = {"graph": f"{GRAPHS}:steps", "every": "1s", "grace": "10s"}
    schedule = fleet.schedule({"restock": {**restock, "input": {"seconds": 0.1, "steps": 500}}})
    with Proxy(port) as proxy:
        fleet.dsn = private_database.dsn.replace(f":{port}/", f":{proxy.port}/")
        replica = fleet.start("a", schedule)
        started = replica.wait_for("tick.started")
        witness.wait_for_begin("restock", "step_3")

        with psycopg.connect(standby.admin_dsn(private_database.name), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")
            proxy.upstream = standby.port
            lost = replica.wait_for("tick.lock_lost", timeout=25)
            begun = witness.wait_for_begin("restock", "step_1", after=witness.last())
            witness.wait_for_begin("restock", "step_5", after=begun.id)

            failed_over = replica.wait_for("database.failed_over")
            assert (failed_over["timeline"], failed_over["old_timeline"]) == (2, 1)
            assert (lost["fire_time"], lost["cause"]) == (started["fire_time"], "failover")
            assert "timeline 1" in lost["lock_error"]
            rows = connection.execute(
                "SELECT thread_id FROM checkpoints WHERE thread_id = %s", [begun.thread_id]
            )
            assert len(rows.fetchall()) >= 4
        assert witness.overlaps() == []


@pytest.mark.parametrize("mode", ["skip", "claim"])
def test_while_the_database_is_away_every_tick_has_its_line_in_time_and_a_stop_is_heard(
    fleet: Fleet, database: Database, mode: str
):
    """Each of them looks whether another replica has it, and what cannot be reached takes its time to fail."""
    port = int(conninfo_to_dict(database.admin_dsn)["port"] or 5432)
    restock = {"graph": f"{GRAPHS}:quick", "every": "2s", "grace": "1s", "catch_up": "1s", "mode": mode}
    schedule = fleet.schedule({f"restock_{number}": restock for number in range(30)})
    with Proxy(port) as proxy:
        dsn = database.dsn.replace(f":{port}/", f":{proxy.port}/")
        env = {"TICKD_CONNECT_TIMEOUT": "500ms", "TICKD_DRAIN_TIMEOUT": "5s"}
        replica = fleet.start("a", schedule, dsn=dsn, env=env)
        replica.wait_for("tick.ran", count=30)
        proxy.freeze()
        replica.wait_for("tick.error", count=40, timeout=30)
        late = [
            parse_instant(line["timestamp"]) - parse_instant(line["fire_time"])
            for line in replica.terminal_lines()
        ]
        code = replica.stop(timeout=20)

    assert max(late) < timedelta(seconds=4)
    assert code == 0, replica.said()
    ended = Counter((line["graph"], line["fire_time"]) for line in replica.terminal_lines())
    assert set(ended.values()) == {1}
    for number in range(30):
        seconds = sorted(
            parse_instant(line["fire_time"]) for line in replica.terminal_lines(f"restock_{number}")
        )
        assert seconds == [seconds[0] + 2 * n * SECOND for n in range(len(seconds))]


@pytest.mark.parametrize("way", ["file", "command"])
def test_a_rotated_password_is_taken_up_without_a_restart(
    fleet: Fleet, database: Database, witness: Witness, tmp_path: Path, way: str
):
    """Between the server's change and the file's, a skip would look as if another replica were at it."""
    role = database.role()
    password = tmp_path / "password"
    password.write_text(f"{role.password}\n")
    environment = {
        "file": {"TICKD_DATABASE_PASSWORD_FILE": str(password)},
        "command": {"TICKD_DATABASE_PASSWORD_COMMAND": f"cat {password}"},
    }[way]
    schedule = fleet.schedule(
        {
            "restock": {"graph": f"{GRAPHS}:quick", "every": "1s"},
            "pack_audit": {"graph": f"{GRAPHS}:steps", "every": "8s", "input": {"seconds": 0.1, "steps": 50}},
        }
    )
    replica = fleet.start("a", schedule, dsn=role.dsn.replace(f":{role.password}@", "@"), env=environment)
    long_run = replica.wait_for("tick.started", graph="pack_audit")
    witness.wait_for_begin("pack_audit", "step_3")

    rotate = sql.SQL("ALTER ROLE {} PASSWORD {}")
    database.connection.execute(rotate.format(sql.Identifier(role.name), sql.Literal("n3w-Passw0rd")))
    failed = replica.wait_for("tick.error", graph="restock")
    password.write_text("n3w-Passw0rd\n")
    replica.wait_for("database.reachable")
    ran = replica.wait_for("tick.ran", graph="restock", after=failed)
    replica.wait_for("tick.ran", graph="pack_audit", fire_time=long_run["fire_time"])
    assert replica.stop() == 0

    unreachable = replica.wait_for("database.unreachable")
    assert "password authentication failed" in unreachable["error"]
    assert "password authentication failed" in failed["error"]
    assert failed["reason"] == "db_connect"
    assert ran["fire_time"] > failed["fire_time"]
    assert replica.events("tick.lock_lost") == []
    said = replica.said()
    assert role.password not in said
    assert "n3w-Passw0rd" not in said


def test_an_overloaded_pool_fails_its_ticks_by_name_and_loses_no_hold(
    fleet: Fleet, database: Database, witness: Witness
):
    """Checkpoints wait for connections in the graphs' own pool; holds, looks and sweeps need none of them."""
    graphs = {
        f"graph_{number}": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "10s"} for number in range(4)
    }
    schedule = fleet.schedule(graphs)
    replica = fleet.start("a", schedule, env={"TICKD_POOL_MAX_SIZE": "1", "TICKD_POOL_TIMEOUT": "500ms"})
    replica.wait_for("tick.ran")

    with psycopg.connect(database.admin_dsn) as blocker:
        blocker.execute("LOCK TABLE checkpoints IN ACCESS EXCLUSIVE MODE")
        failed = replica.wait_for("tick.failed", error_type="PoolTimeout")
    for graph in graphs:
        replica.wait_for("tick.ran", graph=graph, after=failed)
    assert replica.stop() == 0

    ends = Counter((line["event"], line.get("error_type")) for line in replica.terminal_lines())
    assert {event for event, _ in ends} <= {"tick.ran", "tick.failed", "tick.skipped"}
    assert {error for event, error in ends if event == "tick.failed"} == {"PoolTimeout"}
    assert (witness.overlaps(), witness.repeats()) == ([], [])


def test_a_database_that_turns_read_only_costs_its_ticks_and_no_replica(
    fleet: Fleet, database: Database, witness: Witness
):
    """A primary that is demoted answers, and refuses to write; sweeps meet it before anybody knows why."""
    schedule = fleet.schedule({"restock": {"graph": f"{GRAPHS}:quick", "every": "1s", "grace": "1s"}})
    replica = fleet.start("a", schedule)
    replica.wait_for("tick.ran")

    name = sql.Identifier(database.name)
    database.connection.execute(
        sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
    )
    witness.query(END_OTHERS)
    failed = replica.wait_for("tick.error", count=3)
    database.connection.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(name))
    witness.query(END_OTHERS)
    replica.wait_for("tick.ran", after=failed)

    assert replica.stop() == 0
    assert (witness.overlaps(), witness.repeats()) == ([], [])
