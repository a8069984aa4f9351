"""Turns: one at a time, those in a hurry first, and none lost to a cancellation."""

import asyncio
from contextlib import suppress

import pytest

from tests.turns import turn
from tickd.turns import HURRIED_IN_A_ROW, SharedTry, Turns


class Queue:
    """Turns, who has had one so far, and tasks that wait for one."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.had: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def join(self, name: str, *, hurried: bool = False) -> None:
        """Let a task of this name wait for its turn."""
        self.tasks[name] = asyncio.create_task(self._take(name, hurried=hurried))
        await self.settle()

    async def settle(self) -> None:
        """Let every task that can go on do so."""
        for _ in range(100):
            await turn()

    async def _take(self, name: str, *, hurried: bool) -> None:
        async with self.turns.turn(hurried=hurried):
            self.had.append(name)


@pytest.fixture
def queue() -> Queue:
    """A queue before which nobody stands."""
    return Queue()


async def test_whoever_is_in_a_hurry_goes_first_and_the_others_in_their_order(queue: Queue):
    """A start that waited behind every record of a herd would be late by all of them."""
    async with queue.turns.turn():
        await queue.join("record 1")
        await queue.join("record 2")
        await queue.join("start 1", hurried=True)
        await queue.join("start 2", hurried=True)
        assert queue.had == []
    await queue.settle()

    assert queue.had == ["start 1", "start 2", "record 1", "record 2"]


async def test_so_many_in_a_hurry_go_first_and_not_one_more(queue: Queue):
    """Where commits are slow the next start is there before the last one is over, and no record would ever be written."""
    async with queue.turns.turn():
        for number in range(1, 3):
            await queue.join(f"record {number}")
        for _ in range(HURRIED_IN_A_ROW * 2 + 1):
            await queue.join("start", hurried=True)
    await queue.settle()

    starts = ["start"] * HURRIED_IN_A_ROW
    assert queue.had == [*starts, "record 1", *starts, "record 2", "start"]


async def test_those_who_went_while_nobody_was_patient_are_not_counted(queue: Queue):
    """Whoever is patient has been passed over by nobody then."""
    async with queue.turns.turn():
        for _ in range(HURRIED_IN_A_ROW):
            await queue.join("start", hurried=True)
    await queue.settle()
    queue.had.clear()
    async with queue.turns.turn():
        await queue.join("record")
        await queue.join("start", hurried=True)
    await queue.settle()

    assert queue.had == ["start", "record"]


@pytest.mark.parametrize("hurried", [False, True], ids=["patient", "hurried"])
async def test_who_leaves_the_queue_costs_nobody_a_turn(queue: Queue, *, hurried: bool):
    """A cancelled statement must not leave the session to nobody."""
    async with queue.turns.turn():
        await queue.join("leaver", hurried=hurried)
        await queue.join("stayer", hurried=hurried)
        queue.tasks["leaver"].cancel()
    await queue.settle()

    assert queue.had == ["stayer"]


async def test_who_leaves_at_the_moment_of_its_turn_passes_it_on(queue: Queue):
    """The turn has come, and the task has not run since: it is cancelled with the turn in its hands."""
    async with queue.turns.turn():
        await queue.join("leaver")
        await queue.join("stayer")
    queue.tasks["leaver"].cancel()
    await queue.settle()

    assert queue.had == ["stayer"]
    await queue.join("later")
    assert queue.had == ["stayer", "later"]


async def test_a_block_that_raises_ends_its_turn(queue: Queue):
    """A statement that fails is over."""
    with suppress(RuntimeError):
        async with queue.turns.turn():
            raise RuntimeError("no answer")
    await queue.join("next")

    assert queue.had == ["next"]


class Tries:
    """Tries that fail when they are told to, and how many there were."""

    def __init__(self) -> None:
        self.shared = SharedTry()
        self.answer = asyncio.get_running_loop().create_future()
        self.count = 0

    async def go(self) -> None:
        """Try once, as soon as nobody else does."""
        async with self.shared.turn():
            self.count += 1
            await asyncio.shield(self.answer)


async def test_a_try_that_fails_has_failed_for_all_who_waited_for_their_turn():
    """Of whatever cannot be reached each would wait out the time-out after the other."""
    tries = Tries()
    waiting = [asyncio.create_task(tries.go()) for _ in range(5)]
    await turn()
    tries.answer.set_exception(TimeoutError("nobody answers"))

    found = await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(error) for error in found] == ["nobody answers"] * 5
    assert tries.count == 1


async def test_who_comes_after_a_try_that_failed_tries_anew():
    """It may be there again."""
    tries = Tries()
    tries.answer.set_exception(TimeoutError("nobody answers"))
    with suppress(TimeoutError):
        await tries.go()
    tries.answer = asyncio.get_running_loop().create_future()
    tries.answer.set_result(None)

    await asyncio.gather(tries.go(), tries.go())

    assert tries.count == 3
