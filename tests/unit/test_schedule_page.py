"""docs/schedule.md, held to the reader and to the calendar."""

import re
from datetime import timedelta

import pytest

from tests.fire_times import first, series
from tests.pages import DOCS
from tickd import template
from tickd.cron import NICKNAMES, parse_cron
from tickd.entry import Entry, GraphKeys, RunConfig
from tickd.schedule import TOP_KEYS, ScheduleError, parse
from tickd.tick import Tick, parse_instant
from tickd.values import HOLD, LOCK, MODE


PAGE = (DOCS / "schedule.md").read_text()


def rows(heading: str, table: int = 0) -> list[list[str]]:
    """Return the cells of a table below a heading, without its head."""
    section = re.split(r"\n#+ ", PAGE.split(f"# {heading}\n", 1)[1])[0]
    found = re.findall(r"(?:^\|.*\|\n)+", section, flags=re.MULTILINE)[table]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.strip().split("\n")[2:]]


def code(cell: str) -> list[str]:
    """Return what stands in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def entry(lines: str) -> Entry:
    """Return the one graph of a schedule."""
    return parse(f"graphs: {{a: {{graph: 'a:b', {lines}}}}}", path="s.yaml", environment={}).entries["a"]


def test_the_keys_on_the_page_are_those_that_are_read():
    """A key that is not on the page does not exist for whoever writes a schedule."""
    assert {code(row[0])[0] for row in rows("Keys of a graph")} == set(GraphKeys.model_fields)
    (config,) = (row for row in rows("Keys of a graph") if row[0] == "`config`")
    assert set(RunConfig.model_fields) <= set(code(config[2]))
    assert all(f"`{key}`" in PAGE for key in TOP_KEYS)


@pytest.mark.parametrize("row", rows("Keys of a graph"), ids=lambda row: row[0])
def test_the_default_on_the_page_is_the_one_that_counts(row):
    """A default that is not what the page says is found by the first incident."""
    (key,), stated = code(row[0]), code(row[1])
    if not stated:
        return
    found = getattr(entry("every: 1h"), key)
    written = {"timezone": "UTC", "anchor": "1970-01-01T00:00:00Z", "enabled": "true"}.get(key, stated[0])
    assert stated[-1 if key == "timezone" else 0] == written
    spelt = f"{key}: {written}" if key in ("every", "cron", "at") else f"every: 1h, {key}: {written}"
    assert getattr(entry(spelt), key) == found or key == "durability"


def test_what_the_page_calls_unbuilt_is_what_is_refused():
    """Both lists change with the same feature."""
    (sentence,) = re.findall(r"^(.*) are known and not built", PAGE, flags=re.MULTILINE)
    refused = {
        f"{key}: {value}"
        for key, known in {"mode": MODE, "lock": LOCK, "hold": HOLD}.items()
        for value, built in known.items()
        if not built
    }
    assert set(code(sentence)) == refused


FIELD_OF = {"jan": 3, "dec": 3, "sun": 4, "sat": 4, "0": 4, "7": 4, "L": 2, "LW": 2, "mon#2": 4, "5L": 4}


def test_everything_in_the_table_of_the_dialect_is_understood():
    """Whole expressions as they stand, a term alone in the field where it belongs."""
    terms = [term for written, _ in rows("Cron") for term in code(written)]
    assert set(FIELD_OF) < set(terms)
    for term in terms:
        fields = ["*"] * 5
        fields[FIELD_OF.get(term, 0)] = term
        assert parse_cron(term if term.startswith("@") or " " in term else " ".join(fields)).fields
    assert {term for term in terms if term.startswith("@")} == set(NICKNAMES)


@pytest.mark.parametrize("row", rows("Cron", 1), ids=lambda row: row[0])
def test_what_the_page_warns_of_is_warned_of(row):
    """And nothing on it is refused."""
    assert list(parse_cron(*code(row[0])).doubts())


@pytest.mark.parametrize("row", rows("When the clocks change", 1), ids=lambda row: row[0])
def test_the_nights_on_the_page_are_as_it_says(row):
    """People decide by this table whether a job may stand at half past two."""
    (expression,) = code(row[0])
    day = row[1][:10]
    times = re.findall(r"\d\d:\d\d", row[2].split(", which")[0])
    after = {"2026-03-08": "2026-03-08T06:59:59Z", "2026-11-01": "2026-11-01T04:59:59Z"}[day]
    assert first(series(expression, zone_name="America/New_York"), after, len(times)) == " ".join(
        f"{day[5:]}T{time}" for time in times
    )


def test_the_templates_on_the_page_are_filled_as_it_says():
    """The table is an example and the reference at once."""
    found = template.values(
        Tick("restock_plan", parse_instant("2026-05-04T22:30:00Z")),
        entry("every: 1h, timezone: Europe/Oslo").timezone,
    )
    assert {code(row[0])[0]: code(row[1])[0] for row in rows("Templates")} == {
        f"{{{name}}}": value for name, value in found.items()
    }


def test_the_references_on_the_page_are_taken():
    """They are what people copy."""
    for row in rows("References to graphs"):
        (reference,) = code(row[0])
        assert parse(
            f"graphs: {{a: {{graph: '{reference}', every: 1s}}}}", path="s.yaml", environment={}
        ).entries


def test_the_fault_on_the_page_is_worded_as_it_is():
    """An example of a message that does not exist cannot be searched for."""
    (message,) = re.findall(r"^schedule\.yaml:4:5: (.*)$", PAGE, flags=re.MULTILINE)
    with pytest.raises(ScheduleError) as refusal:
        parse(
            "graphs:\n  restock_plan:\n    graph: a:b\n    crom: x\n    every: 1s\n",
            path="schedule.yaml",
            environment={},
        )
    assert str(refusal.value) == f"schedule.yaml:4:5: {message}"


def test_the_shortest_interval_on_the_page_is_the_shortest():
    """One below it is refused."""
    assert entry("every: 100ms").every == timedelta(milliseconds=100)
    with pytest.raises(ScheduleError, match="shorter than 100ms"):
        entry("every: 99ms")
