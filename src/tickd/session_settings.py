"""Session settings: what a lock session is opened with, on this side and on the server's.

A lock session lasts as long as its run, and both ends of it must notice when the other is gone, the client first
(`policy.TrustWindows`). So nothing of this is left to a role's or a server's defaults.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tickd.policy import TrustWindows


def connection_arguments(
    parameters: Mapping[str, Any],
    *,
    application: str,
    connect_timeout: timedelta,
    windows: TrustWindows,
    row_wait: timedelta,
) -> dict[str, Any]:
    """Return libpq's parameters with all that makes their connection fit to hold a lock.

    `row_wait` bounds how long a statement waits for a row that another session has locked.
    """
    given = parameters.get("options", "")
    settings = (f"-c {name}={value}" for name, value in _server_settings(windows, row_wait).items())
    return {
        **parameters,
        "application_name": application,
        "connect_timeout": max(2, round(connect_timeout.total_seconds())),
        # A lock on a hot standby excludes nobody.
        "target_session_attrs": "read-write",
        "keepalives": 1,
        "keepalives_idle": max(1, round(windows.probe_interval.total_seconds())),
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": round(windows.client.total_seconds() * 1000),
        "options": " ".join(filter(None, [given, *settings])),
    }


def _server_settings(windows: TrustWindows, row_wait: timedelta) -> dict[str, Any]:
    """Return what the session sets for itself."""
    return {
        # A role's defaults would end or stop the session in the middle of a run.
        "idle_session_timeout": 0,
        "idle_in_transaction_session_timeout": 0,
        "statement_timeout": 0,
        # A try-lock never waits, but an admission may, for a row. A backend that still waited when this side has given up
        # would hold the graph's lock, and admit a tick for nobody when the row is free.
        "lock_timeout": round(row_wait.total_seconds() * 1000),
        # ON CONFLICT has to see rows committed after the statement began; stricter levels raise instead.
        "default_transaction_isolation": r"read\ committed",
        # Every statement here finds single rows by an index. Of a table without statistics Postgres thinks that it is tiny,
        # and would scan all of it for each tick, with a plan that it keeps.
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        # Where there is no other way than one of these it has a price beyond everything, and Postgres would take a second
        # to compile the statement.
        "jit": "off",
        # The server's side: without these, a vanished host's lock stays for about two hours.
        "tcp_keepalives_idle": round(windows.server_idle.total_seconds()),
        "tcp_keepalives_interval": round(windows.server_interval.total_seconds()),
        "tcp_keepalives_count": windows.server_count,
        "tcp_user_timeout": round(windows.server.total_seconds() * 1000),
    }
