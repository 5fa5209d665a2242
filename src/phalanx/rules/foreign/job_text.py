"""Rendering of the job file that is equivalent to another trainer's configuration, with the source of every value.

Settings that could not be mapped are listed at its end.
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
    """Return the text of the job file; `folder` is where it will be written, for relative paths."""
    lines = [
        f"# Made by phalanx import from {_comment_text(Path(config.file).name)}, a configuration of {config.title}.",
        f'spec = "{EDITIONS[-1]}"',
        f"name = {_toml_value(name)}",
    ]
    for section in ORDER:
        settings = {
            key: setting for key, setting in config.values.items() if key.partition(".")[0] == section and "." in key
        }
        if settings:
            lines += [
                "",
                f"[{section}]",
                *(_setting_line(config, key, setting, folder) for key, setting in settings.items()),
            ]
    lines += ["", *_habit_lines(config), *_unmapped_lines(config, unmapped)]
    return "\n".join(lines) + "\n"


def _setting_line(config: Conversion, key: str, said: JobSetting, folder: Path | None) -> str:
    value = said.value
    if key in ("model.hf_config", "cluster.file") and folder is not None and isinstance(value, str):
        value = os.path.relpath(Path(config.file).parent / value, folder)
    source = f"{Path(config.file).name}:{said.line} {said.key}" if said.key else ""
    note = _comment_text("; ".join(text for text in (source, said.note) if text))
    return f"{key.partition('.')[2]} = {_toml_value(value)}" + (f"  # {note}" if note else "")


def _habit_lines(config: Conversion) -> list[str]:
    """Return comment lines on settings that change the trainer's behaviour, for which jobs have no key."""
    head = [
        "# Settings that no key of a job file expresses; phalanx check takes them into account on that file itself."
    ]
    practices = [f"#   {name} = {_comment_text(str(value))}" for name, value in config.practice.items()]
    return [*head, *practices, ""] if practices else []


def _unmapped_lines(config: Conversion, unmapped: tuple[Unmapped, ...]) -> list[str]:
    if not unmapped:
        return [f"# Every setting of {config.title} that the job schema has a word for is above; none was left over."]
    head = f"# Not mapped: {plural(len(unmapped), 'setting')} that the job schema cannot say."
    return [
        head,
        *(
            f"#   {_comment_text(setting.key)} = {_comment_text(setting.value)}: {_comment_text(setting.why)}"
            for setting in unmapped
        ),
    ]


def _comment_text(text: str) -> str:
    """Shorten a text to 160 printable characters in one line."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= 160 else clean[:159] + "…"


def _toml_value(value: object) -> str:
    """Return a value as TOML.

    >>> _toml_value(True), _toml_value(1e-8), _toml_value([0.9, 0.95]), _toml_value({"a": 1})
    ('true', '1e-08', '[0.9, 0.95]', '{ a = 1 }')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() if value and isinstance(value[0], dict):
            return "[\n" + "".join(f"  {_toml_value(item)},\n" for item in value) + "]"
        case list() | tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
