"""The examples of docs/python.md are run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).parents[2]


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert tried > 8
    assert failed == 0


def test_every_public_function_is_in_the_table() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    for name in phalanx.__all__:
        if name[0].islower():
            assert re.search(rf"`{name}[(.]", page), name
