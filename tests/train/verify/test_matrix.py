"""A sample of the matrix of layouts, compiled, on CPUs; drawn by the version, so that a red one stays red.

Without inductor: its C++ takes a process 25 s of a core for the smallest function, and test_compiling.py has it and its
cache. Here the graphs are the same, in float64, where what tracing loses cannot hide behind rounding.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
from layout_matrix import (
    LAYOUTS,
    MATRIX_CASES,
    MatrixCase,
    exact_trial_of,
    layout_of,
    reference_of,
    refusals,
    runs_compiled,
    sample_cases,
    trial_of,
)

from phalanx.train.verify.compare import compare_outcomes
from phalanx.train.verify.small_trial import eager_trial
from phalanx.train.verify.trial import run_trial

COUNT = 2


def seed() -> str:
    """PHALANX_MATRIX_SEED, else the version: every release draws anew, and a red one stays red."""
    return os.environ.get("PHALANX_MATRIX_SEED") or version("phalanx")


def small(case: MatrixCase) -> bool:
    return runs_compiled(case) and layout_of(case).devices <= 4 and not refusals(case, device="cpu")


WITHIN_S = 900.0  # for four ranks to compile, beside other tests
SEED = seed()
# Each layout once: in float64 its formats and compressions are all the same case.
UNIQUE = list({(case.layout_name, case.recompute, case.offload): case for case in MATRIX_CASES if small(case)}.values())


def test_it_is_a_matrix():
    """As many combinations as were promised, each once, each either run or refused with a reason."""
    assert len(MATRIX_CASES) == len({case.name for case in MATRIX_CASES}) >= 60
    refused = {case.name: refusals(case, device="cuda") for case in MATRIX_CASES}
    assert sum(bool(found) for found in refused.values()) == 7
    assert all(problem.what and problem.fix for found in refused.values() for problem in found)
    runnable = [case for case in MATRIX_CASES if not refused[case.name]]
    assert {layout_of(case).devices for case in runnable} == {4, 8}
    assert {case.layout_name for case in runnable} >= set(LAYOUTS)
    for case in runnable:
        trial = trial_of(case, device="cuda")
        assert trial.settings.compile == runs_compiled(case), case.name
        assert reference_of(trial).settings.layout.devices == 1
    assert (
        sample_cases(MATRIX_CASES, 5, "a")
        == sample_cases(MATRIX_CASES[::-1], 5, "a")
        != sample_cases(MATRIX_CASES, 5, "b")
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", sample_cases(UNIQUE, COUNT, SEED), ids=lambda case: f"{SEED}: {case.name}")
def test_compiled_layouts_equal_one_process(case):
    trial = exact_trial_of(case)
    alone = run_trial(reference_of(eager_trial(trial)), limit_s=WITHIN_S)
    found = compare_outcomes(run_trial(trial, limit_s=WITHIN_S), alone)
    assert found.first is None, f"PHALANX_MATRIX_SEED={SEED}: {found.first.render()}"
