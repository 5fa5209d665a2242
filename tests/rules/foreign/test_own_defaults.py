"""A default is known of the program it is of; what a program, its files or its caller may say otherwise is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.detect import trainer_of_file
from phalanx.rules.specification import check

BATCH = "--per_device_train_batch_size 2 --output_dir out"
ARGS = f"{BATCH} --gradient_accumulation_steps 4"
PARSER = f"{ARGS} --save_strategy steps --evaluation_strategy no"  # arguments of TrainingArguments alone
LOOP = f"{ARGS} --logging_steps 1 --lr_scheduler_type linear --warmup_ratio 0.03 --report_to wandb --save_steps 9"
MEGATRON = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --bf16"
)
DEGREES = ("tensor", "pipeline", "context", "expert")


def convert(folder: Path, text: str, **files: str) -> ConvertedConfig:
    for name, inner in files.items():
        (folder / name.replace("_", ".")).write_text(inner, encoding="utf-8")
    path = folder / "run.sh"
    path.write_text(text + "\n", encoding="utf-8")
    return convert_config(path, trainer_of_file(path))


def known(found: ConvertedConfig, *keys: str) -> tuple[object, ...]:
    """What is known of each; None for what is not."""
    job = found.resolved.job
    pairs = (key.partition(".") for key in keys)
    return tuple(
        None if key in found.unknown else getattr(getattr(job, section), name)
        for key, (section, _, name) in zip(keys, pairs, strict=True)
    )


# ---- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "layout", "zero", "accumulates"),
    [
        (f"run_clm.py {BATCH} --do_train --save_steps 9 --logging_steps 1", 1, 0, False),
        (f"train.py {BATCH} --save_strategy steps --evaluation_strategy no", 1, None, True),
        (f"train_mem.py {BATCH} --save_steps 9 --logging_steps 1 --warmup_ratio 0.1", 1, None, True),
        (f"train_mem.py {BATCH}", None, None, True),  # a name alone is anybody's
        (f"run_clm.py {BATCH}", None, None, True),
        (f"finetune.py {LOOP}", None, None, False),  # words that loops of people's own have too
    ],
)
def test_what_is_known_of_a_program(
    tmp_path: Path, program: str, layout: int | None, zero: int | None, accumulates: bool
) -> None:
    found = convert(tmp_path, f"torchrun --nproc_per_node 8 {program}")
    assert known(found, *(f"parallel.{one}" for one in DEGREES)) == (layout,) * 4
    assert known(found, "parallel.zero") == (zero,)
    assert ("batch.per_replica" in found.unknown) is accumulates


@pytest.mark.parametrize(
    ("program", "defaults"),
    [
        (f"pretrain_gpt.py {MEGATRON}", (1, 1, 0, "none")),
        (f"train.py {MEGATRON} --lr-decay-style cosine", (1, 1, 0, "none")),  # it has Megatron's parser
        ("train.py --num-layers 12 --hidden-size 768 --seq-length 1024 --micro-batch-size 4", (None,) * 4),
        (f"pretrain_gpt.py {MEGATRON} --yaml-cfg all.yaml", (None,) * 4),
    ],
)
def test_megatrons_defaults_are_those_of_its_parser(tmp_path: Path, program: str, defaults: tuple[object, ...]) -> None:
    found = convert(tmp_path, f"torchrun --nproc_per_node 8 {program}")
    keys = ("parallel.tensor", "parallel.pipeline", "parallel.zero", "parallel.recompute")
    assert known(found, *keys) == defaults


def test_megatron_has_no_micro_batch_of_its_own(tmp_path: Path) -> None:
    found = convert(tmp_path, f"python pretrain_gpt.py {MEGATRON.replace('--micro-batch-size 4', '')}")
    assert known(found, "batch.micro") == (None,)


# ---- arguments of a program's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("--seq_parallel_size 4", "parallel.context"),
        ("--ring_attn_size 2", "parallel.context"),
        ("--tensor_parallel_size 2", "parallel.tensor"),
        ("--pp_size 2", "parallel.pipeline"),
        ("--ep_size 8", "parallel.expert"),
        ("--offload_activations True", "parallel.offload"),
        ("--param_dtype bf16", "precision.compute"),
    ],
)
@pytest.mark.parametrize("start", ["run_clm.py " + PARSER + " --do_train", "pretrain_gpt.py " + MEGATRON])
def test_an_argument_nobody_knows_leaves_open_what_it_speaks_of(
    tmp_path: Path, argument: str, key: str, start: str
) -> None:
    plain = convert(tmp_path, f"python {start}")
    found = convert(tmp_path, f"python {start} {argument}")
    said = key == "precision.compute" and "--bf16" in start
    assert known(plain, key) != (None,)
    assert (known(found, key) != (None,)) is said
    assert {*found.unknown} - {*plain.unknown} <= {key}  # and nothing else


@pytest.mark.parametrize("argument", ["--seq_parallel_size 1", "--ep_size 0", "--offload_activations False"])
def test_one_way_and_off_change_nothing(tmp_path: Path, argument: str) -> None:
    found = convert(tmp_path, f"python run_clm.py {PARSER} {argument}")
    assert not {*found.unknown} & {"parallel.context", "parallel.expert", "parallel.offload"}


@pytest.mark.parametrize(
    "text",
    [
        "swift sft --model x --tuner_type full --sequence_parallel_size 4 --per_device_train_batch_size 1",
        f"deepspeed pretrain_gpt.py {MEGATRON} --ds-sequence-parallel-size 4",
    ],
)
def test_sequences_that_are_split(tmp_path: Path, text: str) -> None:
    assert known(convert(tmp_path, text), "parallel.context", "parallel.context_kind") == (4, "ulysses")


# ---- arguments of the caller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "end", "is_open"),
    [
        ("", '"$@"', False),  # as it stands it is started without any
        ("", '"${@:2}"', True),
        ("", "${*:3}", True),
        ("MODEL=$1\nshift\n", '"$@"', True),  # whoever starts it gives some
        ("set -- a b\n", '"${@:2}"', False),
    ],
)
def test_the_rest_of_a_callers_arguments(tmp_path: Path, before: str, end: str, is_open: bool) -> None:
    found = convert(tmp_path, f"{before}python run_clm.py {PARSER} --do_train --bf16 True {end}")
    assert known(found, "precision.compute", "batch.micro") == ("bf16", 2)  # what is said holds
    assert (known(found, "parallel.zero") == (None,)) is is_open


def test_no_arguments_are_no_empty_word(tmp_path: Path) -> None:
    text = f'set -- a\npython run_clm.py {PARSER} --do_train --per_device_train_batch_size 3 "${{@:2}}"'
    assert known(convert(tmp_path, text), "batch.micro", "parallel.zero") == (3, 0)


@pytest.mark.parametrize("words", ["recipe.yaml", "a.json", "--args_file a.txt", "--cfg a.yaml"])
def test_a_file_with_further_arguments(tmp_path: Path, words: str) -> None:
    found = convert(tmp_path, f"torchrun run_clm.py {words} {PARSER} --do_train")
    assert known(found, "parallel.zero", "parallel.tensor", "batch.micro") == (None, None, 2)


def test_sections_of_the_file_that_config_names(tmp_path: Path) -> None:
    text = f"torchrun train.py --config a.yaml {PARSER}"
    assert known(convert(tmp_path, text, a_yaml="seed: 1\n"), "parallel.tensor") == (1,)
    found = convert(tmp_path, text, a_yaml="trainer:\n  tp_size: 4\n")
    assert known(found, "parallel.tensor", "parallel.pipeline") == (None, 1)


def test_a_batch_of_unknown_accumulation_is_unknown(tmp_path: Path) -> None:
    text = f"torchrun --nnodes 1 --nproc_per_node 8 run_clm.py {PARSER} --do_train"
    assert known(convert(tmp_path, text), "batch.global_sequences") == (64,)
    found = convert(tmp_path, text.replace("steps 4", "steps $PASSES"))
    assert known(found, "batch.global_sequences") == (None,)


def test_a_batch_of_unknown_degrees_is_unknown(tmp_path: Path) -> None:
    text = f"torchrun --nnodes 1 --nproc_per_node 8 run_clm.py {PARSER} --do_train --seq_parallel_size 4"
    assert any("how many sequences" in one.what for one in convert(tmp_path, text).missing)


# ---- DeepSpeed's JSON -----------------------------------------------------------------------------------------------


def test_what_the_json_says_beside_its_stage(tmp_path: Path) -> None:
    json = """{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "tensor_parallel": {"autotp_size": 4}}"""
    found = convert(tmp_path, f"deepspeed run_clm.py {PARSER} --do_train --deepspeed d.json", d_json=json)
    assert known(found, "parallel.zero", "parallel.offload", "parallel.tensor") == (3, "parameters", 4)
    found = convert(tmp_path, f"deepspeed run_clm.py {PARSER} --do_train --deepspeed away.json")
    assert known(found, "parallel.zero", "parallel.offload") == (None, None)


@pytest.mark.parametrize(
    ("inner", "key"),
    [
        ('"train_micro_batch_size_per_gpu": 16', "batch.micro"),
        ('"gradient_accumulation_steps": 2', "batch.per_replica"),
        ('"fp16": {"enabled": true}', "precision.compute"),
        ('"bf16": {"enabled": false}', "precision.compute"),
    ],
)
def test_a_json_that_says_otherwise(tmp_path: Path, inner: str, key: str) -> None:
    text = f"deepspeed run_clm.py {PARSER} --bf16 True --deepspeed d.json"
    found = convert(tmp_path, text, d_json='{"zero_optimization": {"stage": 2}, ' + inner + "}")
    assert key in found.unknown
    if 'enabled": true' not in inner:
        told = check(str(tmp_path / "run.sh"), select="TOP005").problems
        assert [one.outcome.severity or one.rule.severity for one in told] == ["error"]
    found = convert(tmp_path, text, d_json='{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    assert key not in found.unknown
    assert not check(str(tmp_path / "run.sh"), select="TOP005").problems


def test_other_programs_take_one_of_the_two(tmp_path: Path) -> None:
    text = f"deepspeed pretrain_gpt.py {MEGATRON} --deepspeed --deepspeed_config d.json"
    json = '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 8}'
    assert known(convert(tmp_path, text, d_json=json), "batch.micro", "parallel.zero") == (None, 1)
    (told,) = check(str(tmp_path / "run.sh"), select="TOP005").problems
    assert told.outcome.severity == "warning"
    assert "micro-batch-size is 4" in told.outcome.what


def test_the_json_says_the_format_where_the_arguments_do_not(tmp_path: Path) -> None:
    text = f"deepspeed pretrain_gpt.py {MEGATRON.replace('--bf16', '')} --deepspeed --deepspeed_config d.json"
    json = '{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}'
    assert known(convert(tmp_path, text, d_json=json), "precision.compute") == ("fp16",)
    (tmp_path / "d.json").unlink()
    assert known(convert(tmp_path, text), "precision.compute") == (None,)


def test_shards_within_a_host(tmp_path: Path) -> None:
    text = f"torchrun --nnodes 2 --nproc_per_node 8 train.py {PARSER} --fsdp "
    found = convert(tmp_path, text + "'hybrid_shard_zero2 auto_wrap'")
    assert known(found, "parallel.zero", "parallel.shard") == (2, 8)
    found = convert(tmp_path, text.replace("_node 8", "_node $N") + "'hybrid_shard auto_wrap'")
    assert known(found, "parallel.zero", "parallel.shard") == (3, None)
    yaml = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\n"
    yaml += "num_processes: 16\nmixed_precision: bf16\n"
    found = convert(tmp_path, f"accelerate launch --config_file a.yaml train.py {PARSER}", a_yaml=yaml)
    assert known(found, "parallel.zero", "parallel.shard") == (3, 8)


def test_fsdp_says_more_than_its_stage(tmp_path: Path) -> None:
    found = convert(tmp_path, f"torchrun train.py {PARSER} --fsdp 'full_shard auto_wrap offload'")
    assert known(found, "parallel.zero", "parallel.offload") == (3, "parameters")
    json = '{"fsdp_version": 2, "reshard_after_forward": false}'
    found = convert(tmp_path, f"torchrun train.py {PARSER} --fsdp auto_wrap --fsdp_config f.json", f_json=json)
    assert known(found, "parallel.zero", "parallel.offload") == (2, "none")
    flags = "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward"
    assert known(convert(tmp_path, f"python pretrain_gpt.py {MEGATRON} {flags}"), "parallel.zero") == (2,)


@pytest.mark.parametrize(
    ("variable", "key"),
    [("ACCELERATE_USE_FSDP=true", "parallel.zero"), ("ACCELERATE_MIXED_PRECISION=fp16", "precision.compute")],
)
def test_variables_that_accelerate_reads(tmp_path: Path, variable: str, key: str) -> None:
    text = f"torchrun run_clm.py {PARSER} --do_train"
    assert known(convert(tmp_path, text), key) != (None,)
    assert known(convert(tmp_path, f"export {variable}\n{text}"), key) == (None,)


def test_a_batch_that_is_searched_for(tmp_path: Path) -> None:
    found = convert(tmp_path, f"torchrun run_clm.py {PARSER} --do_train --auto_find_batch_size True")
    assert known(found, "batch.micro") == (None,)


@pytest.mark.parametrize(
    ("start", "devices"),
    [
        ("srun python", 16),
        ("srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8", 16),
        ("torchrun --nproc_per_node 8", 0),  # on one host, or as many runs as hosts
        ("srun torchrun", 0),
        ("srun torchrun --nnodes $(wc -l hosts) --nproc_per_node 8", 0),
    ],
)
def test_slurms_hosts_are_those_that_the_launcher_is_told(tmp_path: Path, start: str, devices: int) -> None:
    text = f"#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n{start} run_clm.py {PARSER}"
    assert convert(tmp_path, text).devices == devices


# ---- notes ----------------------------------------------------------------------------------------------------------


def test_several_trainings_are_told(tmp_path: Path) -> None:
    text = f"for rate in 1e-4 1e-5; do python run_clm.py {PARSER} --learning_rate $rate; done"
    assert [one.partition(" (")[0] for one in convert(tmp_path, text).notes] == ["several trainings are started"]
    assert convert(tmp_path, f"python run_clm.py {PARSER}").notes == ()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--save_steps 999999", True),
        ("--save_steps 500", False),
        ("--save_steps 5000 --max_steps 4000", True),
        ("--save_steps 200000 --max_steps 900000", False),
    ],
)
def test_steps_that_no_run_reaches(tmp_path: Path, words: str, told: bool) -> None:
    found = convert(tmp_path, f"python run_clm.py {PARSER} {words}")
    assert any(one.startswith("save_steps is") for one in found.notes) is told
    report = check(str(tmp_path / "run.sh"))
    assert any(one.startswith("save_steps is") for one in report.notes) is told
    assert report.exit_code == 0


def test_a_misspelt_key_of_gpt_neox(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    text = "pipe_parallel_size: 1\nmodel_parallel_size: 2\nnum_layers: 12\ntrain_iters: 10\n"
    path.write_text(text + "checkpoint_factr: 100\nlog-interval: 10\nsome_new_word: 1\n", encoding="utf-8")
    (note,) = convert_config(path, "gpt-neox").notes
    assert note == "line 5: checkpoint_factr is no key of GPT-NeoX that we know; did you mean checkpoint_factor?"


def test_a_cure_does_not_count_the_preparation_of_data(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: full\ntemplate: llama3\n"
        "cutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\nmax_steps: 3000\nddp_timeout: 180000000\n"
        "deepspeed: d.json\n",
        encoding="utf-8",
    )
    (tmp_path / "d.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    told = check(str(path), cluster="8xH100:4", select="COM004").problems
    assert told
    assert all("preparation of data" in one.outcome.fix for one in told)
