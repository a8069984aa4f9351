"""DSNs: what is accepted, what is refused and how, and that no part of a password is ever shown."""

import json
import re
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from tickd.dsn import Dsn, parse_dsn
from tickd.errors import Unusable


SETTING = "TICKD_DATABASE_URL"
# What an environment variable can hold.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def parse(url: str, password: str | None = None) -> Dsn:
    """Read a URL as the settings do."""
    return parse_dsn(url, setting=SETTING, password=password)


def slices(secret: str) -> set[str]:
    """Return what must not be found in anything shown: each four characters of a secret."""
    return {secret[n : n + 4] for n in range(len(secret) - 3)}


def refusal(url: str) -> str:
    """Return the text with which a URL is refused, having looked that no traceback would add to it."""
    with pytest.raises(Unusable) as refused:
        parse(url)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__
    return str(refused.value)


@pytest.mark.parametrize(
    "password",
    [
        "S3cr@tZq8x",
        "S3cr@t@Zq8x",
        "S3cr%ZZetq8",
        "S3cr%",
        "S3cr/Zq8x",
        "S3cr@t/Zq8x",
        "S3cr/Z@q8xy",
        "S3cr Zq8x",
        "S3cr\tZq8x",
        "S3cr?Zq8x",
        "S3cr?Zq8x&W7vu=1",
        "S3@r?Zq8x",
    ],
)
def test_a_password_that_makes_the_url_ambiguous_is_refused_without_a_word_of_it(password: str):
    """Left alone, libpq would take a part of it for a host or a database, and show that part in its errors and in the log."""
    said = refusal(f"postgresql://tickd:{password}@db.example/tickd")

    assert not [part for part in slices(password) if part in said]
    assert said.startswith(SETTING)
    assert "percent-encode" in said


@pytest.mark.parametrize(
    "password",
    ["p#ss", "p:ss", "p=ss", "p&ss", "p+ss", "p'ss", "p\\ss", "p[ss", "p]ss", "p\u00df\u20ac", '"'],
)
def test_a_password_that_is_clear_in_a_url_is_taken_as_it_is(password: str):
    """A refusal without need would make people change a good password."""
    dsn = parse(f"postgresql://tickd:{password}@db.example:5433/shop")

    assert dsn.password == password
    assert dsn.describe() == "tickd@db.example:5433/shop"


@given(TEXTS.filter(bool))
def test_any_password_passes_percent_encoded(password: str):
    """It is what the refusal advises."""
    encoded = "".join(f"%{byte:02X}" for byte in password.encode())

    assert parse(f"postgresql://tickd:{encoded}@db/tickd").password == password


@given(st.text())
def test_any_password_passes_on_its_own(password: str):
    """It is the refusal's other advice, and it wins over one in the URL."""
    assert parse("postgresql://tickd:other@db/tickd", password).password == password


@given(TEXTS)
def test_whatever_the_password_is_nothing_of_it_is_shown(password: str):
    """Accepted or refused: the password is in no text that may be printed."""
    try:
        dsn = parse(f"postgresql://tickd:Zq8x{password}W7vu@db/tickd")
    except Unusable as error:
        said = str(error)
    else:
        said = f"{dsn.describe()} {dsn!r}"

    assert not [part for part in ("Zq8x", "W7vu") if part in said]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql+asyncpg://tickd:Zq8x@db/tickd", "drop '+asyncpg'"),
        ("postgres+psycopg://tickd:Zq8x@db/tickd", "drop '+psycopg'"),
        ("mysql://tickd:Zq8x@db/tickd", "it has to begin with postgresql://"),
        ("postgresql://tickd:Zq8x@db/tickd?foo=bar", "a parameter that Postgres does not know: foo"),
        ("postgresql://tickd:Zq8x%ZZ@db/tickd", "an unencoded % or space"),
        ("postgresql://tickd:Zq8x@db/tickd?f o=bar", "an unencoded % or space"),
        (
            "postgresql://tickd:Zq8x@db/tickd?f%20o=bar",
            "a parameter that Postgres does not know: one of them",
        ),
        ("postgresql://tickd:Zq8x@db", "names no database"),
        ("postgresql://db/tickd", "names no user"),
        ("tickd:Zq8x@db/tickd", "is not a Postgres URL that can be read"),
        ("host=db password='Zq8x", "is not a Postgres URL that can be read"),
        ("postgresql://tickd:Zq8x@[::1/tickd", "is not a Postgres URL that can be read"),
        ("", "names no database"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_to_do(url: str, said: str):
    """Each of these is a mistake people make, and libpq's own words for it quote the password."""
    refused = refusal(url)

    assert said in refused
    assert refused.startswith(SETTING)
    assert "Zq8x" not in refused


@pytest.mark.parametrize(
    "url",
    [
        "host=db dbname=shop user=tickd password='p@ss /%?'",
        "host=db dbname=shop user=tickd password=ab://p@ss",
        "postgres://tickd@db/shop?sslmode=require&application_name=x",
        "postgresql://tickd@db/shop?ssl=true",
        "  postgresql://tickd@db/shop\n",
        "postgresql://tickd@/shop?host=/run/postgresql",
        "service=shop",
    ],
)
def test_every_form_that_libpq_knows_is_accepted(url: str):
    """People bring what their other tools take."""
    parse(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("postgresql://tickd@db:5433/shop", "tickd@db:5433/shop"),
        ("postgresql://tickd@db/shop", "tickd@db:5432/shop"),
        ("postgresql://tickd@/shop", "tickd@local socket:5432/shop"),
        ("postgresql://tickd@/shop?hostaddr=10.0.0.1", "tickd@10.0.0.1:5432/shop"),
        ("service=shop", "service shop:5432/"),
    ],
)
def test_a_dsn_is_described_for_people(url: str, text: str):
    """An error that does not say which server it speaks of is half an error."""
    assert parse(url).describe() == text


@pytest.mark.parametrize(
    ("url", "over_socket"),
    [
        ("postgresql://tickd@/shop", True),
        ("postgresql://tickd@/shop?host=/run/postgresql", True),
        ("host=@abstract dbname=shop user=tickd", True),
        ("host=/run/postgresql,db dbname=shop user=tickd", False),
        ("service=shop", False),
        ("postgresql://tickd@db/shop", False),
        ("postgresql://tickd@/shop?hostaddr=10.0.0.1", False),
    ],
)
def test_a_unix_socket_is_told_from_a_network(url: str, *, over_socket: bool):
    """There are no keepalives on a Unix socket, and no need of them."""
    assert parse(url).over_unix_socket() is over_socket


def test_a_server_that_the_environment_names_is_named(monkeypatch: pytest.MonkeyPatch):
    """That is where libpq goes; "local socket", and windows that do not apply there, would be told to whoever looks for it."""
    monkeypatch.setenv("PGHOST", "db")
    monkeypatch.setenv("PGPORT", "5433")

    assert parse("postgresql://tickd@/shop").describe() == "tickd@db:5433/shop"
    assert not parse("postgresql://tickd@/shop").over_unix_socket()
    assert parse("postgresql://tickd@other:1/shop").describe() == "tickd@other:1/shop"
    assert parse("service=shop").describe() == "service shop:5432/"


def test_a_text_is_redacted_of_the_password_in_both_writings():
    """Messages of libpq quote a password as it was written, in a URL or out of one."""
    dsn = parse("postgresql://tickd:p%40ss%2Fword@db/tickd")

    assert dsn.redact("seen p@ss/word and p%40ss%2Fword here") == "seen *** and *** here"
    assert parse("postgresql://tickd@db/tickd").redact("nothing to hide") == "nothing to hide"


@pytest.mark.parametrize("password", ["it's\\2/secret", 'say "friend"', "p\u00e4ssw\u00f6rt 7"])
def test_a_password_is_redacted_in_every_writing_that_a_message_may_quote_it_in(password: str):
    """A graph connects with the same DSN, and a client of its own shows what it was given: as repr, as JSON, as conninfo."""
    dsn = parse(f"postgresql://tickd:{quote(password, safe='')}@db/tickd")
    written = [
        repr({"password": password}),
        ascii(password),
        json.dumps(password),
        make_conninfo(password=password),
        quote_plus(password),
        re.sub("%..", lambda match: match[0].lower(), quote(password, safe="")),
    ]

    shown = [dsn.redact(text) for text in written]

    assert all("***" in text for text in shown), shown


def test_the_longer_of_two_passwords_is_taken_out_first():
    """An old one may be left in the URL, and the new one begin like it."""
    for old, new in (("hunter", "hunter22"), ("hunter22", "hunter")):
        dsn = parse(f"postgresql://tickd:{old}@db/tickd", new)

        assert dsn.redact("seen hunter22") == "seen ***"


async def test_the_password_goes_to_the_connection_and_nowhere_else():
    """It is the one place that has to see it."""
    dsn = parse("postgresql://tickd:hunter22@db/tickd")

    assert await dsn.connection_parameters() == {
        "client_encoding": "UTF8",
        "user": "tickd",
        "host": "db",
        "dbname": "tickd",
        "password": "hunter22",
    }
    assert "hunter22" not in repr(dsn)


async def test_no_password_is_none_given():
    """With a certificate, a .pgpass file or trust there is none, and an empty one would be wrong."""
    assert "password" not in await parse("postgresql://tickd@db/tickd").connection_parameters()


@pytest.mark.parametrize("command", ["sh -c 'unclosed", "   "])
def test_a_password_command_that_is_no_command_is_refused_at_the_start(command: str):
    """Repeating it would not help."""
    with pytest.raises(Unusable, match="TICKD_DATABASE_PASSWORD_COMMAND is not a command"):
        parse_dsn("postgresql://tickd@db/tickd", setting=SETTING, password_command=command)
