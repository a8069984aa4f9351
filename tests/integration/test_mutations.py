"""Standing mutations: each mistake that the design warns of, and the oracle that has to notice it.

An oracle that passes on a mistake proves nothing about the code that is right.
"""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.conftest import Places
from tests.integration.exclusion import GRAPH, admit, bare, fresh_tick, late, lost_updates, race
from tests.mutation import BLOCKING, taking_its_lock
from tests.replicas import ROOT, replica_environment
from tickd import admissions
from tickd.lock import LockPlace, LockSession, open_session


pytestmark = pytest.mark.migrated

# Long enough for a loser to be told, if it is going to be.
PATIENCE = 0.4


@pytest.fixture
def contenders(places: Places) -> tuple[LockPlace, LockPlace]:
    """Two replicas."""
    return places("a"), places("b")


async def test_a_blocking_lock_runs_one_tick_twice(
    contenders: tuple[LockPlace, LockPlace], monkeypatch: pytest.MonkeyPatch
):
    """`pg_advisory_lock` makes the loser wait, and then run what has just been run."""
    monkeypatch.setattr("tickd.lock.TRY_LOCK", "SELECT true FROM pg_advisory_lock(%s::int, %s::int)")

    result = await race(bare, *contenders, patience=PATIENCE)

    assert not result.clean
    assert sorted(result.ran) == ["a", "b"]


async def test_a_blocking_lock_is_noticed_behind_the_ledger_too(
    contenders: tuple[LockPlace, LockPlace], monkeypatch: pytest.MonkeyPatch
):
    """The admission row keeps the loser from running; but it sat waiting for as long as the winner ran."""
    blocking = taking_its_lock(BLOCKING)
    monkeypatch.setattr(admissions, "HOLD_AND_ADMIT", blocking)
    tick = fresh_tick(GRAPH)

    result = await race(lambda place, _: admit(place, tick), *contenders, patience=PATIENCE)

    assert not result.clean
    assert result.refused == []


async def test_a_transaction_lock_holds_nothing(places: Places, monkeypatch: pytest.MonkeyPatch):
    """In autocommit it is gone before the answer arrives: two runs at once, and updates lost."""
    monkeypatch.setattr("tickd.lock.TRY_LOCK", "SELECT pg_try_advisory_xact_lock(%s::int, %s::int)")

    # Two tries that meet within the statement itself still exclude each other, so one race proves nothing.
    overlaps = [(await race(bare, places("a"), places("b"), patience=PATIENCE)).overlaps for _ in range(5)]

    assert 1 in overlaps
    assert await lost_updates(bare, [places(f"r{n}") for n in range(8)], rounds=1) > 0


@pytest.fixture
async def pool_of_one(places: Places, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Take locks on the one connection of a pool, which comes back still open and is handed out again."""
    pooled = await open_session(places())

    class Pooled(LockSession):
        async def close(self) -> None:
            """Give the connection back."""
            self._link.close()

    async def take(place: LockPlace) -> LockSession:
        return Pooled(pooled.connection, place)

    monkeypatch.setattr("tickd.lock.open_session", take)
    yield
    await pooled.close()


@pytest.mark.usefixtures("pool_of_one")
async def test_a_pooled_connection_excludes_nobody_in_its_own_process(places: Places):
    """Session locks stack: the second tick gets the lock that the first one has."""
    result = await race(bare, places("a"), places("a"), patience=PATIENCE)

    assert result.overlaps == 1


REPLICA = """
import asyncio, os, sys
import tickd.lock
from tests.lock_sessions import place_of

if "mutated" in sys.argv:
    tickd.lock.lock_key = lambda graph: hash(graph) % 2**31

async def main():
    async with tickd.lock.sole_writer("restock_plan", place_of(os.environ["DSN"])) as hold:
        print(bool(hold), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def held_by(dsn: str, seed: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a process that contends for a graph, says whether it got it, and stays until it is told to go."""
    environment = {**replica_environment(), "PYTHONHASHSEED": seed, "DSN": dsn}
    return subprocess.Popen(
        [sys.executable, "-c", REPLICA, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def two_processes(dsn: str, *arguments: str) -> Iterator[str]:
    """Yield what two processes with different hash seeds say when both contend for one graph at the same time."""
    processes = []
    try:
        for seed in ("1", "2"):
            process = held_by(dsn, seed, *arguments)
            processes.append(process)
            assert process.stdout
            yield process.stdout.readline().strip()
    finally:
        for process in processes:
            process.communicate("\n", timeout=10)


def test_processes_with_different_hash_seeds_exclude_each_other(dsn: str):
    """The key of a name is the same in every process: crc32, unlike `hash()`, is not salted."""
    assert list(two_processes(dsn)) == ["True", "False"]


def test_hashed_keys_exclude_nobody(dsn: str):
    """Each process would lock a number of its own."""
    assert list(two_processes(dsn, "mutated")) == ["True", "True"]


async def test_without_the_admission_row_a_late_replica_runs_the_tick_again(
    contenders: tuple[LockPlace, LockPlace],
):
    """A run that is shorter than the clocks are apart has freed its lock by then."""
    result = await late(bare, *contenders)

    assert result.ran == ["a", "b"]
