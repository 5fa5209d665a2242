"""Whole-number arithmetic of the shell: `$(( … ))`, `(( … ))`, `let` and `expr`."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*(?:\[[^\]]*\])?)"
    r"|(<<=|>>=|\*\*|\+\+|--|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
BINARY = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
MOST = 1 << 63
MOST_TOKENS = 400


class UnknownNumberError(Exception):
    """An operand is not known, or the text is not arithmetic."""


def evaluate_arithmetic(
    text: str, read: Callable[[str], int], write: Callable[[str, int], None] = lambda name, value: None
) -> int:
    """Return the value of an expression; `read` and `write` access its variables.

    >>> evaluate_arithmetic("(N + 7) / 8 * 8", {"N": 13}.__getitem__)
    16
    """
    tokens: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > MOST_TOKENS:
            raise UnknownNumberError(text[:60])
        tokens.append(match.group().strip())
        at = match.end()
    machine = _Machine(tokens, read, write)
    value = machine.comma() if tokens else 0
    if machine.at < len(tokens):
        raise UnknownNumberError(text[:60])
    return value


class _Machine:
    def __init__(self, tokens: list[str], read: Callable[[str], int], write: Callable[[str, int], None]) -> None:
        self.tokens, self.read, self.write = tokens, read, write
        self.at, self.depth = 0, 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def comma(self) -> int:
        value = self.assign()
        while self.peek() == ",":
            self.at += 1
            value = self.assign()
        return value

    def assign(self) -> int:
        name, operator = self.peek(), self.peek(1)
        if operator in ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=") and _is_name(name):
            self.at += 2
            value = self.assign()
            if operator != "=":
                value = _apply(operator[:-1], self.read(name), value)
            self.write(name, value)
            return value
        return self.choice()

    def choice(self) -> int:
        self.depth += 1
        if self.depth > 40:
            raise UnknownNumberError("nested too deeply")
        value = self.binary(0)
        if self.peek() == "?":
            self.at += 1
            yes = self.assign()
            if self.peek() != ":":
                raise UnknownNumberError("? without :")
            self.at += 1
            no = self.assign()
            value = yes if value else no
        self.depth -= 1
        return value

    def binary(self, level: int) -> int:
        if level == len(BINARY):
            return self.power()
        value = self.binary(level + 1)
        while self.peek() in BINARY[level]:
            operator = self.peek()
            self.at += 1
            value = _apply(operator, value, self.binary(level + 1))
        return value

    def power(self) -> int:
        base = self.unary()
        if self.peek() != "**":
            return base
        self.at += 1
        return _apply("**", base, self.power())

    def unary(self) -> int:
        token = self.peek()
        self.at += 1
        if token in ("+", "-", "!", "~"):
            value = self.unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self.peek()
            self.at += 1
            value = self.read(name) + (1 if token == "++" else -1)
            self.write(name, value)
            return value
        if token == "(":
            value = self.comma()
            if self.peek() != ")":
                raise UnknownNumberError("parenthesis")
            self.at += 1
            return value
        if token[:1].isdigit():
            return _literal(token)
        if not _is_name(token):
            raise UnknownNumberError(token)
        value = self.read(token)
        if self.peek() in ("++", "--"):
            self.write(token, value + (1 if self.peek() == "++" else -1))
            self.at += 1
        return value


def _is_name(token: str) -> bool:
    return bool(token) and (token[0].isalpha() or token[0] == "_")


def _literal(token: str) -> int:
    if len(token) > 20:
        raise UnknownNumberError(token)
    try:
        return int(token, 8) if len(token) > 1 and token[0] == "0" and token.isdigit() else int(token, 0)
    except ValueError as error:
        raise UnknownNumberError(token) from error


def _apply(operator: str, a: int, b: int) -> int:
    if operator in ("/", "%"):
        if b == 0:
            raise UnknownNumberError("division by zero")
        # The shell truncates towards zero, Python rounds down.
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if operator == "/" else a - quotient * b
    if operator in ("**", "<<", ">>") and not 0 <= b < 64:
        raise UnknownNumberError(operator)
    table: dict[str, Callable[[], int]] = {
        "||": lambda: int(bool(a or b)),
        "&&": lambda: int(bool(a and b)),
        "|": lambda: a | b,
        "^": lambda: a ^ b,
        "&": lambda: a & b,
        "==": lambda: int(a == b),
        "!=": lambda: int(a != b),
        "<": lambda: int(a < b),
        ">": lambda: int(a > b),
        "<=": lambda: int(a <= b),
        ">=": lambda: int(a >= b),
        "<<": lambda: a << b,
        ">>": lambda: a >> b,
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "**": lambda: a**b,
    }
    value = table[operator]()
    if abs(value) >= MOST:
        raise UnknownNumberError("overflow")
    return value
