"""The JSON Schema of the schedule file: what editors complete, explain and underline while one types.

It is less strict than the reader, which also knows the calendar, the environment and what keys mean together; but it
accepts every file that the reader accepts.
"""

import itertools
from typing import Any, Final, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from tickd.entry import GraphKeys, Keep, Keys, Retries, RunConfig
from tickd.schedule import LONGEST_NAME, TRIGGERS
from tickd.values import ZONE


DIALECT: Final = "http://json-schema.org/draft-07/schema#"  # the newest that editors know well


class _Generator(GenerateJsonSchema):
    # Defaults are durations and zones; the descriptions name them.
    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's own form


def json_schema() -> dict[str, Any]:
    """Return the schema as plain data."""
    keys = GraphKeys.model_json_schema(ref_template="#/definitions/{model}", schema_generator=_Generator)
    nested = keys.pop("$defs")
    graph = _tidy(keys, GraphKeys)
    graph["description"] = "A graph: what runs, and when."
    graph["allOf"] = [{"not": {"required": list(pair)}} for pair in itertools.combinations(TRIGGERS, 2)]
    return {
        "$schema": DIALECT,
        "title": "tickd schedule",
        "description": "Which LangGraph graphs tickd runs, and when.",
        "type": "object",
        "required": ["graphs"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "Ignored: a place for anchors."}},
        "properties": {
            "timezone": {
                **ZONE.shape,
                "description": "The IANA time zone of every `cron` that names none: Europe/Oslo. UTC if left out.",
            },
            "defaults": {
                "anyOf": [{"$ref": "#/definitions/Graph"}, {"type": "null"}],
                "description": "Keys that every graph starts from; a graph's own keys win.",
            },
            "graphs": {
                "description": "The graphs, by name. The name is the graph's identity: its lock, its ticks, its threads.",
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"minLength": 1, "maxLength": LONGEST_NAME},
                "additionalProperties": {"$ref": "#/definitions/Graph"},
            },
        },
        "definitions": {
            "Graph": graph,
            **{model.__name__: _tidy(nested[model.__name__], model) for model in (RunConfig, Retries, Keep)},
        },
    }


def _tidy(schema: dict[str, Any], model: type[Keys]) -> dict[str, Any]:
    """Drop what pydantic writes for programmers, and let each key be null, which is as good as leaving it out."""
    properties = {}
    for key, each in schema["properties"].items():
        shape = {name: part for name, part in each.items() if name not in ("title", "default", "description")}
        description = model.model_fields[key].description
        properties[key] = {"anyOf": [*_shapes(shape), {"type": "null"}], "description": description}
    return {**{name: part for name, part in schema.items() if name != "title"}, "properties": properties}


def _shapes(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the forms a key may take; where a list of texts is one, so is one text."""
    if shape.get("type") == "array":
        return [shape["items"], {**shape, "minItems": 1}]
    return cast("list[dict[str, Any]]", shape.get("anyOf", [shape]))
