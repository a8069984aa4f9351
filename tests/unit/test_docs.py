"""The pages, held to what the program says of itself."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from tests.pages import DOCS, ROOT, blocks
from tickd.cli import app
from tickd.duration import duration_text
from tickd.log import EVENTS, TERMINAL_EVENTS
from tickd.schedule import parse
from tickd.settings import Settings
from tickd.tick import Outcome, SkipReason


PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
OPERATING = (DOCS / "operating.md").read_text()


def table(heading, page=OPERATING):
    """Return the rows of the first table below a heading, cell by cell, without the head."""
    section = page.split(f"{heading}\n", 1)[1]
    rows = re.findall(r"^\|(.*)\|$", section.split("\n#")[0], flags=re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[2:]]


def code(cell):
    """Return what stands in backquotes in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_the_events_on_the_page_are_the_closed_list():
    """Operators write alerts from the page; an event that is not there is an alert that nobody has."""
    assert {name for row in table("### Events") for name in code(row[0])} == EVENTS


def test_the_page_marks_what_ends_a_tick():
    """One such line per tick and replica is a promise; the page has to say of which lines."""
    marked = {code(row[0])[0] for row in table("### Events") if "*ends the tick*" in row[2]}

    assert marked == TERMINAL_EVENTS - {f"tick.{Outcome.ABANDONED}"}


def test_the_skip_reasons_on_the_page_are_the_closed_list():
    """Each reason has its own remedy."""
    assert {name for row in table("### Why a tick was skipped") for name in code(row[0])} == set(SkipReason)


def test_the_commands_on_the_page_are_those_that_there_are():
    """The page is where somebody looks who does not know that a command exists."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)

    assert {code(row[0])[0] for row in table("## Commands")} == {f"tickd {name}" for name in group.commands}


def test_the_settings_on_the_page_are_those_that_are_read():
    """A setting that is not on the page does not exist for whoever runs this."""
    listed = [code(row[0])[0] for row in table("## Settings")]

    assert listed == [f"TICKD_{name.upper()}" for name in Settings.model_fields]


@pytest.mark.parametrize("row", table("## Settings"), ids=lambda row: row[0])
def test_the_default_on_the_page_is_the_one_that_counts(row):
    """A default that has changed and a page that has not are found by the first incident."""
    (name,), stated = code(row[0]), code(row[1])
    default = Settings.model_fields[name.removeprefix("TICKD_").lower()].default
    if isinstance(default, timedelta):
        assert stated == [duration_text(default)]
    elif isinstance(default, int | str | Path):
        assert stated == [str(default)]
    else:
        assert name == "TICKD_LOG_FORMAT" or stated == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    """A dead link in a README says how well the rest is kept."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_schedule_on_a_page_is_a_good_one(page):
    """People copy from pages."""
    for block in blocks(page, "yaml"):
        if "graphs:" in block:
            assert parse(block, path=page.name, environment={}).entries


def test_the_example_schedule_is_a_good_one_without_a_warning():
    """It is the first file that anybody opens."""
    path = ROOT / "config" / "schedule.yaml"
    schedule = parse(path.read_text(), path=str(path), environment={})

    assert not schedule.warnings
    assert set(schedule.entries) == set(yaml.safe_load(path.read_text())["graphs"])


def test_the_readme_starts_with_its_two_commands_and_they_are_in_the_makefile():
    """They are all that a newcomer is asked to type."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = re.findall(r"^- `make ([a-z]+)`", (ROOT / "README.md").read_text(), flags=re.MULTILINE)

    assert commands == ["dev", "test"]
    assert set(commands) <= set(targets)
