"""What `--json` prints is JSON, whatever the numbers are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.output import print_json


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
