"""A mutated admission: HOLD_AND_ADMIT with another way to take its lock, in both of its forms."""

from dataclasses import replace

from tickd.admissions import HOLD_AND_ADMIT
from tickd.batch import Question


TRY = "pg_try_advisory_lock(%(space)s::int, due.key)"
# The late one looks long before it tries.
SLOW_TRY = f"(SELECT {TRY} FROM pg_sleep(0.3))"
BLOCKING = "(SELECT true FROM pg_advisory_lock(%(space)s::int, due.key))"


def taking_its_lock(by: str) -> Question:
    """Return the statement with another expression in the place of the try."""
    one, many = (text.replace(TRY, by) for text in (HOLD_AND_ADMIT.one, HOLD_AND_ADMIT.many))
    assert HOLD_AND_ADMIT.one != one
    assert HOLD_AND_ADMIT.many != many
    return replace(HOLD_AND_ADMIT, one=one, many=many)
