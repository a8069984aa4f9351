"""A schedule of ten thousand graphs; how long it takes is what `benchmarks/load_schedule.py` measures."""

import resource

from benchmarks.day import BEGIN
from benchmarks.load_schedule import read, text_of


GRAPHS = 10_000


def test_ten_thousand_graphs_are_read_and_checked_within_bounded_memory():
    """A large schedule is read as a small one is, and does not cost a replica its memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    schedule = read(text_of(GRAPHS))

    assert len(schedule.entries) == GRAPHS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert all(entry.series.after(BEGIN) for entry in schedule.entries.values())
