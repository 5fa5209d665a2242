"""Expansion of words as in a shell: quotes removed, variables and arithmetic filled in, fields split."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError, evaluate_arithmetic
from phalanx.rules.foreign.shell.partial_text import MOST_TEXT, Text, Unknown, UnknownTable, is_known
from phalanx.rules.foreign.shell.patterns import strip_pattern, substitute_pattern
from phalanx.rules.foreign.shell.scanner import MOST_NESTED, end_of_backquote, end_of_dollar, end_of_piece

_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!_-])(\[.*?\](?=$|[-:=+?%#/^,@]))?(.*)", re.DOTALL)
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|%%?|##?|//?|\^\^?|,,?|:|@", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!_-]")
_RANGE = re.compile(r"(.*?)\{(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(\d{1,6}))?\}(.*)", re.DOTALL)
_CHOICE = re.compile(r"([^{}$]*)\{([^{}$\s]*,[^{}$\s]*)\}([^{}]*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "0": "\0", "a": "\a", "e": "\x1b"}
MOST_FIELDS = 5_000


class Scope(Protocol):
    """The parts of the interpreter that an expansion needs."""

    unknowns: UnknownTable
    depth: int

    def get_variable(self, name: str) -> Text | None: ...
    def set_variable(self, name: str, value: Text) -> None: ...
    def unset_mark(self, name: str) -> str: ...
    def positional(self) -> tuple[str, ...] | None: ...
    def has_shifted(self) -> bool: ...
    def special(self, name: str) -> str: ...
    def substitute(self, text: str) -> str: ...
    def open_mark(self, why: str, name: str = "") -> str: ...


def expand_fields(raw: str, scope: Scope) -> list[str]:
    """Return the fields of a word: none, one or several.

    The pieces of a word are (text, kind): "split" pieces are split at blanks, and "list" pieces begin new fields.
    """
    if "{" in raw and (alternatives := _spread_braces(raw)) is not None:
        return [field for alternative in alternatives for field in expand_fields(alternative, scope)]
    fields: list[str] = []
    current: str | None = None
    for text, kind in _parts(raw, scope):
        if kind == "list":
            items = text.split("\x00") if text else []
            if not items:
                continue
            current = (current or "") + items[0]
            for item in items[1:]:
                fields.append(current)
                current = item
        elif kind == "split":
            words = text.split()
            if not words:
                if text and current is not None:
                    fields.append(current)
                    current = None
                continue
            if text[0].isspace() and current is not None:
                fields.append(current)
                current = None
            current = (current or "") + words[0]
            for word in words[1:]:
                fields.append(current)
                current = word
            if text[-1].isspace():
                fields.append(current)
                current = None
        else:
            current = (current or "") + text
        if len(fields) > MOST_FIELDS:
            return [scope.open_mark("more words than a command line has")]
    if current is not None:
        fields.append(current)
    return [field if len(field) <= MOST_TEXT else scope.open_mark("a text that is too long") for field in fields]


def expand_text(raw: str, scope: Scope) -> str:
    """Return a word as one text: for the value of an assignment, the subject of a case, a word of [[ ]]."""
    pieces = (" ".join(text.split("\x00")) if kind == "list" else text for text, kind in _parts(raw, scope))
    return _bounded("".join(pieces), scope)


def expand_quoted(raw: str, scope: Scope) -> str:
    """Return text expanded by the rules of double quotes: the body of a here-document."""
    pieces = (" ".join(text.split("\x00")) if kind == "list" else text for text, kind in _double(raw, scope, here=True))
    return _bounded("".join(pieces), scope)


def _bounded(text: str, scope: Scope) -> str:
    return text if len(text) <= MOST_TEXT else scope.open_mark("a text that is too long")


_piece_end = lru_cache(maxsize=8192)(
    end_of_piece
)  # cached, because the same words are expanded in every iteration of a loop


def _parts(raw: str, scope: Scope) -> Iterator[tuple[str, str]]:
    at = 0
    plain = 0
    while at < len(raw):
        char = raw[at]
        if char not in "\\'\"`$":
            at += 1
            continue
        if at > plain:
            yield raw[plain:at], "plain"
        end = _piece_end(raw, at, 0)
        if char == "\\":
            if raw[at + 1 : end] not in ("\n", ""):
                yield raw[at + 1 : end], "quoted"
        elif char == "'":
            yield raw[at + 1 : end - 1], "quoted"
        elif char == '"':
            yield "", "quoted" if raw[at:end] not in ('"$@"', '"${@}"') and not _is_list(raw[at:end]) else "split"
            yield from _double(raw[at + 1 : end - 1], scope)
        elif char == "`":
            inner = re.sub(r"\\([`$\\])", r"\1", raw[at + 1 : end - 1])
            yield scope.substitute(inner), "split"
        else:
            piece, end = _dollar_piece(raw, at, end)
            if piece.startswith("$'"):
                yield _ansi_text(piece[2:-1]), "quoted"
            elif piece.startswith('$"'):
                yield "", "quoted"
                yield from _double(piece[2:-1], scope)
            else:
                text, several = expand_dollar(piece, scope)
                if several:
                    yield " ".join(text.split("\x00")), "split"
                else:
                    yield text, "split" if piece != "$" else "plain"
        at = plain = end
    if plain < len(raw):
        yield raw[plain:], "plain"


def _is_list(quoted: str) -> bool:
    return re.fullmatch(r'"\$\{(!?[A-Za-z_]\w*\[@\]|@)[^"]*\}"', quoted) is not None


def _dollar_piece(raw: str, at: int, end: int) -> tuple[str, int]:
    """Return the piece at a dollar sign: `$NAME` with its name, other expansions as the scanner ends them."""
    if end == at + 1:
        name = _NAME.match(raw, at + 1)
        end = name.end() if name else end
    return raw[at:end], end


def _double(text: str, scope: Scope, *, here: bool = False) -> Iterator[tuple[str, str]]:
    at = plain = 0
    while at < len(text):
        char = text[at]
        if char not in "\\`$":
            at += 1
            continue
        if at > plain:
            yield text[plain:at], "quoted"
        if char == "\\":
            after = text[at + 1 : at + 2]
            end = at + 2
            if after == "\n":
                pass
            elif after in ("$", "`", "\\") or (after == '"' and not here):
                yield after, "quoted"
            else:
                yield text[at:end], "quoted"
        elif char == "`":
            end = end_of_backquote(text, at + 1)
            yield scope.substitute(re.sub(r"\\([`$\\\"])", r"\1", text[at + 1 : end - 1])), "quoted"
        else:
            piece, end = _dollar_piece(text, at, end_of_dollar(text, at, 0, quoted=True))
            value, several = expand_dollar(piece, scope, quoted=True)
            yield value, "list" if several else "quoted"
        at = plain = end
    if plain < len(text):
        yield text[plain:], "quoted"


def _ansi_text(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match.group(1), match.group()), text, flags=re.DOTALL)


def _spread_braces(raw: str) -> list[str] | None:
    """Return the words of `a{1..3}` and `{a,b}`; None if there are no braces to expand."""
    if any(char in raw for char in "'\"`") or "${" in raw:
        return None
    if match := _RANGE.fullmatch(raw):
        before, first, last, step, after = match.groups()
        low, high, increment = int(first), int(last), max(1, int(step or 1))
        if abs(high - low) // increment > 1_000:
            return None
        numbers = range(low, high + 1, increment) if high >= low else range(low, high - 1, -increment)
        width = len(first) if first.startswith("0") and len(first) > 1 else 0
        return [f"{before}{number:0{width}d}{after}" for number in numbers]
    if match := _CHOICE.fullmatch(raw):
        return [f"{match.group(1)}{choice}{match.group(3)}" for choice in match.group(2).split(",")]
    return None


# ---- expansions that begin with a dollar sign -----------------------------------------------------------------------


def expand_dollar(piece: str, scope: Scope, *, quoted: bool = False) -> tuple[str, bool]:
    """Return (text, whether it is a list, joined by zero characters)."""
    if piece == "$":
        return "$", False
    if piece.startswith("$((") and piece.endswith("))"):
        return expand_arithmetic(piece[3:-2], scope), False
    if piece.startswith("$("):
        return scope.substitute(piece[2:-1]), False
    inner = piece[2:-1] if piece.startswith("${") else piece[1:]
    scope.depth += 1
    try:
        if scope.depth > MOST_NESTED:
            return scope.open_mark("expansions that are nested too deeply"), False
        return _parameter(inner, scope, quoted=quoted)
    finally:
        scope.depth -= 1


def expand_arithmetic(text: str, scope: Scope) -> str:
    """Return the value of an arithmetic expression, or a mark."""
    filled = expand_text(text.replace('"', ""), scope)
    try:
        return str(evaluate_in(filled, scope))
    except UnknownNumberError:
        cause = scope.unknowns.first(filled)
        if cause is None:
            cause = next(
                (
                    cause_of_name
                    for name in re.findall(r"[A-Za-z_]\w*", filled)
                    if (cause_of_name := _cause(name, scope))
                ),
                None,
            )
        if cause is None:
            return scope.open_mark(f"arithmetic that is not understood: {filled[:60]}")
        return scope.unknowns.mark(
            Unknown(kind="open", why=cause.why, name=cause.name, line=cause.line, file=cause.file)
        )


def _cause(name: str, scope: Scope) -> Unknown | None:
    value = scope.get_variable(name)
    text = scope.unset_mark(name) if value is None else value if isinstance(value, str) else ""
    return scope.unknowns.first(text)


def evaluate_in(text: str, scope: Scope) -> int:
    """Evaluate arithmetic with the script's variables; raise UnknownNumberError."""
    steps = 0

    def read(name: str) -> int:
        nonlocal steps
        steps += 1
        if steps > 500:
            raise UnknownNumberError(name)
        bare, _, index = name.partition("[")
        value = scope.get_variable(bare)
        if isinstance(value, tuple):
            value = _element(value, index[:-1] or "0", scope)
        elif isinstance(value, dict):
            value = value.get(expand_text(index[:-1], scope))
        if value is None or not is_known(value):
            raise UnknownNumberError(name)
        word = value.strip()
        if re.fullmatch(r"-?\d{1,19}", word):
            return int(word)
        if not word:
            return 0
        if word == name:
            raise UnknownNumberError(name)
        return evaluate_arithmetic(word, read, write)

    def write(name: str, value: int) -> None:
        scope.set_variable(name, str(value))

    if not is_known(text):
        raise UnknownNumberError(text)
    return evaluate_arithmetic(text, read, write)


def _element(items: tuple[str, ...], index: str, scope: Scope) -> str | None:
    number = expand_arithmetic(index, scope)
    if not is_known(number):
        return number
    place = int(number)
    items_up_to = items[: place + 1] if place >= 0 else items
    if any(scope.unknowns.alone(item) for item in items_up_to[:-1]):
        return scope.open_mark("an element of a list of unknown length")
    return items[place] if -len(items) <= place < len(items) else None


def _parameter(inner: str, scope: Scope, *, quoted: bool) -> tuple[str, bool]:
    match = _PARAMETER.fullmatch(inner)
    if inner in ("#", "!", "?", "$", "-", "_"):
        return scope.special(inner), False
    if match is None:
        return scope.open_mark(f"an expansion that is not understood: ${{{inner[:40]}}}"), False
    prefix, name, index, operation = match.groups()
    if prefix == "#":
        return _length(name, index, scope), False
    if name in ("@", "*"):
        if scope.positional() is None and (scope.has_shifted() or re.match(r":\s*\(?([2-9]|\d\d|\$)", operation)):
            # The caller of the script gives arguments: the first are used elsewhere, and the others are unknown.
            return scope.open_mark("arguments that the script is given after its first"), True
        return _joined_or_list(scope.positional() or (), name, operation, scope, quoted=quoted)
    if index in ("[@]", "[*]"):
        value = scope.get_variable(name)
        if prefix == "!":
            keys = (
                [str(index_number) for index_number in range(len(value))]
                if isinstance(value, tuple)
                else list(value or ())
            )
            return "\x00".join(keys), True
        items = _items(value)
        if not items and operation[:1] in ("-", ":") and operation[:2] != ":+" and not operation[1:2].isdigit():
            return expand_text(operation.lstrip(":-"), scope), False
        if value is None and not operation:
            return "", True  # an array that was never assigned has no words
        return _joined_or_list(items, index[1], operation, scope, quoted=quoted)
    value = _single(name, index, scope)
    if prefix == "!" and value is not None:
        if not is_known(value) or not _NAME.fullmatch(value):
            return scope.open_mark(f"the name of a variable in ${name}"), False
        name, value = value, _single(value, None, scope)
    return _applied(name, value, operation, scope), False


def _items(value: Text | None) -> tuple[str, ...]:
    if isinstance(value, dict):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,) if value is not None else ()


def _joined_or_list(items: tuple[str, ...], kind: str, rest: str, scope: Scope, *, quoted: bool) -> tuple[str, bool]:
    if rest.startswith(":") and items and not any(map(scope.unknowns.alone, items)):
        start, _, count = rest[1:].partition(":")
        first, number = expand_arithmetic(start or "0", scope), expand_arithmetic(count, scope) if count else ""
        if not is_known(first + number):
            return scope.open_mark("a part of a list"), False
        items = items[int(first) :][: int(number)] if number else items[int(first) :]
    elif rest[:1] in ("/", "%", "#", "^", ","):
        items = tuple(_applied("", item, rest, scope) for item in items)
    if kind == "*" and quoted:
        return " ".join(items), False
    return "\x00".join(items), True


def _length(name: str, index: str | None, scope: Scope) -> str:
    if name in ("@", "*"):
        return scope.special("#")
    value = scope.get_variable(name)
    if index in ("[@]", "[*]"):
        items = _items(value)
        unsure = any(scope.unknowns.alone(item) for item in items)
        return scope.open_mark(f"the length of {name}", name) if unsure else str(len(items))
    text = _single(name, index, scope)
    if text is None or not is_known(text):
        return scope.open_mark(f"the length of {name}", name)
    return str(len(text))


def _single(name: str, index: str | None, scope: Scope) -> str | None:
    if name.isdigit():
        if name == "0":
            return scope.special("0")
        arguments = scope.positional()
        if arguments is None:
            return None
        return arguments[int(name) - 1] if 0 < int(name) <= len(arguments) else ""
    value = scope.get_variable(name)
    if isinstance(value, dict):
        return value.get(expand_text(index[1:-1], scope)) if index else None
    if isinstance(value, tuple):
        return _element(value, index[1:-1] if index else "0", scope)
    return value


def _applied(name: str, value: str | None, rest: str, scope: Scope) -> str:
    """Apply `${NAME<operator><word>}`: a variable that nothing sets gets the default."""
    match = _OPERATOR.match(rest)
    if match is None:
        return scope.unset_mark(name) if value is None else value
    operator, word = match.group(), rest[match.end() :]
    if operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
        return _default_applied(name, value, operator, word, scope)
    if value is None:
        return scope.unset_mark(name)
    if not is_known(value):
        return scope.unknowns.derived(value)
    return _changed(value, operator, word, scope)


# Variables that a scheduler sets for every job: their defaults are for a test without a scheduler.
SCHEDULER = re.compile(r"(SLURM|PBS|LSB|OMPI|PMI|PET|MLP|VC|ARNOLD)_\w+|WORLD_SIZE")


def _default_applied(name: str, value: str | None, operator: str, word: str, scope: Scope) -> str:
    current = scope.unset_mark(name) if value is None else value
    cause = scope.unknowns.alone(current)
    if cause is not None and cause.kind != "unset" and not _cannot_be_empty(current, scope):
        return scope.unknowns.derived(current)  # it may or may not be empty
    is_empty = (cause is not None and cause.kind == "unset") or (operator[0] == ":" and value == "")
    if operator[-1] in "-=":
        if not is_empty:
            return current
        text = expand_text(word, scope)
        if SCHEDULER.fullmatch(name):
            text = scope.open_mark(f"{name}, which the scheduler sets; {text} without", name)
        if operator[-1] == "=" and _NAME.fullmatch(name):
            scope.set_variable(name, text)
        return text
    if operator[-1] == "+":
        return "" if is_empty else expand_text(word, scope)
    return scope.unset_mark(name) if is_empty else current


def _cannot_be_empty(text: str, scope: Scope) -> bool:
    cause = scope.unknowns.alone(text)
    return cause is None or (cause.kind == "either" and bool(cause.choices) and all(cause.choices))


def _changed(value: str, operator: str, word: str, scope: Scope) -> str:
    if operator in ("^^", "^", ",,", ","):
        change = str.upper if operator[0] == "^" else str.lower
        return change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
    if operator == ":":
        start, _, count = word.partition(":")
        first = expand_arithmetic(start or "0", scope)
        number = expand_arithmetic(count, scope) if count else ""
        if not is_known(first + number):
            return scope.unknowns.derived(first + number)
        substring = value[int(first) :]
        return substring[: int(number)] if number else substring
    if operator == "@":
        return value
    if operator in ("/", "//"):
        anchor = word[:1] if operator == "/" and word[:1] in "#%" else ""
        old, _, new = _split_slash(word[len(anchor) :])
        changed = substitute_pattern(
            value, expand_text(old, scope), expand_text(new, scope), every=operator == "//", anchor=anchor
        )
    else:
        changed = strip_pattern(value, expand_text(word, scope), operator)
    return scope.open_mark("a pattern that is not understood") if changed is None else changed


def _split_slash(word: str) -> tuple[str, str, str]:
    at = 0
    while at < len(word) and word[at] != "/":
        at = end_of_piece(word, at, 0)
    return word[:at], word[at : at + 1], word[at + 1 :]
