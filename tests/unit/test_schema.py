import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tickd.cli.schedule import schema_text
from tickd.entry import GraphKeys, Keep, Keys, Retries, RunConfig
from tickd.schedule import ScheduleError, parse
from tickd.schema import json_schema


ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft7Validator(json_schema())


def _as_an_editor_reads_it(text: str) -> object:
    """YAML 1.2 as editors read it: PyYAML's loader, without the dates and flags of 1.1."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own form
            first: [
                (tag, pattern)
                for tag, pattern in resolvers
                if not tag.endswith(("timestamp", "bool")) or first in "tTfF"
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return yaml.load(text, Loader)  # a safe one, with less


def test_the_schema_that_is_checked_in_is_the_one_that_is_printed():
    """Editors read the file; `tickd schema` > config/schedule.schema.json renews it."""
    assert (ROOT / "config" / "schedule.schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_schema_is_one():
    """An editor that cannot read it says nothing at all."""
    jsonschema.Draft7Validator.check_schema(json.loads(schema_text()))


def test_every_key_is_described():
    """Hovering over a key is how most people will read the reference."""
    definitions = json_schema()["definitions"]
    models: dict[str, type[Keys]] = {
        "Graph": GraphKeys,
        "RunConfig": RunConfig,
        "Retries": Retries,
        "Keep": Keep,
    }
    for name, model in models.items():
        assert set(definitions[name]["properties"]) == set(model.model_fields)
        assert all(key["description"].endswith(".") for key in definitions[name]["properties"].values())


@pytest.mark.parametrize("file", ["config/schedule.yaml", "src/tickd/starter/schedule.yaml"])
def test_the_example_files_name_the_schema_and_fit_it(file):
    """Their first line is what makes an editor complete and explain keys."""
    text = (ROOT / file).read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=schedule.schema.json"
    VALIDATOR.validate(_as_an_editor_reads_it(text))
    parse(text, path=file, environment={})


GRAPHS = [
    "graph: a:b, cron: '@daily'",
    "graph: ./a.py:b, cron: ['0 9 * * *', '0 10 * * *'], timezone: Europe/Oslo, jitter: 30s",
    "graph: langgraph.json#x, every: 1.5h, anchor: 2026-01-01T00:00:00Z",
    "graph: a:b, at: [2026-01-01T00:00:00Z], enabled: false, input: {a: 1}, context: {b: [2]}",
    "graph: a:b, every: '${E:-1m}', enabled: '${X:-true}', input: 'a.b:c', config: {recursion_limit: 5, tags: x, metadata: {a: 1}}",
    "graph: a:b, every: 1m, config: {recursion_limit: '${L:-7}', tags: [x, y], configurable: {a: 1}}, keep: 7d",
    "graph: a:b, every: 1m, keep: {threads: 7d, ticks: null}, durability: exit, timeout: null, grace: 1m, thread: '{graph}'",
    "graph: a:b, every: 1m, mode: claim, retries: {attempts: 3, backoff: 1s, max_backoff: 1m, on: [ValueError]}, missed: all, max_backlog: 5",
]  # fmt: skip


@pytest.mark.parametrize("graph", GRAPHS)
def test_what_the_reader_accepts_the_schema_accepts(graph):
    """A red line under a file that works teaches people to ignore red lines."""
    text = f"x-a: 1\ndefaults: {{{graph.split(', ', 1)[0]}}}\ngraphs:\n  a: {{{graph}}}\n"
    parse(text, path="s.yaml", environment={})
    VALIDATOR.validate(_as_an_editor_reads_it(text))


@pytest.mark.parametrize(
    "text",
    [
        "timezon: UTC\ngraphs: {a: {graph: a:b, every: 1s}}",
        "graphs: {}",
        "graphs: []",
        "graphs: {a: {graph: a:b, every: 10}}",
        "graphs: {a: {graph: a, every: 1s}}",
        "graphs: {a: {graph: a:b, every: 1s, cron: '@daily'}}",
        "graphs: {a: {graph: a:b, every: 1s, timezon: UTC}}",
        "graphs: {a: {graph: a:b, every: 1s, mode: enqueue}}",
        "graphs: {a: {graph: a:b, every: 1s, enabled: 'no'}}",
        "graphs: {a: {graph: a:b, every: 1s, config: {limit: 5}}}",
        "graphs: {a: {graph: a:b, every: 1s, keep: {thread: 1d}}}",
        "graphs: {a: {graph: a:b, every: 1s, context: x}}",
    ],
)
def test_an_editor_underlines_what_the_reader_refuses(text):
    """Not all of it, the schema knows no calendar; but the usual mistakes."""
    assert not VALIDATOR.is_valid(_as_an_editor_reads_it(text))
    with pytest.raises(ScheduleError):
        parse(text, path="s.yaml", environment={})
