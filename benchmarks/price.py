"""Prices: what each piece of a tick takes on an idle server, and which piece of a floor does the same.

The peers are measured on a Python of their own, so nothing here needs more than the standard library.
"""

import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quantiles import spread


UNCOUNTED = 5
# The pieces of the floors, by which every other one is divided.
TRY_HELD = "try a lock that is held"
TRY_UNLOCK = "try and unlock"
TRY_RUN_UNLOCK = "try, run, unlock"
CONNECT_TRY_HELD = "connect, try a lock that is held, close"
CONNECT_TRY_UNLOCK = "connect, try, unlock, close"
CONNECT_TRY_RUN_UNLOCK = "connect, try, run, unlock, close"
Price = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing that is done again and again, and the piece of a floor that does the same."""

    name: str
    call: Callable[[], Awaitable[Any]]
    floor: str | None = None


class Laps:
    """Goes round so many times, after a few that do not count, and keeps how long each round took."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._took: list[float] = []

    def __iter__(self) -> Iterator[int]:
        for number in range(-UNCOUNTED, self._rounds):
            began = time.perf_counter()
            yield number
            if number >= 0:
                self._took.append((time.perf_counter() - began) * 1000)

    def spread(self) -> Price:
        """Return the spread of a round's duration, in milliseconds."""
        return spread(self._took)


async def priced(rounds: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Measure one piece after another; return the figures."""
    cost_ms = {}
    for piece in pieces:
        laps = Laps(rounds)
        for _ in laps:
            await piece.call()
        cost_ms[piece.name] = laps.spread()
    return figures(rounds, cost_ms, {piece.name: piece.floor for piece in pieces if piece.floor})


def figures(rounds: int, cost_ms: dict[str, Price], floors: dict[str, str]) -> dict[str, Any]:
    """Return the figures of pieces, and by which piece of a floor each is divided."""
    return {"rounds": rounds, "cost_ms": cost_ms, "floors": floors}


def rounds_asked_for() -> int:
    """Return how many rounds the program was told to measure."""
    return int(sys.argv[1])


def tell(figures: dict[str, Any]) -> None:
    """Print the figures for whoever started this program."""
    print(json.dumps(figures))
