"""Patterns of the shell: `*`, `?`, `[…]` and `@(a|b)`, as `case`, `[[ ]]`, `${X%…}` and `${X/…}` use them."""

from __future__ import annotations

import re
from functools import lru_cache

from phalanx.rules.foreign.shell.partial_text import is_known

MOST_PATTERN = 200  # characters
_PLAIN = re.compile(r"[\w./:=,-]*")
MOST_STARS = 4  # more of them make a match slow on a hostile text


def matches_pattern(text: str, pattern: str) -> bool | None:
    """Whether the whole text fits; None where that cannot be said.

    >>> matches_pattern("llama-7B", "*-@(7|13)B"), matches_pattern("a", "b|c")
    (True, False)
    """
    if pattern == text and is_known(text):
        return True
    if not is_known(pattern) or not is_known(text):
        return True if pattern == "*" else None
    if _PLAIN.fullmatch(pattern):  # most arms of a case: --lr)
        return pattern == text
    found = _compiled(pattern)
    return None if found is None else found.fullmatch(text) is not None


def strip_pattern(text: str, pattern: str, operator: str) -> str | None:
    """`${X#p}`, `${X##p}`, `${X%p}` and `${X%%p}`.

    >>> strip_pattern("a/b/c.sh", "*/", "##"), strip_pattern("a/b/c.sh", ".*", "%")
    ('c.sh', 'a/b/c')
    """
    found = _compiled(pattern)
    if found is None:
        return None
    size = len(text)
    if operator[0] == "#":
        ends = range(size + 1) if operator == "#" else range(size, -1, -1)
        return next((text[end:] for end in ends if found.fullmatch(text, 0, end)), text)
    starts = range(size, -1, -1) if operator == "%" else range(size + 1)
    return next((text[:start] for start in starts if found.fullmatch(text, start)), text)


def substitute_pattern(text: str, old: str, new: str, *, every: bool, anchor: str = "") -> str | None:
    """`${X/old/new}`, `${X//old/new}`, and with an anchor `${X/#old/new}` and `${X/%old/new}`."""
    if not old:
        return text
    found = _compiled(old, anchor=anchor)
    return None if found is None else found.sub(lambda _: new, text, count=0 if every else 1)


@lru_cache(maxsize=512)
def _compiled(pattern: str, *, anchor: str = "") -> re.Pattern[str] | None:
    if len(pattern) > MOST_PATTERN or pattern.count("*") > MOST_STARS or not is_known(pattern):
        return None
    parts, at, groups = [], 0, []
    while at < len(pattern):
        char, after = pattern[at], pattern[at + 1 : at + 2]
        if char in "@?*+!" and after == "(":
            if char in "!*+":
                return None
            groups.append(")?" if char == "?" else ")")
            parts.append("(?:")
            at += 2
            continue
        if char == ")" and groups:
            parts.append(groups.pop())
        elif char == "|" and groups:
            parts.append("|")
        elif char == "*":
            parts.append(".*")
        elif char == "?":
            parts.append(".")
        elif char == "[" and (end := pattern.find("]", at + 2)) > 0:
            inner = pattern[at + 1 : end]
            negated = inner[:1] in ("!", "^")
            kept = re.sub(r"[\\\[]", lambda hit: "\\" + hit.group(), inner[1:] if negated else inner)
            parts.append(f"[{'^' if negated else ''}{kept}]")
            at = end
        elif char == "\\" and after:
            parts.append(re.escape(after))
            at += 1
        else:
            parts.append(re.escape(char))
        at += 1
    text = "".join(parts)
    text = f"\\A(?:{text})" if anchor == "#" else f"(?:{text})\\Z" if anchor == "%" else text
    try:
        return re.compile(text, re.DOTALL)
    except re.error:
        return None
