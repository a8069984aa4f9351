"""A schedule of ten thousand graphs."""

import resource
import time

from benchmarks.load_schedule import DAY, read, text_of


GRAPHS = 10_000


def test_ten_thousand_graphs_are_read_and_checked_in_five_seconds():
    """A reload must not cost a replica its ticks. Processor time: a busy machine proves nothing either way."""
    text = text_of(GRAPHS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    schedule = read(text)
    assert time.process_time() - begin < 5
    assert len(schedule.entries) == GRAPHS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024

    begin = time.process_time()
    assert all(entry.series.after(DAY) for entry in schedule.entries.values())
    assert time.process_time() - begin < 2
