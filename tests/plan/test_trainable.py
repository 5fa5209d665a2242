"""What the trainer cannot run is said by the planner, by `check` and by `train --dry-run`, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve
from phalanx.job.load import load
from phalanx.plan.make import plan as make_plan
from phalanx.plan.trainable import COMPRESSIONS, trainer_problems

CASES = {
    "latent attention": (["model.preset=deepseek-v3"], "8xH100:64", "has latent attention (MLA)"),
    "ALiBi": (['model.positions="alibi"'], "8xH100:8", '"alibi" is planned but not trained'),
    "TPUs": ([], "4xTPU-v5p:16", "the trainer does not run on"),
    "fp8 over tensor ranks": (["precision.compute=fp8", "parallel.tensor=2"], "8xH100:8", '"fp8" with tensor = 2'),
    "top-k": (["parallel.compression=topk"], "8xH100:8", 'no gradient compression "topk"'),
    "fp4": (["precision.compute=fp4"], "8xB200:8", "fp4 is planned but not trained"),
    "a compiled split backward": (
        ["train.compile=true", "parallel.pipeline=2", "parallel.schedule=zero-bubble"], "8xH100:8", "zero-bubble",
    ),
}  # fmt: skip


def written(tmp_path, overrides):
    """The example as a job file of its own."""
    job = tmp_path / "job.toml"
    job.write_text(Path("examples/llama-3-8b-64xH100.toml").read_text())
    return str(job), [word for one in overrides for word in ("--set", one)]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_warns(name):
    overrides, cluster, told = CASES[name]
    resolved = load("examples/llama-3-8b-64xH100.toml", overrides=overrides)
    made = make_plan(resolved, resolve(cluster))
    assert any("`phalanx train` cannot run this plan" in text and told in text for text in made.warnings)
    assert trainer_problems(made.job, made.layout, made.cluster)


def test_another_framework_is_not_held_to_our_limits():
    overrides = ["model.preset=deepseek-v3", "parallel.framework=megatron-core"]
    made = make_plan(load("examples/llama-3-8b-64xH100.toml", overrides=overrides), resolve("8xH100:64"))
    assert not any("phalanx train" in text for text in made.warnings)


def test_what_can_be_trained_is_not_warned_of():
    made = make_plan(load("examples/llama-3-8b-64xH100.toml"), resolve("8xH100:8"))
    assert trainer_problems(made.job, made.layout, made.cluster) == []


def test_check_tells(tmp_path, capsys):
    job, words = written(tmp_path, ["parallel.compression=topk"])
    main(["check", job, *words])
    assert 'phalanx train cannot run this: parallel.compression: the trainer has no gradient compression "topk"' in (
        capsys.readouterr().out
    )


def test_train_refuses_before_it_starts(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    job, words = written(tmp_path, ["parallel.compression=topk"])
    monkeypatch.chdir(tmp_path)
    assert main(["train", job, "--dry-run", *words]) == UserError.exit_code
    assert 'the trainer has no gradient compression "topk"' in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_list_of_compressions_is_the_trainers():
    pytest.importorskip("torch")
    from phalanx.train.parallel.compress import KINDS

    assert set(COMPRESSIONS) == {"none", *KINDS}
