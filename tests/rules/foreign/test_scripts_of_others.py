"""Scripts that are not Megatron's training: those of other trainers are read or named, and what is left out is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.detect import TrainsNothingError, trainer_of_file
from phalanx.rules.specification import check

SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"


def convert(folder: Path, text: str, name: str = "run.sh") -> ConvertedConfig:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return convert_config(path, trainer_of_file(path))


@pytest.mark.parametrize(
    ("text", "zero", "recompute"),
    [
        ("megatron sft --model a/b --tensor_model_parallel_size 2", 1, "selective"),
        ("megatron pt --model a/b --use_distributed_optimizer false --recompute_granularity none", 0, "none"),
        ("NPROC_PER_NODE=8 \\\nswift sft \\\n --model a/b --deepspeed zero3", 3, "full"),
        ("swift rlhf --rlhf_type dpo --model a/b --gradient_checkpointing false", 0, "none"),
    ],
)
def test_ms_swift_has_defaults_of_its_own(tmp_path: Path, text: str, zero: int, recompute: str) -> None:
    found = convert(tmp_path, text)
    job = found.resolved.job
    assert (found.trainer, job.parallel.zero, job.parallel.recompute) == ("ms-swift", zero, recompute)
    assert not found.unknown.keys() & {"parallel.zero", "parallel.recompute"}
    assert "precision.compute" in found.unknown  # that of the model


def test_a_json_is_found_from_the_root_of_the_repository_and_not_from_above(tmp_path: Path) -> None:
    text = (
        "deepspeed train.py --deepspeed conf/zero3.json --per_device_train_batch_size 4 --output_dir out --bf16 True\n"
    )
    for place in ("conf", "outside/conf"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    found = convert(tmp_path / "repo", text, "scripts/v1/run.sh")
    assert found.trainer == "transformers"
    assert "parallel.zero" in found.unknown  # only above the repository
    (tmp_path / "repo" / "conf").mkdir()
    (tmp_path / "repo" / "conf" / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    found = convert(tmp_path / "repo", text, "scripts/v1/run.sh")
    assert found.resolved.job.parallel.zero == 3
    assert "parallel.zero" not in found.unknown


@pytest.mark.parametrize(
    "program",
    ["inference.py", "tools/run_text_generation_server.py", "evaluation.py", "examples/text_generation_ptq.py"],
)
def test_what_trains_nothing_by_its_name_is_told(tmp_path: Path, program: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun {program} {SIZES} --ckpt-format torch\n")
    with pytest.raises(TrainsNothingError):
        trainer_of_file(path)
    path.write_text(f"python convert.py\ntorchrun pretrain_gpt.py {SIZES}\n")
    assert trainer_of_file(path) == "megatron"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"python3 -m verl.trainer.main_ppo {SIZES}", "verl"),
        ("deepspeed --module openrlhf.cli.train_sft --zero_stage 3", "OpenRLHF"),
        (f"coverage run tests/collections/llm/gpt_pretraining.py {SIZES}", "NeMo's tests"),
    ],
)
def test_scripts_of_other_tools_are_named(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(UserError, match=name):
        trainer_of_file(path)


def test_a_wrapper_leaves_open_what_it_is_not_told(tmp_path: Path) -> None:
    more = "--expert_model_parallel_size 8 --recompute_granularity full --save out --lr 1e-4 --train_iters 10"
    found = convert(tmp_path, f"bash ./run_slurm.sh --tensor_model_parallel_size 2 {SIZES} {more}\n")
    assert found.resolved.job.parallel.tensor == 2
    assert {"parallel.zero", "parallel.pipeline"} <= found.unknown.keys()
    report = check(str(tmp_path / "run.sh"))
    assert not [one for one in report.problems if one.verdict == "fail" and one.severity != "info"]


def test_a_placeholder_is_a_value_that_nobody_gave(tmp_path: Path) -> None:
    arguments = "--save <PATH TO CKPT> --save-interval 100 --tensor-model-parallel-size <TP> --data-path <DATA>/text"
    found = convert(tmp_path, f'OPT="{SIZES} {arguments}"\nsrun sh -c "python pretrain_gpt.py $OPT"\n')
    assert "--save-interval" in [theirs for theirs, _ in found.mapped] + [one.key for one in found.unmapped]
    assert "parallel.tensor" in found.unknown
    assert convert(tmp_path, f"cat <<EOF >x\nEOF\npython pretrain_gpt.py {SIZES} <in >out\n").trainer == "megatron"


def test_every_second_layer_is_half_of_them(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\nlocal_batch_size = 1\nsteps = 100\n'
    text += 'dataset = "c4"\n[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"\n'
    parallel = convert(tmp_path, text, "a.toml").resolved.job.parallel
    assert (parallel.recompute, parallel.recompute_layers) == ("full", 16)
    assert "parallel.recompute" in convert(tmp_path, text.replace("8B", "other"), "b.toml").unknown
    # Tokens of the published model are not those of this file: nothing is said of epochs.
    assert "DAT002" not in [one.rule.id for one in check(str(tmp_path / "a.toml")).problems if one.verdict == "fail"]


def test_a_large_seed_is_no_finding(tmp_path: Path) -> None:
    found = convert(tmp_path, f"python pretrain_gpt.py {SIZES} --seed 2345678926\n")
    assert found.resolved.job.data.seed == 345678926


def test_names_of_forks_for_their_data_count(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python pretrain_gpt.py {SIZES} --train-iters 10 --train-weighted-split-paths-path x\n")
    assert "DAT001" not in [one.rule.id for one in check(str(path)).problems if one.verdict == "fail"]


@pytest.mark.parametrize(
    ("text", "micro", "zero", "recompute"),
    [
        ("tuner_type: lora\nper_device_train_batch_size: 2\ndeepspeed: zero3\n", 2, 3, "full"),
        ("tuner_type: full\nmicro_batch_size: 4\nglobal_batch_size: 64\n", 4, 1, "selective"),
        ("train_type: full\nmicro_batch_size: 4\nuse_distributed_optimizer: false\n", 4, 0, "selective"),
    ],
)
def test_the_yaml_of_ms_swift_is_read_as_its_command(
    tmp_path: Path, text: str, micro: int, zero: int, recompute: str
) -> None:
    found = convert(tmp_path, f"model: Qwen/Qwen2.5-7B-Instruct\ntorch_dtype: bfloat16\n{text}", "sft.yaml")
    job = found.resolved.job
    assert (found.trainer, job.batch.micro, job.parallel.zero) == ("ms-swift", micro, zero)
    assert (job.parallel.recompute, job.precision.compute, job.model.hidden) == (recompute, "bf16", 3584)


def test_a_setting_without_a_value_is_off(tmp_path: Path) -> None:
    base = "base_model: NousResearch/Meta-Llama-3-8B\nmicro_batch_size: 2\nsequence_len: 4096\n"
    assert convert(tmp_path, f"{base}deepspeed:\nfsdp:\nfsdp_config:\n", "a.yml").resolved.job.parallel.zero == 0
    assert convert(tmp_path, f"{base}fsdp:\n  - full_shard\n", "b.yml").resolved.job.parallel.zero == 3


def test_a_second_command_that_may_follow_gives_the_first_no_flags(tmp_path: Path) -> None:
    text = f"""
DT=fp16
if [[ $NEW -eq 1 ]]; then DT=bf16; fi
run="torchrun pretrain_gpt.py {SIZES} --micro-batch-size 1 --global-batch-size 8 --train-iters 1000 --$DT"
command="$run"
if [[ $AGAIN -eq 1 ]]; then
  command="$run; rm -rf out; $run"
fi
eval $command
"""
    found = convert(tmp_path, text)
    assert "precision.compute" in found.unknown  # fp16 or bf16
    assert found.resolved.job.batch.micro == 1


def test_old_editions_of_torchtitan_leave_the_head_out_of_fp8_themselves(tmp_path: Path) -> None:
    base = "[model]\nname = 'llama3'\nflavor = '8B'\n{}\n[training]\nseq_len = 8192\n{}batch_size = 2\nsteps = 1000\n"
    old = convert(tmp_path, base.format("[float8]\nenable_float8_linear = true", ""), "old.toml")
    middle = convert(tmp_path, base.format("converters = 'float8'", ""), "middle.toml")
    new = convert(tmp_path, base.format("converters = ['float8']", "local_"), "new.toml")
    assert (old.resolved.job.precision.compute, new.resolved.job.precision.compute) == ("fp8", "fp8")
    assert [one.practice.fp8_spares_sensitive for one in (old, middle, new)] == [True, None, False]
