"""The exceptions of tickd: each one has a caller that branches on it."""


class Unusable(Exception):
    """What the user gave (command line, settings, schedule) cannot be used; the process exits with 2.

    The text says what is wrong, where, and what to do. It never contains a secret.
    """


class DatabaseUnusable(Exception):
    """The database refuses tickd for good (wrong password, missing database or right); the process exits with 3."""
