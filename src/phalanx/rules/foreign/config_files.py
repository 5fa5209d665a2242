"""Configuration files of other trainers as leaves with lines: TOML, JSON, YAML, and arguments in shell scripts."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import mistake
from phalanx.io.files import read_text
from phalanx.io.toml import read_toml
from phalanx.rules.foreign.conversion import MOST_DEPTH, MOST_LEAVES, Leaf, leaves_of, value_text
from phalanx.units import KIB

NOUN = "configuration"
MOST_YAML_BYTES = 256 * KIB  # the parser is pure Python: a full Megatron-Bridge dump of 22 kB takes about 0.1 s

Steps = tuple[str | int, ...]


def read_tree(path: Path) -> dict[str, Leaf]:
    """The leaves of a file, by its ending; raises UserError for what is not a small file of its kind."""
    if path.suffix == ".toml":
        source = read_toml(path, noun="job file")
        return leaves_of(source.table, file=str(path), line=lambda steps: source.lines.get(steps, 0))
    return _read_json(path) if path.suffix == ".json" else _read_yaml(path)


# ---- JSON ----------------------------------------------------------------------------------------------------------

# A string without an end reaches to the end of the text, once: it is not looked for again behind each escaped quote.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def _read_json(path: Path) -> dict[str, Leaf]:
    text = read_text(path, noun=NOUN)
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
    """DeepSpeed refuses a key given twice (runtime/config_utils.py), and so do we."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"key {name[:60]!r} is given twice")
        table[name] = value
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
    import yaml  # 30 ms: only for those who have one

    text = read_text(path, noun=NOUN)
    if len(text.encode()) > MOST_YAML_BYTES:
        raise mistake(str(path), f"is larger than {MOST_YAML_BYTES // KIB} KiB", why="no training configuration is")
    lines: dict[Steps, int] = {}
    try:
        table = _build_data(yaml.parse(text, Loader=yaml.SafeLoader), lines, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        what = str(getattr(error, "problem", None) or "cannot be parsed")
        raise mistake(where, f"is not YAML: {what[:120]}") from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is not a YAML mapping", fix="a configuration has keys: name: value")
    return leaves_of(table, file=str(path), line=lambda steps: _nearest_line(lines, steps))


def _nearest_line(lines: Mapping[Steps, int], steps: Steps) -> int:
    """The line of a path, or of what is around it: below an alias nothing has a line of its own."""
    while steps and steps not in lines:
        steps = steps[:-1]
    return lines.get(steps, 0)


def _build_data(events: Iterable[Any], lines: dict[Steps, int], path: Path) -> object:
    """Plain data of the parser's events, without recursion. An alias shares what its anchor built: it costs nothing."""
    frames: list[_Frame] = []
    anchors: dict[str, object] = {}
    roots: list[object] = []
    for event in events:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            frames.pop()
        if kind not in ("ScalarEvent", "AliasEvent", "MappingStartEvent", "SequenceStartEvent"):
            continue
        top = frames[-1] if frames else None
        if top is not None and isinstance(top.inner, dict) and top.key is None:
            if type(event).__name__ != "ScalarEvent":
                raise mistake(f"{path}:{line}", "uses a list or a mapping as a key")
            top.key = str(event.value)
            if top.key in top.inner:
                raise mistake(f"{path}:{line}", f"key {value_text(top.key)} is given twice", fix="keep one of the two")
            continue
        steps = top.next_steps() if top is not None else ()
        lines.setdefault(steps, line)
        value = _event_value(event, kind, anchors, frames, f"{path}:{line}")
        top.take(value) if top is not None else roots.append(value)
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
    """Null, true, a number or text. Tags such as !!python/object say nothing to us: no object is built."""
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


# An argument list, or the shell script that holds it, as leaves. Nothing is run.
#
# Read are `--flag values`, `VAR=value` and `VAR=( … )`, `$VAR` and `${VAR}`, `export VAR=value` as the environment, and
# `#SBATCH --nodes=4`. Command substitution, arithmetic and positional parameters stay as they were written; what stands
# between `if` and `fi` is kept apart, since nobody knows which way it goes.


MOST_NESTED = 3
MOST_TEXT = 1 << 18
MOST_VALUE = 4_096  # characters; substitution of variables in variables could grow without end

# Linear on hostile text without possessive quantifiers, which Python 3.11.0 to 3.11.4 match wrongly (CPython issue
# 106052): each repeat stops at a character it cannot hold itself, so going back never finds another end.
_QUOTED = r"\"([^\"\\]*(?:\\.[^\"\\]*)*)\"|'([^']*)'"
_WORD = re.compile(
    r"(?P<blank>(?:[ \t\r;&|]|\\\r?\n)+)"
    r"|(?P<newline>\n)"
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<close>\))"
    r"|(?P<word>(?:\$\(\([^\n)]{0,999}\)\)|\$\([^\n)]{0,999}\)|\$\{[^}\n]{0,999}\}"
    rf"|{_QUOTED}|\\[^\n]|[^\s\"'\\();&|]|(?<==)\()+)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_ASSIGN = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*|\d)(?::?-([^}]{0,999}))?\})")
_LIST = re.compile(r"\"?\$\{[A-Za-z_]\w*\[[@*]\]\}\"?")
_SBATCH = re.compile(r"#SBATCH\s+--([a-z-]+)[= ](\S+)")
_IN_QUOTES = re.compile(r"--\S+\s")  # "--fp8-format hybrid" as one word
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")


END = ""  # a word that ends the values of a flag


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word of the script, without its quotes."""

    text: str
    line: int
    doubtful: bool = False  # between if and fi


@dataclass(kw_only=True, slots=True)
class _Script:
    variables: dict[str, str] = field(default_factory=dict)
    words: list[Word] = field(default_factory=list)
    environment: dict[str, Leaf] = field(default_factory=dict)
    depth: int = 0  # of if, case and for
    nested: int = 0  # quotes within quotes that are being read


def read_arguments(path: Path) -> dict[str, Leaf]:
    """The leaves of an argument list; of a flag given twice the last one holds, as it does for argparse."""
    text = read_text(path, noun="configuration")
    if len(text) > MOST_TEXT:
        raise mistake(str(path), f"is longer than {MOST_TEXT:,} characters", why="no training script is")
    script = _Script()
    _scan_script(text, script, first_line=1)
    found = dict(script.environment)
    for key, value, word in _flag_arguments(script.words):
        name = f"{key} (in an if, line {word.line})" if word.doubtful else key
        if name in found:
            old = found.pop(name)
            found[f"{name} (line {old.line}, given again)"] = old
        found[name] = Leaf(key=name, value=value, line=word.line)
        if len(found) > MOST_LEAVES:
            raise mistake(str(path), f"holds more than {MOST_LEAVES:,} settings", why="no training run does")
    return {key: Leaf(key=key, value=leaf.value, line=leaf.line) for key, leaf in found.items()}


def _scan_script(text: str, script: _Script, *, first_line: int) -> None:
    starts = [match.end() for match in re.finditer("\n", text)]
    exported, fresh = False, True  # `export` was the last word; a line begins
    for match in _WORD.finditer(text):
        line = first_line + bisect_right(starts, match.start())
        if match.lastgroup in ("newline", "close"):
            fresh, exported = True, False
            script.words.append(Word(text=END, line=line))
        elif match.lastgroup == "comment":
            if found := _SBATCH.match(match.group()):
                key = f"SBATCH.{found.group(1)}"
                script.environment[key] = Leaf(key=key, value=found.group(2), line=line)
        elif match.lastgroup == "word":
            exported = _take_word(match.group(), script, line, fresh=fresh, exported=exported)
            fresh = False


def _scan_inner(text: str, script: _Script, line: int) -> bool:
    """Read words in quotes as words, three levels deep; whether that was done."""
    if script.nested >= MOST_NESTED:
        return False
    script.nested += 1
    _scan_script(text, script, first_line=line)
    script.nested -= 1
    return True


def _take_word(raw: str, script: _Script, line: int, *, fresh: bool, exported: bool) -> bool:
    """Note one word; the answer is whether the next one is exported."""
    if fresh and raw in ("if", "case", "for", "while"):
        script.depth += 1
    elif fresh and raw in ("fi", "esac", "done"):
        script.depth = max(0, script.depth - 1)
    elif raw == "export":
        return True
    elif (assigned := _ASSIGN.fullmatch(raw)) and not raw.startswith("-"):
        _assign_variable(script, assigned.group(1), assigned.group(2), line, exported=exported)
        return exported
    elif not _LIST.fullmatch(raw):  # its words were read where the list was made
        _take_words(raw, script, line)
    return False


def _assign_variable(script: _Script, name: str, raw: str, line: int, *, exported: bool) -> None:
    if raw.startswith("("):  # a list begins: its words follow one by one
        if len(raw) > 1:
            _take_words(raw[1:], script, line)
        return
    text = _unquoted_word(raw)
    if "--" in text and (text.lstrip(" \\\n\t").startswith("--")):
        _scan_inner(text, script, line)
        script.variables[name] = ""  # where it is used nothing is left to add
        return
    value = _fill_variables(text, script)
    script.variables[name] = value
    if exported or name.startswith(("NCCL_", "TORCH_")):
        script.environment[f"env.{name}"] = Leaf(key=f"env.{name}", value=value, line=line)


def _take_words(raw: str, script: _Script, line: int) -> None:
    text = _unquoted_word(raw)
    several = ("\n" in text and "--" in text) or _IN_QUOTES.match(text)
    if several and _scan_inner(text, script, line):
        return
    filled = _fill_variables(text, script)
    if filled or not _VARIABLE.search(text):
        script.words.append(Word(text=filled, line=line, doubtful=script.depth > 0))


def _unquoted_word(raw: str) -> str:
    """Without quotes and backslashes, as the shell would hand it on.

    >>> _unquoted_word('"a b"c'), _unquoted_word("'$x'"), _unquoted_word("a\\\\ b")
    ('a bc', '$x', 'a b')
    """
    if '"' not in raw and "'" not in raw and "\\" not in raw:
        return raw
    parts = re.findall(rf"{_QUOTED}|\\(.)|([^\"'\\]+)", raw, re.DOTALL)
    return "".join(next((one for one in part if one), "") for part in parts)


def _fill_variables(text: str, script: _Script) -> str:
    """Known variables in their places; unknown ones stay as they are, with their default where one is given."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1) or found.group(2)
        known = script.variables.get(name)
        if known is not None:
            return known
        return found.group(3) if found.group(3) is not None else found.group()

    return _VARIABLE.sub(value, text)[:MOST_VALUE]


def _flag_arguments(words: list[Word]) -> Iterator[tuple[str, object, Word]]:
    """(flag, value, word) of each flag: true without values, a text for one, a list for more."""
    flag: Word | None = None
    key, values = "", list[str]()
    for word in [*words, Word(text=END, line=0)]:
        begins = _FLAG.match(word.text)
        if begins or word.text == END or word.text.endswith(".py"):  # the program: what follows are its own flags
            if flag is not None:
                yield key, (values[0] if len(values) == 1 else list(values)) if values else True, flag
            key, equals, first = word.text.partition("=")
            flag, values = (word, [first] if equals else []) if begins else (None, [])
        elif flag is not None:
            values.append(word.text)
