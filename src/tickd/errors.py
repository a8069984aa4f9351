"""The exceptions of tickd: each one has a caller that branches on it."""


class Unusable(Exception):
    """What the user gave (command line, settings, schedule) cannot be used; the process exits with 2.

    The text says what is wrong, where, and what to do. It never contains a secret.
    """


class DatabaseUnusable(Exception):
    """The database refuses tickd for good (wrong password, missing database or right); the process exits with 3."""


class AmbiguousEffect(Exception):
    """An earlier run of the node began this effect and was cut off before it could note whether it took place.

    A node may catch it and ask: the other side, or a person.
    """


class StaleHold(Exception):
    """The graph has a newer hold than this run's, so the run must not begin anything any more."""
