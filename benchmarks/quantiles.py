"""Quantiles: where a sorted list of measurements has its middle and its ends."""

from collections.abc import Sequence
from math import ceil


QUANTILES = {"min": 0.0, "p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Return the q-quantile of ordered values, by the nearest rank; None of none."""
    return ordered[max(0, ceil(q * len(ordered)) - 1)] if ordered else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return every quantile of interest of values in any order."""
    ordered = sorted(values)
    return {name: quantile(ordered, q) for name, q in QUANTILES.items()}
