"""The Dockerfile and compose.yaml, read: no container engine is at hand in the gate."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from tests.dockerfile import exec_form, health_command, instructions
from tickd.duration import parse_duration


ROOT = Path(__file__).parent.parent.parent
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def image():
    """The instructions of the image's last stage, by name."""
    return instructions()[-1]


def test_the_image_starts_tickd_itself_without_a_shell(image):
    """A shell as process 1 would swallow SIGTERM, and every stop would be a kill."""
    (entry_point,), (command,) = image["ENTRYPOINT"], image["CMD"]

    assert exec_form(entry_point) == ["/opt/tickd/bin/tickd"]
    assert exec_form(command) == ["run"]


def test_the_image_is_built_in_two_stages(image):
    """Neither pip, nor the sources, nor a compiler belongs where the daemon runs."""
    assert len(instructions()) == 2
    assert "RUN" not in image
    assert any("--from=build" in copy for copy in image["COPY"])


def test_the_user_is_a_number_and_not_root(image):
    """An orchestrator that insists on non-root can only check a number."""
    (user,) = image["USER"]

    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)


def test_the_image_has_a_health_check_without_a_shell():
    """The slim image has neither curl nor wget."""
    interpreter, _, program = health_command()

    assert interpreter == "/opt/tickd/bin/python"
    assert "/live" in program


def test_everything_the_build_copies_is_let_through():
    """A file that .dockerignore holds back fails the build on somebody else's machine."""
    lines = (ROOT / ".dockerignore").read_text().split()
    copied = [
        name
        for stage in instructions()
        for copy in stage["COPY"]
        if not copy.startswith("--from")
        for name in copy.split()[:-1]
    ]

    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in lines


def test_compose_runs_three_replicas_of_one_service():
    """Three services would be three configurations to keep alike."""
    assert set(SERVICES) == {"postgres", "tickd"}
    assert SERVICES["tickd"]["deploy"]["replicas"] == 3
    assert SERVICES["tickd"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}


def test_compose_takes_every_right_from_the_replicas():
    """The replicas write no file and need no capability."""
    tickd = SERVICES["tickd"]

    assert tickd["read_only"] is True
    assert tickd["cap_drop"] == ["ALL"]
    assert tickd["security_opt"] == ["no-new-privileges:true"]


def test_compose_waits_longer_than_a_replica_drains():
    """Docker kills what has not stopped in time, in the middle of a hand-off."""
    tickd = SERVICES["tickd"]

    drain = parse_duration(tickd["environment"]["TICKD_DRAIN_TIMEOUT"])
    assert parse_duration(tickd["stop_grace_period"]) >= drain + timedelta(seconds=5)


def test_compose_gives_the_replicas_the_server_and_password_it_sets():
    """A typing error here is found by whoever tries it first."""
    database, tickd = (SERVICES[name]["environment"] for name in ("postgres", "tickd"))

    assert tickd["TICKD_DATABASE_URL"] == (
        f"postgresql://{database['POSTGRES_USER']}@postgres:5432/{database['POSTGRES_DB']}"
    )
    assert tickd["TICKD_DATABASE_PASSWORD"] == database["POSTGRES_PASSWORD"]
