"""Each trainer by keys that only its files have; everything else is told apart, with what it looks like."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.rules.foreign.convert import convert_config
from phalanx.rules.foreign.detect import trainer_of_file

NEMO = "trainer:\n  devices: 8\nmodel:\n  micro_batch_size: 4\n  tensor_model_parallel_size: 2\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("compose.yaml", "services:\n  trainer:\n    image: x\nmodel:\n  a: 1\n", "looks like a compose file"),
        ("pod.yaml", "apiVersion: v1\nkind: Pod\nmodel:\n  a: 1\ndata:\n  b: 2\n", "a Kubernetes manifest"),
        (
            "mpt-7b.yaml",
            "model:\n  name: mpt_causal_lm\ntrain_loader:\n  x: 1\nmax_duration: 1ep\noptimizer:\n  name: adam\n"
            "scheduler:\n  name: cosine\nfsdp_config:\n  sharding_strategy: FULL_SHARD\n",
            "looks like llm-foundry",
        ),
        ("x.yaml", "trainer:\n  a: 1\nmodel:\n  b: 2\ndata:\n  c: 3\n", "nearest: "),
        ("x.json", '{"fp16": true, "learning_rate": 1, "gradient_accumulation_steps": 2}', "not a configuration"),
        ("x.sh", "echo hello\npython train.py --lr 1\n", "no command that could be read has two arguments"),
        (
            "y.sh",
            "python grpo.py --per_device_train_batch_size 1 --learning_rate 1e-6\n",
            "it has --per_device_train_batch_size, and beside it none of",
        ),
        (
            "vit.yaml",
            f"{NEMO}  img_h: 224\n  optim:\n    lr: 1e-3\n",
            "a NeMo configuration of speech, audio or vision",
        ),
        ("eval.yaml", f"run:\n  results_dir: x\n{NEMO}", "NeMo-Framework-Launcher's conversion, export or evaluation"),
        ("neuron.yaml", f"distributed_strategy:\n  zero1: true\n{NEMO}", "it looks like Neuron's NxD Training"),
        ("recipe.py", "from torchtitan.trainer import Trainer\n", "without a recipe"),
    ],
)
def test_what_is_none_of_them_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        trainer_of_file(path)
    assert message in str(caught.value)


def test_what_the_nemo_launcher_trains_is_nemo(tmp_path: Path) -> None:
    path = tmp_path / "squad.yaml"
    path.write_text(f"run:\n  results_dir: x\n{NEMO}  optim:\n    lr: 1e-4\n", encoding="utf-8")
    assert trainer_of_file(path) == "nemo"


def test_a_toml_with_metrics_is_not_torchtitan(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[metrics]\nport = 1\n[training]\nplan = 'weekly'\n[profiling]\non = true\n", encoding="utf-8")
    assert trainer_of_file(path) == ""


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("[training]\ntensor_parallel_degree = 4\n", "parallel.tensor", 4),
        ("[training]\nsequence_parallel_degree = 2\n", "parallel.tensor", 2),
        (
            "[training]\ntensor_parallel_degree = 1\n[experimental]\npipeline_parallel_degree = 2\n",
            "parallel.pipeline",
            2,
        ),
        ("[training]\nseq_len = 8192\n[experimental]\ncontext_parallel_degree = 8\n", "parallel.context", 8),
        ("[training]\nenable_float8_linear = true\n", "precision.compute", "fp8"),
        ("[training]\nenable_float8_linear = false\n", "precision.compute", "bf16"),
        ("[training]\ndata_parallel_degree = 1\n", "parallel.zero", 0),
    ],
)
def test_older_keys_of_torchtitan(tmp_path: Path, text: str, key: str, value: object) -> None:
    path = tmp_path / "old.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n' + text, encoding="utf-8")
    assert trainer_of_file(path) == "torchtitan"
    section, _, name = key.partition(".")
    assert getattr(getattr(convert_config(path, "torchtitan").resolved.job, section), name) == value


def test_a_variable_is_given_and_goes_before_the_script(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    head = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 1024 --train-iters 5"
    path.write_text(
        f'if [ "$SIZE" = large ]; then TP=8; else TP=2; fi\ntorchrun p.py {head} --micro-batch-size 1 '
        "--global-batch-size 64 --bf16 --tensor-model-parallel-size $TP\n",
        encoding="utf-8",
    )
    found = convert_config(path, "megatron")
    assert found.unknown["parallel.tensor"] == "--tensor-model-parallel-size depends on the condition in line 1"
    assert any("--tensor-model-parallel-size is not known" in one.what for one in found.missing)
    for given, tensor in (("SIZE=large", 8), ("SIZE=small", 2), ("TP=4", 4)):
        found = convert_config(path, "megatron", overrides=(given,))
        assert (found.resolved.job.parallel.tensor, dict(found.unknown)) == (tensor, {})


def test_bloom_keeps_its_layout_positions_vocabulary_and_ramp() -> None:
    path = Path(__file__).parents[1] / "foreign_corpus" / "bloom_2.sh"
    found = convert_config(path, "megatron", cluster="8xA100:48")
    job = found.resolved.job
    assert (job.parallel.tensor, job.parallel.pipeline, job.parallel.zero, job.parallel.recompute) == (8, 4, 0, "full")
    assert (job.model.positions, job.model.vocab) == ("alibi", 250_880)
    assert len(job.batch.ramp) == 8
    assert found.missing == ()


def test_a_refused_script_names_the_configurations_it_names(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text('[model]\nflavor = "8B"\n[training]\nseq_len = 8192\n')
    (tmp_path / "notes.json").write_text('{"title": "none of a trainer"}')
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\ntorchrun -m torchtitan.train --job.config_file ./llama.toml notes.json\n")
    with pytest.raises(UserError) as refused:
        trainer_of_file(script)
    fix = refused.value.problems[0].fix
    assert fix.endswith("llama.toml: torchtitan's configuration, which the script names")
    assert "notes.json" not in fix
