"""What `--json` prints is JSON, whatever the numbers are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.output import note, print_json, say


@dataclass(frozen=True)
class Inner:
    rate: float


def test_print_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = {
        "a": Inner(rate=float("inf")),
        "b": (np.float64(1.5), np.int64(2), np.array([1.0, np.nan])),
        "c": Path("x"),
    }
    print_json(value)
    assert json.loads(capsys.readouterr().out) == {"a": {"rate": None}, "b": [1.5, 2, [1.0, None]], "c": "x"}


def test_controls_in_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\x9b\nend")
    note("c\u202e")
    print_json({"d": "e\x9b\x7f\u202e"})
    out, err = capsys.readouterr()
    said, _, document = out.partition("end\n")
    assert (said, err) == ("a\\x1b[2J\\x9b\n", "c\\u202e\n")
    assert "\\u009b\\u007f\\u202e" in document
    assert json.loads(document) == {"d": "e\x9b\x7f\u202e"}
