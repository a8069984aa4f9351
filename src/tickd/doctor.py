"""The doctor: whether this replica's surroundings fit what it is about to do, and what to change where they don't.

It looks and changes nothing. Each finding is one sentence about one thing, as it is found, with the advice in it.
"""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from tickd.clock import DatabaseClock
from tickd.database import FINAL_REFUSALS, POOLER, STANDBY
from tickd.errors import DatabaseUnusable
from tickd.lock import (
    LockPlace,
    LockSession,
    closing,
    open_session,
    pooler_complaint,
    probe,
    reaches_pooler,
    standby_complaint,
)
from tickd.migrations import foresee
from tickd.settings import Settings


OLDEST_SERVER = 140000
# What a replica opens besides its pool, its runs and its attempts: the ledger's two, the one that listens, and the one
# that holds share.
FIXED_CONNECTIONS = 4

SERVER = """
SELECT current_setting('server_version_num')::int,
       current_setting('max_connections')::int,
       current_setting('superuser_reserved_connections')::int,
       current_setting('max_locks_per_transaction')::int,
       current_setting('max_prepared_transactions')::int,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user),
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
       (SELECT count(DISTINCT application_name) FROM pg_stat_activity WHERE application_name LIKE 'tickd/%%' AND pid <> pg_backend_pid())
"""


class Health(StrEnum):
    """How a finding is meant."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    health: Health
    sentence: str


@dataclass(frozen=True, slots=True)
class Server:
    """What one query says of the server and of who is on it."""

    version_number: int
    max_connections: int
    reserved: int
    locks_per_transaction: int
    prepared_transactions: int
    role_limit: int
    connections: int
    replicas: int


def out_of_reach(place: LockPlace, error: Exception) -> Finding:
    """Say why no session can be opened there, in the words of the start where it knows the reason."""
    reason = place.dsn.redact(str(error)).strip() or type(error).__name__
    meaning = next((meaning for words, meaning in FINAL_REFUSALS if words in reason), None)
    if meaning == POOLER:
        return Finding("database", Health.BAD, pooler_complaint(place.dsn))
    if meaning == STANDBY:
        return Finding("database", Health.BAD, standby_complaint(place.dsn))
    sentence = f"{place.dsn.describe()} cannot be reached{f', {meaning}' if meaning else ''}: {reason}"
    return Finding("database", Health.BAD, sentence)


async def examine(settings: Settings, place: LockPlace, *, graphs: int) -> list[Finding]:
    """Look at the database as a replica with these settings would use it; raises OperationalError when it is not there."""
    async with closing(await open_session(place)) as session:
        server = Server(*await session.fetch(SERVER))
        clock = DatabaseClock()
        await clock.measure(session.fetch)
        about = session.connection.info.parameter_status
        version, encoding = str(about("server_version")), str(about("server_encoding"))
        tables = await _tables(session)
    return [
        _server(server, version, encoding),
        await _way_to_locks(settings, place),
        tables,
        _clock(clock.skew(), settings.skew_limit),
        _windows(place),
        _connections(settings, server),
        _lock_table(settings, server, graphs),
    ]


def _server(server: Server, version: str, encoding: str) -> Finding:
    if server.version_number < OLDEST_SERVER:
        sentence = (
            f"Postgres {version} is older than 14, the oldest that tickd's lock sessions can be set up on"
        )
        return Finding("server", Health.BAD, sentence)
    if encoding != "UTF8":
        # SQL_ASCII has no characters at all, so texts come back as bytes; all others miss most of what a model may say.
        sentence = f"Postgres {version}, and the database's encoding is {encoding}, which cannot hold every text of a graph"
        return Finding("server", Health.DOUBTFUL, f"{sentence}: create the database with ENCODING 'UTF8'")
    return Finding("server", Health.GOOD, f"Postgres {version}")


async def _way_to_locks(settings: Settings, place: LockPlace) -> Finding:
    try:
        identity = await probe(place)
        pooled = await reaches_pooler(settings.database(), place.connect_timeout, same_as=identity)
    except DatabaseUnusable as error:
        return Finding("locks", Health.BAD, str(error))
    way = "through a pooler" if pooled else "directly"
    return Finding("locks", Health.GOOD, f"locks reach the primary directly; checkpoints go {way}")


async def _tables(session: LockSession) -> Finding:
    try:
        versions = await foresee(session.connection)
    except DatabaseUnusable as error:
        return Finding("tables", Health.BAD, str(error))
    state = f"ledger version {versions.ledger}, checkpointer version {versions.saver}"
    if not versions.current:
        return Finding(
            "tables", Health.DOUBTFUL, f"{state}: the next start, or `tickd migrate`, brings them up to date"
        )
    return Finding("tables", Health.GOOD, f"{state}, up to date")


def _clock(skew: timedelta, limit: timedelta) -> Finding:
    milliseconds = skew.total_seconds() * 1000
    sentence = f"this host's clock is {abs(milliseconds):.0f} ms {'ahead of' if milliseconds > 0 else 'behind'} the database's"
    if abs(skew) > limit:
        return Finding(
            "clock", Health.DOUBTFUL, f"{sentence}, more than TICKD_SKEW_LIMIT: let both follow a time server"
        )
    return Finding("clock", Health.GOOD, sentence)


def _windows(place: LockPlace) -> Finding:
    if place.dsn.over_unix_socket():
        sentence = "over a Unix socket, the kernel tells each side of the other's end at once"
        return Finding("trust", Health.GOOD, sentence)
    windows = place.windows
    sentence = (
        f"a run that is cut off has stopped after {windows.client.total_seconds():g} s, and its lock is free after "
        f"{windows.server.total_seconds():g} s"
    )
    return Finding("trust", Health.GOOD, sentence)


def _connections(settings: Settings, server: Server) -> Finding:
    """Compare what the replicas may open at most with what the server, and the role, allow."""
    replicas = max(1, server.replicas)
    each = settings.pool_max_size + FIXED_CONNECTIONS + settings.max_running + settings.lock_attempts
    allowed = server.max_connections - server.reserved
    if server.role_limit >= 0:
        allowed = min(allowed, server.role_limit)
    sentence = (
        f"{replicas} {'replica' if replicas == 1 else 'replicas'} may open {replicas} x ({settings.pool_max_size} pool + "
        f"{FIXED_CONNECTIONS} + {settings.max_running} runs + {settings.lock_attempts} attempts) = {replicas * each} connections; "
        f"{allowed} are allowed, {server.connections} are open now"
    )
    if replicas * each > allowed:
        advice = "lower TICKD_MAX_RUNNING or TICKD_POOL_MAX_SIZE, give graphs `hold: shared`, or raise max_connections"
        return Finding("connections", Health.DOUBTFUL, f"{sentence}: {advice}")
    return Finding("connections", Health.GOOD, sentence)


def _lock_table(settings: Settings, server: Server, graphs: int) -> Finding:
    """Compare the locks that runs hold at most with the table that all sessions of the server share."""
    slots = server.locks_per_transaction * (server.max_connections + server.prepared_transactions)
    held = min(graphs, settings.max_running * max(1, server.replicas))
    sentence = f"runs hold {held} advisory locks at most; the server's lock table has {slots} slots"
    # Tables, indexes and everybody else's locks live there as well.
    if held > slots // 2:
        return Finding("lock table", Health.DOUBTFUL, f"{sentence}: raise max_locks_per_transaction")
    return Finding("lock table", Health.GOOD, sentence)
