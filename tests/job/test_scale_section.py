"""[scale]: what muP and CompleteP need to know, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.job.load import job_to_dict, load

JOB = """
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 256
[batch]
global_tokens = 1024
[cluster]
spec = "local-cpu:1"
"""


def read(tmp_path: Path, more: str, *, job: str = JOB) -> str:
    """The message a job is refused with; empty if it is not."""
    (tmp_path / "job.toml").write_text(job + more)
    try:
        load(tmp_path / "job.toml")
    except UserError as error:
        return str(error)
    return ""


def test_without_the_section_the_standard_holds(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    job = load(tmp_path / "job.toml").job
    assert job.scale.parametrization == "standard"
    assert job_to_dict(job)["scale"] == {
        "parametrization": "standard",
        "base_width": 0,
        "base_depth": 0,
        "base_head_dim": 64,
    }


def test_the_base_must_be_given(tmp_path: Path) -> None:
    said = read(tmp_path, '[scale]\nparametrization = "completep"\n')
    assert 'scale.parametrization = "completep" without scale.base_width' in said
    assert 'scale.parametrization = "completep" without scale.base_depth' in said
    assert not read(tmp_path, '[scale]\nparametrization = "mup"\nbase_width = 64\n')


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ('[plugins]\noptimizer = "own.py:Lion"\n', "with plugins.optimizer"),
        ('[train]\nweights = "weights"\n', "with train.weights"),
    ],
)
def test_what_is_not_worked_out_is_refused_by_name(tmp_path: Path, more: str, what: str) -> None:
    said = read(tmp_path, '[scale]\nparametrization = "mup"\nbase_width = 64\n' + more)
    assert f'scale.parametrization = "mup" {what}' in said
    assert 'use parametrization = "standard"' in said


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    job = JOB.replace('preset = "gpt2"', 'preset = "mixtral-8x7b"')
    assert "with a model with experts" in read(tmp_path, '[scale]\nparametrization = "mup"\nbase_width = 64\n', job=job)


def test_a_base_without_effect_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB + "[scale]\nbase_width = 64\n")
    warnings = load(tmp_path / "job.toml").warnings
    assert any("scale.base_width has no effect" in one.render() for one in warnings)
