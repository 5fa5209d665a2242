"""The job file that is equivalent to another trainer's configuration: every value with where it came from.

At its end stands what could not be said.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from phalanx.job.schema import EDITIONS, SECTIONS
from phalanx.rules.evidence import Unmapped
from phalanx.rules.foreign.conversion import Conversion, JobSetting
from phalanx.units import plural

ORDER = ("model", *SECTIONS)
UNKNOWN_CLUSTER = "unknown"


def render_job_file(
    config: Conversion, *, name: str, unmapped: tuple[Unmapped, ...], folder: Path | None = None
) -> str:
    """The text of the job file; `folder` is where it will be written, for paths relative to it."""
    parts = [
        f"# Made by phalanx import from {_comment_text(Path(config.file).name)}, a configuration of {config.title}.",
        f'spec = "{EDITIONS[-1]}"',
        f"name = {_toml_value(name)}",
    ]
    for section in ORDER:
        said = {key: one for key, one in config.values.items() if key.partition(".")[0] == section and "." in key}
        if said:
            parts += ["", f"[{section}]", *(_setting_line(config, key, one, folder) for key, one in said.items())]
    parts += ["", *_habit_lines(config), *_unmapped_lines(config, unmapped)]
    return "\n".join(parts) + "\n"


def _setting_line(config: Conversion, key: str, said: JobSetting, folder: Path | None) -> str:
    value = said.value
    if key in ("model.hf_config", "cluster.file") and folder is not None and isinstance(value, str):
        value = os.path.relpath(Path(config.file).parent / value, folder)
    where = f"{Path(config.file).name}:{said.line} {said.key}" if said.key else ""
    note = _comment_text("; ".join(part for part in (where, said.note) if part))
    return f"{key.partition('.')[2]} = {_toml_value(value)}" + (f"  # {note}" if note else "")


def _habit_lines(config: Conversion) -> list[str]:
    """Settings that change how the trainer behaves, which no key of a job says."""
    head = [
        "# Settings that no key of a job file expresses; phalanx check takes them into account on that file itself."
    ]
    said = [f"#   {name} = {_comment_text(str(value))}" for name, value in config.practice.items()]
    return [*head, *said, ""] if said else []


def _unmapped_lines(config: Conversion, unmapped: tuple[Unmapped, ...]) -> list[str]:
    if not unmapped:
        return [f"# Every setting of {config.title} that the job schema has a word for is above; none was left over."]
    head = f"# Not mapped: {plural(len(unmapped), 'setting')} that the job schema cannot say."
    return [
        head,
        *(f"#   {_comment_text(one.key)} = {_comment_text(one.value)}: {_comment_text(one.why)}" for one in unmapped),
    ]


def _comment_text(text: str) -> str:
    """One line, printable, short."""
    clean = "".join(one if one.isprintable() else "?" for one in text)
    return clean if len(clean) <= 160 else clean[:159] + "…"


def _toml_value(value: object) -> str:
    """A value as TOML writes it.

    >>> _toml_value(True), _toml_value(1e-8), _toml_value([0.9, 0.95]), _toml_value({"a": 1})
    ('true', '1e-08', '[0.9, 0.95]', '{ a = 1 }')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() if value and isinstance(value[0], dict):
            return "[\n" + "".join(f"  {_toml_value(one)},\n" for one in value) + "]"
        case list() | tuple():
            return "[" + ", ".join(_toml_value(one) for one in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml_value(one)}" for key, one in value.items()) + " }"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
