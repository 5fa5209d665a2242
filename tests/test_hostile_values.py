"""Hostile counts, numbers and paths: each is refused with exit code 2 and a short message, within little CPU time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("table", "least"), [("options", 250), ("paths", 80), ("files", 500)])
def test_hostile_values_are_refused(tmp_path: Path, table: str, least: int) -> None:
    script = Path(__file__).with_name("hostile_values.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), table], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *wrong, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert wrong == []
    assert last["calls"] >= least
