"""Settings files that a command names: of `accelerate launch`, of FSDP, of a program's --config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UserError
from phalanx.rules.foreign.config_files import json_leaves, yaml_leaves
from phalanx.rules.foreign.conversion import Leaf
from phalanx.rules.foreign.shell.partial_text import is_known
from phalanx.rules.foreign.shell.training_command import ACCELERATE, Arguments, ScriptReading, canonical_flag

# Prefix of leaves of the YAML given to `accelerate launch`
LAUNCH_FILE = "accelerate_file."
# Prefix of leaves of the DeepSpeed JSON that the launcher or its YAML names
LAUNCH_JSON = "accelerate_ds."
# Prefix of leaves of the JSON that the Trainer's --fsdp_config names
FSDP_FILE = "fsdp_file."
# After one of these prefixes: a leaf with the reason why the named file could not be read
UNREAD = "unread"


def launch_leaves(reading: ScriptReading, leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves of the files that `accelerate launch` reads in addition to its arguments."""
    launchers = [arguments for command in reading.commands for arguments in command.launcher]
    file_leaves: dict[str, Leaf] = {}
    if (leaf := leaves.get(f"{ACCELERATE}config_file")) is not None:
        file_leaves = _of_file(reading, leaf, _names(launchers, "config_file"), LAUNCH_FILE)
    json = leaves.get(f"{ACCELERATE}deepspeed_config_file")
    names = _names(launchers, "deepspeed_config_file")
    if (
        json is None
        and (json_leaf := file_leaves.get(f"{LAUNCH_FILE}deepspeed_config.deepspeed_config_file")) is not None
    ):
        json, names = json_leaf, {str(json_leaf.value)}
    return file_leaves | (_of_file(reading, json, names, LAUNCH_JSON) if json is not None else {})


def program_leaves(reading: ScriptReading, leaves: dict[str, Leaf], name: str, prefix: str) -> dict[str, Leaf]:
    """Return the leaves of the file that an argument of the program names, or of the JSON in the argument itself."""
    leaf = next(
        (arguments for key, arguments in leaves.items() if key.startswith("--") and canonical_flag(key) == name), None
    )
    if leaf is None or leaf.value is True:
        return {}
    return _of_file(
        reading,
        leaf,
        _names((arguments for command in reading.commands for arguments in command.program), name),
        prefix,
    )


def _names(commands: Iterable[Arguments], name: str) -> set[str]:
    """Return the file names that an argument has in all variants of a command."""
    names = set()
    for arguments in commands:
        words = next((words for flag, words in arguments.items() if canonical_flag(flag) == name), ())
        names.add(words[0] if words else "")
    return names


def _of_file(reading: ScriptReading, leaf: Leaf, names: set[str], prefix: str) -> dict[str, Leaf]:
    """Return the leaves of a file under a prefix, on the line that names it.

    Or a leaf with the reason why it is unread.
    """
    file_name = str(leaf.value)[:80]
    name = names.pop() if len(names) == 1 else ""
    if not name or not is_known(name):
        reason = leaf.unknown or f"{file_name} differs between the commands"
    elif (text := name if name.startswith("{") else _text_of(reading, name)) is None:
        reason = f"{file_name} is not here"
    elif not is_known(text):
        reason = f"{file_name} depends on what the script does not say"
    else:
        try:
            read_leaves = json_leaves if name.endswith(".json") or text.lstrip().startswith("{") else yaml_leaves
            inner = read_leaves(text, Path(file_name))
        except UserError:
            reason = f"{file_name} is not JSON or YAML"
        else:
            return {
                prefix + key: replace(inner_leaf, key=prefix + key, line=leaf.line) for key, inner_leaf in inner.items()
            }
    return {prefix + UNREAD: Leaf(key=prefix + UNREAD, value=file_name, line=leaf.line, unknown=reason)}


def _text_of(reading: ScriptReading, name: str) -> str | None:
    for command in reading.commands:
        if name in command.command.files:
            return command.command.files[name]
    return reading.interpreter.read_file(name)
