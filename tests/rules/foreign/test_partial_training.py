"""Files that train an adapter, convert or evaluate: nothing is told of them that holds for whole trainings only."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.rules.foreign.convert import convert_config
from phalanx.rules.foreign.detect import TrainsNothingError
from phalanx.rules.specification import check

LLAMA_FACTORY = "model_name_or_path: meta-llama/Meta-Llama-3-70B\nstage: sft\ntemplate: llama3\ncutoff_len: 4096\n"
AXOLOTL = "base_model: meta-llama/Meta-Llama-3-70B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\n"
NEMO = """
trainer: {devices: 8, num_nodes: 1, precision: bf16, max_steps: 1000}
model: {micro_batch_size: 1, global_batch_size: 128, tensor_model_parallel_size: 1, encoder_seq_length: 4096,
  num_layers: 80, hidden_size: 8192, ffn_hidden_size: 28672, num_attention_heads: 64,
  tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-8B}, PEFT}
"""
SWIFT = (
    "#!/bin/bash\nNPROC_PER_NODE=8 swift sft --model meta-llama/Meta-Llama-3-70B --per_device_train_batch_size 1 \\\n"
    "  --torch_dtype bfloat16 --max_length 8192 ARGS\n"
)
TRAINER = (
    "#!/bin/bash\ntorchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-70B \\\n"
    "  --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16 True --model_max_length 4096 ARGS \\\n"
    "  --save_strategy steps --logging_steps 1 --tf32 True --gradient_checkpointing True\n"
)


def memory_of(tmp_path: Path, name: str, text: str, *more: str) -> set[str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    report = check(path, cluster="8xH100:1", overrides=["batch.global_sequences=64", *more])
    return {one.verdict for one in report.findings if one.rule.id == "MEM001"}


@pytest.mark.parametrize(
    ("name", "partial", "whole"),
    [
        ("lf.yaml", LLAMA_FACTORY + "finetuning_type: lora\n", LLAMA_FACTORY + "finetuning_type: full\n"),
        ("default.yaml", LLAMA_FACTORY, LLAMA_FACTORY + "finetuning_type: full\n"),
        ("ax.yml", AXOLOTL + "adapter: qlora\n", AXOLOTL + "adapter:\n"),
        ("swift.sh", SWIFT.replace("ARGS", ""), SWIFT.replace("ARGS", "--train_type full")),
        ("llava.sh", TRAINER.replace("ARGS", "--lora_enable True --lora_r 128"), TRAINER.replace("ARGS", "")),
        (
            "off.sh",
            TRAINER.replace("ARGS", "--lora_r 64"),
            TRAINER.replace("ARGS", "--lora_enable False --lora_r 64"),
        ),
        (
            "nemo.yaml",
            NEMO.replace("PEFT", "peft: {peft_scheme: lora}"),
            NEMO.replace("PEFT", "peft: {peft_scheme: null}"),
        ),
    ],
)
def test_memory_of_an_adapter_is_unknown_and_that_of_the_whole_model_is_judged(
    tmp_path: Path, name: str, partial: str, whole: str
) -> None:
    assert memory_of(tmp_path, name, partial) == {"unknown"}
    more = ("precision.master_weights=true", "parallel.zero=3")
    assert memory_of(tmp_path, name, whole, *more) == {"fail"}, "70B and more in one host of H100"


def test_a_model_that_code_loads_may_be_of_half_the_memory(tmp_path: Path) -> None:
    whole = AXOLOTL + "optimizer: adamw_torch\n"
    assert memory_of(tmp_path, "a.yml", whole, "parallel.zero=0") == {"unknown"}
    assert memory_of(tmp_path, "b.yml", whole.replace("_torch", "_bnb_8bit"), "precision.master_weights=true") == {
        "unknown"
    }
    full = LLAMA_FACTORY + "finetuning_type: full\nbf16: true\n"
    assert memory_of(tmp_path, "c.yaml", full, "parallel.zero=0") == {"fail"}
    assert memory_of(tmp_path, "c.yaml", full) == {"unknown"}, "accelerate launch --config_file may shard it"


def test_a_known_model_with_other_sizes_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "small.yml"
    path.write_text(AXOLOTL + "overrides_of_model_config:\n  num_hidden_layers: 4\n", encoding="utf-8")
    assert "which model" in " ".join(one.what for one in convert_config(path, "axolotl").missing)


def test_axolotl_without_a_format_has_none_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "plain.yml"
    path.write_text(AXOLOTL.replace("bf16: true\n", ""), encoding="utf-8")
    assert "precision.compute" in convert_config(path, "axolotl").unknown


def test_an_adapter_says_why_there_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(LLAMA_FACTORY + "finetuning_type: lora\nsave_steps: 20\nlogging_steps: 1\n", encoding="utf-8")
    report = check(path, cluster="8xH100:1", overrides=["batch.global_sequences=64"])
    told = " ".join(one.outcome.what for one in report.findings if one.rule.id in ("TOP001", "MEM001"))
    assert "trains a part of its weights only (finetuning_type = lora)" in told
    assert not [
        one for one in report.problems if one.verdict == "fail" and one.rule.id in ("CKP001", "CKP004", "EFF005")
    ]
    assert report.exit_code == 0


BUILD = (
    "--tensor-model-parallel-size 2 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --bf16 --distributed-timeout-minutes 60 --vocab-size 32000"
)


@pytest.mark.parametrize("program", ["tools/checkpoint_to_hf.py", "perplexity.py"])
def test_a_program_that_is_told_neither_length_nor_rate_trains_nothing(tmp_path: Path, program: str) -> None:
    path = tmp_path / "go.sh"
    path.write_text(f"deepspeed --num_gpus 1 {program} {BUILD} --load ckpt\n", encoding="utf-8")
    with pytest.raises(TrainsNothingError):
        convert_config(path, "megatron")


@pytest.mark.parametrize("more", ["--train-iters 10", "--lr 1e-4", "$(python make_arguments.py)"])
def test_one_that_is_told_or_may_be_told_does(tmp_path: Path, more: str) -> None:
    path = tmp_path / "go.sh"
    path.write_text(f"torchrun --nproc_per_node 8 main.py {BUILD} {more}\n", encoding="utf-8")
    assert convert_config(path, "megatron").trainer == "megatron"


def verdicts(path: Path, rule: str, **options: str) -> list[str]:
    return [
        one.outcome.what for one in check(path, **options).problems if one.rule.id == rule and one.verdict == "fail"
    ]


def test_logits_beyond_our_index_are_no_fault_of_another_trainer(tmp_path: Path) -> None:
    path = tmp_path / "full.yaml"
    text = LLAMA_FACTORY.replace("70B", "8B") + "finetuning_type: full\nper_device_train_batch_size: 16\nbf16: true\n"
    path.write_text(text + "deepspeed: null\n", encoding="utf-8")
    assert verdicts(path, "TOP001", cluster="8xH100:1") == []


def test_the_number_of_experts_may_be_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "moe.sh"
    moe = f"torchrun pretrain_gpt.py {BUILD} --train-iters 5000 --lr 1e-4 --expert-model-parallel-size 4"
    path.write_text(f"{moe} --num-experts ${{NUM_EXPERTS}} --global-batch-size 64\n", encoding="utf-8")
    assert verdicts(path, "TOP001") + verdicts(path, "TOP005") == []
    path.write_text(f"{moe} --global-batch-size 64\n", encoding="utf-8")
    assert "expert ranks for a model without experts" in verdicts(path, "TOP005")


@pytest.mark.parametrize(("optimizer", "told"), [("adam", True), ("muon", False), ("lion", False), ("sgd", False)])
def test_a_rate_is_held_against_published_ones_of_the_same_optimizer(
    tmp_path: Path, optimizer: str, told: bool
) -> None:
    path = tmp_path / "rate.sh"
    text = (
        f"torchrun pretrain_gpt.py {BUILD} --train-iters 5000 --lr 0.01 --lr-warmup-iters 500 --optimizer {optimizer}"
    )
    path.write_text(f"{text} --global-batch-size 64\n", encoding="utf-8")
    assert bool(verdicts(path, "OPT001")) is told


def test_an_evaluation_trains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "eval_loss.sh"
    path.write_text(f"torchrun pretrain_gpt.py {BUILD} --train-iters 0 --train-samples 0 --lr 1e-4\n", encoding="utf-8")
    with pytest.raises(TrainsNothingError):
        convert_config(path, "megatron")


def test_a_section_of_a_fork_is_not_the_default_model(tmp_path: Path) -> None:
    path = tmp_path / "vision.toml"
    text = '[job]\ndump_folder = "out"\n[model]\nbackbone = "vit"\n[training]\nbatch_size = 16\nsteps = 2000\n'
    path.write_text(text, encoding="utf-8")
    assert "which model" in " ".join(one.what for one in convert_config(path, "torchtitan").missing)
    path.write_text(text.replace('backbone = "vit"', 'norm_type = "rmsnorm"'), encoding="utf-8")
    assert "which model" not in " ".join(one.what for one in convert_config(path, "torchtitan").missing)


OFFLOAD = """CPU=true
cat <<EOT > ds.json
{"train_batch_size": 64, "zero_optimization": {"stage": 3$(if [ "$CPU" = "true" ]; then echo ',
  "offload_optimizer": {"device": "cpu"}'; fi)}}
EOT
"""


def test_where_the_optimizer_lies_is_read_or_unknown(tmp_path: Path) -> None:
    path = tmp_path / "zero.sh"
    command = f"deepspeed pretrain_gpt.py {BUILD} --train-iters 500 --lr 1e-4 --deepspeed --deepspeed_config"

    def offload_of(text: str) -> object:
        path.write_text(text, encoding="utf-8")
        found = convert_config(path, "megatron")
        return "unknown" if "parallel.offload" in found.unknown else found.resolved.job.parallel.offload

    assert offload_of(f"{OFFLOAD}{command} ds.json\n") == "optimizer"
    assert offload_of(f"{OFFLOAD.replace('CPU=true', 'CPU=false')}{command} ds.json\n") == "none"
    assert offload_of(f"{command} elsewhere.json --zero-stage 3\n") == "unknown"
    assert offload_of(f"{command} elsewhere.json --zero-stage 3 --cpu-optimizer\n") == "optimizer"


def test_memory_just_above_the_device_is_a_remark_and_far_above_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "fit.sh"
    base = f"torchrun pretrain_gpt.py {BUILD} --train-iters 500 --lr 1e-4 --lr-warmup-iters 50 --global-batch-size 64"
    found = set()
    for more in ("--num-layers 39", "--num-layers 46", "--num-layers 80"):  # 92 %, 108 %, 185 % of the device
        path.write_text(f"{base} {more}\n", encoding="utf-8")
        found |= {
            (one.severity, "holds" in one.outcome.what)
            for one in check(path, cluster="8xH100:1").problems
            if one.rule.id == "MEM001"
        }
    assert ("error", False) in found
    assert any(severity == "info" for severity, _ in found)
    assert ("error", True) not in found, "what fits by our prediction is no error of another trainer's file"


def test_towers_and_projectors_are_not_judged_as_a_language_model(tmp_path: Path) -> None:
    path = tmp_path / "multimodal.sh"
    text = f"torchrun train.py {BUILD} --train-iters 500 --lr 1e-4 --lr-warmup-iters 50 --global-batch-size 64"
    path.write_text(f"{text} --num-layers 80 --freeze-LM --freeze-ViT\n", encoding="utf-8")
    assert verdicts(path, "MEM001", cluster="8xH100:1") + verdicts(path, "EFF005", cluster="8xH100:1") == []
    path.write_text(TRAINER.replace("ARGS", "--tune_mm_mlp_adapter True --learning_rate 2e-2"), encoding="utf-8")
    assert verdicts(path, "OPT001") == []
    path.write_text(TRAINER.replace("ARGS", "--learning_rate 2e-2"), encoding="utf-8")
    assert verdicts(path, "OPT001")
