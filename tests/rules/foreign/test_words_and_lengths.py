"""What DeepSpeed refuses in its JSON; and what may be said of a run of which nobody says how long or of what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.rules.run_rules import CheckReport
from phalanx.rules.specification import check

SOUND = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
REFUSED = {
    "a switch for a table": ({"bf16": True}, "reads a table"),
    "a device that is a word cut short": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cp"}}},
        "no device",
    ),
    "a schedule of another library": ({"scheduler": {"type": "CosineWithWarmup", "params": {}}}, "no scheduler"),
}


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(report: CheckReport, rule: str) -> list[str]:
    return [one.outcome.what for one in report.problems if one.rule.id == rule and one.severity != "info"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses_is_found(tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    assert not problems(check(written(tmp_path, "sound.json", json.dumps(SOUND))), "TOP005")
    found = problems(check(written(tmp_path, "ds.json", json.dumps(SOUND | change, indent=1))), "TOP005")
    assert any(words in one for one in found), found


@pytest.mark.parametrize("kind", ["StepLR", "WarmupCosineLR", "OneCycle", "ReduceLROnPlateau"])
def test_schedules_of_deepspeed_and_torch_are_none(tmp_path: Path, kind: str) -> None:
    text = json.dumps(SOUND | {"scheduler": {"type": kind, "params": {}}})
    assert not problems(check(written(tmp_path, "ds.json", text)), "TOP005")


FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
finetuning_type: full
deepspeed: ds.json
dataset: alpaca
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""


@pytest.mark.parametrize("way", ["use_badam: true", "use_galore: true", "mixture_of_depths: convert"])
def test_ways_of_training_that_the_planner_does_not_know_have_no_plan(tmp_path: Path, way: str) -> None:
    text = f"{FACTORY}max_steps: 2000000\n{way}\n".replace(
        "per_device_train_batch_size: 1", "per_device_train_batch_size: 512"
    )
    report = check(written(tmp_path, "a.yaml", text), cluster="8xH100:1")
    assert not problems(report, "MEM001")
    assert not problems(report, "EFF005")


def test_whole_state_dicts_of_accelerate_are_its_habit(tmp_path: Path) -> None:
    text = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n"
    )
    assert not problems(check(written(tmp_path, "a.yaml", text)), "SEC001")


def test_eight_bit_moments_are_not_called_bf16(tmp_path: Path) -> None:
    text = FACTORY.replace("deepspeed: ds.json\n", "").replace("bf16: true", "pure_bf16: true")
    plain = problems(check(written(tmp_path, "a.yaml", text)), "PRC002")
    eight = problems(check(written(tmp_path, "b.yaml", f"{text}optim: paged_adamw_8bit\n")), "PRC002")
    assert any("moments" in one for one in plain)
    assert not any("moments" in one for one in eight)
    assert any("without an fp32 copy" in one for one in eight)


def test_experts_of_nanotron_by_either_name(tmp_path: Path) -> None:
    text = """\
model:
  model_config: {{hidden_size: 512, intermediate_size: 2048, num_attention_heads: 8, num_hidden_layers: 4,
    num_key_value_heads: 8, vocab_size: 32000{experts}}}
  dtype: bfloat16
optimizer: {{zero_stage: 0, clip_grad: 1.0, learning_rate_scheduler: {{learning_rate: 0.0003, lr_warmup_steps: 100}}}}
parallelism: {{dp: 2, pp: 1, tp: 1, expert_parallel_size: 2}}
tokens: {{micro_batch_size: 4, sequence_length: 256, train_steps: 1800, batch_accumulation_per_replica: 1}}
"""
    assert problems(check(written(tmp_path, "a.yaml", text.format(experts=""))), "TOP001")
    experts = ", moe_num_experts: 4, num_experts_per_tok: 1"
    assert not problems(check(written(tmp_path, "b.yaml", text.format(experts=experts))), "TOP001")
