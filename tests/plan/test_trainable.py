"""What the trainer cannot run is said by the planner, by `check` and by `train --dry-run`, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.plan.text import plan_text
from phalanx.plan.trainable import COMPRESSIONS, trainer_problems

CASES = {
    "latent attention": (["model.preset=deepseek-v3"], "8xH100:64", "has latent attention (MLA)"),
    "ALiBi": (['model.positions="alibi"'], "8xH100:8", '"alibi" is planned but not trained'),
    "TPUs": ([], "4xTPU-v5p:16", "the trainer does not run on"),
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
    made = make_plan(resolved, resolve_cluster(cluster))
    assert any("`phalanx train` cannot run this plan" in text and told in text for text in made.warnings)
    assert trainer_problems(made.job, made.layout, made.cluster)


def test_another_framework_is_not_held_to_our_limits():
    overrides = ["model.preset=deepseek-v3", "parallel.framework=megatron-core"]
    made = make_plan(load("examples/llama-3-8b-64xH100.toml", overrides=overrides), resolve_cluster("8xH100:64"))
    assert not any("phalanx train" in text for text in made.warnings)


def test_what_can_be_trained_is_not_warned_of():
    made = make_plan(load("examples/llama-3-8b-64xH100.toml"), resolve_cluster("8xH100:8"))
    assert trainer_problems(made.job, made.layout, made.cluster) == []


def test_check_tells(tmp_path, capsys):
    job, words = written(tmp_path, ["parallel.compression=topk"])
    main(["check", job, *words])
    assert 'phalanx train cannot run this: parallel.compression: the trainer has no gradient compression "topk"' in (
        capsys.readouterr().out
    )


def test_full_attention_in_place_of_a_sliding_window_is_said_and_not_refused(tmp_path, capsys):
    def warnings(*overrides):
        resolved = load("examples/llama-3-8b-64xH100.toml", overrides=["model.preset=mistral-7b", *overrides])
        made = make_plan(resolved, resolve_cluster("8xH100:8"))
        assert trainer_problems(made.job, made.layout, made.cluster) == []
        return [text for text in made.warnings if "sliding-window attention over 4,096 tokens" in text]

    (told,) = warnings()
    assert "planned, and trained by `phalanx train`, with full attention over sequences of 8,192" in told
    assert "use data.sequence = 4096 or less" in told
    assert warnings("data.sequence=4096") == []
    assert warnings("model.sliding_window=0") == []
    (theirs,) = warnings("parallel.framework=megatron-core")
    assert "phalanx train" not in theirs
    job, words = written(tmp_path, ["model.preset=mistral-7b"])
    main(["check", job, *words])
    assert "it is planned, and trained by `phalanx train`, with full attention" in capsys.readouterr().out


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


# A lost model replica is left out: where that cannot be, everybody says so, in the same words.

LEAVE_OUT = ["fault.on_loss=leave-out"]
ON_GPUS = '"leave-out" on H100-80GB-SXM'


@pytest.fixture(scope="module")
def replicated():
    """Four model replicas on CPUs, which can be left out."""
    fixed = ["parallel.pipeline=1", "parallel.zero=0", "parallel.shard=1"]
    made = make_plan(load("examples/first-run.toml", overrides=[*LEAVE_OUT, *fixed]), resolve_cluster("local-cpu:4"))
    assert made.reliability.replica_loss is not None
    return made


def refused(plan, *, layout=None, **sections):
    """What is said of the plan's job with other values in some sections."""
    job = replace(plan.job, **{name: replace(getattr(plan.job, name), **values) for name, values in sections.items()})
    return [one.what for one in trainer_problems(job, layout or plan.layout, plan.cluster)]


def test_replicas_on_cpus_can_be_left_out(replicated):
    assert refused(replicated) == []
    assert not any("leave-out" in text for text in replicated.warnings)


@pytest.mark.parametrize(
    ("told", "sections"),
    [
        ('fault.recovery = "shrink"', {"fault": {"recovery": "shrink"}}),
        ('fault.recovery = "stop"', {"fault": {"recovery": "stop"}}),
        ("numerics.reproducible", {"numerics": {"reproducible": True}}),
        ("model.module", {"model": {"module": "net.py:Net"}}),
        ("plugins.callbacks", {"plugins": {"callbacks": ("own.py:Own",)}}),
        ("plugins.data", {"plugins": {"data": "own.py:rows"}}),
        ("plugins.optimizer", {"plugins": {"optimizer": "own.py:Own"}}),
    ],
)
def test_what_keeps_replicas_from_being_left_out(replicated, told, sections):
    assert f'"leave-out" with {told}' in refused(replicated, **sections)
    rebuilt = {name: dict(values) for name, values in sections.items()}
    rebuilt.setdefault("fault", {})["on_loss"] = "rebuild"
    assert not any("leave-out" in what for what in refused(replicated, **rebuilt))


def test_layouts_without_replicas_to_leave_out(replicated):
    whole = replace(replicated.layout, zero=2, shard=replicated.layout.data)
    assert any("the one model replica of" in what for what in refused(replicated, layout=whole))
    packed = replace(replicated.layout, compression="bf16")
    assert '"leave-out" with compression "bf16"' in refused(replicated, layout=packed)


def test_a_replica_cannot_be_left_out_of_a_model_with_experts(replicated):
    experts = replace(replicated.job.model, experts=4, experts_per_token=2, expert_ffn=64)
    what = [one.what for one in trainer_problems(replace(replicated.job, model=experts), replicated.layout,
                                                 replicated.cluster)]  # fmt: skip
    assert '"leave-out" with a model with experts' in what


def test_plan_check_and_dry_run_refuse_gpus_in_the_same_words(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    job, words = written(tmp_path, [*LEAVE_OUT, "parallel.shard=8"])
    monkeypatch.chdir(tmp_path)
    assert main(["plan", job, *words]) == 0
    said = capsys.readouterr()
    assert ON_GPUS in said.out + said.err
    main(["check", job, *words])
    assert f"phalanx train cannot run this: fault.on_loss: {ON_GPUS}" in capsys.readouterr().out
    assert main(["train", job, "--dry-run", *words]) == UserError.exit_code
    assert ON_GPUS in capsys.readouterr().err


def test_the_price_of_leaving_out_says_where_it_is_refused(replicated):
    page = plan_text(replicated)
    assert '(fault.on_loss = "leave-out"):' in page
    assert "leave the replica out: every rank waits" in page
    assert "refuses" not in page
    made = make_plan(
        load("examples/llama-3-8b-64xH100.toml", overrides=["parallel.shard=8"]), resolve_cluster("8xH100:8")
    )
    assert f"`phalanx train` refuses {ON_GPUS}" in " ".join(plan_text(made).split())
