"""A sample of the matrix of layouts, compiled, on CPUs; drawn by the commit, so that a red commit stays red."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from phalanx.train.verify.compare import compare
from phalanx.train.verify.matrix import (
    CASES,
    LAYOUTS,
    Case,
    exact_trial_of,
    judge,
    layout_of,
    reference_of,
    refusals,
    runs_compiled,
    sample,
    trial_of,
)
from phalanx.train.verify.prove import CACHE
from phalanx.train.verify.ranks import Place
from phalanx.train.verify.shrink import eager
from phalanx.train.verify.trial import run_trial

EXACT, NATIVE = 5, 1  # cases: in float64 without a compiler; in their own format with one, twice


def seed() -> str:
    """PHALANX_MATRIX_SEED, else the commit."""
    told = os.environ.get("PHALANX_MATRIX_SEED", "")
    if told:
        return told
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def small(case: Case) -> bool:
    return runs_compiled(case) and layout_of(case).devices <= 4 and not refusals(case, device="cpu")


SEED = seed()
# Each layout once: in float64 its formats and compressions are all the same case.
UNIQUE = list({(case.layout_name, case.recompute, case.offload): case for case in CASES if small(case)}.values())
# A gloo rank on a core of its own compiles a block in 10 to 20 s, so few of these.
NATIVES = [case for case in CASES if small(case) and case.recompute == "none" and case.precision == "bf16"]


def test_it_is_a_matrix():
    """As many combinations as were promised, each once, each either run or refused with a reason."""
    assert len(CASES) == len({case.name for case in CASES}) >= 60
    refused = {case.name: refusals(case, device="cuda") for case in CASES}
    assert sum(bool(found) for found in refused.values()) == 9
    assert all(problem.what and problem.fix for found in refused.values() for problem in found)
    runnable = [case for case in CASES if not refused[case.name]]
    assert {layout_of(case).devices for case in runnable} == {4, 8}
    assert {case.layout_name for case in runnable} >= set(LAYOUTS)
    for case in runnable:
        trial = trial_of(case, device="cuda")
        assert trial.settings.compile == runs_compiled(case), case.name
        assert reference_of(trial).settings.layout.devices == 1
    assert sample(CASES, 5, "a") == sample(CASES[::-1], 5, "a") != sample(CASES, 5, "b")


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(UNIQUE, EXACT, SEED), ids=lambda case: f"{SEED}: {case.name}")
def test_compiled_layouts_equal_one_process(case):
    """The graphs that are compiled, in float64: gradients lost by tracing are lost here too."""
    trial = exact_trial_of(case)
    found = compare(run_trial(trial), run_trial(reference_of(eager(trial))))
    assert found.first is None, f"PHALANX_MATRIX_SEED={SEED}: {found.first.render()}"


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(NATIVES, NATIVE, SEED), ids=lambda case: f"{SEED}: {case.name}")
def test_a_second_start_from_the_compile_cache_equals_the_first(case, tmp_path):
    trial = trial_of(case, device="cpu")
    place = Place(environ={CACHE: str(tmp_path)})
    wanted = run_trial(reference_of(trial), place=place, limit_s=600)
    for start in ("cold", "warm"):
        found = run_trial(trial, place=place, limit_s=600)
        first = judge(case, found, wanted).first
        assert first is None, f"PHALANX_MATRIX_SEED={SEED}, {start}: {first.render()}"
    assert found.graphs[0] > 0, "nothing came from the cache"
