"""The cron dialect: crontab(5) as Debian's cron means it, with seconds, `L`, `#` and the nicknames.

An expression is checked here, field by field, so that a refusal can name the field and the text; cronsim then finds the
matching wall-clock times. Time zones are not met here: `calendar` turns wall-clock times into instants.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final

from cronsim import CronSim, CronSimError


NICKNAMES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an expression: its name, its lowest and highest number, and what may stand for a number."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    special: str = ""  # a regular expression of what else is a whole term

    @property
    def span(self) -> int:
        """How many values go round before the field begins again; weekday 7 is 0 again."""
        return self.high - self.low + (0 if self.name == "day-of-week" else 1)


MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FIELDS: Final = (
    Field("second", 0, 59),
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day-of-month", 1, 31, special="l|lw"),
    Field("month", 1, 12, names=MONTHS),
    Field("day-of-week", 0, 7, names=DAYS, special=r"[0-7]l|(?:[0-7]|" + "|".join(DAYS) + r")#[1-5]"),
)
TERM: Final = re.compile(r"(?:(\*)|([a-z0-9]{1,20})(?:-([a-z0-9]{1,20}))?)(?:/([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression of the dialect; build it with `parse_cron`."""

    text: str
    fields: tuple[str, ...]  # always six, seconds first, lower case
    engine: CronSim

    @property
    def fixed(self) -> bool:
        """Whether it names times of the day, rather than every so many minutes or hours: cron's rule for clock changes."""
        return not any(field.startswith("*") for field in self.fields[:3])

    @property
    def seconds(self) -> tuple[int, ...]:
        """The seconds of a minute at which it may fire."""
        return tuple(sorted(self.engine.seconds))

    def next_wall_clock(self, after: datetime) -> datetime | None:
        """Return the first matching wall-clock time strictly after a naive one; None when there is none in 50 years."""
        engine = copy.copy(self.engine)  # it is its own cursor, and several threads may ask at once
        engine.dt = after.replace(microsecond=0)
        try:
            return next(engine)
        except (StopIteration, OverflowError, ValueError):  # the last two: past the year 9999
            return None

    def in_words(self) -> str:
        """Return the expression as a sentence."""
        fields = self.fields[1:] if self.fields[0] == "0" else self.fields
        return CronSim(" ".join(fields), datetime(2000, 1, 1)).explain()  # noqa: DTZ001  # a wall clock has no zone

    def doubts(self) -> Iterator[str]:
        """Yield what a person probably did not mean by this expression, a sentence each."""
        for field, text in zip(FIELDS, self.fields, strict=True):
            yield from _uneven_steps(field, text)
        yield from self._doubtful_stars()
        yield from self._doubtful_days()

    def _doubtful_stars(self) -> Iterator[str]:
        second, minute, hour = self.fields[:3]
        if second == "*" and minute != "*":
            yield "second is * and minute is not: it fires 60 times in each such minute; write 0 for once"
        elif minute == "*" and hour.isdigit():
            yield f"minute is * and hour is {hour}: it fires every minute of that hour; write 0 for once"

    def _doubtful_days(self) -> Iterator[str]:
        day, weekday = self.fields[3], self.fields[5]
        if "*" in (day, weekday):
            return
        if day.startswith("*") or weekday.startswith("*"):
            yield (
                f"day-of-month {day!r} and day-of-week {weekday!r}: one starts with *, so, as in Debian's cron, a day "
                "must match both"
            )
        else:
            yield (
                f"day-of-month {day!r} and day-of-week {weekday!r}: as in every cron, a day matches when either does, "
                "not both; for the first Monday of a month write mon#1"
            )


@lru_cache(maxsize=1024)
def parse_cron(text: str) -> Cron:
    """Return the expression that a text holds; ValueError says which field is wrong, and what would be right."""
    written = text.strip()
    if not written.isascii():
        odd = next(character for character in written if not character.isascii())
        raise ValueError(
            f"{text!r} holds the character U+{ord(odd):04X}: type the expression afresh, in plain ASCII"
        )
    fields = _fields(written.lower())
    for field, part in zip(FIELDS, fields, strict=True):
        _check(field, part)
    try:
        return Cron(written, fields, CronSim(" ".join(fields), datetime(2000, 1, 1)))  # noqa: DTZ001  # as above
    except CronSimError:
        # Each field is right by itself, so what is left is a day that none of the months has.
        raise ValueError(f"{text!r} never fires: no month of it has such a day") from None


def _fields(lower: str) -> tuple[str, ...]:
    if lower.startswith("@"):
        lower = _nickname(lower)
    fields = tuple(lower.split())
    if fields and "tz=" in fields[0]:
        raise ValueError(
            f"{fields[0]!r} is a line of its own in a crontab; here the zone is the key 'timezone'"
        )
    if len(fields) == len(FIELDS) - 1:
        return ("0", *fields)
    if len(fields) == len(FIELDS):
        return fields
    hint = ", without a command" if len(fields) > len(FIELDS) else ""
    raise ValueError(
        f"{lower!r} has {len(fields)} fields; cron has 5 (minute hour day-of-month month day-of-week), or 6 with seconds "
        f"first{hint}"
    )


def _nickname(lower: str) -> str:
    if lower == "@reboot":
        raise ValueError(
            "@reboot means nothing on several replicas: use a time, or `tickd fire` when you deploy"
        )
    if lower.startswith("@every"):
        raise ValueError(f"{lower!r} is not cron: use the key 'every', for instance every: 5m")
    if lower not in NICKNAMES:
        raise ValueError(f"{lower!r} is not one of {', '.join(NICKNAMES)}")
    return NICKNAMES[lower]


def _check(field: Field, text: str) -> None:
    for term in text.split(","):
        if field.special and re.fullmatch(field.special, term):
            continue
        match = TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"{field.name}: {term!r} is not understood{_hint(field, term)}")
        _check_term(field, term, match)


def _check_term(field: Field, term: str, match: re.Match[str]) -> None:
    star, first, last, step = match.groups()
    if step is not None and int(step) == 0:
        raise ValueError(f"{field.name}: {term!r} steps by 0: a step is 1 or more")
    if star:
        return
    low = _number(field, first, term)
    high = _number(field, last, term) if last else low
    if high < low:
        raise ValueError(f"{field.name}: {term!r} runs backwards{_wrapped(field, low, high)}")


def _number(field: Field, text: str, term: str) -> int:
    if text in field.names:
        return field.names.index(text) + (1 if field.name == "month" else 0)
    if not text.isdigit():
        names = f" or {field.names[0]}-{field.names[-1]}" if field.names else ""
        raise ValueError(
            f"{field.name}: {term!r} is not understood; {field.low}-{field.high}{names} are{_hint(field, term)}"
        )
    if not field.low <= int(text) <= field.high:
        raise ValueError(f"{field.name}: {term!r} is out of range; {field.low}-{field.high} is the range")
    return int(text)


def _wrapped(field: Field, low: int, high: int) -> str:
    if field.name == "day-of-week" and high == 0:
        return f"; Sunday is 0 and 7: write {low}-7"
    return f"; write {low}-{field.high},{field.low}-{high}"


def _hint(field: Field, term: str) -> str:
    if "?" in term:
        return "; ? is Quartz's: write *"
    if term.startswith("l") or "last" in term:
        return "; the last day of the month is L in day-of-month, the last Friday is 5L in day-of-week"
    if "w" in term and field.name == "day-of-month":
        return "; of Quartz's W only LW, the last weekday, is known"
    if term.startswith(("h", "~")) or "~" in term:
        return "; a random or hashed minute differs between replicas: use the key 'jitter'"
    return ""


def _uneven_steps(field: Field, text: str) -> Iterator[str]:
    """Yield a sentence for each step that goes over the whole field and does not divide it."""
    for term in text.split(","):
        match = TERM.fullmatch(term)
        if match is None or match[4] is None:
            continue
        step, start = int(match[4]), _number(field, match[2], term) if match[2] else field.low
        whole = match[3] is None or (start, _number(field, match[3], term)) == (field.low, field.high)
        if not whole or step == 1:
            continue
        if step >= field.span:
            yield f"{field.name} {term!r}: the step is as long as the field, so it fires at {start} only"
        elif field.name == "day-of-month" or field.span % step:
            values = range(start, field.low + field.span, step)
            yield (
                f"{field.name} {term!r}: {step} does not divide the field evenly, it fires at "
                f"{', '.join(str(value) for value in values)} and begins again; for even gaps use 'every'"
            )
