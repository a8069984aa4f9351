"""A DSN: where a database is and how one gets in, with the password kept out of everything that is shown.

The password may change while tickd runs (rotation), so it is read again for each connection: from the URL or the
settings, from a file, or from a command. libpq's own messages quote what they could not read, which may be a part of
the password; none of them is passed on for a URL that does not parse.
"""

import asyncio
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from tickd.errors import Unusable


KEYWORDS = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
HINT = (
    "percent-encode special characters of the password (@ is %40, / is %2F, % is %25, # is %23, space is %20), "
    "or leave it out of the URL and set TICKD_DATABASE_PASSWORD, TICKD_DATABASE_PASSWORD_FILE or "
    "TICKD_DATABASE_PASSWORD_COMMAND"
)
COMMAND_SECONDS = 10


@dataclass(frozen=True, slots=True, repr=False)
class Dsn:
    """A database to connect to: libpq parameters without the password, and where the password comes from.

    `secrets` are the passwords that were given for it, in every writing in which a message might quote them.
    """

    parameters: Mapping[str, str]
    password: str | None = None
    password_file: Path | None = None
    password_command: tuple[str, ...] | None = None
    secrets: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Dsn({self.describe()})"

    def describe(self) -> str:
        """Return `user@host:port/name`, for people."""
        user = self.parameters.get("user", "")
        service = self.parameters.get("service")
        unnamed = f"service {service}" if service else "local socket"
        host = self.parameters.get("host") or self.parameters.get("hostaddr") or unnamed
        port = self.parameters.get("port", "5432")
        return f"{user + '@' if user else ''}{host}:{port}/{self.parameters.get('dbname', user)}"

    def over_unix_socket(self) -> bool:
        """Say whether the server is met over a Unix socket, where neither side has keepalives."""
        host = self.parameters.get("host", "")
        if self.parameters.get("hostaddr") or (not host and "service" in self.parameters):
            return False  # where a service leads is in a file that libpq alone reads
        return all(not each or each.startswith(("/", "@")) for each in host.split(","))

    async def connection_parameters(self) -> dict[str, Any]:
        """Return libpq's parameters for one connection, the password as it is now.

        Without an encoding of the client's, psycopg returns the texts of a database that has none as bytes.
        """
        password = await self._current_password()
        given = {"client_encoding": "UTF8", **self.parameters}
        return {**given, **({"password": password} if password is not None else {})}

    def redact(self, text: str) -> str:
        """Return the text without the secrets; the longest first, because one may begin like another."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    async def _current_password(self) -> str | None:
        if self.password_file is not None:
            try:
                return self.password_file.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise psycopg.OperationalError(
                    f"the password file {self.password_file} cannot be read ({type(error).__name__})"
                ) from None
        if self.password_command is not None:
            return await _output_of(self.password_command)
        return self.password


async def _output_of(command: tuple[str, ...]) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise psycopg.OperationalError(f"the password command cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        raise psycopg.OperationalError(
            f"the password command gave no answer within {COMMAND_SECONDS} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise psycopg.OperationalError(f"the password command ended with exit code {process.returncode}")
    try:
        return output.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise psycopg.OperationalError("the password command printed something that is not UTF-8") from None


def parse_dsn(
    url: str,
    *,
    setting: str,
    password: str | None = None,
    password_file: Path | None = None,
    password_command: str | None = None,
) -> Dsn:
    """Return the DSN of a Postgres URL or a libpq `key=value` text; anything else raises Unusable naming the setting.

    The separate password settings win over a password in the URL.
    """
    url = url.strip()
    _refuse_unreadable(url, setting)
    try:
        parameters = conninfo_to_dict(url)
    except psycopg.Error:
        # libpq quotes the part it stumbled over, and that part may be the password.
        raise Unusable(f"{setting} is not a Postgres URL that can be read: {HINT}") from None
    if "service" not in parameters:
        # libpq would go there all the same, and everything that is said of the server would be wrong.
        parameters = {**_place_of_environment(), **parameters}
    in_url = parameters.pop("password", None)
    if not parameters.get("dbname") and not parameters.get("service"):
        raise Unusable(f"{setting} names no database: write postgresql://USER@HOST/DATABASE")
    if not parameters.get("user") and not parameters.get("service"):
        raise Unusable(f"{setting} names no user: write postgresql://USER@HOST/DATABASE")
    if password is None and in_url is not None:
        password = str(in_url)
    return Dsn(
        parameters={key: str(value) for key, value in parameters.items()},
        password=password,
        password_file=password_file,
        password_command=None if password_command is None else _words(password_command),
        secrets=_writings(url, password, in_url, parameters.get("sslpassword")),
    )


def _place_of_environment() -> dict[str, str]:
    """Return where libpq looks for a server that is not named: PGHOST, PGHOSTADDR, PGPORT."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.keyword in (b"host", b"hostaddr", b"port") and option.val and option.val != option.compiled
    }


def _writings(url: str, *secrets: Any) -> frozenset[str]:
    """Return the secrets as they are, as they stand in the URL, and as others write them who quote a text or build a DSN."""
    given = {str(secret) for secret in secrets if secret}
    in_url = re.findall(r"(?<=://)[^:/?@]*:([^/?@]+)@|[?&](?:ssl)?password=([^&]+)", url)
    written = given | {part for pair in in_url for part in pair if part}
    return frozenset(written.union(*map(_writings_of, given)))


def _writings_of(secret: str) -> set[str]:
    encoded = quote(secret, safe="", errors="surrogatepass")
    return {
        encoded,
        # Either case of the hexadecimal digits is right.
        re.sub("%..", lambda match: match[0].lower(), encoded),
        encoded.replace("%20", "+"),
        repr(secret)[1:-1],
        ascii(secret)[1:-1],
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        re.sub(r"(['\\])", r"\\\1", secret),  # in libpq's key='value'
    }


def _refuse_unreadable(url: str, setting: str) -> None:
    """Refuse what libpq would misread in silence or refuse in words that quote the password."""
    parts = re.fullmatch(r"([A-Za-z][\w+.-]*)://([^/?]*)([^?]*)(.*)", url, re.DOTALL)
    if parts is None:
        return
    scheme, authority, path, query = parts.groups()
    if scheme not in ("postgresql", "postgres"):
        known = re.fullmatch(r"(postgres(?:ql)?)\+\w+", scheme)
        hint = f"drop {scheme[len(known[1]) :]!r}" if known else "it has to begin with postgresql://"
        raise Unusable(f"{setting} has a scheme that Postgres does not know: {hint}")
    if authority.count("@") > 1 or "@" in path:
        # libpq would take a part of p@ss for the host name, or of p@s/s for the database's, and both are shown.
        raise Unusable(f"{setting} has an unencoded @ or / in its password: {HINT}")
    if re.search(r"%(?![0-9A-Fa-f]{2})|\s", authority + path + query):
        raise Unusable(f"{setting} has an unencoded % or space: {HINT}")
    _refuse_unknown_parameters(query, setting)


def _refuse_unknown_parameters(query: str, setting: str) -> None:
    for pair in filter(None, query.removeprefix("?").split("&")):
        name = unquote(pair.partition("=")[0])
        if name in KEYWORDS or name == "ssl":
            continue
        if "@" in query:
            # The ? may stand in a password that is not encoded, and then the names are parts of it.
            raise Unusable(f"{setting} has an unencoded ? or @: {HINT}")
        shown = name if re.fullmatch(r"\w{1,40}", name) else "one of them"
        raise Unusable(f"{setting} has a parameter that Postgres does not know: {shown}")


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        words = ()
    if not words:
        raise Unusable(
            "TICKD_DATABASE_PASSWORD_COMMAND is not a command: it is empty, or a quotation mark has no second one"
        )
    return words
