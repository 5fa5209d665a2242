r"""Texts that others wrote, for a terminal: what would act instead of being read is spelt out.

Escape sequences clear screens and set titles, and bidirectional controls turn the order of letters around
(CVE-2021-42574). Both are outside what Unicode calls printable, as str.isprintable knows it; letters of every script
and every width of space stay.
"""

from __future__ import annotations

import re
import unicodedata

# All that may have to be spelt out: everything but line breaks, tabs, and the printable ranges of nearly all texts.
_SUSPECT = re.compile(r"[^\n\t -~¡-¬®-ͷ]")


def visible(text: str) -> str:
    r"""The text with every character that is not printable as `\xNN` or `\uNNNN`; line breaks and tabs stay.

    >>> print(visible("a\x1b[2Jb\x9bc\u202ed"), visible("µ · – ö 漢"))
    a\x1b[2Jb\x9bc\u202ed µ · – ö 漢
    """
    if text.isprintable():
        return text
    return _SUSPECT.sub(lambda found: _spelt_out(found[0]) if _is_control(found[0]) else found[0], text)


def visible_json(text: str) -> str:
    r"""JSON that means the same: only its strings hold such characters, and there `\uNNNN` stands for them.

    >>> print(visible_json('{"a": "b\x9bc"}'))
    {"a": "b\u009bc"}
    """
    return _SUSPECT.sub(lambda found: _json_escape(found[0]) if _is_control(found[0]) else found[0], text)


def one_line(text: str) -> str:
    r"""A name: also line breaks and tabs are spelt out.

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
    """As JSON writes it: beyond 16 bits as two."""
    raw = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{raw[at : at + 2].hex()}" for at in range(0, len(raw), 2))
