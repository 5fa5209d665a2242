"""Syntax tree of a shell script. Words keep their raw text: quotes and expansions are processed when they are used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """A word as written in the script, with its quotes."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """`NAME=word`, `NAME+=word`, `NAME[index]=word`, or with `items`, `NAME=( words )`."""

    name: str
    line: int
    index: str | None = None
    append: bool = False
    value: Word | None = None
    items: tuple[Word, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Redirect:
    """`> target`; a here-document has a `body`, and is `literal` if its end word was quoted."""

    operator: str
    target: Word
    body: list[str] | None = None  # filled at the end of the line that names it
    literal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleCommand:
    """A simple command: assignments, then words; either may be missing."""

    line: int
    assignments: tuple[Assignment, ...] = ()
    words: tuple[Word | Assignment, ...] = ()  # assignments here are arguments of declare, export and local
    redirects: tuple[Redirect, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Commands joined by `|`; `negated` by a leading `!`."""

    parts: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AndOr:
    """`first && second || third`."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IfClause:
    """Conditions with their bodies, in order, and the `else` body."""

    line: int
    branches: tuple[tuple[Block, Block], ...]
    otherwise: Block = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ForLoop:
    """`for name in words`; without words, over the positional parameters."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: Block


@dataclass(frozen=True, kw_only=True, slots=True)
class CountingLoop:
    """`for ((start; condition; step))`."""

    line: int
    start: str
    condition: str
    step: str
    body: Block


@dataclass(frozen=True, kw_only=True, slots=True)
class WhileLoop:
    """A `while` loop, or with `until`, its negation."""

    line: int
    condition: Block
    body: Block
    until: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseClause:
    """`case subject in pattern) body ;; esac`."""

    line: int
    subject: Word
    arms: tuple[tuple[tuple[Word, ...], Block], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionDefinition:
    """A function, whose body is followed when it is called."""

    name: str
    body: Block


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandGroup:
    """`{ … }`, or in a `subshell`, `( … )`."""

    body: Block
    subshell: bool = False
    redirects: tuple[Redirect, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TestClause:
    """`[[ … ]]`: words and operators."""

    line: int
    words: tuple[Word, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticCommand:
    """`(( … ))`."""

    line: int
    text: str


Node = (
    SimpleCommand
    | Pipeline
    | AndOr
    | IfClause
    | ForLoop
    | CountingLoop
    | WhileLoop
    | CaseClause
    | FunctionDefinition
    | CommandGroup
    | TestClause
    | ArithmeticCommand
)
Block = tuple[Node, ...]
