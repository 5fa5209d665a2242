"""The job file as JSON Schema, generated from its rules, for editors that complete and check TOML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from phalanx.job.key_rules import KeyRule, rule_of
from phalanx.job.model import known_presets
from phalanx.job.model_section import shape_rules
from phalanx.job.schema import SECTIONS, Job, RampStage, Waiver

# The draft that TOML editors read (Taplo, Even Better TOML).
DIALECT = "http://json-schema.org/draft-07/schema#"
SCHEMA_NAME = "job.schema.json"
SHIPPED = Path(__file__).with_name(SCHEMA_NAME)
ROWS = {"ramp": RampStage, "waiver": Waiver}  # lists of tables


def job_json_schema() -> dict[str, Any]:
    """Return the schema of a job file; constraints between keys, or on the hardware, are not part of it."""
    top_keys = {"spec", "name", "profile", "rules", "waiver"}
    top_properties = _properties(item for item in fields(Job) if item.name in top_keys)
    return {
        "$schema": DIALECT,
        "title": "Phalanx job file",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **top_properties,
            "model": _model_schema(),
            **{name: _section_schema(cls) for name, cls in SECTIONS.items()},
        },
    }


def schema_text() -> str:
    """Return the text of the schema, as shipped and as `phalanx schema` prints it."""
    return json.dumps(job_json_schema(), indent=1, ensure_ascii=False) + "\n"


def _model_schema() -> dict[str, Any]:
    properties: dict[str, Any] = {name: _key_schema(rule) for name, rule in shape_rules().items()}
    properties["arguments"] = {"type": ["object", "string"], "description": "what the module's function receives"}
    properties["preset"] = {"enum": sorted(known_presets()), "description": "a model whose shape is known"}
    properties["hf_config"] = {"type": "string", "description": "a Hugging Face config.json, relative to the job file"}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _section_schema(cls: type) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": _properties(fields(cls))}
    if cls.__doc__:
        schema["description"] = " ".join(cls.__doc__.split())
    return schema


def _properties(items: Iterable[Field[Any]]) -> dict[str, Any]:
    properties = {}
    for item in items:
        rule = rule_of(item.metadata)
        schema = _key_schema(rule)
        if item.name in ROWS:
            row = ROWS[item.name]
            inner = {"type": "object", "additionalProperties": False, "properties": _properties(fields(row))}
            inner["required"] = [column.name for column in fields(row) if column.default is MISSING]
            schema = {**schema, "type": "array", "items": inner}
        if item.default is not MISSING and isinstance(item.default, bool | int | float | str):
            schema["default"] = item.default
        properties[rule.key or item.name] = schema
    return properties


def _key_schema(rule: KeyRule) -> dict[str, Any]:
    text = "; ".join(note for note in (rule.note, rule.expects) if note)
    return {**rule.schema, **({"description": text} if text else {})}
