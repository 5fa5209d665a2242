"""Boundaries of words, quotes and expansions in shell text."""

from __future__ import annotations

MOST_NESTED = 24  # nesting of quotes and expansions
BREAKS = frozenset(" \t\r\n;&|<>()")


class ShellSyntaxError(Exception):
    """Text that no shell accepts; `line` counts from 1 within the text."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


def line_at(text: str, position: int) -> int:
    """Return the line of a position, from 0."""
    return text.count("\n", 0, position)


def end_of_word(text: str, start: int, *, breaks: frozenset[str] = BREAKS) -> int:
    """Return the end of the word that begins at `start`.

    >>> end_of_word("--lr ${X:-a b} c", 5)
    14
    """
    at = start
    while at < len(text):
        char = text[at]
        if char in "@!+?*" and text[at + 1 : at + 2] == "(" and (at > start or char in "@!+?"):
            at = _end_of_parentheses(text, at + 2, 0)  # a pattern such as @(a|b)
        elif char in breaks:
            if char in "<>" and text[at + 1 : at + 2] == "(" and at == start:
                at = _end_of_parentheses(text, at + 2, 0)
                continue
            break
        else:
            at = end_of_piece(text, at, 0)
    return at


def end_of_piece(text: str, at: int, depth: int) -> int:
    """Return the end of one character, quote or expansion outside of quotes."""
    if depth > MOST_NESTED:
        raise ShellSyntaxError(f"nests deeper than {MOST_NESTED} levels", line_at(text, at) + 1)
    char = text[at]
    if char == "\\":
        return min(len(text), at + 2)
    if char == "'":
        closing_quote = text.find("'", at + 1)
        if closing_quote < 0:
            raise ShellSyntaxError("quote ' that is never closed", line_at(text, at + 1) + 1)
        return closing_quote + 1
    if char == '"':
        return end_of_double(text, at + 1, depth + 1)
    if char == "`":
        return end_of_backquote(text, at + 1)
    if char == "$":
        return end_of_dollar(text, at, depth)
    return at + 1


def end_of_dollar(text: str, at: int, depth: int, *, quoted: bool = False) -> int:
    """Return the end of an expansion that begins with a dollar sign."""
    next_char = text[at + 1 : at + 2]
    if next_char == "(":
        return _end_of_parentheses(text, at + 2, depth + 1)
    if next_char == "{":
        return _end_of_braces(text, at + 2, depth + 1)
    if next_char == "'" and not quoted:
        end = at + 2
        while end < len(text) and text[end] != "'":
            end += 2 if text[end] == "\\" else 1
        return min(len(text), end + 1)
    if next_char == '"' and not quoted:
        return end_of_double(text, at + 2, depth + 1)
    return at + 1


def end_of_double(text: str, at: int, depth: int) -> int:
    """Return the end of double quotes, from the first character inside."""
    start = at
    while at < len(text):
        char = text[at]
        if char == '"':
            return at + 1
        if char == "\\":
            at += 2
        elif char == "`":
            at = end_of_backquote(text, at + 1)
        elif char == "$":
            if depth > MOST_NESTED:
                raise ShellSyntaxError(f"nests deeper than {MOST_NESTED} levels", line_at(text, at) + 1)
            at = end_of_dollar(text, at, depth, quoted=True)
        else:
            at += 1
    raise ShellSyntaxError('quote " that is never closed', line_at(text, start) + 1)


def end_of_backquote(text: str, at: int) -> int:
    """Return the end of a command in backquotes, from the first character inside."""
    start = at
    while at < len(text) and text[at] != "`":
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        raise ShellSyntaxError("quote ` that is never closed", line_at(text, start) + 1)
    return at + 1


def _end_of_parentheses(text: str, at: int, depth: int) -> int:
    # A comment begins only where a word could
    start, num_open, can_begin_word = at, 1, True
    while at < len(text):
        char = text[at]
        if char == "(":
            num_open += 1
            at += 1
        elif char == ")":
            num_open -= 1
            at += 1
            if not num_open:
                return at
        elif char == "#" and can_begin_word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            at = end_of_piece(text, at, depth + 1)
        can_begin_word = char in " \t\n;"
    raise ShellSyntaxError("parenthesis ( that is never closed", line_at(text, start) + 1)


def _end_of_braces(text: str, at: int, depth: int) -> int:
    start = at
    while at < len(text):
        char = text[at]
        if char == "}":
            return at + 1
        # An apostrophe inside "${X:-it's}" is a letter; one that is closed before the brace is a quote.
        if char == "'":
            end, brace = text.find("'", at + 1), text.find("}", at)
            at = end + 1 if end >= 0 and (brace < 0 or end < brace) else at + 1
        else:
            at = end_of_piece(text, at, depth + 1)
    raise ShellSyntaxError("brace ${ that is never closed", line_at(text, start) + 1)
