"""The environment, read once into Settings: prefix `TICKD_`, and a `.env` file in the working directory."""

import difflib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, DotEnvSettingsSource, SettingsConfigDict

from tickd.dsn import Dsn, parse_dsn
from tickd.duration import FORMS, parse_duration
from tickd.errors import Unusable
from tickd.policy import TrustWindows


ENV_FILE = ".env"
# application_name has 63 bytes and shows anything but printable ASCII as escapes; `tickd/` takes six of them.
REPLICA_FORM = re.compile(r"[!-~]{1,57}")


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


def _more_than_nothing(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("has to be longer than nothing")
    return value


def _whole_seconds(value: timedelta) -> timedelta:
    if value < timedelta(seconds=1) or value % timedelta(seconds=1):
        raise ValueError(
            "has to be whole seconds, and at least 1s: Postgres takes no fractions, and 0 for its default"
        )
    return value


Duration = Annotated[timedelta, BeforeValidator(_duration)]
Span = Annotated[Duration, AfterValidator(_more_than_nothing)]
WholeSeconds = Annotated[Duration, AfterValidator(_whole_seconds)]


def _default_replica() -> str:
    host = re.sub(r"[^!-~]", "-", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}"


class Settings(BaseSettings):
    """What one replica is told by its environment. Durations are written like `30s`."""

    model_config = SettingsConfigDict(
        env_prefix="TICKD_",
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
    )

    database_url: SecretStr | None = Field(
        None, description="Checkpoints and ledger; may go through a pooler."
    )
    lock_database_url: SecretStr | None = Field(
        None, description="Locks; has to reach the server directly. Default: the same as DATABASE_URL."
    )
    database_password: SecretStr | None = Field(
        None, description="The password, as it is; wins over one in the URL."
    )
    database_password_file: Path | None = Field(
        None, description="A file with the password, read per connection."
    )
    database_password_command: str | None = Field(
        None, description="A command that prints it, run per connection."
    )
    schedule: Path = Field(Path("schedule.yaml"), description="The schedule file.")
    replica: str = Field(
        default_factory=_default_replica, description="This replica's name in logs and in Postgres."
    )
    lock_space: int = Field(
        7301, ge=-(2**31), le=2**31 - 1, description="First int4 of every lock; one per application."
    )
    pool_min_size: int = Field(1, ge=0, description="Checkpoint connections kept open.")
    pool_max_size: int = Field(4, ge=1, description="Checkpoint connections at most.")
    pool_timeout: Span = Field(
        timedelta(seconds=30), description="How long a checkpoint waits for a connection."
    )
    max_running: int = Field(50, ge=1, description="Ticks that this replica runs at the same time, at most.")
    lock_attempts: int = Field(
        10, ge=1, description="Lock connections that are tried at the same time, at most."
    )
    connect_timeout: Span = Field(
        timedelta(seconds=5), description="How long one connection may take to open."
    )
    database_deadline: Duration = Field(
        timedelta(seconds=60), description="How long a start waits for the database."
    )
    drain_timeout: Duration = Field(timedelta(seconds=30), description="How long a stop waits for runs.")
    probe_interval: Span = Field(
        timedelta(seconds=3), description="How often a run's lock session is probed."
    )
    probe_timeout: Span = Field(timedelta(seconds=4), description="How long a probe waits for the answer.")
    stop_allowance: Duration = Field(timedelta(seconds=10), description="How long a run may take to stop.")
    keepalive_idle: WholeSeconds = Field(
        timedelta(seconds=9), description="Silence after which Postgres asks for us."
    )
    keepalive_interval: WholeSeconds = Field(timedelta(seconds=5), description="How often it asks again.")
    keepalive_count: int = Field(3, ge=1, le=100, description="After how many unanswered it frees the lock.")
    lease: Duration = Field(timedelta(seconds=30), description="How long a claim outlives its last renewal.")
    http: str | None = Field(None, description="host:port for GET /live and /ready; default: none.")
    skew_limit: Duration = Field(
        timedelta(seconds=1), description="Clock difference to the database that is warned of."
    )
    log_format: Literal["json", "console"] | None = Field(
        None, description="Default: console on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least level that is logged."
    )

    @field_validator("replica")
    @classmethod
    def _replica_fits_application_name(cls, value: str) -> str:
        if not REPLICA_FORM.fullmatch(value):
            raise ValueError(
                "has to be 1 to 57 printable ASCII characters without spaces, to fit Postgres' application_name"
            )
        return value

    @field_validator("http")
    @classmethod
    def _http_is_host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s\[\]]*):\d{1,5}", value):
            raise ValueError("has to be host:port, for instance 0.0.0.0:8080")
        return value

    @model_validator(mode="after")
    def _pool_sizes_fit(self) -> "Settings":
        if self.pool_min_size > self.pool_max_size:
            raise ValueError(
                f"POOL_MIN_SIZE {self.pool_min_size} is above POOL_MAX_SIZE {self.pool_max_size}"
            )
        return self

    def database(self) -> Dsn:
        """Return where checkpoints and the ledger live; without a URL raises Unusable."""
        if self.database_url is None:
            raise Unusable(
                "TICKD_DATABASE_URL is not set. Replicas exclude each other through one Postgres that all of them share, "
                "so `tickd run` does not start one of its own. Set TICKD_DATABASE_URL=postgresql://USER@HOST/DATABASE, "
                "or try tickd without any set-up: `tickd dev`."
            )
        return self._dsn(self.database_url, "TICKD_DATABASE_URL")

    def lock_database(self) -> Dsn:
        """Return where locks are taken: the direct way to the same database."""
        if self.lock_database_url is None:
            return self.database()
        return self._dsn(self.lock_database_url, "TICKD_LOCK_DATABASE_URL")

    def windows(self) -> TrustWindows:
        """Return how long holds are trusted; raises Unusable when the client's window does not fit into the server's."""
        windows = TrustWindows(
            probe_interval=self.probe_interval,
            probe_timeout=self.probe_timeout,
            stop_allowance=self.stop_allowance,
            server_idle=self.keepalive_idle,
            server_interval=self.keepalive_interval,
            server_count=self.keepalive_count,
            lease=self.lease,
        )
        windows.check()
        return windows

    def secrets(self) -> frozenset[str]:
        """Return every password that the settings hold, in every writing, to keep them out of the log."""
        return self.database().secrets | self.lock_database().secrets

    def _dsn(self, url: SecretStr, setting: str) -> Dsn:
        return parse_dsn(
            url.get_secret_value(),
            setting=setting,
            password=self.database_password.get_secret_value() if self.database_password else None,
            password_file=self.database_password_file,
            password_command=self.database_password_command,
        )


class _ScheduleAlone(BaseSettings):
    """The one setting that a command needs which looks at a schedule and at no database."""

    model_config = Settings.model_config

    schedule: Path = Settings.model_fields["schedule"].default


def usual_schedule() -> Path:
    """Return the schedule file where the command line names none, whatever else the settings say."""
    with _told_of_env_file():
        return _ScheduleAlone().schedule


def read_settings(**overrides: Any) -> Settings:
    """Return the settings of this process; whatever is wrong is one Unusable that names each variable, never its value."""
    try:
        with _told_of_env_file():
            return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise Unusable("\n".join(_complaint(fault) for fault in error.errors())) from None


@contextmanager
def _told_of_env_file() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:  # PowerShell writes UTF-16
        raise Unusable(f"{ENV_FILE}: this is not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        raise Unusable(f"{ENV_FILE}: cannot be read: {error.strerror}") from None


def _complaint(fault: Any) -> str:
    name = "TICKD_" + "_".join(str(part) for part in fault["loc"]).upper() if fault["loc"] else "the settings"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "time_delta_type":
        message = f"expected a duration such as {FORMS}"
    return f"{name}: {message}"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return one sentence per `TICKD_` variable that nothing reads, here or in `.env`, with the nearest that something does."""
    known = [f"TICKD_{name.upper()}" for name in Settings.model_fields]
    in_file = (name.upper() for name in DotEnvSettingsSource(Settings).env_vars)
    unknown = (
        n
        for n in {*environment, *in_file}
        if n.startswith("TICKD_") and n not in known and not n.startswith("TICKD_TEST_")
    )
    return [
        f"{name} is set, and nothing reads it" + (f"; did you mean {near[0]}?" if near else "")
        for name in sorted(unknown)
        for near in [difflib.get_close_matches(name, known, 1)]
    ]
