"""Where words, quotes and expansions end in shell text."""

from __future__ import annotations

MOST_NESTED = 24  # quotes and expansions within each other
BREAKS = frozenset(" \t\r\n;&|<>()")


class ShellSyntaxError(Exception):
    """Text that no shell would read; `line` counts from 1 within the text."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


def line_at(text: str, position: int) -> int:
    """The line of a position, from 0."""
    return text.count("\n", 0, position)


def end_of_word(text: str, start: int, *, breaks: frozenset[str] = BREAKS) -> int:
    """The end of the word that begins at `start`.

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
    """The end of one character, quote or expansion outside of quotes."""
    if depth > MOST_NESTED:
        raise ShellSyntaxError(f"nests deeper than {MOST_NESTED} levels", line_at(text, at) + 1)
    char = text[at]
    if char == "\\":
        return min(len(text), at + 2)
    if char == "'":
        found = text.find("'", at + 1)
        if found < 0:
            raise ShellSyntaxError("quote ' that is never closed", line_at(text, at + 1) + 1)
        return found + 1
    if char == '"':
        return end_of_double(text, at + 1, depth + 1)
    if char == "`":
        return end_of_backquote(text, at + 1)
    if char == "$":
        return end_of_dollar(text, at, depth)
    return at + 1


def end_of_dollar(text: str, at: int, depth: int, *, quoted: bool = False) -> int:
    """The end of what begins with a dollar sign."""
    after = text[at + 1 : at + 2]
    if after == "(":
        return _end_of_parentheses(text, at + 2, depth + 1)
    if after == "{":
        return _end_of_braces(text, at + 2, depth + 1)
    if after == "'" and not quoted:
        end = at + 2
        while end < len(text) and text[end] != "'":
            end += 2 if text[end] == "\\" else 1
        return min(len(text), end + 1)
    if after == '"' and not quoted:
        return end_of_double(text, at + 2, depth + 1)
    return at + 1


def end_of_double(text: str, at: int, depth: int) -> int:
    """The end of double quotes, from the first character inside."""
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
    """The end of `command`, from the first character inside."""
    start = at
    while at < len(text) and text[at] != "`":
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        raise ShellSyntaxError("quote ` that is never closed", line_at(text, start) + 1)
    return at + 1


def _end_of_parentheses(text: str, at: int, depth: int) -> int:
    start, open_ones, begins = at, 1, True  # a comment begins only where a word could
    while at < len(text):
        char = text[at]
        if char == "(":
            open_ones += 1
            at += 1
        elif char == ")":
            open_ones -= 1
            at += 1
            if not open_ones:
                return at
        elif char == "#" and begins:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            at = end_of_piece(text, at, depth + 1)
        begins = char in " \t\n;"
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
