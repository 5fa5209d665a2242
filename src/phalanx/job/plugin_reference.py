"""References to custom code in a job: "file.py:name", "package.module:name" or an entry point, and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import mistake
from phalanx.job.schema import PluginReferences

SOURCE_MODULE = "phalanx_job_source"  # the name of the module whose source the job contains
ENTRY_POINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PLUGIN_GROUPS = {  # entry-point groups, by key of [plugins]
    "callbacks": "phalanx.callbacks",
    "loss": "phalanx.losses",
    "optimizer": "phalanx.optimizers",
    "data": "phalanx.datasets",
    "metrics": "phalanx.metrics",
}
MODEL_GROUP = "phalanx.models"  # the entry-point group of model.module


def runs_named_code(text: str) -> bool:
    """Return whether a reference names a file or module, which needs consent; installed entry points do not.

    >>> runs_named_code('net.py:build {"width": 8}'), runs_named_code("tiny-net"), runs_named_code("")
    (True, False, False)
    """
    return ":" in text.partition("{")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginReference:
    """A parsed reference.

    >>> PluginReference.parse('log.py:LossLog {"every": 10}', key="plugins.callbacks").arguments
    {'every': 10}
    """

    place: str  # a file, a module, or "" for an entry point
    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str, *, key: str) -> PluginReference:
        """Parse a reference; raises UserError if it has another form."""
        head, brace, arguments_text = text.partition("{")
        place, _, name = head.strip().rpartition(":")
        try:
            arguments = json.loads(brace + arguments_text) if brace else {}
        except ValueError as error:
            raise mistake(key, f"{text!r} ends in something that is not JSON: {error}") from error
        names_code = all(word.isidentifier() for word in name.split(".")) if place else ENTRY_POINT.fullmatch(name)
        if not names_code:
            raise mistake(
                key,
                f"{text!r} names no code",
                fix='write "file.py:name", "package.module:name" or the name of an entry point',
            )
        return cls(place=place, name=name, arguments=arguments)


def list_references(plugins: PluginReferences) -> list[tuple[str, str]]:
    """Return key and text of every reference in a job."""
    single = [(key, getattr(plugins, key)) for key in ("loss", "optimizer", "data")]
    several = [(key, text) for key in ("callbacks", "metrics") for text in getattr(plugins, key)]
    return [(key, text) for key, text in (*several, *single) if text]
