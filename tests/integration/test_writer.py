"""The public way in, async and sync: the same lock, the same row, the same fence as the daemon's."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg import sql
from pydantic import SecretStr

import tickd
import tickd.sync
from tests.database import Server
from tests.fences import config, graph, prepare
from tests.onlooker import Onlooker
from tests.pooler import Pooler
from tests.replicas import python_path
from tickd import LockLost
from tickd.errors import DatabaseUnusable, Unusable
from tickd.fence import is_refused
from tickd.migrations import LOCK_KEY
from tickd.settings import Settings, read_settings
from tickd.tick import Outcome, SkipReason
from tickd.writer import continue_tick


@pytest.fixture
async def settings(dsn: str) -> Settings:
    """The settings of a script on the test's migrated database."""
    await prepare(dsn)
    return read_settings(database_url=dsn, replica="script")


def rows(dsn: str, graph: str) -> list[tuple[Any, ...]]:
    """Return outcome, replica, token and error type of the graph's ticks."""
    with psycopg.connect(dsn) as connection:
        query = (
            "SELECT outcome, replica, token, error_type FROM tickd.ticks WHERE graph = %s ORDER BY fire_time"
        )
        return connection.execute(query, [graph]).fetchall()


async def test_a_block_runs_its_graph_as_a_tick_of_its_own(dsn: str, settings: Settings):
    """What a web handler ran is in the ledger beside what the replicas ran."""
    async with tickd.sole_writer("restock", settings=settings) as hold:
        result = await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)

    assert result["seen"] == ["n0", "n1"]
    assert rows(dsn, "restock") == [("ran", "script", 1, None)]
    assert hold.config["metadata"]["tickd_token"] == 1


async def test_a_second_writer_is_refused_at_once_and_names_the_first(settings: Settings):
    """Nobody waits: the answer is who has it."""
    async with (
        tickd.sole_writer("restock", settings=settings) as first,
        tickd.sole_writer("restock", settings=settings) as second,
    ):
        assert first
        assert not second
        assert second.reason is SkipReason.LOCK_HELD
        assert second.holder is not None
        assert second.holder.replica == "script"
        with pytest.raises(RuntimeError, match="script has it"):
            _ = second.saver


async def test_two_graphs_do_not_block_each_other(settings: Settings):
    """The lock is the graph's, not the application's."""
    async with (
        tickd.sole_writer("restock", settings=settings) as first,
        tickd.sole_writer("audit", settings=settings) as second,
    ):
        assert first
        assert second


async def test_an_exception_ends_the_tick_as_failed_and_lets_go(dsn: str, settings: Settings):
    """The block's own error is the news, and the next writer comes in."""
    with pytest.raises(ZeroDivisionError):
        async with tickd.sole_writer("restock", settings=settings):
            _ = 1 / 0
    async with tickd.sole_writer("restock", settings=settings) as hold:
        assert hold

    assert rows(dsn, "restock") == [("failed", "script", 1, "ZeroDivisionError"), ("ran", "script", 2, None)]


async def test_an_exception_that_has_no_text_ends_the_tick_as_failed_as_well(dsn: str, settings: Settings):
    """Where its text raised, the block's error was lost for that one, and the tick recorded as one that ran."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(Wordless):
        async with tickd.sole_writer("restock", settings=settings):
            raise Wordless

    assert rows(dsn, "restock") == [("failed", "script", 1, "Wordless")]


async def test_a_plain_saver_is_refused_on_a_thread_of_tickd_and_passes_on_others(
    dsn: str, settings: Settings
):
    """The entry point that never asked for the lock is the one that the lock cannot stop."""
    async with tickd.sole_writer("restock", thread_id="restock", settings=settings) as hold:
        await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)

    async with AsyncPostgresSaver.from_conn_string(dsn) as rogue:
        compiled = graph().compile(checkpointer=rogue)
        with pytest.raises(psycopg.Error) as refused:
            await compiled.ainvoke({"seen": []}, config("restock"))
        passed = await compiled.ainvoke({"seen": []}, config("of somebody else"))

    assert is_refused(refused.value)
    assert "graph restock" in str(refused.value)
    assert passed["seen"] == ["n0", "n1"]


async def test_a_terminated_session_sets_lost_and_ends_in_lock_lost(
    dsn: str, admin_dsn: str, settings: Settings
):
    """Code that goes on after its lock is gone has to learn that what it did was not alone."""
    with pytest.raises(LockLost):  # noqa: PT012  # the block is the test: it is left by the exception
        async with tickd.sole_writer("restock", settings=settings) as hold:
            with psycopg.connect(admin_dsn, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 7301"
                )
            await hold.lost.wait()

    assert rows(dsn, "restock") == [(None, "script", 1, None)]


async def test_an_interrupted_tick_is_continued_once(dsn: str, settings: Settings):
    """The answer to an interrupt goes to the thread that asked, under the lock, and only as long as it asks."""
    async with tickd.sole_writer("restock", settings=settings) as hold:
        hold.outcome = Outcome.INTERRUPTED
    async with continue_tick(hold.tick, settings=settings) as again:
        assert again
        assert again.config["configurable"]["thread_id"] == str(hold.tick)
        assert again.config["metadata"]["tickd_attempt"] == 2
    async with continue_tick(hold.tick, settings=settings) as late:
        assert (bool(late), late.reason) == (False, None)

    assert rows(dsn, "restock") == [("ran", "script", 2, None)]


async def test_an_outcome_may_be_a_word_and_a_wrong_one_is_the_blocks_own_error(dsn: str, settings: Settings):
    """The names of outcomes are no public import; what cannot be recorded must not leave a tick that seems to run."""
    async with tickd.sole_writer("restock", settings=settings) as hold:
        hold.outcome = "interrupted"
    with pytest.raises(ValueError, match="done"):
        async with tickd.sole_writer("audit", settings=settings) as hold:
            hold.outcome = "done"

    assert rows(dsn, "restock") == [("interrupted", "script", 1, None)]
    assert rows(dsn, "audit") == [("failed", "script", 1, "ValueError")]


async def test_a_thread_may_be_made_from_the_tick(settings: Settings):
    """`thread` of the schedule is a rule, not a name."""
    async with tickd.sole_writer(
        "restock", thread_id=lambda tick: f"t-{tick.graph}", settings=settings
    ) as hold:
        assert hold.config["configurable"]["thread_id"] == "t-restock"


async def test_an_empty_name_is_refused(settings: Settings):
    """All nameless graphs would exclude each other."""
    with pytest.raises(Unusable, match="needs a name"):
        async with tickd.sole_writer("", settings=settings):
            pass


async def test_an_unreachable_database_is_named_without_its_password():
    """A script's traceback ends up in tickets."""
    settings = read_settings(database_url="postgresql://u:Sw0rdf1sh@127.0.0.1:1/x")

    with pytest.raises(DatabaseUnusable, match=r"u@127\.0\.0\.1:1/x cannot be reached") as refused:
        async with tickd.sole_writer("restock", settings=settings):
            pass

    assert "Sw0rdf1sh" not in str(refused.value)


@pytest.mark.parametrize("ignored", ["", "ignore_startup_parameters = options"])
async def test_a_lock_through_a_pooler_is_refused(
    dsn: str, settings: Settings, server: Server, onlooker: Onlooker, ignored: str
):
    """The lock would stay on one backend of the pooler's, and the unlock go to another: the graph would be held for good."""
    pooler = Pooler(server.admin)
    try:
        with (pooler.home / "pgbouncer.ini").open("a") as config:
            config.write(f"{ignored}\n")
        pooler.start()
        through = settings.model_copy(update={"database_url": SecretStr(pooler.through(dsn))})
        with pytest.raises(DatabaseUnusable, match="goes through a connection pooler"):
            async with tickd.sole_writer("restock", settings=through):
                pass
        assert onlooker.locks() == []
        # Checkpoints may go through it.
        both = through.model_copy(update={"lock_database_url": settings.database_url})
        async with tickd.sole_writer("restock", settings=both) as hold:
            result = await graph().compile(checkpointer=hold.saver).ainvoke({"seen": []}, hold.config)
    finally:
        pooler.remove()

    assert result["seen"] == ["n0", "n1"]


async def test_a_database_without_tables_or_rights_is_said_to_be_so(
    dsn: str, tmp_path: Path, onlooker: Onlooker
):
    """Nobody learns from `relation does not exist` what to do, nor from a traceback."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "asks.py").write_text(ASKS)
    with pytest.raises(DatabaseUnusable, match="run `tickd migrate`"):
        async with tickd.sole_writer("asks", settings=read_settings(database_url=dsn, replica="script")):
            pass
    bare = run(tmp_path, dsn, "fire", "asks")

    await prepare(dsn)
    role = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    onlooker.connection.execute(
        sql.SQL(
            "REVOKE ALL ON ALL TABLES IN SCHEMA tickd FROM {0}; ALTER SCHEMA tickd OWNER TO postgres"
        ).format(sql.Identifier(str(role)))
    )
    forbidden = [
        run(tmp_path, dsn, *words)
        for words in (["fire", "asks"], ["status"], ["why", "asks", "2026-05-04T10:00Z"])
    ]

    assert (bare.returncode, [each.returncode for each in forbidden]) == (3, [3, 3, 3])
    assert "run `tickd migrate`" in bare.stderr
    for each in forbidden:
        assert "permission denied for" in each.stderr
        assert "Traceback" not in each.stderr


@pytest.mark.usefixtures("settings")
async def test_what_postgres_cannot_have_is_a_fault_of_the_command_line(dsn: str, tmp_path: Path):
    """A name that is no text, and a number that is none of Postgres', were tracebacks."""
    for words in (["history", "x", "--count", "9" * 30], ["why", "\udcff", "2026-05-04T10:00Z"]):
        asked = run(tmp_path, dsn, *words)
        assert (asked.returncode, "Traceback" in asked.stderr) == (2, False), asked.stderr


@pytest.mark.usefixtures("settings")
async def test_an_order_to_a_read_only_server_is_refused_in_a_sentence(dsn: str, tmp_path: Path):
    """To ask, a standby will do; to pause, it will not."""
    read_only = f"{dsn}{'&' if '?' in dsn else '?'}options=-c%20default_transaction_read_only%3Don"

    assert run(tmp_path, read_only, "status").returncode == 0
    refused = run(tmp_path, read_only, "pause", "restock")

    assert (refused.returncode, "Traceback" in refused.stderr) == (3, False), refused.stderr
    assert "read-only" in refused.stderr


def test_without_an_event_loop_the_same_lock_and_the_same_saver(dsn: str):
    """A notebook and a cron script have no loop, and the same threads to spoil."""
    import asyncio  # noqa: PLC0415  # only this test has no loop

    asyncio.run(prepare(dsn))
    settings = read_settings(database_url=dsn, replica="script")
    with tickd.sync.sole_writer("restock", settings=settings) as hold:
        result = graph().compile(checkpointer=hold.saver).invoke({"seen": []}, hold.config)
        with tickd.sync.sole_writer("restock", settings=settings) as second:
            assert not second
    with (
        pytest.raises(ZeroDivisionError),
        tickd.sync.sole_writer("restock", settings=settings),
    ):
        _ = 1 / 0

    assert result["seen"] == ["n0", "n1"]
    assert rows(dsn, "restock") == [("ran", "script", 1, None), ("failed", "script", 2, "ZeroDivisionError")]


BLOCKED = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def test_a_ctrl_c_while_the_hold_is_being_taken_lets_it_go(dsn: str, admin_dsn: str, onlooker: Onlooker):
    """In a notebook the process lives on, and would keep the graph from every replica until it ends."""
    import asyncio  # noqa: PLC0415  # as above

    asyncio.run(prepare(dsn))
    settings = read_settings(database_url=dsn, replica="script")

    interrupted = threading.Event()

    def note(*_: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        asyncio.run(onlooker.until(lambda: onlooker.value(BLOCKED) == 1))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait(10)
        blocking.rollback()

    before = signal.signal(signal.SIGINT, note)
    try:
        with psycopg.connect(admin_dsn) as blocking:
            blocking.execute("LOCK TABLE tickd.threads")
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt), tickd.sync.sole_writer("restock", settings=settings):
                pass
    finally:
        signal.signal(signal.SIGINT, before)

    assert onlooker.rows("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = 7301") == []
    assert rows(dsn, "restock") == [("failed", "script", 1, "KeyboardInterrupt")]


SCHEDULE = """
graphs:
  asks:
    graph: ./asks.py:graph
    every: 1d
"""
ASKS = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

from langgraph.types import interrupt


class State(TypedDict, total=False):
    answer: str


def ask(state):
    return {"answer": interrupt("approve?")}


graph = StateGraph(State)
graph.add_node("ask", ask)
graph.add_edge(START, "ask")
"""
ASKS_TWICE = ASKS.replace('interrupt("approve?")', 'interrupt("approve?") or interrupt("sure?")')
# Two that write nothing, for in one super-step only one may write.
ASKS_BOTH = f"""{ASKS.replace("return", "")}
graph.add_node("ask_too", ask)
graph.add_edge(START, "ask_too")
"""
STOPS = """
from typing import TypedDict
from langgraph.graph import START, StateGraph


class State(TypedDict, total=False):
    answer: str


graph = StateGraph(State)
graph.add_sequence([("one", lambda _: {}), ("two", lambda _: {})])
graph.add_edge(START, "one")
"""
BELOW = """
from langgraph.graph import START, StateGraph

from asks import State, graph as below


graph = StateGraph(State)
graph.add_node("below", below.compile())
graph.add_edge(START, "below")
"""
FACTORIES = """
import asyncio
import contextlib
from langgraph.graph import START, StateGraph

begun, broken_down = asyncio.Event(), asyncio.Event()


async def works(state):
    return {}


async def fails(state):
    raise ValueError("no model")


async def waits_for_the_breakdown(state):
    begun.set()
    await broken_down.wait()


def graph():
    builder = StateGraph(dict)
    builder.add_node("node", NODE)
    builder.add_edge(START, "node")
    return builder


@contextlib.asynccontextmanager
async def swallows():
    with contextlib.suppress(ValueError):
        yield graph()


@contextlib.asynccontextmanager
async def breaks_down():
    async def client():
        await begun.wait()
        asyncio.get_running_loop().call_soon(broken_down.set)
        raise ConnectionError("tool server went away")

    async with asyncio.TaskGroup() as clients:
        clients.create_task(client())
        yield graph()


@contextlib.asynccontextmanager
async def cannot_close():
    yield graph()
    raise OSError("disk full")
"""
# A sync node that goes on for a while after the run was cancelled, and notes whether the tick was over meanwhile.
WORKS_ON = """
import asyncio
import os
import threading
from pathlib import Path
import psycopg
from langgraph.graph import START, StateGraph

cancelled = threading.Event()


async def waits(state):
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


def works_on(state):
    assert cancelled.wait(20)
    with psycopg.connect(os.environ["TICKD_DATABASE_URL"], autocommit=True) as connection:
        for _ in range(50):
            ((outcome, _),) = connection.execute("SELECT outcome, pg_sleep(0.02) FROM tickd.ticks").fetchall()
            if outcome:
                break
    Path("seen").write_text(str(outcome))


graph = StateGraph(dict)
graph.add_node("waits", waits)
graph.add_node("works_on", works_on)
graph.add_edge(START, "waits")
graph.add_edge(START, "works_on")
"""
REFUSE_QUESTIONS = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk full'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON checkpoint_writes FOR EACH ROW
WHEN (NEW.checkpoint_ns <> '' AND NEW.channel = '__interrupt__') EXECUTE FUNCTION refuse()
"""


def run(
    folder: Path, dsn: str, *words: str, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run one command of tickd in the folder."""
    return subprocess.run(
        [sys.executable, "-m", "tickd", *words],
        cwd=folder,
        env={"TICKD_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin", "COLUMNS": "200", **python_path()},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.usefixtures("settings")
async def test_fire_runs_now_and_resume_tick_answers(dsn: str, tmp_path: Path):
    """A graph that waits for a person is fired, shown, and answered from the same terminal."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "asks.py").write_text(ASKS)

    fired = run(tmp_path, dsn, "fire", "asks")
    assert fired.returncode == 0, fired.stderr
    assert "interrupted" in fired.stdout
    assert "approve?" in fired.stdout
    fire_time = fired.stdout.split()[0].removeprefix("asks/")
    waiting = run(tmp_path, dsn, "backlog")
    assert "interrupted" in waiting.stdout

    answered = run(tmp_path, dsn, "resume-tick", "asks", fire_time, "--value", '"yes"')
    assert answered.returncode == 0, answered.stderr
    assert " ran in " in answered.stdout
    assert run(tmp_path, dsn, "backlog").stdout == "Nothing waits.\n"
    assert "ran: the graph finished" in run(tmp_path, dsn, "why", "asks", fire_time).stdout
    again = run(tmp_path, dsn, "resume-tick", "asks", fire_time, "--value", '"yes"')
    assert again.returncode == 1
    assert "was not run: it waits on no interrupt" in again.stdout
    never = run(tmp_path, dsn, "resume-tick", "asks", "2026-05-04T10:00:00Z", "--value", "1", "--json")
    assert (never.returncode, json.loads(never.stdout)["reason"]) == (1, None)


@pytest.mark.usefixtures("settings")
async def test_a_fired_tick_ends_as_it_does_whoever_reads_of_it(dsn: str, tmp_path: Path):
    """A terminal that is gone would have failed a tick that waits for its answer."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "asks.py").write_text(ASKS.replace('"approve?"', '{"approve?"}'))

    told = run(tmp_path, dsn, "fire", "asks", "--json")
    assert json.loads(told.stdout)["interrupts"] == [["approve?"]], told  # a set is no JSON
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        run(tmp_path, dsn, "fire", "asks", stdout=nobody)

    assert [row[0] for row in rows(dsn, "asks")] == ["interrupted", "interrupted"]


@pytest.mark.usefixtures("settings")
async def test_an_answer_that_is_null_is_an_answer_and_answers_the_one_question(dsn: str, tmp_path: Path):
    """The page on effects asks for it; and the next question has to be asked, not answered by the same."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE.replace("asks.py:graph", "below.py:graph"))
    (tmp_path / "asks.py").write_text(ASKS_TWICE)
    (tmp_path / "below.py").write_text(BELOW)

    fired = run(tmp_path, dsn, "fire", "asks")
    fire_time = fired.stdout.split()[0].removeprefix("asks/")
    resume = ("resume-tick", "asks", fire_time, "--value")
    once, twice = run(tmp_path, dsn, *resume, "null"), run(tmp_path, dsn, *resume, '"yes"')

    assert "['sure?']" in once.stdout, once
    assert " ran in " in twice.stdout, twice


@pytest.mark.usefixtures("settings")
async def test_a_tick_that_asks_several_things_is_answered_one_by_one(dsn: str, tmp_path: Path):
    """An answer to which question nobody knows would fail the tick, and nobody could answer it any more."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "asks.py").write_text(ASKS_BOTH)

    fired = run(tmp_path, dsn, "fire", "asks")
    fire_time = fired.stdout.split()[0].removeprefix("asks/")
    resume = ("resume-tick", "asks", fire_time, "--value")
    refused = run(tmp_path, dsn, *resume, '"yes"')
    one, other = re.findall("'([0-9a-f]{32})'", refused.stderr)
    half = run(tmp_path, dsn, *resume, json.dumps({one: "yes"}))
    whole = run(tmp_path, dsn, *resume, json.dumps({other: "yes"}))

    assert (refused.returncode, "several things" in refused.stderr) == (2, True), refused
    assert "interrupted in" in half.stdout, half
    assert " ran in " in whole.stdout, whole


@pytest.mark.usefixtures("settings")
async def test_a_fired_graph_that_stops_at_a_breakpoint_is_interrupted_each_time(dsn: str, tmp_path: Path):
    """A breakpoint ends a run like success, in a subgraph too; told as the end, nobody would go on."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE.replace("asks.py:graph", "below.py:graph"))
    (tmp_path / "asks.py").write_text(STOPS)
    (tmp_path / "below.py").write_text(BELOW.replace("compile()", 'compile(interrupt_before="*")'))

    fired = run(tmp_path, dsn, "fire", "asks")
    fire_time = fired.stdout.split()[0].removeprefix("asks/")
    resume = ("resume-tick", "asks", fire_time, "--value")
    answered = run(tmp_path, dsn, *resume, '"no"')
    once, twice = run(tmp_path, dsn, *resume, "null"), run(tmp_path, dsn, *resume, "null")

    assert ("interrupted in" in fired.stdout, "['before below|one']" in fired.stdout) == (True, True), fired
    assert (answered.returncode, "asks nothing" in answered.stderr) == (2, True), answered
    assert ("interrupted in" in once.stdout, "['before below|two']" in once.stdout) == (True, True), once
    assert " ran in " in twice.stdout, twice


@pytest.mark.usefixtures("settings")
async def test_a_fired_graph_has_failed_that_asks_in_a_subgraph_which_could_not_be_saved(
    dsn: str, onlooker: Onlooker, tmp_path: Path
):
    """LangGraph drops the error for the question's sake, and the answer would find no question."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE.replace("asks.py:graph", "below.py:graph"))
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "below.py").write_text(BELOW)
    onlooker.connection.execute(REFUSE_QUESTIONS)

    fired = run(tmp_path, dsn, "fire", "asks")

    assert fired.returncode == 1
    assert "disk full" in fired.stderr
    assert onlooker.rows("SELECT outcome FROM tickd.ticks") == [("failed",)]


@pytest.mark.parametrize(
    ("factory", "node", "code", "said"),
    [
        ("swallows", "fails", 1, "ValueError: no model"),
        ("breaks_down", "waits_for_the_breakdown", 0, "ConnectionError: tool server went away"),
        ("cannot_close", "works", 0, "OSError: disk full"),
    ],
)
@pytest.mark.usefixtures("settings")
async def test_what_a_factory_holds_open_and_a_fired_run_leave_each_other_alone(
    dsn: str, tmp_path: Path, factory: str, node: str, code: int, said: str
):
    """On a replica the two are tasks apart: a run that failed has failed, and one that goes well is not cancelled."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE.replace("asks.py:graph", f"factories.py:{factory}"))
    (tmp_path / "factories.py").write_text(FACTORIES.replace("NODE", node))

    fired = run(tmp_path, dsn, "fire", "asks")

    assert (fired.returncode, said in fired.stderr) == (code, True), fired
    assert [row[0] for row in rows(dsn, "asks")] == ["failed" if code else "ran"]


@pytest.mark.usefixtures("settings")
async def test_a_fired_run_that_times_out_holds_the_lock_for_as_long_as_a_thread_of_it_works(
    dsn: str, tmp_path: Path
):
    """Cancelled, the run is over at once, and the thread of a sync node is not: a replica would be beside it."""
    (tmp_path / "schedule.yaml").write_text(
        SCHEDULE.replace("asks.py:graph", "works_on.py:graph") + "    timeout: 100ms\n"
    )
    (tmp_path / "works_on.py").write_text(WORKS_ON)

    fired = run(tmp_path, dsn, "fire", "asks")

    assert (tmp_path / "seen").read_text() == "None", fired
    assert (fired.returncode, " timed_out in " in fired.stdout) == (1, True), fired
    assert [row[0] for row in rows(dsn, "asks")] == ["timed_out"]


async def test_fire_is_refused_with_the_holders_name_while_the_graph_is_held(
    dsn: str, settings: Settings, tmp_path: Path
):
    """A person at a terminal must not be the second writer either (C7)."""
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    (tmp_path / "asks.py").write_text(ASKS)
    async with tickd.sole_writer("asks", settings=settings):
        refused = run(tmp_path, dsn, "fire", "asks")

    assert refused.returncode == 1
    assert "asks was not run: script (backend" in refused.stdout


SLEEPS = """
import asyncio, os, time
from typing import TypedDict
from langgraph.graph import START, StateGraph


class State(TypedDict, total=False):
    seconds: float


def sync_node(state):
    os.system("echo a child prints")
    print("a node prints", "begun", flush=True)
    time.sleep(state["seconds"])


async def async_node(state):
    print("begun", flush=True)
    await asyncio.sleep(60)


def one(node):
    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder


sync, waits = one(sync_node), one(async_node)
"""
SLEEPING = """
graphs:
  sync: {graph: "./sleeps.py:sync", every: 1h, timeout: 200ms, input: {seconds: 1}}
  long: {graph: "./sleeps.py:sync", every: 1h, input: {seconds: 60}}
  waits: {graph: "./sleeps.py:waits", every: 1h}
"""


@pytest.mark.usefixtures("settings")
async def test_a_fired_run_past_its_timeout_is_timed_out_and_held_until_its_thread_has_ended(
    dsn: str, onlooker: Onlooker, tmp_path: Path
):
    """Nothing stops a sync node's thread, and a replica that got the lock meanwhile would be a second writer (I1)."""
    (tmp_path / "schedule.yaml").write_text(SLEEPING)
    (tmp_path / "sleeps.py").write_text(SLEEPS)

    fired = run(tmp_path, dsn, "fire", "sync", "--json")

    assert fired.returncode == 1, fired.stderr
    told = json.loads(fired.stdout)
    assert told["outcome"] == "timed_out"
    held = "SELECT outcome, finished_at - admitted_at >= interval '1 second' FROM tickd.ticks"
    assert onlooker.rows(held) == [("timed_out", True)]
    # What the graph and its children print is no part of the JSON.
    assert "a node prints" in fired.stderr
    assert "a child prints" in fired.stderr


@pytest.mark.usefixtures("settings")
async def test_a_graph_that_fails_is_json_for_a_program_as_well(dsn: str, tmp_path: Path):
    """A program that reads the line must not have to read a traceback."""
    (tmp_path / "schedule.yaml").write_text(SLEEPING.replace("seconds: 1", "seconds: no number"))
    (tmp_path / "sleeps.py").write_text(SLEEPS)

    fired = run(tmp_path, dsn, "fire", "sync", "--json")

    assert fired.returncode == 1
    told = json.loads(fired.stdout)
    assert (told["outcome"], told["error_type"]) == ("failed", "TypeError")
    assert "Traceback" in fired.stderr


@pytest.mark.usefixtures("settings")
async def test_a_fired_run_that_is_told_to_stop_has_not_succeeded(
    dsn: str, onlooker: Onlooker, tmp_path: Path
):
    """An orchestrator takes 0 for done, and would not look again."""
    (tmp_path / "schedule.yaml").write_text(SLEEPING)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with firing(tmp_path, dsn, "waits") as process:
        process.terminate()
        _, said = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "Traceback" not in said
    assert onlooker.rows("SELECT outcome, error_type FROM tickd.ticks") == [("failed", "CancelledError")]


@pytest.mark.usefixtures("settings")
async def test_a_second_signal_takes_a_fired_runs_thread_with_it(dsn: str, tmp_path: Path):
    """A process that let the lock go and waited for its thread would be a second writer for as long."""
    (tmp_path / "schedule.yaml").write_text(SLEEPING)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with firing(tmp_path, dsn, "long") as process:
        process.terminate()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)

    assert process.returncode == 130


@pytest.mark.usefixtures("settings")
async def test_a_fired_run_whose_hold_is_lost_is_stopped(dsn: str, onlooker: Onlooker, tmp_path: Path):
    """A replica may have the graph by now; a run that saves nothing for a while must not go on beside it (I4)."""
    (tmp_path / "schedule.yaml").write_text(SLEEPING)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with firing(tmp_path, dsn, "waits") as process:
        onlooker.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 7301"
        )
        told, _ = process.communicate(timeout=30)

    assert process.returncode == 1
    assert json.loads(told)["outcome"] == "lock_lost"


@contextmanager
def firing(folder: Path, dsn: str, graph: str) -> Iterator[subprocess.Popen[str]]:
    """Fire the graph, whose node says `begun` on stderr, and let the block have the process from then on."""
    with subprocess.Popen(
        # What runs the tests may ignore Ctrl-C, as a shell lets what it starts in the background.
        ["env", "--default-signal=INT", sys.executable, "-m", "tickd", "fire", graph, "--json"],
        cwd=folder,
        env={"TICKD_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert any("begun" in line for line in process.stderr)
            yield process
        finally:
            process.kill()


async def test_a_paused_graph_is_refused_until_it_is_resumed(dsn: str, settings: Settings, tmp_path: Path):
    """A pause holds for every way in, and a typing error in its name is said."""
    async with tickd.sole_writer("restock", settings=settings):
        pass

    assert "is paused since" in run(tmp_path, dsn, "pause", "restock").stdout
    async with tickd.sole_writer("restock", settings=settings) as hold:
        assert hold.reason is SkipReason.PAUSED
    wrong = run(tmp_path, dsn, "pause", "restok")
    assert wrong.returncode == 2
    assert "did you mean 'restock'?" in wrong.stderr
    assert "fires again" in run(tmp_path, dsn, "resume", "restock").stdout
    async with tickd.sole_writer("restock", settings=settings) as hold:
        assert hold


def test_the_guard_is_removed_and_brought_back_by_name(dsn: str, tmp_path: Path):
    """Who takes the guard away means it: no start brings it back, only the command does."""
    assert "guard installed" in run(tmp_path, dsn, "migrate").stdout
    assert run(tmp_path, dsn, "migrate", "--remove-guard").stdout == "The guard is removed.\n"
    assert run(tmp_path, dsn, "migrate", "--remove-guard").stdout == "There was no guard.\n"
    assert "Migrated" in run(tmp_path, dsn, "migrate").stdout


def test_a_command_that_is_told_to_stop_has_not_done_its_work(dsn: str, onlooker: Onlooker):
    """The job that migrates would be complete, and the replicas that come after it would find no tables."""
    import asyncio  # noqa: PLC0415  # as above

    onlooker.rows("SELECT pg_advisory_lock(%s)", LOCK_KEY)
    with subprocess.Popen(
        [sys.executable, "-m", "tickd", "migrate"], env={"TICKD_DATABASE_URL": dsn, "PATH": "/usr/bin:/bin"}
    ) as process:
        asyncio.run(onlooker.until(lambda: onlooker.sessions("tickd/"), seconds=30))
        process.terminate()

    assert process.returncode == 1


def test_the_public_names_are_typed_and_few():
    """What is exported is what is promised."""
    assert tickd.__all__ == ["LockLost", "WriterHold", "sole_writer"]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = tickd.other
