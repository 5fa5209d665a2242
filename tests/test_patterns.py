"""No possessive quantifier and no atomic group: Debian 12's own Python, 3.11.2, matches them wrongly."""

from __future__ import annotations

import ast
import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "tests", "benchmarks", ".ci")


def test_no_pattern_uses_what_python_3_11_2_matches_wrongly() -> None:
    """CPython issues 100061 and 106052; `phalanx import` lost every flag of a Megatron script to them."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))] + [ROOT / "conftest.py"]
    files.remove(Path(__file__))  # it holds them as examples
    files.remove(ROOT / "tests/rules/foreign_corpus/make_corpus.py")  # it holds shell
    assert len(files) > 500, "the scan must see the sources"
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files for line, text in refused(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        r"re.compile('a*+b')",
        r"X = r'(?>ab?c)'",
        r"X = (r'[^\n]' r'*+')",
        r"X = rf'\d{{1,3}}+{y}'",
        r"re.findall(f'{x}a++', y)",
        r"pattern.sub('x', re.sub(b'a?+', b'', y))",
        r"X = r'(?P<word>(?:a|(?=b++))*)'",
    ],
)
def test_the_scan_finds_them(source: str) -> None:
    assert list(refused(source))


@pytest.mark.parametrize(
    "source", ["X = 'the kernel is C++, not Python'", r"X = r'[*+]\++a+?'", r"re.compile('a[++]')"]
)
def test_the_scan_leaves_others_alone(source: str) -> None:
    assert not list(refused(source))


def refused(source: str) -> Iterator[tuple[int, str | bytes]]:
    """Line and text of each raw string, and of each text handed to `re`, that holds one of the two."""
    if not re.search(r"[*+?}]\+|\(\?>", source):  # most files: nothing to parse
        return
    tree = ast.parse(source)
    handed = {
        inner
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("re.")
        for inner in ast.walk(call)
    }
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = _text(node)
        if node in parts or text is None or not _has_refused(text):
            continue
        written = ast.get_source_segment(source, node) or ""
        if node in handed or re.search(r"""(?i)\b(?:r|rf|fr|rb|br)["']""", written):
            yield node.lineno, text


def _text(node: ast.AST) -> str | bytes | None:
    if isinstance(node, ast.JoinedStr):  # what is filled in counts as one character
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value
    return None


def _has_refused(text: str | bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _holds(parser.parse(text))
        except (re.error, OverflowError, RecursionError):
            return False  # no pattern


def _holds(parsed: object) -> bool:
    if isinstance(parsed, parser.SubPattern):
        return any(
            code in (codes.POSSESSIVE_REPEAT, codes.ATOMIC_GROUP) or _holds(argument) for code, argument in parsed
        )
    return isinstance(parsed, list | tuple) and any(_holds(item) for item in parsed)
