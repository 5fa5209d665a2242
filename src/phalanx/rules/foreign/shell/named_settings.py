"""The files that a command names and that say settings: of `accelerate launch`, of FSDP, of a program's --config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UserError
from phalanx.rules.foreign.config_files import json_leaves, yaml_leaves
from phalanx.rules.foreign.conversion import Leaf
from phalanx.rules.foreign.shell.partial_text import is_known
from phalanx.rules.foreign.shell.training_command import ACCELERATE, Arguments, ScriptReading, canonical_flag

LAUNCH_FILE = "accelerate_file."  # leaves of the YAML that `accelerate launch` is given
LAUNCH_JSON = "accelerate_ds."  # leaves of the DeepSpeed JSON that it, or that YAML, names
FSDP_FILE = "fsdp_file."  # leaves of the JSON that the Trainer's --fsdp_config names
UNREAD = "unread"  # below one of these: why the file that is named says nothing here


def launch_leaves(reading: ScriptReading, leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """What `accelerate launch` reads besides its arguments."""
    launchers = [arguments for one in reading.commands for arguments in one.launcher]
    found: dict[str, Leaf] = {}
    if (leaf := leaves.get(f"{ACCELERATE}config_file")) is not None:
        found = _of_file(reading, leaf, _names(launchers, "config_file"), LAUNCH_FILE)
    json = leaves.get(f"{ACCELERATE}deepspeed_config_file")
    names = _names(launchers, "deepspeed_config_file")
    if json is None and (named := found.get(f"{LAUNCH_FILE}deepspeed_config.deepspeed_config_file")) is not None:
        json, names = named, {str(named.value)}
    return found | (_of_file(reading, json, names, LAUNCH_JSON) if json is not None else {})


def program_leaves(reading: ScriptReading, leaves: dict[str, Leaf], name: str, prefix: str) -> dict[str, Leaf]:
    """The leaves of the file that an argument of the program names, or that stand in the argument itself."""
    leaf = next((one for key, one in leaves.items() if key.startswith("--") and canonical_flag(key) == name), None)
    if leaf is None or leaf.value is True:
        return {}
    return _of_file(reading, leaf, _names((one for c in reading.commands for one in c.program), name), prefix)


def _names(commands: Iterable[Arguments], name: str) -> set[str]:
    """The words that an argument has in all ways of a command."""
    found = set()
    for arguments in commands:
        words = next((words for flag, words in arguments.items() if canonical_flag(flag) == name), ())
        found.add(words[0] if words else "")
    return found


def _of_file(reading: ScriptReading, leaf: Leaf, names: set[str], prefix: str) -> dict[str, Leaf]:
    """The leaves of a file under a prefix, on the line that names it; of one that cannot be read, why not."""
    shown = str(leaf.value)[:80]
    name = names.pop() if len(names) == 1 else ""
    if not name or not is_known(name):
        why = leaf.unknown or f"{shown} differs between the commands"
    elif (text := name if name.startswith("{") else _text_of(reading, name)) is None:
        why = f"{shown} is not here"
    elif not is_known(text):
        why = f"{shown} depends on what the script does not say"
    else:
        try:
            read = json_leaves if name.endswith(".json") or text.lstrip().startswith("{") else yaml_leaves
            inner = read(text, Path(shown))
        except UserError:
            why = f"{shown} is not JSON or YAML"
        else:
            return {prefix + key: replace(one, key=prefix + key, line=leaf.line) for key, one in inner.items()}
    return {prefix + UNREAD: Leaf(key=prefix + UNREAD, value=shown, line=leaf.line, unknown=why)}


def _text_of(reading: ScriptReading, name: str) -> str | None:
    for one in reading.commands:
        if name in one.command.files:
            return one.command.files[name]
    return reading.interpreter.read_file(name)
