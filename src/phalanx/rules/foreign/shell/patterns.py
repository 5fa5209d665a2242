"""Patterns of the shell: `*`, `?`, `[…]` and `@(a|b)`, as `case`, `[[ ]]`, `${X%…}` and `${X/…}` use them."""

from __future__ import annotations

import re
from functools import lru_cache

from phalanx.rules.foreign.shell.partial_text import is_known

MOST_PATTERN = 200  # characters
_PLAIN = re.compile(r"[\w./:=,-]*")
MOST_STARS = 4  # more of them make a match slow on a hostile text


def matches_pattern(text: str, pattern: str) -> bool | None:
    """Return whether a pattern matches the full text; None if that cannot be decided.

    >>> matches_pattern("llama-7B", "*-@(7|13)B"), matches_pattern("a", "b|c")
    (True, False)
    """
    if pattern == text and is_known(text):
        return True
    if not is_known(pattern) or not is_known(text):
        return True if pattern == "*" else None
    if _PLAIN.fullmatch(pattern):  # most arms of a case, such as --lr)
        return pattern == text
    compiled = _compiled(pattern)
    return None if compiled is None else compiled.fullmatch(text) is not None


def strip_pattern(text: str, pattern: str, operator: str) -> str | None:
    """Apply `${X#p}`, `${X##p}`, `${X%p}` or `${X%%p}`; None if the pattern is not supported.

    >>> strip_pattern("a/b/c.sh", "*/", "##"), strip_pattern("a/b/c.sh", ".*", "%")
    ('c.sh', 'a/b/c')
    """
    compiled = _compiled(pattern)
    if compiled is None:
        return None
    size = len(text)
    if operator[0] == "#":
        ends = range(size + 1) if operator == "#" else range(size, -1, -1)
        return next((text[end:] for end in ends if compiled.fullmatch(text, 0, end)), text)
    starts = range(size, -1, -1) if operator == "%" else range(size + 1)
    return next((text[:start] for start in starts if compiled.fullmatch(text, start)), text)


def substitute_pattern(text: str, old: str, new: str, *, every: bool, anchor: str = "") -> str | None:
    """Apply `${X/old/new}` or `${X//old/new}`, or with an anchor `${X/#old/new}` or `${X/%old/new}`."""
    if not old:
        return text
    compiled = _compiled(old, anchor=anchor)
    return None if compiled is None else compiled.sub(lambda _: new, text, count=0 if every else 1)


@lru_cache(maxsize=512)
def _compiled(pattern: str, *, anchor: str = "") -> re.Pattern[str] | None:
    if len(pattern) > MOST_PATTERN or pattern.count("*") > MOST_STARS or not is_known(pattern):
        return None
    regex_parts, at, groups = [], 0, []
    while at < len(pattern):
        char, next_char = pattern[at], pattern[at + 1 : at + 2]
        if char in "@?*+!" and next_char == "(":
            if char in "!*+":
                return None
            groups.append(")?" if char == "?" else ")")
            regex_parts.append("(?:")
            at += 2
            continue
        if char == ")" and groups:
            regex_parts.append(groups.pop())
        elif char == "|" and groups:
            regex_parts.append("|")
        elif char == "*":
            regex_parts.append(".*")
        elif char == "?":
            regex_parts.append(".")
        elif char == "[" and (end := pattern.find("]", at + 2)) > 0:
            inner = pattern[at + 1 : end]
            negated = inner[:1] in ("!", "^")
            character_class = re.sub(r"[\\\[]", lambda match: "\\" + match.group(), inner[1:] if negated else inner)
            regex_parts.append(f"[{'^' if negated else ''}{character_class}]")
            at = end
        elif char == "\\" and next_char:
            regex_parts.append(re.escape(next_char))
            at += 1
        else:
            regex_parts.append(re.escape(char))
        at += 1
    text = "".join(regex_parts)
    text = f"\\A(?:{text})" if anchor == "#" else f"(?:{text})\\Z" if anchor == "%" else text
    try:
        return re.compile(text, re.DOTALL)
    except re.error:
        return None
