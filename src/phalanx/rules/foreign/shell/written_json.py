"""The DeepSpeed JSON that a training command names: written by the script itself, or next to it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UserError
from phalanx.rules.foreign.config_files import json_leaves
from phalanx.rules.foreign.conversion import Leaf
from phalanx.rules.foreign.shell.partial_text import MARK, is_known
from phalanx.rules.foreign.shell.training_command import ScriptReading, canonical_flag

NAMES = ("deepspeed_config", "deepspeed")
_STRING_OR_MARK = re.compile(rf'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|{MARK.pattern}')


def named_json(reading: ScriptReading, leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves of the JSON with the prefix `ds.`; if it cannot be read, one leaf with the reason."""
    flag = next(
        (command for command in leaves if canonical_flag(command) in NAMES and leaves[command].value is not True), ""
    )
    if not flag:
        return {}
    texts = set()
    for command in reading.commands:
        for arguments in command.program:
            words = arguments.get(flag, ())
            name = words[0] if words else ""
            texts.add(
                command.command.files.get(name)
                if name in command.command.files
                else reading.interpreter.read_file(name)
            )
    text = texts.pop() if len(texts) == 1 else None
    file_name = str(leaves[flag].value)
    line = leaves[flag].line
    if text is None:
        reason = f"{file_name} is not here" if len(texts) == 0 else f"{file_name} differs between the commands"
        return {
            "ds.zero_optimization.stage": Leaf(key="ds.zero_optimization.stage", value="$?", line=line, unknown=reason)
        }
    quoted = _STRING_OR_MARK.sub(lambda match: match.group() if match.group()[0] == '"' else f'"{match.group()}"', text)
    try:
        plain_leaves = json_leaves(quoted, Path(file_name))
    except UserError:
        cause = reading.unknowns.first(text)
        reason = f"{file_name} is not JSON" if cause is None else f"depends on {cause.why}"
        return {
            "ds.zero_optimization.stage": Leaf(key="ds.zero_optimization.stage", value="$?", line=line, unknown=reason)
        }
    named_leaves: dict[str, Leaf] = {}
    for key, leaf in plain_leaves.items():
        value, reason = leaf.value, ""
        if isinstance(value, str) and not is_known(value):
            cause = reading.unknowns.first(value)
            reason = f"depends on {cause.why}" if cause is not None else "is not known"
            value = reading.unknowns.shown(value)
        named_leaves[f"ds.{key}"] = replace(leaf, key=f"ds.{key}", value=value, line=line, unknown=reason)
    return named_leaves
