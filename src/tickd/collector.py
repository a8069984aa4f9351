"""The collector: Python's garbage collector, kept away from what lives as long as the daemon does.

A replica of ten thousand entries keeps two hundred thousand objects that never become garbage: libraries, graphs,
calendars. The collector's default is to look at all of them again and again while runs come and go, in pauses of up to
half a second on a busy machine in which neither loop answers, and a quarter of a busy replica's processor time went
there. So these objects are frozen once they are all there, and a collection looks at what came after them, after more
of it has come.
"""

import gc


# How many more objects are made than freed before the young are looked at: some twenty runs of a small graph.
YOUNG = 20_000
# Those that have survived are few, now that nothing else is among them, and may be large: a run's state. So they are
# looked at sooner than the default of ten rounds later.
ROUNDS = 4


def relax() -> None:
    """Collect more seldom; a graph's module that has asked for still less, or for nothing, has its way."""
    young, _, _ = gc.get_threshold()
    if 0 < young < YOUNG:
        gc.set_threshold(YOUNG, ROUNDS, ROUNDS)


def freeze() -> None:
    """Leave everything that is there by now out of all later collections."""
    gc.freeze()
