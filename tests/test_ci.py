"""`.ci/tests.py`: a test that fails fails the run, and its second run alone only explains it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "tests.py"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with two groups to run."""
    spec = importlib.util.spec_from_file_location("suite_of_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "runs_of_tests", lambda: {"one 1/1": ["tests/one.py"], "two 1/1": ["tests/two.py"]})
    return module


def run_suite(suite: ModuleType, monkeypatch: pytest.MonkeyPatch, failed: list[str], racy: set[str]) -> tuple[int, int]:
    """The exit code of a suite in which one group has these failures, and how many tests ran again alone."""
    alone = []

    def call_pytest(words: Sequence[str], output: IO[bytes], failures: Path) -> tuple[int, list[str]]:
        if words[-1].endswith(".py"):
            own = failed if words[-1] == "tests/two.py" else []
            return int(bool(own)), own
        alone.append(words[-1])
        return int(words[-1] not in racy), []

    monkeypatch.setattr(suite, "call_pytest", call_pytest)
    return suite.main([]), len(alone)


def test_a_test_that_passes_alone_is_a_race_and_still_fails_the_run(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    failed = ["tests/two.py::test_races", "tests/two.py::test_is_wrong"]
    assert run_suite(suite, monkeypatch, failed, {failed[0]}) == (1, 2)
    printed = capfdbinary.readouterr().out.decode()
    assert "tests/two.py::test_races: passed alone: a race\n" in printed
    assert "tests/two.py::test_is_wrong: failed alone too\n" in printed
    assert "failed: two 1/1" in printed
    assert run_suite(suite, monkeypatch, failed[:1], {failed[0]}) == (1, 1)
    assert run_suite(suite, monkeypatch, [], set()) == (0, 0)


def test_of_many_failures_the_first_eight_run_alone(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [f"tests/two.py::test_{number}" for number in range(12)]
    assert run_suite(suite, monkeypatch, failed, set(failed)) == (1, 8)
