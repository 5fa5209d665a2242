"""What single settings of other trainers become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.job.schema import Job
from phalanx.rules.foreign import mcore, mcore_model, nemo
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.detect import trainer_of_file

DATA = Path(__file__).parent / "data"
GPT = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304 "
    "--max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 --train-iters 100"
)


def megatron(tmp_path: Path, text: str, *, cluster: str | None = "8xA100:1", plain: bool = False) -> ConvertedConfig:
    path = tmp_path / "args.txt"
    path.write_text(text if plain else f"{GPT} {text}\n", encoding="utf-8")
    return convert_config(path, "megatron", cluster=cluster)


def torchtitan(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "llama3"\nflavor = "8B"\n{text}', encoding="utf-8")
    return convert_config(path, "torchtitan", cluster="8xH100:1").resolved.job


def deepspeed(tmp_path: Path, text: str, *settings: str) -> Job:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return convert_config(
        path, "deepspeed", cluster="8xA100:1", overrides=("model.preset=gpt2", "data.sequence=1024", *settings)
    ).resolved.job


def accelerate(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    settings = ("model.preset=gpt2", "data.sequence=1024", "batch.global_sequences=64")
    return convert_config(path, "accelerate", cluster="8xA100:1", overrides=settings).resolved.job


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("", "train.timeout_s", 600.0),  # its default of 10 minutes is said, not ours
        ("--distributed-timeout-minutes 2", "comm.init_timeout_s", 120.0),
        ("--distributed-timeout-seconds-after-init 60", "train.timeout_s", 60.0),
        ("--bf16", "precision.compute", "bf16"),
        ("--bf16", "precision.grad_reduce", "fp32"),  # bf16 turns fp32 sums on
        ("--bf16 --grad-reduce-in-bf16", "precision.grad_reduce", "bf16"),
        ("--fp16", "precision.grad_reduce", "bf16"),  # summed in fp16: the nearest word
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "precision.grad_reduce", "fp32"),
        ("--fp16 --loss-scale 4096", "precision.loss_scale", 4096.0),
        ("--bf16 --fp8-format hybrid", "precision.compute", "fp8"),
        ("--use-distributed-optimizer", "parallel.zero", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.zero", 2),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "parallel.recompute_layers",
            3,
        ),
        ("--recompute-activations", "parallel.recompute", "selective"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "parallel.virtual_pipeline", 4),
        ("--bf16 --overlap-grad-reduce", "comm.bucket_mib", 152.6),  # 40e6 parameters of 4 bytes
        ("--bf16", "comm.bucket_mib", 65536.0),  # no overlap: one bucket
        ("--lr 1e-4 --min-lr 1e-5", "optim.final_lr", pytest.approx(0.1)),
        ("--rampup-batch-size 32 16 600", "batch.ramp", None),
        ("--swiglu", "model.ffn", 2688),  # int(4 · 1024 · 2/3 / 64) · 64
        ("--rotary-base 500000 --position-embedding-type rope", "model.rope_theta", 500_000.0),
        ("--check-weight-hash-across-dp-replicas-interval 50", "fault.digest_every", 50),
        ("--save out --save-interval 7 --most-recent-k 2", "checkpoint.keep", 2),
    ],
)
def test_megatron(tmp_path: Path, text: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    said = getattr(getattr(megatron(tmp_path, text).resolved.job, section), name)
    if key == "batch.ramp":
        assert [(one.until_tokens, one.global_tokens) for one in said] == [(300 * 1024, 32768), (600 * 1024, 49152)]
    else:
        assert said == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("", "train.timeout_s", 100.0),
        ("", "comm.init_timeout_s", 300.0),
        ("[comm]\ntrain_timeout_seconds = 50", "train.timeout_s", 50.0),
        ("", "parallel.zero", 3),
        ("[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8", "parallel.zero", 0),
        ("[parallelism]\ndata_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 2", "parallel.data", 8),
        ("[parallelism]\ndata_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 2", "parallel.shard", 4),
        ('[parallelism]\nfsdp_reshard_after_forward = "never"', "parallel.zero", 2),
        ("[parallelism]\ndata_parallel_replicate_degree = 2", "parallel.shard", 4),  # of eight devices
        ("[training]\nlocal_batch_size = 3", "batch.global_sequences", 24),
        ("[training]\nlocal_batch_size = 3\nglobal_batch_size = 48", "batch.global_sequences", 48),
        ('[activation_checkpoint]\nmode = "none"', "parallel.recompute", "none"),
        ('[checkpoint]\nenable = true\nasync_mode = "async"', "checkpoint.asynchronous", True),
        ("[fault_tolerance]\nenable = true", "fault.recovery", "shrink"),
        ("[lr_scheduler]\ndecay_ratio = 0.1", "optim.decay", 0.1),
    ],
)
def test_torchtitan(tmp_path: Path, text: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(torchtitan(tmp_path, text), section), name) == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('{"train_batch_size": 64}', "train.timeout_s", 1800.0),
        ('{"train_batch_size": 64, "bf16": {"enabled": true}}', "comm.bucket_mib", 953.7),  # 5e8 of 2 bytes
        ('{"train_batch_size": 64}', "comm.bucket_mib", 1907.3),
        ('{"train_batch_size": 64, "bf16": {"enabled": true}}', "precision.grad_reduce", "bf16"),
        ('{"train_batch_size": 64, "communication_data_type": "fp32", "fp16": {"enabled": true}}',
         "precision.grad_reduce", "fp32"),
        ('{"train_batch_size": 64, "fp16": {"enabled": true, "loss_scale": 128}}', "precision.loss_scale", 128.0),
        ('{"train_batch_size": 64, "fp16": {"enabled": true, "loss_scale": 0}}', "precision.loss_scale", "auto"),
        ('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}', "batch.global_sequences", 48),
        ('{"train_batch_size": 64, "gradient_accumulation_steps": 2}', "batch.micro", 4),
        ('{"train_batch_size": 64, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
         "parallel.offload", "parameters"),
        ('{"train_batch_size": 64, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}',
         "parallel.compression", "int8"),
        ('{"train_batch_size": 64, "optimizer": {"type": "AdamW"}}', "optim.clip", 0.0),
        ('{"train_batch_size": 64}', "optim.clip", 1.0),  # the script's own optimizer, and its clipping: not said here
    ],
)  # fmt: skip
def test_deepspeed(tmp_path: Path, text: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(deepspeed(tmp_path, text), section), name) == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "parallel.zero", 0),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "comm.bucket_mib", 25.0),
        ("distributed_type: FSDP\nmixed_precision: bf16\n", "precision.grad_reduce", "bf16"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "parallel.zero", 2),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n",
         "parallel.zero", 2),
        ("distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nfsdp_config:\n"
         "  fsdp_sharding_strategy: HYBRID_SHARD\n", "parallel.shard", 4),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n", "train.timeout_s", 1800.0),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 4\n", "parallel.tensor", 4),
    ],
)  # fmt: skip
def test_accelerate(tmp_path: Path, text: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(accelerate(tmp_path, text), section), name) == value


def test_what_deepspeed_leaves_to_the_trainer_is_asked_for_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 64, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",'
        ' "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}'
    )
    settings = ("model.preset=gpt2", "data.sequence=1024")
    found = convert_config(path, "deepspeed", cluster="8xA100:1", overrides=settings)
    assert [one.fix for one in found.missing] == ["give --set precision.compute=bf16"]
    found = convert_config(path, "deepspeed", cluster="8xA100:1", overrides=(*settings, "precision.compute=bf16"))
    job = found.resolved.job
    assert (job.precision.grad_reduce, job.optim.clip, job.comm.bucket_mib) == ("bf16", 1.0, "auto")
    assert {one.key for one in found.unmapped} == {
        "bf16.enabled",
        "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
    }


def test_steps_between_checkpoints_become_seconds_of_the_predicted_step(tmp_path: Path) -> None:
    found = megatron(tmp_path, "--bf16 --save out --save-interval 50")
    twice = megatron(tmp_path, "--bf16 --save out --save-interval 100")
    one, two = found.resolved.job.checkpoint.interval_s, twice.resolved.job.checkpoint.interval_s
    assert isinstance(one, float)
    assert isinstance(two, float)
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_without_a_cluster_the_steps_stay_steps_and_are_listed(tmp_path: Path) -> None:
    found = megatron(tmp_path, "--save out --save-interval 50", cluster=None)
    assert [one.fix for one in found.missing] == ["give --cluster, as --cluster 8xH100:16"]
    assert "in steps" in next(one.why for one in found.unmapped if one.key == "--save-interval")
    assert 'spec = "unknown"' in found.text


def test_megatrons_bucket_grows_with_the_data_ranks(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text(f"{GPT} --global-batch-size 1024 --bf16 --overlap-grad-reduce\n")
    found = convert_config(tmp_path / "args.txt", "megatron", cluster="8xA100:16")
    assert found.resolved.job.comm.bucket_mib == 488.3  # 128e6 parameters of 4 bytes


def test_a_size_that_is_a_variable_is_asked_for_and_not_replaced_by_a_default(tmp_path: Path) -> None:
    found = megatron(tmp_path, "--tensor-model-parallel-size $TP --lr $LR --train-samples 100")
    assert [one.fix for one in found.missing] == ["give --set TP=…, or --set parallel.tensor=…"]
    assert dict(found.unknown)["parallel.tensor"].endswith("depends on TP, which nothing sets")
    why = {one.key: one.why for one in found.unmapped}
    assert why["--lr"] == "depends on LR, which nothing sets"
    path = tmp_path / "args.txt"
    assert convert_config(path, "megatron", overrides=("TP=4",)).resolved.job.parallel.tensor == 4
    found = convert_config(path, "megatron", cluster="8xA100:1", overrides=("parallel.tensor=2", "data.sequence=512"))
    assert found.missing == ()
    assert (found.resolved.job.parallel.tensor, found.resolved.job.data.tokens) == (2, 100 * 512)


def test_a_wrong_degree_is_a_finding_at_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text(GPT + "\n--bf16\n--tensor-model-parallel-size 3\n", encoding="utf-8")
    failing = [one for one in phalanx.check(path, cluster="8xA100:1").findings if one.verdict == "fail"]
    assert [one.line for one in failing if "parallel.tensor" in one.outcome.what] == [3], failing


def test_habits_follow_the_settings(tmp_path: Path) -> None:
    assert megatron(tmp_path, "--ckpt-format torch").practice.checkpoint_format == "torch-pickle"
    assert megatron(tmp_path, "").practice.checkpoint_format == "dcp"
    assert megatron(tmp_path, "--calculate-per-token-loss").practice.token_weighted_loss is True
    assert megatron(tmp_path, "").practice.token_weighted_loss is False
    assert megatron(tmp_path, "--log-throughput").practice.telemetry == ("steps", "utilization")


def test_every_habit_that_is_stated_names_its_source() -> None:
    from dataclasses import fields

    from phalanx.rules.facts.trainers import _BY_NAME

    for practice in _BY_NAME.values():
        stated = {item.name for item in fields(practice) if getattr(practice, item.name) is not None}
        assert practice.sources is not None
        assert stated - {"trainer", "sources"} == set(practice.sources), practice.trainer


def test_the_caller_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "args.txt"
    path.write_text(GPT + " --bf16\n", encoding="utf-8")
    found = convert_config(
        path, "megatron", cluster="8xA100:1", overrides=("batch.global_sequences=32", "precision.compute=fp16")
    )
    assert found.resolved.job.batch.global_sequences == 32
    assert found.resolved.job.precision.compute == "fp16"
    assert found.resolved.origins["precision.compute"].kind == "set"
    with pytest.raises(UserError, match="is not an override"):
        convert_config(path, "megatron", overrides=("nonsense",))


def test_a_cluster_of_another_size_goes_before_the_files_own(tmp_path: Path) -> None:
    found = convert_config(DATA / "megatron_gpt3_175b.sh", "megatron", cluster="8xA100:16")
    assert {one.key: one.why for one in found.unmapped}["--nnodes"] == "--cluster has 128 devices and goes before it"


def test_megatrons_own_test_recipes_are_read(tmp_path: Path) -> None:
    """tests/functional_tests/test_cases/gpt/*/model_config.yaml, and Megatron-Bridge's moe_model_zoo."""
    path = tmp_path / "model_config.yaml"
    flags = "".join(f"  {flag}: {value}\n" for flag, value in zip(*[iter(GPT.split())] * 2, strict=True))
    path.write_text(f"ENV_VARS:\n  NCCL_ALGO: Ring\nMODEL_ARGS:\n{flags}  --bf16: true\nTEST_TYPE: regular\n")
    assert trainer_of_file(path) == "megatron"
    found = convert_config(path, "megatron", cluster="8xA100:1")
    assert found.resolved.job.comm.algorithm == "ring"
    assert (found.resolved.job.model.layers, found.resolved.job.precision.compute) == (24, "bf16")
    assert found.unmapped == ()


def test_nemo_reads_references_and_leaves_functions_alone(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(
        "trainer:\n  devices: 8\n  num_nodes: 1\n  max_steps: 10\n  precision: 16\nmodel:\n  micro_batch_size: 1\n"
        "  global_batch_size: 8\n  encoder_seq_length: 512\n  max_position_embeddings: ${.encoder_seq_length}\n"
        "  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 4\n  ffn_hidden_size: ${multiply:4,64}\n"
        "  kv_channels: ${model.hidden_size}\n  vocab_size: ${a.b}\n  loop: ${model.loop}\n"
    )
    found = convert_config(path, "nemo", cluster="8xA100:1", overrides=("model.vocab=512",))
    model = found.resolved.job.model
    assert (model.max_positions, model.head_dim, model.ffn) == (512, 64, 256)
    assert found.resolved.job.precision.compute == "fp16"
    assert {"model.ffn_hidden_size", "model.vocab_size", "model.loop"} <= {one.key for one in found.unmapped}


NEMO = (
    "trainer:\n  devices: 8\n  num_nodes: 1\n  max_steps: 10\n  precision: {precision}\nmodel:\n  micro_batch_size: 1\n"
    "  global_batch_size: 8\n  encoder_seq_length: 512\n  num_layers: 2\n  hidden_size: 64\n  num_attention_heads: 4\n"
    "  vocab_size: 512\n{more}"
)


@pytest.mark.parametrize(
    ("precision", "more", "reduce", "sums"),
    [
        ("16", "  megatron_amp_O2: False\n", "fp32", None),  # autocast over fp32 weights
        ("16", "", "fp32", None),  # its default
        ("16", "  megatron_amp_O2: True\n", "bf16", "fp16"),  # the nearest word to fp16
        ("bf16", "  megatron_amp_O2: True\n", "fp32", None),
    ],
)
def test_nemo_without_o2_keeps_gradients_in_fp32(
    tmp_path: Path, precision: str, more: str, reduce: str, sums: str | None
) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(NEMO.format(precision=precision, more=more))
    found = convert_config(path, "nemo", cluster="8xA100:1")
    assert (found.resolved.job.precision.grad_reduce, found.practice.sums_in) == (reduce, sums)
    assert found.resolved.origins["precision.grad_reduce"].by_hand
    assert found.resolved.job.precision.master_weights


@pytest.mark.parametrize(
    ("more", "saves"),
    [("checkpoint:\n  save: null\n", False), ("", None), ("checkpoint:\n  load_optim: false\n", None)],
)
def test_a_recipe_may_save_what_its_file_does_not_say(tmp_path: Path, more: str, saves: bool | None) -> None:
    path = tmp_path / "bridge.yaml"
    path.write_text("train:\n  global_batch_size: 8\n  micro_batch_size: 1\n  train_iters: 9\n" + more)
    found = convert_config(path, "nemo", cluster="8xA100:1", overrides=("model.preset=gpt2", "data.sequence=1024"))
    assert found.practice.saves is saves
    origin = found.resolved.origins.get("checkpoint.interval_s")
    assert (origin is not None and origin.by_hand) == (saves is False)
    lost = "load_optim" in more
    assert ("moments" in (found.practice.resumes_exactly or ("moments",))) != lost


@pytest.mark.parametrize(
    ("passes", "settings", "batch", "unmapped"),
    [
        (4, ("batch.global_sequences=64",), (64, 2), ()),
        (4, ("batch.micro=2",), (64, 2), ()),
        (4, ("batch.global_sequences=64", "batch.micro=2"), (64, 2), ()),
        (1, ("batch.global_sequences=64", "batch.micro=2"), (64, 2), ("gradient_accumulation_steps",)),
        (3, ("batch.global_sequences=64", "batch.micro=2"), (64, 2), ("gradient_accumulation_steps",)),
    ],
)
def test_accelerates_passes_make_the_batch(
    tmp_path: Path, passes: int, settings: tuple[str, ...], batch: tuple[int, int], unmapped: tuple[str, ...]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\nmixed_precision: bf16\ngradient_accumulation_steps: {passes}\n")
    settings = ("model.preset=gpt2", "data.sequence=1024", *settings)
    found = convert_config(path, "accelerate", cluster="8xA100:1", overrides=settings)
    assert found.missing == ()
    assert (found.resolved.job.batch.global_sequences, found.resolved.job.batch.micro) == batch
    assert tuple(one.key for one in found.unmapped) == unmapped
    assert all(f"are not {passes} pass" in one.why for one in found.unmapped)


@pytest.mark.parametrize(
    ("converters", "why"),
    [
        ("", "no converter of model.converters reads it"),
        ('converters = ["quantize.linear.float8"]\n', "how fp8 is scaled: precision.compute is fp8 either way"),
    ],
)
def test_settings_of_a_converter_count_where_it_is_named(tmp_path: Path, converters: str, why: str) -> None:
    path = tmp_path / "run.toml"
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n{converters}[quantize.linear.float8]\nrecipe_name = "rowwise"\n'
    path.write_text(text + "[float8]\nenable_fsdp_float8_all_gather = true\n")
    found = convert_config(path, "torchtitan", cluster="8xH100:1")
    assert dict(found.irrelevant)["quantize.linear.float8.recipe_name"] == why
    assert [one.key for one in found.unmapped] == (["float8.enable_fsdp_float8_all_gather"] if converters else [])


def test_nemo_knows_every_word_that_megatron_core_asks_for() -> None:
    asked = set(
        re.findall(
            r"config\.(?:read_whole|read_number|read_flag|read_word|has_leaf|find_leaf)\(\"(\w+)\"\)",
            Path(mcore.__file__).read_text() + Path(mcore_model.__file__).read_text(),
        )
    )
    only_arguments = {
        "swiglu", "disable_bias_linear", "untie_embeddings_and_output_weights", "group_query_attention",
        "use_rotary_position_embeddings", "padded_vocab_size", "tokenizer_type", "vocab_file", "recompute_activations",
        "checkpoint_activations", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16",
        "torch_fsdp2_no_reshard_after_forward",
    }  # fmt: skip
    assert asked - only_arguments <= nemo.WORDS
