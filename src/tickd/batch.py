"""A batch: what many holds ask of the session that they share in the same words, put to the server as one statement.

While one statement is under way others gather behind it, and then go out together: one round trip and one commit for as
many as have come meanwhile. Nobody waits for a batch to fill.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString


@dataclass(frozen=True, slots=True)
class Question:
    """One statement in two forms: `one` for a single hold, and `many` for any number of them.

    `one` takes each value by its name, and answers with one row or none. `many` takes an array of each, in the same order,
    and answers with a row for each that has an answer: its number, counted from 1, and then what `one` answers. `space`
    and `replica` are those of the session in both. No two of a batch may have the same value of `apart`. Those that are
    not `hurried` let the hurried ones go first. A `probe` is answered within a probe's time, or the session is given up.
    One that `locks` may have taken the locks of its `key` also where it failed.

    Each array stands in a sub-select, which hides its length from the planner. It would plan each batch anew for that,
    and to plan an admission takes as long as to run it. And it is sent as bytes (`%(...)b`): as text, psycopg would look
    through all its values for quotes.
    """

    one: LiteralString
    many: LiteralString
    apart: str
    hurried: bool = True
    probe: bool = False
    locks: bool = False


class Batch:
    """Everybody who asks one question at one time."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._asking: dict[Any, tuple[Mapping[str, Any], asyncio.Future[Any]]] = {}

    @property
    def alone(self) -> bool:
        """Say whether there is no more than one who asks."""
        return len(self._asking) <= 1

    def takes(self, values: Mapping[str, Any]) -> bool:
        """Say whether these values may be asked together with those that are here."""
        return values[self.question.apart] not in self._asking

    def add(self, values: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Take part; the future comes to be the answer's row, or None. Cancelled before the batch is sent, it is not."""
        answer = asyncio.get_running_loop().create_future()
        self._asking[values[self.question.apart]] = (values, answer)
        return answer

    def close(self) -> dict[str, list[Any]]:
        """Return the values of all who still wait, as arrays; none when nobody does."""
        self._asking = {key: one for key, one in self._asking.items() if not one[1].done()}
        asked = [values for values, _ in self._asking.values()]
        return {name: [values[name] for values in asked] for name in asked[0]} if asked else {}

    def answer(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Give everybody their row."""
        by_number = {number: row for number, *row in rows}
        for number, (_, answer) in enumerate(self._asking.values(), start=1):
            if not answer.done():
                answer.set_result(by_number.get(number))

    def fail(self, error: BaseException) -> None:
        """Let everybody know that there is no answer."""
        for _, answer in self._asking.values():
            if not answer.done():
                answer.set_exception(error)
