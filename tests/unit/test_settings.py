"""The settings: the environment read as people mean it, refused in plain words, and no value of a secret shown."""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest

from tickd.errors import Unusable
from tickd.settings import ENV_FILE, Settings, read_settings, unknown_variables, usual_schedule


URL = "postgresql://tickd:Sw0rdf1sh-Zq8x@db/tickd"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch):
    """Neither the developer's own TICKD_ variables nor a .env file: that is looked for in the working directory."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"TICKD_{name.upper()}", raising=False)
    monkeypatch.setitem(Settings.model_config, "env_file", None)


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    """Read the settings with these variables set."""
    for name, value in {"DATABASE_URL": URL, **variables}.items():
        monkeypatch.setenv(f"TICKD_{name}", value)
    return read_settings()


def refusal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """Return the words with which these variables are refused."""
    with pytest.raises(Unusable) as refused:
        read(monkeypatch, **variables).windows()
    assert refused.value.__context__ is None or refused.value.__suppress_context__
    return str(refused.value)


def test_one_url_is_enough(monkeypatch: pytest.MonkeyPatch):
    """Everything else has a value that suits most."""
    settings = read(monkeypatch)

    assert settings.database() == settings.lock_database()
    assert (settings.lock_space, settings.schedule) == (7301, Path("schedule.yaml"))
    assert settings.windows().client < settings.windows().server


def test_without_a_url_the_refusal_says_why_and_what_else_there_is():
    """Replicas with a database each would exclude nobody, so none is started in silence."""
    with pytest.raises(Unusable, match=r"TICKD_DATABASE_URL is not set.*`tickd dev`"):
        read_settings().database()


def test_locks_may_take_another_way_to_the_database(monkeypatch: pytest.MonkeyPatch):
    """The pool may go through a pooler; a lock may not."""
    settings = read(monkeypatch, LOCK_DATABASE_URL="postgresql://tickd@direct/tickd")

    assert settings.database().describe() == "tickd@db:5432/tickd"
    assert settings.lock_database().describe() == "tickd@direct:5432/tickd"


@pytest.mark.parametrize(
    "password", ["p@ss #word", "12345678", "1234_5678", '"p@ss\\word"', "007", "null", " x "]
)
async def test_a_password_is_taken_as_it_is_written(monkeypatch: pytest.MonkeyPatch, password: str):
    """Numbers, quotes and comment signs have no meaning in an environment variable."""
    settings = read(monkeypatch, DATABASE_PASSWORD=password)

    assert (await settings.database().connection_parameters())["password"] == password


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch):
    """Compose files set variables to nothing when the host has none."""
    settings = read(monkeypatch, LOCK_DATABASE_URL="", REPLICA="", POOL_MAX_SIZE="")

    assert settings.lock_database() == settings.database()
    assert settings.replica
    assert settings.pool_max_size == 4


@pytest.mark.parametrize("space", ["-2147483648", "-1", "0", "7301", "2147483647"])
def test_a_lock_space_is_any_int4(monkeypatch: pytest.MonkeyPatch, space: str):
    """Postgres takes no other."""
    assert read(monkeypatch, LOCK_SPACE=space).lock_space == int(space)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LOCK_SPACE", "3000000000", "less than or equal to 2147483647"),
        ("LOCK_SPACE", "-2147483649", "greater than or equal to -2147483648"),
        ("LOCK_SPACE", "7301.5", "valid integer"),
        ("LOCK_SPACE", "x", "valid integer"),
        ("REPLICA", "with space", "1 to 57 printable ASCII characters"),
        ("REPLICA", "\u00e5", "1 to 57 printable ASCII characters"),
        ("REPLICA", "r" * 58, "1 to 57 printable ASCII characters"),
        ("POOL_MAX_SIZE", "0", "greater than or equal to 1"),
        ("MAX_RUNNING", "0", "greater than or equal to 1"),
        ("LOCK_ATTEMPTS", "0", "greater than or equal to 1"),
        ("DRAIN_TIMEOUT", "30", "is not a duration such as 500ms, 30s, 10m, 2h or 1d"),
        ("CONNECT_TIMEOUT", "0s", "longer than nothing"),
        ("PROBE_INTERVAL", "0s", "longer than nothing"),
        ("PROBE_TIMEOUT", "0ms", "longer than nothing"),
        ("POOL_TIMEOUT", "0s", "longer than nothing"),
        ("KEEPALIVE_IDLE", "500ms", "whole seconds"),
        ("KEEPALIVE_IDLE", "0s", "whole seconds"),
        ("KEEPALIVE_INTERVAL", "5500ms", "whole seconds"),
        ("KEEPALIVE_COUNT", "0", "greater than or equal to 1"),
        ("HTTP", "8080", "host:port"),
        ("LOG_FORMAT", "xml", "'json' or 'console'"),
        ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    """The reader has to find the variable and see what was expected."""
    refused = refusal(monkeypatch, **{name: value})

    assert refused.startswith(f"TICKD_{name}: ")
    assert said in refused


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch):
    """Nobody likes to start a container five times for five mistakes."""
    refused = refusal(monkeypatch, LOCK_SPACE="x", DRAIN_TIMEOUT="30", REPLICA="a b")

    assert [line.partition(":")[0] for line in refused.splitlines()] == [
        "TICKD_REPLICA",
        "TICKD_LOCK_SPACE",
        "TICKD_DRAIN_TIMEOUT",
    ]


def test_pool_sizes_have_to_fit_each_other(monkeypatch: pytest.MonkeyPatch):
    """The pool would raise the same as a traceback."""
    assert "POOL_MIN_SIZE 5 is above POOL_MAX_SIZE 4" in refusal(
        monkeypatch, POOL_MIN_SIZE="5", POOL_MAX_SIZE="4"
    )


def test_a_server_that_gives_up_first_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Two replicas would run one graph: the one that is cut off, and the one that gets its lock (I4)."""
    refused = refusal(monkeypatch, KEEPALIVE_IDLE="2s", KEEPALIVE_INTERVAL="1s")

    assert "keepalive idle 2 s + 3 x 1 s = 5 s" in refused


def test_every_variable_that_the_refusal_of_windows_names_is_read(monkeypatch: pytest.MonkeyPatch):
    """Advice that leads nowhere is worse than none."""
    refused = (
        refusal(monkeypatch, STOP_ALLOWANCE="1h")
        + " "
        + refusal(monkeypatch, STOP_ALLOWANCE="1s", LEASE="5s")
    )

    named = {word.strip(".,;") for word in refused.split() if word.startswith("TICKD_")}
    assert len(named) == 7
    assert unknown_variables(dict.fromkeys(named, "")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgresql://tickd:Sw0rdf1sh%Zq8x@db/tickd"),
        ("DATABASE_URL", "postgresql://tickd:Sw0rdf1sh@Zq8x/ab@db/tickd"),
        ("LOCK_DATABASE_URL", "postgresql+psycopg://tickd:Sw0rdf1sh@db/tickd"),
    ],
)
def test_a_refused_url_shows_nothing_of_its_password(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    """The refusal goes to stderr, and from there into somebody's log."""
    with pytest.raises(Unusable) as refused:
        read(monkeypatch, **{name: value}).secrets()

    assert str(refused.value).startswith(f"TICKD_{name} ")
    assert not [part for part in ("Sw0r", "f1sh", "Zq8x") if part in str(refused.value)]


@pytest.mark.parametrize("shown", [repr, str, lambda settings: settings.model_dump_json()])
def test_settings_do_not_show_their_secrets(monkeypatch: pytest.MonkeyPatch, shown):
    """They may end in a traceback's locals or a debugger's output."""
    settings = read(monkeypatch, DATABASE_PASSWORD="hunter22hunter")

    assert "Zq8x" not in shown(settings)
    assert "hunter22" not in shown(settings)


def test_every_writing_of_every_password_is_a_secret(monkeypatch: pytest.MonkeyPatch):
    """A graph may read the variable itself and raise an error that quotes it."""
    settings = read(
        monkeypatch,
        DATABASE_URL="postgresql://tickd:p%2fss%2Fw0rd@db/tickd?sslpassword=k%65ypass",
        LOCK_DATABASE_URL="host=db dbname=tickd user=tickd password='other pass'",
        DATABASE_PASSWORD="third/pass",
    )

    assert settings.secrets() >= {
        "p%2fss%2Fw0rd",
        "p/ss/w0rd",
        "p%2Fss%2Fw0rd",
        "k%65ypass",
        "keypass",
        "other pass",
        "other%20pass",
        "third/pass",
        "third%2Fpass",
    }


def test_a_default_replica_name_fits_everywhere(monkeypatch: pytest.MonkeyPatch):
    """Host names of containers are long, and some have underscores or worse."""
    monkeypatch.setattr("socket.gethostname", lambda: "h\u00f6st name" * 20)

    replica = read(monkeypatch).replica

    assert replica.startswith("h-st-name")
    assert len(replica) <= 57


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TICKD_DATABASE_ULR", "; did you mean TICKD_DATABASE_URL?"),
        ("TICKD_MAX_RUNING", "; did you mean TICKD_MAX_RUNNING?"),
        ("TICKD_XYZZY", ""),
    ],
)
def test_a_variable_that_nothing_reads_is_warned_of(name: str, said: str):
    """Else a misspelt one keeps its default in silence, for months."""
    assert unknown_variables({name: "x", "TICKD_REPLICA": "a", "PATH": ""}) == [
        f"{name} is set, and nothing reads it{said}"
    ]


@pytest.fixture
def env_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file .env of a working directory; it has yet to be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(Settings.model_config, "env_file", ENV_FILE)
    return tmp_path / ENV_FILE


def test_a_variable_of_the_env_file_that_nothing_reads_is_warned_of(env_file: Path):
    """Where the settings are written there, that is where they are misspelt."""
    env_file.write_text("TICKD_DATABSE_URL=x\nTICKD_REPLICA=a\nLANGSMITH_TRACING=true\n")

    assert unknown_variables({"PATH": ""}) == [
        "TICKD_DATABSE_URL is set, and nothing reads it; did you mean TICKD_DATABASE_URL?"
    ]


def test_an_env_file_that_is_no_text_is_refused_in_words(env_file: Path):
    """PowerShell's `>` writes UTF-16, and a traceback of the codec does not say which file it was."""
    env_file.write_text("TICKD_REPLICA=a\n", encoding="utf-16")

    for ask in (read_settings, usual_schedule):
        with pytest.raises(Unusable, match=r"\.env: this is not UTF-8"):
            ask()


def test_an_env_file_that_cannot_be_read_is_refused_in_words(env_file: Path):
    """A secret that is another user's, a mount that is gone: nothing may start with half of its settings."""
    env_file.symlink_to("/proc/self/mem")  # may be opened, and not read: as root, too

    with pytest.raises(Unusable, match=r"\.env: cannot be read: Input/output error"):
        read_settings()


def test_the_variables_of_the_test_suite_are_not_warned_of():
    """TICKD_TEST_DSN names a server for the tests, beside whatever else runs in that shell."""
    assert unknown_variables({"TICKD_TEST_DSN": "x"}) == []


def test_each_setting_says_what_it_is_for():
    """The reference page is made of these sentences."""
    fields = Settings.model_fields

    assert all(field.description and field.description.endswith(".") for field in fields.values())
    assert not [
        a for a, b in itertools.combinations(fields, 2) if fields[a].description == fields[b].description
    ]


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    """`tickd run other.yaml` runs the other one; an argument that was not given changes nothing."""
    read(monkeypatch, SCHEDULE="one.yaml", DRAIN_TIMEOUT="5s")

    assert read_settings(schedule=Path("other.yaml")).schedule == Path("other.yaml")
    assert read_settings(schedule=None).schedule == Path("one.yaml")
    assert read_settings().drain_timeout == timedelta(seconds=5)
