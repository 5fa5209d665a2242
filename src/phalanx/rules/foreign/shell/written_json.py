"""The DeepSpeed JSON that a training command names: written by the script itself, or lying beside it."""

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
    """Its leaves under `ds.`; where it cannot be read, one leaf that says so."""
    flag = next((one for one in leaves if canonical_flag(one) in NAMES and leaves[one].value is not True), "")
    if not flag:
        return {}
    texts = set()
    for one in reading.commands:
        for arguments in one.program:
            words = arguments.get(flag, ())
            name = words[0] if words else ""
            texts.add(one.command.files.get(name) if name in one.command.files else reading.interpreter.read_file(name))
    text = texts.pop() if len(texts) == 1 else None
    shown = str(leaves[flag].value)
    line = leaves[flag].line
    if text is None:
        why = f"{shown} is not here" if len(texts) == 0 else f"{shown} differs between the commands"
        return {
            "ds.zero_optimization.stage": Leaf(key="ds.zero_optimization.stage", value="$?", line=line, unknown=why)
        }
    quoted = _STRING_OR_MARK.sub(lambda hit: hit.group() if hit.group()[0] == '"' else f'"{hit.group()}"', text)
    try:
        found = json_leaves(quoted, Path(shown))
    except UserError:
        cause = reading.unknowns.first(text)
        why = f"{shown} is not JSON" if cause is None else f"depends on {cause.why}"
        return {
            "ds.zero_optimization.stage": Leaf(key="ds.zero_optimization.stage", value="$?", line=line, unknown=why)
        }
    named: dict[str, Leaf] = {}
    for key, leaf in found.items():
        value, why = leaf.value, ""
        if isinstance(value, str) and not is_known(value):
            cause = reading.unknowns.first(value)
            why = f"depends on {cause.why}" if cause is not None else "is not known"
            value = reading.unknowns.shown(value)
        named[f"ds.{key}"] = replace(leaf, key=f"ds.{key}", value=value, line=line, unknown=why)
    return named
