"""Configurations of NeMo, Megatron-Bridge, OLMo-core, nanotron and the fine-tuning trainers: each cause found on files
of other people's repositories (benchmarks/2026-11-18-foreign-blind-4.md), in files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.rules.foreign.convert import ConvertedConfig, convert_config
from phalanx.rules.foreign.detect import TrainsNothingError, trainer_of_file
from phalanx.rules.specification import check

CLUSTER = "8xH100:2"
BRIDGE = """from megatron.bridge.training.config import ConfigContainer

def recipe() -> ConfigContainer:
    return ConfigContainer(
        model=Provider(tensor_model_parallel_size=2, num_layers=24, hidden_size=1024, num_attention_heads=16),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=DDP),
        optimizer=OptimizerConfig(use_distributed_optimizer=OPTIMIZER, lr=1e-4),
        train=TrainingConfig(micro_batch_size=1, global_batch_size=64, train_iters=1000),
    )
"""
NEMO_2 = """import nemo_run as run
from dataclasses import dataclass

@dataclass
class HyenaConfig:
    recompute_granularity: str = "full"
    num_layers: int = 24

def pretrain() -> run.Partial:
    return run.Partial(
        train,
        model=run.Config(Model, config=run.Config(HyenaConfig)),
        trainer=run.Config(Trainer, strategy=run.Config(Strategy, tensor_model_parallel_size=2, ddp=run.Config(
            DDP, use_distributed_optimizer=True))),
        optim=run.Config(Optim, config=run.Config(OptimizerConfig, use_distributed_optimizer=SHARDED)),
    )
"""
OLMO = """from olmo_core.config import DType
from olmo_core.float8 import Float8Config

def build_config(name: str) -> ExperimentConfig:
    return ExperimentConfig(
        train_module=TransformerTrainModuleConfig(
            rank_microbatch_size=8192,
            max_sequence_length=4096,
            dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.bfloat16),
            float8_config=FLOAT8,
        ),
    )
"""
NEOX = """pipe_parallel_size: 1
model_parallel_size: 2
num_layers: 12
hidden_size: 768
num_attention_heads: 12
seq_length: 2048
max_position_embeddings: 2048
train_micro_batch_size_per_gpu: 4
train_iters: 320000
"""
LLAMA_FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
finetuning_type: full
template: llama3
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3
bf16: true
"""
NANOTRON = """model:
  dtype: bfloat16
  model_config:
    hidden_size: 1024
    intermediate_size: 4096
    num_attention_heads: 16
    num_hidden_layers: 24
    num_key_value_heads: 16
    vocab_size: 50304
optimizer:
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_warmup_steps: 0
  zero_stage: 0
parallelism: {dp: 2, pp: 1, tp: 1}
tokens: {micro_batch_size: 4, sequence_length: 2048, train_steps: 10000, batch_accumulation_per_replica: 8}
"""
NEMO_1 = """trainer: {devices: 32, num_nodes: 2, precision: bf16, max_steps: 100000}
model:
  micro_batch_size: 4
  global_batch_size: GLOBAL
  tensor_model_parallel_size: 1
  encoder_seq_length: 2048
  max_position_embeddings: 2048
  num_layers: 24
  hidden_size: 2048
  num_attention_heads: 16
  data:
    data_prefix: PREFIX
"""


def read(tmp_path: Path, name: str, text: str, *settings: str) -> ConvertedConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return convert_config(path, trainer_of_file(path), overrides=settings)


def told(tmp_path: Path, name: str, text: str, *, cluster: str | None = CLUSTER) -> list[tuple[str, str, str]]:
    """Rule, severity and sentence of every finding."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    report = check(path, cluster=cluster)
    return [(one.rule.id, one.severity, one.outcome.what) for one in report.problems if one.verdict == "fail"]


@pytest.mark.parametrize(("ddp", "optimizer", "zero"), [(True, False, 1), (False, True, 1), (False, False, 0)])
def test_a_distributed_optimizer_of_megatron_bridge_is_on_if_either_place_asks_for_it(
    tmp_path: Path, ddp: bool, optimizer: bool, zero: int
) -> None:
    found = read(tmp_path, "r.py", BRIDGE.replace("DDP)", f"{ddp})").replace("OPTIMIZER", str(optimizer)))
    assert found.resolved.job.parallel.zero == zero


@pytest.mark.parametrize(("sharded", "zero"), [(True, 1), (False, 0)])
def test_the_optimizer_of_nemo_2_overrules_its_strategy_and_a_class_may_recompute(
    tmp_path: Path, sharded: bool, zero: int
) -> None:
    found = read(tmp_path, "r.py", NEMO_2.replace("SHARDED", str(sharded)))
    assert (found.resolved.job.parallel.zero, found.resolved.job.parallel.recompute) == (zero, "full")


@pytest.mark.parametrize(
    ("float8", "compute"), [("Float8Config()", "fp8"), ("Float8Config(enabled=False)", "bf16"), ("None", "bf16")]
)
def test_float8_of_olmo_core_is_on_unless_it_says_otherwise(tmp_path: Path, float8: str, compute: str) -> None:
    found = read(tmp_path, "r.py", OLMO.replace("FLOAT8", float8))
    assert found.resolved.job.precision.compute == compute


def test_of_a_key_given_twice_in_yaml_the_last_holds_and_the_other_is_told(tmp_path: Path) -> None:
    twice = NEOX + "model_parallel_size: 4\n"
    assert read(tmp_path, "n.yml", twice).resolved.job.parallel.tensor == 4
    found = [one for one in told(tmp_path, "n.yml", twice, cluster=None) if "also stands" in one[2]]
    assert found == [
        (
            "TOP005",
            "warning",
            "model_parallel_size also stands on line 2 with another value: the trainer takes the last and says nothing",
        )
    ]
    report = check(tmp_path / "n.yml")
    assert [one.line for one in report.problems if "also stands" in one.outcome.what] == [10], "where the last one is"
    same = told(tmp_path, "n.yml", NEOX + "model_parallel_size: 2\n", cluster=None)
    assert not [one for one in same if "also stands" in one[2]], "twice the same is no fault"


def test_omegaconf_refuses_a_key_given_twice(tmp_path: Path) -> None:
    text = NEMO_1.replace("GLOBAL", "256").replace("PREFIX", "/data") + "  num_layers: 12\n"
    found = [one for one in told(tmp_path, "n.yaml", text, cluster=None) if "also stands" in one[2]]
    assert [(one[0], one[1]) for one in found] == [("TOP005", "error")]


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\ndatasets:\n  - path: x\nsequence_len: 2048\ndataset_prepared_path: out\n",
        "model_name_or_path: a/b\nfinetuning_type: lora\ntemplate: llama3\ninfer_backend: vllm\n",
        "model_name_or_path: a/b\nfinetuning_type: lora\ntemplate: llama3\ncutoff_len: 4\nexport_dir: out\n",
        "checkpoint:\n  save: out\nmodel:\n  _target_: a.GPTModelProvider\n  tensor_model_parallel_size: 1\n"
        "train: null\ndataset: null\nddp: null\n",
    ],
    ids=["axolotl prepares data", "llama-factory generates", "llama-factory exports", "bridge converted"],
)
def test_a_file_that_trains_nothing_is_told_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainsNothingError, match="trains nothing"):
        trainer_of_file(path)


def test_a_run_that_goes_on_needs_no_warm_up(tmp_path: Path) -> None:
    def warm(text: str) -> bool:
        return any("without a warm-up" in what for _, _, what in told(tmp_path, "n.yaml", text, cluster=None))

    assert warm(NANOTRON + "checkpoints: {resume_checkpoint_path: null}\n")
    assert not warm(NANOTRON + "checkpoints: {resume_checkpoint_path: out/9000}\n")


def test_a_template_says_neither_hosts_nor_a_batch_that_cannot_be(tmp_path: Path) -> None:
    whole = NEMO_1.replace("GLOBAL", "8")
    assert [
        one for one in told(tmp_path, "n.yaml", whole.replace("PREFIX", "/data"), cluster=None) if "batch" in one[2]
    ]
    assert told(tmp_path, "n.yaml", whole.replace("PREFIX", "???"), cluster=None) == []
    found = told(tmp_path, "n.yaml", NEMO_1.replace("GLOBAL", "6").replace("PREFIX", "???"), cluster=None)
    assert not [one for one in found if one[0] in ("BAT001", "TOP005")]


NO_RATE = "a learning rate of 0"


def test_an_optimizer_of_a_fork_has_its_own_rates_and_memory(tmp_path: Path) -> None:
    rate = LLAMA_FACTORY + "learning_rate: 0.0\ndeepspeed: z3.json\n"
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    assert [one for one in told(tmp_path, "a.yaml", rate) if NO_RATE in one[2]], "of the Trainer's nothing is learnt"
    assert not [one for one in told(tmp_path, "a.yaml", rate + "use_fisher: true\n") if NO_RATE in one[2]]
    still = told(tmp_path, "a.yaml", rate + "use_unsloth: true\n")
    assert [one for one in still if NO_RATE in one[2]], "a switch of LLaMA-Factory's own"


def test_pure_bf16_halves_weights_states_and_gradients(tmp_path: Path) -> None:
    pure = read(tmp_path, "a.yaml", LLAMA_FACTORY + "pure_bf16: true\n").resolved.job.precision
    assert (pure.master_weights, pure.optimizer_state, pure.grad_reduce) == (False, "bf16", "bf16")
    with_copy = read(tmp_path, "a.yaml", LLAMA_FACTORY + "pure_bf16: true\ndeepspeed: z3.json\n").resolved.job.precision
    assert with_copy.optimizer_state == "fp32", "DeepSpeed has states of its own"


@pytest.mark.parametrize(
    ("name", "known"),
    [("gpt-oss-120b", True), ("./gpt-oss-120b-w4a16-experts-4bit-2:4", False), ("Qwen/Qwen2.5-7B-Instruct-AWQ", False)],
)
def test_a_quantised_model_is_not_the_model_of_its_name(tmp_path: Path, name: str, known: bool) -> None:
    text = f"base_model: {name}\nsequence_len: 2048\nmicro_batch_size: 1\ndatasets:\n  - path: x\n"
    origins = read(tmp_path, "a.yaml", text).resolved.origins
    assert ("stand-in" not in origins["model.hidden"].where) is known if "model.hidden" in origins else known


def test_fp16_of_axolotl_goes_before_bf16_where_that_is_auto(tmp_path: Path) -> None:
    text = "base_model: a/b\nsequence_len: 2048\nmicro_batch_size: 1\ndatasets:\n  - path: x\nbf16: auto\nfp16: FP16\n"
    found = [read(tmp_path, "a.yml", text.replace("FP16", word)) for word in ("true", "false", "")]
    assert [one.resolved.job.precision.compute for one in found] == ["fp16", "bf16", "bf16"]


def test_a_word_of_megatron_alone_makes_no_file_of_nemo(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("train:\n  micro_batch_size: 8\nmodel:\n  dim: 2048\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not a configuration that Phalanx recognises"):
        trainer_of_file(path)


def test_save_steps_count_only_where_steps_are_the_strategy(tmp_path: Path) -> None:
    every = LLAMA_FACTORY + "save_steps: 500\n"
    mapped = dict(read(tmp_path, "a.yaml", every + "save_strategy: epoch\n").irrelevant)
    assert mapped["save_steps"] == "save_strategy is epoch"
    assert "save_steps" not in dict(read(tmp_path, "a.yaml", every).irrelevant)


def test_a_bucket_of_a_hundred_elements_is_small_and_not_nothing(tmp_path: Path) -> None:
    zero = '{"stage": 2, "reduce_bucket_size": 1e2}'
    text = f'{{"train_batch_size": 512, "bf16": {{"enabled": true}}, "zero_optimization": {zero}}}'
    assert 0 < read(tmp_path, "ds.json", text).resolved.job.comm.bucket_mib < 0.01
    assert not [one for one in told(tmp_path, "ds.json", text, cluster=None) if one[0] == "TOP001"]
