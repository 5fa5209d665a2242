"""Launch scripts against the arguments that bash makes of them: what is read is right, or unknown, and never wrong."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cpu_limits import cpu_limit

CORPUS = Path(__file__).parent / "foreign_corpus"
NAMES = sorted(path.name for path in CORPUS.glob("*.sh"))
CPU_S = 5.0  # of one script; the slowest takes 0.1
# Idioms whose values nobody can know from the script alone: here, and only here, unknown is the answer.
OPEN = {
    "unknown_argument": {"TP"},
    "unknown_environment": {"TP"},
    "unknown_command": {"global"},
    "unknown_branch": {"TP", "recompute"},
    "unknown_case": {"TP", "recompute"},
    "unknown_array": {"ZeRO", "precision"},
    "several_runs": {"TP"},
}


@cache
def benchmark() -> ModuleType:
    """The comparison that is also made with public repositories."""
    path = Path(__file__).parents[2] / "benchmarks" / "foreign_files.py"
    spec = importlib.util.spec_from_file_location("foreign_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def captured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CORPUS / "captured.json").read_text(encoding="utf-8"))
    return found


def test_there_are_two_hundred_scripts_with_their_arguments() -> None:
    assert len(NAMES) >= 200
    assert set(NAMES) == set(captured())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_bash_makes_of_it(name: str) -> None:
    tool = benchmark()
    truth = tool.truth_of(captured()[name])
    with cpu_limit(CPU_S):
        read = tool.read_of(CORPUS / name)
    assert truth is not None
    verdicts = {key: tool.verdict(key, truth[key], read[key]) for key in tool.KEYS}
    wrong = {key: (truth[key], read[key]) for key, one in verdicts.items() if one == "wrong"}
    assert wrong == {}
    unknown = {key for key in tool.KEYS if read[key] == "unknown" and truth[key] is not None}
    assert unknown == OPEN.get(name.rpartition("_")[0], set())
