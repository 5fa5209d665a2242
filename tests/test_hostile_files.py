"""Every reader of files under limits of memory and processor time: hostile files are refused in a sentence, or read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_no_reader_is_hurt_by_a_hostile_file(tmp_path: Path) -> None:
    script = Path(__file__).with_name("hostile_files.py")
    command = [sys.executable, str(script), str(tmp_path / "files")]
    (tmp_path / "files").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    *wrong, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert wrong == []
    assert last["calls"] > 1000  # of readers with files
