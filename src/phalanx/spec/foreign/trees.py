"""TOML, JSON and YAML of strangers as leaves with lines: plain data only, small and shallow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import UserError, mistake
from phalanx.job.source import read_source
from phalanx.job.textfile import read_text
from phalanx.spec.foreign.leaf import MOST_DEPTH, MOST_LEAVES, Leaf, leaves_of
from phalanx.units import KIB

NOUN = "configuration"
MOST_YAML_BYTES = 256 * KIB  # the parser is pure Python: a full Megatron-Bridge dump of 22 kB takes about 0.1 s

Steps = tuple[str | int, ...]


def read_tree(path: Path) -> dict[str, Leaf]:
    """The leaves of a file, by its ending; raises UserError for what is not a small file of its kind."""
    if path.suffix == ".toml":
        return _toml(path)
    return _json(path) if path.suffix == ".json" else _yaml(path)


def _toml(path: Path) -> dict[str, Leaf]:
    source = read_source(path)
    return leaves_of(source.table, file=str(path), line=lambda steps: source.lines.get(steps, 0))


# ---- JSON ----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]++', re.DOTALL)


def _json(path: Path) -> dict[str, Leaf]:
    text = read_text(path, noun=NOUN)
    lines = json_lines(text, file=str(path))
    try:
        table = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise mistake(f"{path}:{error.lineno}", f"is not JSON: {error.msg[:120]}") from error
    except (ValueError, RecursionError) as error:
        raise mistake(str(path), f"is not JSON that a trainer reads: {str(error)[:120]}") from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is not a JSON object", fix="a DeepSpeed configuration is { … }")
    return leaves_of(table, file=str(path), line=lambda steps: lines.get(steps, 0))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses a key given twice (runtime/config_utils.py), and so do we."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)[:60]!r} is given twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def json_lines(text: str, *, file: str) -> dict[Steps, int]:
    """The line of every key and element; judges nothing but depth, the parser does the rest.

    >>> json_lines('{"a":\\n  {"b": [1,\\n 2]}}', file="x")[("a", "b")]
    2
    """
    lines: dict[Steps, int] = {}
    stack: list[str | int] = []  # the key or index we are at, one per open bracket
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


def _yaml(path: Path) -> dict[str, Leaf]:
    import yaml  # 30 ms: only for those who have one

    text = read_text(path, noun=NOUN)
    if len(text.encode()) > MOST_YAML_BYTES:
        raise mistake(str(path), f"is larger than {MOST_YAML_BYTES // KIB} KiB", why="no training configuration is")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Steps, int] = {}
        table = _plain(root, (), lines, [0], path)
    except yaml.YAMLError as error:
        raise _not_yaml(path, error) from error
    except RecursionError as error:
        raise mistake(str(path), f"nests deeper than {MOST_DEPTH} levels") from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is not a YAML mapping", fix="a configuration has keys: name: value")
    return leaves_of(table, file=str(path), line=lambda steps: lines.get(steps, 0))


def _not_yaml(path: Path, error: Any) -> UserError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    what = str(getattr(error, "problem", None) or "cannot be parsed")
    return mistake(where, f"is not YAML: {what[:120]}")


def _plain(node: Any, steps: Steps, lines: dict[Steps, int], seen: list[int], path: Path) -> object:
    """A node as plain data. Every visit counts, so that aliases of aliases cannot grow without end."""
    import yaml

    seen[0] += 1
    if node is None:
        return {}
    if seen[0] > 4 * MOST_LEAVES or len(steps) > MOST_DEPTH:
        raise mistake(f"{path}:{node.start_mark.line + 1}", "holds more, or deeper, than a configuration does")
    lines.setdefault(steps, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return {
            name: _plain(inner, (*steps, name), lines, seen, path)
            for name, inner in ((_name(key, path), value) for key, value in node.value)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, (*steps, index), lines, seen, path) for index, one in enumerate(node.value)]
    return _scalar(node)


def _name(node: Any, path: Path) -> str:
    if not isinstance(node.value, str):
        raise mistake(f"{path}:{node.start_mark.line + 1}", "uses a list or a mapping as a key")
    return node.value


_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]{1,4})?")


def _scalar(node: Any) -> object:
    """Null, true, a number or text. Tags such as !!python/object are text to us: nothing is built."""
    text = str(node.value)
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) and len(text) < 40 else text
