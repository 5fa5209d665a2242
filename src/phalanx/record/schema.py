"""The schema of events as it is shipped: JSON Schema 2020-12, one definition per kind of event."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def load_schema() -> dict[str, Any]:
    """The schema as JSON values; any JSON Schema library can check a line of a run against it."""
    text = files("phalanx.record").joinpath("data/events.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def event_fields() -> dict[str, tuple[str, ...]]:
    """The fields of each kind of event beside those that all have.

    >>> event_fields()["run_end"]
    ('step', 'state')
    """
    return {kind: tuple(known["properties"]) for kind, known in load_schema()["$defs"].items()}
