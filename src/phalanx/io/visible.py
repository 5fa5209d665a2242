r"""Untrusted texts for a terminal: control characters are replaced by their escapes.

Escape sequences clear screens and set titles, and bidirectional controls reverse the order of letters
(CVE-2021-42574). Unicode, and so str.isprintable, counts neither as printable. Letters of every script and spaces of
every width stay.
"""

from __future__ import annotations

import re
import unicodedata

# Candidates for escaping: everything but line breaks, tabs, and the printable ranges of nearly all texts.
_SUSPECT = re.compile(r"[^\n\t -~¡-¬®-ͷ]")


def visible(text: str) -> str:
    r"""Return the text with every unprintable character as `\xNN` or `\uNNNN`; line breaks and tabs stay.

    >>> print(visible("a\x1b[2Jb\x9bc\u202ed"), visible("µ · – ö 漢"))
    a\x1b[2Jb\x9bc\u202ed µ · – ö 漢
    """
    if text.isprintable():
        return text
    return _SUSPECT.sub(lambda match: _spelt_out(match[0]) if _is_control(match[0]) else match[0], text)


def visible_json(text: str) -> str:
    r"""Return equivalent JSON: unprintable characters, which only occur in its strings, are written as `\uNNNN`.

    >>> print(visible_json('{"a": "b\x9bc"}'))
    {"a": "b\u009bc"}
    """
    return _SUSPECT.sub(lambda match: _json_escape(match[0]) if _is_control(match[0]) else match[0], text)


def one_line(text: str) -> str:
    r"""Return a text on one line: line breaks and tabs are escaped as well.

    >>> print(one_line("a\nb"))
    a\nb
    """
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_control(char: str) -> bool:
    return not char.isprintable() and unicodedata.category(char) != "Zs"


def _spelt_out(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(char: str) -> str:
    """Return a character as JSON escape; beyond 16 bits as two escapes."""
    raw = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{raw[at : at + 2].hex()}" for at in range(0, len(raw), 2))
