"""A database for one test: made fresh, owned by a role without privileges, and dropped with everything that uses it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo


# Each of its four-character slices is rare enough to be looked for in whatever tickd prints.
PASSWORD = "Sw0rdf1sh-Zq8x"


@dataclass(frozen=True, slots=True)
class Role:
    """A role that logs in with a password, and its URL of the test's database."""

    name: str
    password: str
    dsn: str


@dataclass(slots=True)
class Server:
    """A running server, reached as superuser: a throwaway cluster, or the one that TICKD_TEST_DSN names."""

    admin: str
    owner: str = field(default_factory=lambda: f"tickd_{secrets.token_hex(4)}")

    def admin_dsn(self, database: str) -> str:
        """Return the conninfo of a database as superuser."""
        return make_conninfo(self.admin, dbname=database)

    def url(self, role: str, database: str) -> str:
        """Return the URL of a database for a role that was made here."""
        parts: dict[str, Any] = {"host": "127.0.0.1", "port": 5432, **conninfo_to_dict(self.admin)}
        return f"postgresql://{role}:{PASSWORD}@{parts['host']}:{parts['port']}/{database}"

    def make_owner(self) -> None:
        """Make the role that owns the tests' databases; it has no privilege beyond that."""
        with psycopg.connect(self.admin, autocommit=True) as connection:
            _make_role(connection, self.owner, connection_limit=-1)

    def drop_owner(self) -> None:
        """Drop the owner of the tests' databases."""
        with psycopg.connect(self.admin, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(self.owner)))


class Database:
    """One database of one test."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.name = f"t_{secrets.token_hex(5)}"
        self.roles: list[str] = []
        self.connection = psycopg.connect(server.admin, autocommit=True)

    @property
    def dsn(self) -> str:
        """The URL as the role that owns the database and has no other privilege: what tickd is given in production."""
        return self.server.url(self.server.owner, self.name)

    @property
    def admin_dsn(self) -> str:
        """The conninfo as superuser, to look on from outside."""
        return self.server.admin_dsn(self.name)

    def create(self, template: str = "template0", *, encoding: str | None = None) -> None:
        """Create the database: empty, or as a copy of another; an empty one may have an encoding of its own."""
        # Ten times as fast as the default strategy, which writes every page to the log, where nothing is synced to disk.
        statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {} STRATEGY file_copy")
        names = map(sql.Identifier, (self.name, self.server.owner, template))
        of_its_own = (
            sql.SQL(" ENCODING {} LOCALE 'C'").format(sql.Literal(encoding)) if encoding else sql.SQL("")
        )
        self.connection.execute(statement.format(*names) + of_its_own)

    def drop(self) -> None:
        """Drop the database, whoever is still connected to it."""
        self.connection.execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(self.name))
        )

    def role(
        self, *, settings: Mapping[str, str] | None = None, connection_limit: int = -1, owner: bool = True
    ) -> Role:
        """Make a role with defaults of its own; unless `owner` is false, the database becomes its property."""
        name = f"r_{secrets.token_hex(5)}"
        _make_role(self.connection, name, connection_limit=connection_limit)
        self.roles.append(name)
        for key, value in (settings or {}).items():
            statement = sql.SQL("ALTER ROLE {} SET {} = {}")
            self.connection.execute(
                statement.format(sql.Identifier(name), sql.Identifier(key), sql.Literal(value))
            )
        if owner:
            statement = sql.SQL("ALTER DATABASE {} OWNER TO {}")
            self.connection.execute(statement.format(sql.Identifier(self.name), sql.Identifier(name)))
        return Role(name, PASSWORD, self.server.url(name, self.name))

    def limit_connections(self, role: Role, limit: int) -> None:
        """Change how many connections a role may have; those it has stay."""
        statement = sql.SQL("ALTER ROLE {} CONNECTION LIMIT {}")
        self.connection.execute(statement.format(sql.Identifier(role.name), sql.Literal(limit)))

    def close(self) -> None:
        """Drop the database and its roles, and leave the server."""
        with self.connection:
            self.drop()
            for name in self.roles:
                self.connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def _make_role(connection: psycopg.Connection, name: str, *, connection_limit: int) -> None:
    statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} CONNECTION LIMIT {}")
    connection.execute(
        statement.format(sql.Identifier(name), sql.Literal(PASSWORD), sql.Literal(connection_limit))
    )
