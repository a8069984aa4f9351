"""What many holds ask of one session in the same words: one statement, and to each hold its own answer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from tests.lock_sessions import Open, sessions
from tests.mutation import SLOW_TRY, taking_its_lock
from tests.onlooker import Onlooker
from tests.turns import turn
from tickd import admissions, claim, ledger
from tickd.admissions import Admission, Refusal, Unfinished
from tickd.batch import Question
from tickd.ledger import Finish
from tickd.lock import LockSession, sole_writer
from tickd.policy import TrustWindows
from tickd.shared import SharedSession
from tickd.tick import Outcome, SkipReason, Tick, lock_key, run_id


pytestmark = pytest.mark.migrated

TEN = datetime(2026, 5, 4, 10, tzinfo=UTC)
# How many asked together, and who one is; the last comes first.
TOGETHER = Question(
    one="SELECT 1, %(key)s::int",
    many="""
SELECT number, count(*) OVER (), 6 / key FROM unnest(%(key)s::int[]) WITH ORDINALITY AS asked (key, number)
ORDER BY number DESC
""",
    apart="key",
)
PLANS = "SELECT generic_plans, custom_plans FROM pg_prepared_statements"
MOST = 8
RAN = Finish(Outcome.RAN, 1)
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
SLOW = replace(TOGETHER, many="SELECT 1, pg_sleep(0.3) FROM unnest(%(key)s::int[])")
LATER = replace(TOGETHER, one="SELECT 2, 2", hurried=False)


SECOND = timedelta(seconds=1)
# A statement has two seconds for its answer.
SHORT_WINDOWS = TrustWindows(
    probe_interval=SECOND,
    probe_timeout=SECOND / 2,
    stop_allowance=SECOND,
    server_idle=4 * SECOND,
    server_count=0,
)
GRAPHS = ("one", "blocked", "two")


@pytest.fixture
async def open_as(dsn: str) -> AsyncIterator[Open]:
    """Opens a session that holds may share, for a replica's name."""
    async with sessions(dsn, kind="shared") as open_as:
        yield open_as


@pytest.fixture
async def session(open_as: Open) -> LockSession:
    """The shared session of replica a."""
    return await open_as("a")


def tick(graph: str) -> Tick:
    """Return the graph's tick of ten o'clock."""
    return Tick(graph, TEN)


async def admit(session: LockSession, graph: str) -> Any:
    """Ask for the graph's tick."""
    one = tick(graph)
    return await admissions.hold_and_admit(
        session, one, thread_id=str(one), run_id=run_id(one), tell_running=True
    )


async def whole_life(session: LockSession, one: Tick) -> None:
    """Admit the tick, record its end and unlock, whatever is answered."""
    await admissions.hold_and_admit(session, one, thread_id=str(one), run_id=run_id(one))
    await ledger.record(session, one, token=1, finish=RAN)
    await session.unlock(one.graph)


async def busy(session: LockSession, onlooker: Onlooker) -> asyncio.Task[Any]:
    """Keep the session busy for a moment."""
    task = asyncio.create_task(session.fetch("SELECT pg_sleep(0.3)"))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    return task


async def asking(session: LockSession, key: int, question: Question = TOGETHER) -> asyncio.Task[Any]:
    """Let a task ask, and return it when it has."""
    task = asyncio.create_task(session.ask(question, {"key": key}))
    await turn()
    return task


async def test_whoever_asks_while_the_session_is_busy_is_asked_for_together(
    session: LockSession, onlooker: Onlooker
):
    """Each gets the answer to its own question, in whatever order the rows come."""
    sleeping = await busy(session, onlooker)

    answers = await asyncio.gather(*(session.ask(TOGETHER, {"key": key}) for key in (1, 2, 3)))

    assert answers == [[3, 6], [3, 3], [3, 2]]
    await sleeping


async def test_leases_are_renewed_together_and_each_claim_hears_of_its_own(
    session: LockSession, onlooker: Onlooker
):
    """Fifty claimed runs would be fifty commits in each interval, and admissions would wait for them."""
    graphs = ("a", "b", "c")
    await asyncio.gather(*(admit(session, graph) for graph in graphs))
    onlooker.connection.execute("UPDATE tickd.ticks SET token = 2 WHERE graph = 'b'")
    sleeping = await busy(session, onlooker)

    lease = timedelta(hours=1)
    a, b, c = await asyncio.gather(*(session.ask(*claim.renewal(tick(graph), 1, lease)) for graph in graphs))

    assert (a, b, c) == ([1], None, [1])
    query = """
    SELECT array_agg(graph ORDER BY graph), min(lease_until) > now() + interval '50 minutes'
    FROM tickd.ticks WHERE lease_until IS NOT NULL GROUP BY xmin::text
    """
    assert onlooker.rows(query) == [(["a", "c"], True)]
    await sleeping


@pytest.mark.parametrize("kind", ["shared", "apart"])
async def test_it_is_not_planned_anew_for_its_length(dsn: str, kind: str):
    """To plan an admission of many takes longer than to run it."""
    async with sessions(dsn, kind=kind) as open_as:
        own = [await open_as("a") for _ in range(MOST)] if kind == "apart" else [await open_as("a")] * MOST
        for session in own:
            session.ledger = own[0].ledger
        for count in [*range(1, MOST + 1)] * 3:
            graphs = [f"graph-{count}-{number}" for number in range(count)]
            ticks = [Tick(graph, TEN + timedelta(seconds=count)) for graph in graphs]
            await asyncio.gather(*map(whole_life, own, ticks))

        plans = await own[0].ledger.fetch_all(PLANS)

    # Postgres plans the first five for their values, whatever they are.
    assert len(plans) >= (3 if kind == "shared" else 2)
    assert [custom for _, custom in plans if custom > 5] == []
    assert sum(generic for generic, _ in plans) > 0


async def test_two_that_must_not_meet_in_one_statement_are_asked_apart(session: LockSession):
    """A statement that inserts two rows for one thread fails for everybody in it."""
    answers = await asyncio.gather(*(session.ask(TOGETHER, {"key": key}) for key in (1, 2, 1)))

    assert answers == [[2, 6], [2, 3], [1, 6]]


async def test_two_questions_are_two_statements(session: LockSession):
    """They are gathered by what is asked, not by when."""
    answers = await asyncio.gather(
        session.ask(LATER, {"key": 1}), session.ask(TOGETHER, {"key": 1}), session.ask(TOGETHER, {"key": 2})
    )

    assert list(answers) == [[1, 6], [2, 6], [2, 3]]


async def test_one_that_is_cancelled_before_its_turn_is_not_asked_for(
    session: LockSession, onlooker: Onlooker
):
    """Nothing has to be undone then."""
    sleeping = await busy(session, onlooker)
    staying, leaving = [await asking(session, key) for key in (1, 2)]
    leaving.cancel()

    assert await staying == [1, 6]
    await sleeping


async def test_all_may_be_cancelled_before_their_turn(session: LockSession, onlooker: Onlooker):
    """A statement for nobody is not sent."""
    sleeping = await busy(session, onlooker)
    leaving = [await asking(session, key) for key in (1, 2)]
    for task in leaving:
        task.cancel()
    await sleeping

    assert await session.ask(TOGETHER, {"key": 3}) == [1, 2]


async def test_an_error_is_everybodys_and_the_session_goes_on(session: LockSession):
    """Nobody knows whose fault it was, and nobody is left waiting."""
    answers = await asyncio.gather(
        *(session.ask(TOGETHER, {"key": key}) for key in (0, 1)), return_exceptions=True
    )

    assert [type(answer) for answer in answers] == [psycopg.errors.DivisionByZero] * 2
    assert await session.ask(TOGETHER, {"key": 1}) == [1, 6]


async def test_the_end_of_the_session_is_told_to_all_who_ask(session: SharedSession, onlooker: Onlooker):
    """Those under way, and those that wait for their turn."""
    sleeping = await busy(session, onlooker)
    waiting = [await asking(session, key) for key in (1, 2)]

    onlooker.terminate(session.connection.info.backend_pid)

    answers = await asyncio.gather(sleeping, *waiting, return_exceptions=True)
    assert all(isinstance(answer, psycopg.OperationalError) for answer in answers), answers


async def test_closing_the_session_leaves_nobody_waiting(session: SharedSession, onlooker: Onlooker):
    """A stop must not hang on a statement that is never sent."""
    under_way = await asking(session, 1, SLOW)
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    waiting = await asking(session, 1)

    await session.end()

    answers = await asyncio.gather(under_way, waiting, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the shared session was closed"] * 2


async def test_asking_a_closed_session_fails_though_others_waited_with_the_same_question(
    session: SharedSession, onlooker: Onlooker
):
    """A run that lets go of its graph after its session was lost and closed hung for ever, with its place and its hold."""
    under_way = await asking(session, 1, SLOW)
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    waiting = await asking(session, 1)
    await session.end()

    async with asyncio.timeout(5):
        answers = await asyncio.gather(
            under_way, waiting, session.ask(TOGETHER, {"key": 2}), return_exceptions=True
        )

    assert [type(answer) for answer in answers] == [psycopg.OperationalError] * 3
    assert await session.unlock("restock_plan") is None


async def test_each_tick_of_a_batch_is_admitted_or_refused_for_reasons_of_its_own(
    open_as: Open, onlooker: Onlooker
):
    """One that is new, one that runs elsewhere, one that has run, one handed off, one whose graph is paused."""
    session, other = await open_as("a"), await open_as("b")
    for graph, outcome in (("ran", Outcome.RAN), ("handed", Outcome.HANDED_OFF), ("runs", None)):
        earlier = tick(graph) if graph == "ran" else Tick(graph, TEN - timedelta(hours=1))
        admission: Any
        held, admission = await admissions.hold_and_admit(
            other, earlier, thread_id=str(earlier), run_id=run_id(earlier)
        )
        assert held
        if outcome is not None:
            assert await ledger.record(other, earlier, token=admission.token, finish=Finish(outcome, 1))
            await other.unlock(graph)
    onlooker.connection.execute(
        "INSERT INTO tickd.graphs (space, graph, key, paused_at) VALUES (7301, 'paused', %s, now())",
        [lock_key("paused")],
    )

    graphs = ("new", "runs", "ran", "handed", "paused", "new too")
    new, runs, ran, handed, paused, new_too = await asyncio.gather(*(admit(session, one) for one in graphs))

    assert new == (True, Admission(1, 1, str(tick("new"))))
    assert new_too == (True, Admission(1, 1, str(tick("new too"))))
    assert runs[0] is False
    assert isinstance(runs[1], Unfinished)
    assert (runs[1].replica, runs[1].fire_time) == ("b", TEN - timedelta(hours=1))
    assert ran == (None, Refusal(SkipReason.ALREADY_RAN, "b"))
    assert handed[0] is None
    assert isinstance(handed[1], Unfinished)
    assert handed[1].fire_time == TEN - timedelta(hours=1)
    assert paused == (None, Refusal(SkipReason.PAUSED))
    keys = {key for pid, _, key in onlooker.locks() if pid == session.connection.info.backend_pid}
    assert keys == {lock_key("new"), lock_key("new too")}


async def test_two_graphs_on_one_thread_are_both_admitted(session: LockSession):
    """One row of the thread cannot be moved twice in one statement."""
    attempts = [
        admissions.hold_and_admit(session, tick(graph), thread_id="common", run_id=run_id(tick(graph)))
        for graph in ("one", "two")
    ]

    assert [held for held, _ in await asyncio.gather(*attempts)] == [True, True]


async def test_two_batches_on_the_same_threads_take_them_in_one_order(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """Crosswise they would wait for each other, and Postgres would end one of them with all of its ticks."""
    a, b = await open_as("a"), await open_as("b")

    def waiting() -> int:
        return int(onlooker.value(WAITING))

    def together(session: LockSession, threads: dict[str, str]) -> asyncio.Future[Any]:
        return asyncio.gather(
            *(
                admissions.hold_and_admit(session, tick(graph), thread_id=thread, run_id=run_id(tick(graph)))
                for graph, thread in threads.items()
            )
        )

    await together(a, {"first on s": "s", "first on t": "t"})
    async with await psycopg.AsyncConnection.connect(admin_dsn) as other:
        await other.execute("SELECT FROM tickd.threads WHERE thread_id = 's' FOR UPDATE")
        there = together(a, {"one": "s", "two": "t"})
        await onlooker.until(lambda: waiting() == 1)
        back = together(b, {"three": "t", "four": "s"})
        await onlooker.until(lambda: waiting() == 2)
        await other.rollback()

    assert [held for held, _ in (*await there, *await back)] == [True] * 4


async def test_a_thread_that_passes_from_one_graph_of_a_batch_to_another_is_the_latter_s(
    session: LockSession, onlooker: Onlooker
):
    """The one leaves its old threads behind, and this one is not its own any more."""

    async def admit_on(thread: str, second: int, graph: str) -> Any:
        due = Tick(graph, TEN + timedelta(seconds=second))
        return await admissions.hold_and_admit(session, due, thread_id=thread, run_id=run_id(due))

    await admit_on("passes", 0, "one")
    await ledger.record(session, Tick("one", TEN), token=1, finish=RAN)
    await session.unlock("one")
    sleeping = await busy(session, onlooker)
    held = await asyncio.gather(admit_on("new", 1, "one"), admit_on("passes", 1, "two"))
    await sleeping

    assert [one for one, _ in held] == [True, True]
    assert onlooker.rows("SELECT thread_id, graph, token FROM tickd.threads ORDER BY 1") == [
        ("new", "one", 2),
        ("passes", "two", 1),
    ]


async def test_each_end_of_a_batch_is_written_by_its_own_token(session: LockSession, onlooker: Onlooker):
    """A stale one among them finds no row, and the others' ends are theirs."""
    graphs = ("one", "two", "three")
    admitted: list[Any] = await asyncio.gather(*(admit(session, graph) for graph in graphs))
    outcomes = (Outcome.RAN, Outcome.FAILED, Outcome.RAN)
    stale = {"three": 1}

    recorded = await asyncio.gather(
        *(
            ledger.record(
                session,
                tick(graph),
                token=granted.token + stale.get(graph, 0),
                finish=Finish(outcome, 1, error="late feed" if outcome is Outcome.FAILED else None),
            )
            for graph, (_, granted), outcome in zip(graphs, admitted, outcomes, strict=True)
        )
    )

    assert recorded == [True, True, False]
    rows = onlooker.rows("SELECT graph, outcome, error FROM tickd.ticks ORDER BY graph")
    assert rows == [("one", "ran", None), ("three", None, None), ("two", "failed", "late feed")]
    assert await asyncio.gather(*(session.unlock(graph) for graph in (*graphs, "four"))) == [
        True,
        True,
        True,
        False,
    ]
    assert onlooker.locks() == []


async def test_a_row_that_somebody_has_locked_costs_its_own_tick_alone(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """With short windows it had cost the session, with all of its holds; and with others every tick that was due with it."""
    session = await open_as("a", windows=SHORT_WINDOWS)

    async def is_admitted(graph: str) -> bool:
        one = tick(graph)
        attempt = partial(admissions.hold_and_admit, tick=one, thread_id=graph, run_id=run_id(one))
        async with sole_writer(graph, session.place, attempt=attempt, session=session) as hold:
            return isinstance(hold.granted, Admission)

    async with await psycopg.AsyncConnection.connect(admin_dsn) as operator:
        await operator.execute("INSERT INTO tickd.graphs (space, graph, key) VALUES (7301, 'blocked', 0)")
        sleeping = await busy(session, onlooker)
        one, blocked, two = await asyncio.gather(*map(is_admitted, GRAPHS), return_exceptions=True)
        await sleeping

    assert (one, two) == (True, True)
    assert isinstance(blocked, psycopg.errors.LockNotAvailable)
    assert onlooker.locks() == []  # what the failed statement had taken was not taken twice
    assert await session.fetch("SELECT 1") == (1,)


async def test_an_end_whose_row_somebody_has_locked_keeps_no_other_end_from_being_written(
    open_as: Open, onlooker: Onlooker, admin_dsn: str
):
    """They would all be told as holds that were lost."""
    session = await open_as("a", windows=SHORT_WINDOWS)
    await asyncio.gather(*(admit(session, graph) for graph in GRAPHS))

    async with await psycopg.AsyncConnection.connect(admin_dsn) as operator:
        await operator.execute("SELECT FROM tickd.ticks WHERE graph = 'blocked' FOR UPDATE")
        sleeping = await busy(session, onlooker)
        ends = (ledger.record(session, tick(graph), token=1, finish=RAN) for graph in GRAPHS)
        one, blocked, two = await asyncio.gather(*ends, return_exceptions=True)
        await sleeping

    assert (one, two) == (True, True)
    assert isinstance(blocked, psycopg.errors.LockNotAvailable)
    assert await ledger.record(session, tick("blocked"), token=1, finish=RAN)


async def test_one_cancelled_in_mid_statement_is_undone_and_the_rest_of_its_batch_runs(
    open_as: Open, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
):
    """Its lock has been taken in the same statement as theirs."""
    session = await open_as("a")
    monkeypatch.setattr(admissions, "HOLD_AND_ADMIT", taking_its_lock(SLOW_TRY))
    started = asyncio.Event()

    async def hold(graph: str) -> None:
        attempt = partial(
            admissions.hold_and_admit, tick=tick(graph), thread_id=graph, run_id=run_id(tick(graph))
        )
        async with sole_writer(graph, session.place, attempt=attempt, session=session) as hold:
            assert isinstance(hold.granted, Admission)
            await started.wait()

    staying, leaving = asyncio.create_task(hold("staying")), asyncio.create_task(hold("leaving"))
    await onlooker.until(lambda: [row for row in onlooker.sessions("tickd/a") if "pg_sleep" in row[3]])
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving

    assert [key for _, _, key in onlooker.locks()] == [lock_key("staying")]
    started.set()
    await staying
    assert onlooker.locks() == []
