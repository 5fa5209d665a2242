"""Other people's texts: nothing in them acts on a terminal, and what can be read stays as it is."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.io.visible import one_line, visible, visible_json

ANY = st.text(st.characters(codec=None))  # surrogates too: file names that are not UTF-8 have them


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("\u202egnp.\u2066exe\u2069", "\\u202egnp.\\u2066exe\\u2069"),
        ("\udcff", "\\udcff"),
        ("\U000e0001", "\\U000e0001"),
        ("a\rb\nc\td", "a\\x0db\nc\td"),
    ],
)
def test_what_would_act_is_spelt_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text", ["TP1·CP1 – 30 µs, ±5 %", "Jörg", "漢字 한글 עברית العربية", "1\u202f024\u00a0GB", "🚂"]
)
def test_what_is_read_stays(text: str) -> None:
    assert one_line(text) == text == visible(text) == visible_json(text)


@given(ANY)
def test_nothing_acts_and_twice_is_once(text: str) -> None:
    shown = one_line(text)
    assert all(char.isprintable() or unicodedata.category(char) == "Zs" for char in shown)
    assert one_line(shown) == shown
    shown.encode("utf-8")  # what print does


@given(ANY)
def test_json_means_the_same(text: str) -> None:
    shown = visible_json(json.dumps({"a": text}, ensure_ascii=False, indent=1))
    assert json.loads(shown) == {"a": text}
    assert visible(shown) == shown
