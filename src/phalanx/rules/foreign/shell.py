"""An argument list, or the shell script that holds it, as leaves. Nothing is run.

Read are `--flag values`, `VAR=value` and `VAR=( … )`, `$VAR` and `${VAR}`, `export VAR=value` as the environment, and
`#SBATCH --nodes=4`. Command substitution, arithmetic and positional parameters stay as they were written; what stands
between `if` and `fi` is kept apart, since nobody knows which way it goes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import mistake
from phalanx.io.files import read_text
from phalanx.rules.foreign.conversion import MOST_LEAVES, Leaf

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
    _scan(text, script, first_line=1)
    found = dict(script.environment)
    for key, value, word in _arguments(script.words):
        name = f"{key} (in an if, line {word.line})" if word.doubtful else key
        if name in found:
            old = found.pop(name)
            found[f"{name} (line {old.line}, given again)"] = old
        found[name] = Leaf(key=name, value=value, line=word.line)
        if len(found) > MOST_LEAVES:
            raise mistake(str(path), f"holds more than {MOST_LEAVES:,} settings", why="no training run does")
    return {key: Leaf(key=key, value=leaf.value, line=leaf.line) for key, leaf in found.items()}


def _scan(text: str, script: _Script, *, first_line: int) -> None:
    starts = [match.end() for match in re.finditer("\n", text)]
    exported, fresh = False, True  # `export` was the last word; a line begins
    for match in _WORD.finditer(text):
        line = first_line + bisect_right(starts, match.start())
        if match.lastgroup in ("newline", "close"):
            fresh, exported = True, False
            script.words.append(Word(text=END, line=line))
        elif match.lastgroup == "comment":
            _batch_line(match.group(), script, line)
        elif match.lastgroup == "word":
            exported = _take(match.group(), script, line, fresh=fresh, exported=exported)
            fresh = False


def _scan_inner(text: str, script: _Script, line: int) -> bool:
    """Read words in quotes as words, three levels deep; whether that was done."""
    if script.nested >= MOST_NESTED:
        return False
    script.nested += 1
    _scan(text, script, first_line=line)
    script.nested -= 1
    return True


def _batch_line(text: str, script: _Script, line: int) -> None:
    if found := _SBATCH.match(text):
        key = f"SBATCH.{found.group(1)}"
        script.environment[key] = Leaf(key=key, value=found.group(2), line=line)


def _take(raw: str, script: _Script, line: int, *, fresh: bool, exported: bool) -> bool:
    """Note one word; the answer is whether the next one is exported."""
    if fresh and raw in ("if", "case", "for", "while"):
        script.depth += 1
    elif fresh and raw in ("fi", "esac", "done"):
        script.depth = max(0, script.depth - 1)
    elif raw == "export":
        return True
    elif (assigned := _ASSIGN.fullmatch(raw)) and not raw.startswith("-"):
        _assign(script, assigned.group(1), assigned.group(2), line, exported=exported)
        return exported
    elif not _LIST.fullmatch(raw):  # its words were read where the list was made
        _words(raw, script, line)
    return False


def _assign(script: _Script, name: str, raw: str, line: int, *, exported: bool) -> None:
    if raw.startswith("("):  # a list begins: its words follow one by one
        if len(raw) > 1:
            _words(raw[1:], script, line)
        return
    text = _bare(raw)
    if "--" in text and (text.lstrip(" \\\n\t").startswith("--")):
        _scan_inner(text, script, line)
        script.variables[name] = ""  # where it is used nothing is left to add
        return
    value = _filled(text, script)
    script.variables[name] = value
    if exported or name.startswith(("NCCL_", "TORCH_")):
        script.environment[f"env.{name}"] = Leaf(key=f"env.{name}", value=value, line=line)


def _words(raw: str, script: _Script, line: int) -> None:
    text = _bare(raw)
    several = ("\n" in text and "--" in text) or _IN_QUOTES.match(text)
    if several and _scan_inner(text, script, line):
        return
    filled = _filled(text, script)
    if filled or not _VARIABLE.search(text):
        script.words.append(Word(text=filled, line=line, doubtful=script.depth > 0))


def _bare(raw: str) -> str:
    """Without quotes and backslashes, as the shell would hand it on.

    >>> _bare('"a b"c'), _bare("'$x'"), _bare("a\\\\ b")
    ('a bc', '$x', 'a b')
    """
    if '"' not in raw and "'" not in raw and "\\" not in raw:
        return raw
    parts = re.findall(rf"{_QUOTED}|\\(.)|([^\"'\\]+)", raw, re.DOTALL)
    return "".join(next((one for one in part if one), "") for part in parts)


def _filled(text: str, script: _Script) -> str:
    """Known variables in their places; unknown ones stay as they are, with their default where one is given."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1) or found.group(2)
        known = script.variables.get(name)
        if known is not None:
            return known
        return found.group(3) if found.group(3) is not None else found.group()

    return _VARIABLE.sub(value, text)[:MOST_VALUE]


def _arguments(words: list[Word]) -> Iterator[tuple[str, object, Word]]:
    """(flag, value, word) of each flag: true without values, a text for one, a list for more."""
    flag: Word | None = None
    key, values = "", list[str]()
    for word in [*words, Word(text=END, line=0)]:
        begins = _FLAG.match(word.text)
        if begins or word.text == END or word.text.endswith(".py"):  # the program: what follows are its own flags
            if flag is not None:
                yield key, _argument_value(values), flag
            key, equals, first = word.text.partition("=")
            flag, values = (word, [first] if equals else []) if begins else (None, [])
        elif flag is not None:
            values.append(word.text)


def _argument_value(values: list[str]) -> object:
    if not values:
        return True
    return values[0] if len(values) == 1 else list(values)
