"""What a script leaves to its launcher, to files and to its program: read where it can be, and otherwise unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.detect import trainer_of_file
from phalanx.rules.specification import check

ARGS = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --output_dir out"
TRAINER = f"{ARGS} --save_strategy steps --logging_steps 10 --lr_scheduler_type cosine"
DEEPSPEED = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"


def convert(folder: Path, text: str, **files: str) -> ConvertedConfig:
    for name, inner in files.items():
        (folder / name.replace("_", ".")).write_text(inner, encoding="utf-8")
    path = folder / "run.sh"
    path.write_text(text + "\n", encoding="utf-8")
    return convert_config(path, trainer_of_file(path))


def value_of(found: ConvertedConfig, key: str) -> object:
    """What is known of a key; None for what is not."""
    section, _, name = key.partition(".")
    return None if key in found.unknown else getattr(getattr(found.resolved.job, section), name)


ZERO, FORMAT, AGAIN = "parallel.zero", "precision.compute", "parallel.recompute"


@pytest.mark.parametrize(
    ("launch", "files", "zero", "precision"),
    [
        ("--config_file a.yaml", {"a_yaml": DEEPSPEED + "deepspeed_config:\n  zero_stage: 3\n"}, 3, "bf16"),
        (
            "--config_file=a.yaml --zero_stage 1",
            {"a_yaml": DEEPSPEED + "deepspeed_config:\n  zero_stage: 3\n"},
            1,
            "bf16",
        ),
        ("--config_file a.yaml", {"a_yaml": DEEPSPEED.replace("DEEPSPEED", "MULTI_GPU")}, 0, "bf16"),
        ("--config_file a.yaml", {"a_yaml": f"{FSDP}  fsdp_sharding_strategy: SHARD_GRAD_OP\n"}, 2, "bf16"),
        ("--config_file a.yaml", {}, None, None),
        ("--config_file $1", {}, None, None),
        ("", {}, None, None),  # the user's own default_config.yaml
        ("--num_processes 8", {}, None, None),
        ("--use_deepspeed", {}, None, None),
        ("--multi_gpu --mixed_precision bf16", {}, 0, "bf16"),
        ("--use_deepspeed --zero_stage 2 --mixed_precision fp16", {}, 2, "fp16"),
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD --mixed_precision bf16", {}, 3, "bf16"),
        (
            "--mixed_precision bf16 --use_deepspeed --deepspeed_config_file d.conf",
            {"d_conf": '{"zero_optimization": {"stage": 3}}'},
            3,
            "bf16",
        ),
        ("--mixed_precision bf16 --use_deepspeed --deepspeed_config_file d.conf", {}, None, "bf16"),
    ],
)
@pytest.mark.parametrize("program", [TRAINER, ARGS])
def test_what_accelerate_launch_is_told(
    tmp_path: Path, launch: str, files: dict[str, str], zero: int | None, precision: str | None, program: str
) -> None:
    found = convert(tmp_path, f"accelerate launch {launch} train.py {program}", **files)
    assert (value_of(found, ZERO), value_of(found, FORMAT)) == (zero, precision)
    assert value_of(found, AGAIN) is None  # the program may turn it on by itself


def test_the_program_goes_before_its_launcher(tmp_path: Path) -> None:
    yaml = DEEPSPEED + "deepspeed_config:\n  zero_stage: 3\n"
    text = f"accelerate launch --config_file a.yaml train.py {TRAINER} --deepspeed d.json --fp16 True"
    found = convert(tmp_path, text, a_yaml=yaml, d_json='{"zero_optimization": {"stage": 1}}')
    assert (value_of(found, ZERO), value_of(found, FORMAT)) == (1, "fp16")


@pytest.mark.parametrize(
    ("launch", "devices"),
    [("", 16), ("--num_processes 8 --num_machines 1", 8), ("--num_processes $N", 0), ("--num_processes 3", 0)],
)
def test_devices_are_those_of_the_launcher(tmp_path: Path, launch: str, devices: int) -> None:
    text = f"accelerate launch --config_file a.yaml {launch} train.py {TRAINER}"
    assert convert(tmp_path, text, a_yaml=FSDP + "  fsdp_version: 1\n").devices == devices


@pytest.mark.parametrize(
    ("text", "zero", "precision"),
    [
        ("deepspeed train.py --zero_stage 3", 3, None),
        ("deepspeed --num_gpus=8 train.py --deepspeed_config d.json", 2, "bf16"),
        ("deepspeed train.py --deepspeed --deepspeed_config d.json", 2, "bf16"),
        ("deepspeed train.py --deepspeed_config away.json", None, None),
        ("deepspeed train.py", None, None),
        ("torchrun train.py --use_deepspeed", None, None),
        ("torchrun train.py --precision bf16", None, "bf16"),
        ("torchrun train.py --mixed_precision odd", None, None),
    ],
)
def test_a_program_that_is_not_the_trainer_has_none_of_its_defaults(
    tmp_path: Path, text: str, zero: int | None, precision: str | None
) -> None:
    json = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    found = convert(tmp_path, f"{text} --per_device_train_batch_size 2 --output_dir out", d_json=json)
    assert (value_of(found, ZERO), value_of(found, FORMAT), value_of(found, AGAIN)) == (zero, precision, None)
    assert "batch.per_replica" in found.unknown  # it may accumulate on its own


def test_defaults_are_known_of_a_program_that_is(tmp_path: Path) -> None:
    found = convert(tmp_path, f"torchrun --nproc_per_node 8 examples/run_clm.py {TRAINER}")
    assert (value_of(found, ZERO), value_of(found, FORMAT), value_of(found, AGAIN)) == (0, "fp32", "none")
    assert "batch.per_replica" not in found.unknown


@pytest.mark.parametrize(
    ("argument", "files", "zero", "recompute"),
    [
        ("--fsdp_config f.json", {"f_json": '{"activation_checkpointing": true}'}, 3, "full"),
        ('--fsdp_config \'{"fsdp_activation_checkpointing": "true"}\'', {}, 3, "full"),
        ("--fsdp_config f.json", {"f_json": '{"limit_all_gathers": true}'}, 3, "none"),
        ("--fsdp_config f.json", {}, 3, None),
    ],
)
def test_the_fsdp_config_of_the_trainer_is_opened(
    tmp_path: Path, argument: str, files: dict[str, str], zero: int, recompute: str | None
) -> None:
    text = f"torchrun train.py {TRAINER} --gradient_checkpointing False --fsdp 'full_shard auto_wrap' {argument}"
    found = convert(tmp_path, text, **files)
    assert (value_of(found, ZERO), value_of(found, AGAIN)) == (zero, recompute)


def test_activation_checkpointing_of_accelerate_is_recomputation(tmp_path: Path) -> None:
    text = f"accelerate launch --config_file a.yaml train.py {TRAINER} --gradient_checkpointing False"
    found = convert(tmp_path, text, a_yaml=FSDP + "  fsdp_activation_checkpointing: true\n")
    assert value_of(found, AGAIN) == "full"
    assert value_of(convert(tmp_path, text.replace("a.yaml", "b.yaml")), AGAIN) is None


def test_the_file_of_swift_is_opened_and_arguments_go_before_it(tmp_path: Path) -> None:
    yaml = "model: a/b\ntrain_type: full\nper_device_train_batch_size: 4\ndeepspeed: zero2\nbf16: true\n"
    found = convert(tmp_path, "swift sft --config c.yaml --per_device_train_batch_size 1", c_yaml=yaml)
    assert (value_of(found, ZERO), value_of(found, FORMAT), found.partial) == (2, "bf16", "")
    assert value_of(found, "batch.micro") == 1
    away = convert(tmp_path, "swift sft --model a/b --config away.yaml")
    assert (value_of(away, ZERO), value_of(away, AGAIN)) == (None, None)
    assert "away.yaml is not here" in away.partial


def test_arguments_may_be_shortened_as_argparse_takes_them(tmp_path: Path) -> None:
    text = f"torchrun train.py {TRAINER.replace('per_device_train_batch_size', 'per_device_train_batch')}"
    found = convert(tmp_path, text)
    assert (found.trainer, value_of(found, "batch.micro")) == ("transformers", 2)


def test_a_refusal_says_what_is_there(tmp_path: Path) -> None:
    text = "torchrun train.py --custom_per_device_train_batch_size 4 --learning_rate 1e-5 --output_dir out"
    with pytest.raises(UserError, match="has arguments of the Trainer, but no --per_device_train_batch_size"):
        convert(tmp_path, text)


@pytest.mark.parametrize(
    ("more", "severities"),
    [
        ("--save_only_model True", ["info"]),
        ("--save_only_model True --resume_from_checkpoint out/checkpoint-500", ["warning"]),
        ("--save_only_model False", []),
        ("", []),
    ],
)
def test_checkpoints_of_weights_alone_are_told(tmp_path: Path, more: str, severities: list[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun train.py {TRAINER} --save_steps 500 {more}\n", encoding="utf-8")
    found = [one for one in check(path).findings if one.rule.id == "CKP006" and one.verdict == "fail"]
    assert [one.severity for one in found] == severities
    assert all("moments, scheduler, rng" in one.outcome.what for one in found)
