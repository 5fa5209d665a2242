"""Configuration files of other trainers as leaves with line numbers: TOML, JSON and YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import mistake
from phalanx.io.files import read_text
from phalanx.io.toml import read_toml
from phalanx.rules.foreign.conversion import MOST_DEPTH, Leaf, leaves_of, value_text
from phalanx.units import KIB

NOUN = "configuration"
MOST_TWICE = 50  # keys given twice
# The parser is pure Python: a full Megatron-Bridge dump of 22 kB takes about 0.1 s
MOST_YAML_BYTES = 256 * KIB

Steps = tuple[str | int, ...]


def read_tree(path: Path) -> dict[str, Leaf]:
    """Read the leaves of a file by its ending; raise UserError if it is too large or invalid."""
    if path.suffix == ".toml":
        source = read_toml(path, noun="job file")
        return leaves_of(source.table, file=str(path), line=lambda steps: source.lines.get(steps, 0))
    if path.suffix == ".json":
        return json_leaves(read_text(path, noun=NOUN), path)
    return _read_yaml(path)


# ---- JSON ----------------------------------------------------------------------------------------------------------

# A string without an end reaches to the end of the text in one match, which keeps the scan linear.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def json_leaves(text: str, path: Path) -> dict[str, Leaf]:
    """Return the leaves of a JSON text; `path` is its source."""
    lines = json_lines(text, file=str(path))
    try:
        table = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise mistake(f"{path}:{error.lineno}", f"is not JSON: {error.msg[:120]}") from error
    except (ValueError, RecursionError) as error:
        raise mistake(str(path), f"is not JSON that a trainer reads: {str(error)[:120]}") from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is not a JSON object", fix="a DeepSpeed configuration is { … }")
    return leaves_of(table, file=str(path), line=lambda steps: lines.get(steps, 0))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table; raise ValueError for a key given twice, as DeepSpeed does (runtime/config_utils.py)."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"key {name[:60]!r} is given twice")
        table[name] = value
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def json_lines(text: str, *, file: str) -> dict[Steps, int]:
    """Return the line of every key and element; checks only the depth, as the parser does the rest.

    >>> json_lines('{"a":\\n  {"b": [1,\\n 2]}}', file="x")[("a", "b")]
    2
    """
    lines: dict[Steps, int] = {}
    stack: list[str | int] = []  # the current key or index, one per open bracket
    key, line, end = "", 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        token = match.group()
        if token in "{[":
            stack.append("" if token == "{" else 0)
            if len(stack) > MOST_DEPTH:
                raise mistake(f"{file}:{line}", f"nests deeper than {MOST_DEPTH} levels")
        elif token in "}]":
            # No pop: a surplus bracket is left to the parser to report.
            stack = stack[:-1]
        elif token == "," and stack and isinstance(top := stack[-1], int):
            stack[-1] = top + 1
        elif token == ":" and stack:
            stack[-1] = key
            lines[tuple(stack)] = line
        elif token[0] == '"':
            key = token[1:-1]
    return lines


# ---- YAML ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Frame:
    """A mapping or a list that is still open."""

    inner: dict[str, object] | list[object]
    steps: Steps
    key: str | None = None  # of a mapping: the key whose value comes next

    def next_steps(self) -> Steps:
        return (*self.steps, len(self.inner) if isinstance(self.inner, list) else str(self.key))

    def take(self, value: object) -> None:
        if isinstance(self.inner, list):
            self.inner.append(value)
        else:
            self.inner[str(self.key)] = value
            self.key = None


def _read_yaml(path: Path) -> dict[str, Leaf]:
    return yaml_leaves(read_text(path, noun=NOUN), path)


def yaml_leaves(text: str, path: Path) -> dict[str, Leaf]:
    """Return the leaves of a YAML text; `path` is its source."""
    import yaml  # imported here because it takes 30 ms

    if len(text.encode()) > MOST_YAML_BYTES:
        raise mistake(str(path), f"is larger than {MOST_YAML_BYTES // KIB} KiB", why="no training configuration is")
    lines: dict[Steps, int] = {}
    earlier: dict[Steps, tuple[int, object]] = {}
    try:
        table = _build_data(yaml.parse(text, Loader=yaml.SafeLoader), lines, earlier, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = str(getattr(error, "problem", None) or "cannot be parsed")
        raise mistake(location, f"is not YAML: {problem[:120]}") from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is not a YAML mapping", fix="a configuration has keys: name: value")
    leaves = leaves_of(table, file=str(path), line=lambda steps: _nearest_line(lines, steps))
    for steps, (line, value) in earlier.items():
        key = ".".join(str(step) for step in steps)
        leaf_name = next((name for name in leaves if name == key or name.startswith(f"{key}.")), None)
        if leaf_name is not None and leaves[leaf_name].value != value:
            leaves[leaf_name] = replace(leaves[leaf_name], earlier=line, twice=key)
    return leaves


def _nearest_line(lines: Mapping[Steps, int], steps: Steps) -> int:
    """Return the line of a path, or of its nearest parent: values below an alias have no own line."""
    while steps and steps not in lines:
        steps = steps[:-1]
    return lines.get(steps, 0)


def _build_data(
    events: Iterable[Any], lines: dict[Steps, int], earlier: dict[Steps, tuple[int, object]], path: Path
) -> object:
    """Build plain data from the parser's events, without recursion; an alias shares what its anchor built.

    Of a key given twice the last value holds, as in PyYAML; `earlier` gets line and value of the first.
    """
    frames: list[_Frame] = []
    anchors: dict[str, object] = {}
    roots: list[object] = []
    for event in events:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            frames.pop()
        if kind not in ("ScalarEvent", "AliasEvent", "MappingStartEvent", "SequenceStartEvent"):
            continue
        frame = frames[-1] if frames else None
        if frame is not None and isinstance(frame.inner, dict) and frame.key is None:
            if type(event).__name__ != "ScalarEvent":
                raise mistake(f"{path}:{line}", "uses a list or a mapping as a key")
            frame.key = str(event.value)
            if frame.key in frame.inner:
                repeated = frame.next_steps()
                earlier[repeated] = lines.get(repeated, line), frame.inner[frame.key]
                if len(earlier) > MOST_TWICE:
                    raise mistake(f"{path}:{line}", f"key {value_text(frame.key)} is given twice, as many others are")
            continue
        steps = frame.next_steps() if frame is not None else ()
        lines[steps] = line
        value = _event_value(event, kind, anchors, frames, f"{path}:{line}")
        frame.take(value) if frame is not None else roots.append(value)
        if isinstance(value, dict | list) and kind != "AliasEvent":
            frames.append(_Frame(inner=value, steps=steps))
            if len(frames) > MOST_DEPTH:
                raise mistake(f"{path}:{line}", f"nests deeper than {MOST_DEPTH} levels")
    if len(roots) > 1:
        raise mistake(str(path), "holds more than one document", fix="split it: a configuration is one")
    return roots[0] if roots else {}


def _event_value(event: Any, kind: str, anchors: dict[str, object], frames: list[_Frame], where: str) -> object:
    if kind == "AliasEvent":
        if event.anchor not in anchors or any(frame.inner is anchors[event.anchor] for frame in frames):
            raise mistake(where, f"alias *{str(event.anchor)[:60]} names nothing that is finished")
        return anchors[event.anchor]
    value: object = {} if kind == "MappingStartEvent" else [] if kind == "SequenceStartEvent" else _yaml_scalar(event)
    if event.anchor:
        anchors[event.anchor] = value
    return value


_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]{1,4})?")


def _yaml_scalar(event: Any) -> object:
    """Return null, a boolean, a number or text. Tags such as !!python/object are ignored: no object is built."""
    text = str(event.value)
    if event.style in ("'", '"', "|", ">"):
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) and len(text) < 40 else text
