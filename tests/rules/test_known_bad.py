"""Forty configurations that are known to be bad, each a sound one with one mistake: the mistake is found and placed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.rules.run_rules import CheckReport
from phalanx.rules.specification import check

WAN = 'accelerator = "H100"\ndomains = 4\ndomain_devices = 8\nnic_gbps = 1\nnic_latency_us = 20000\n'
MEGATRON = {
    "num-layers": "32",
    "hidden-size": "4096",
    "ffn-hidden-size": "14336",
    "num-attention-heads": "32",
    "group-query-attention": "",
    "num-query-groups": "8",
    "seq-length": "8192",
    "max-position-embeddings": "8192",
    "position-embedding-type": "rope",
    "swiglu": "",
    "normalization": "RMSNorm",
    "disable-bias-linear": "",
    "untie-embeddings-and-output-weights": "",
    "vocab-size": "128256",
    "tensor-model-parallel-size": "2",
    "sequence-parallel": "",
    "use-distributed-optimizer": "",
    "overlap-grad-reduce": "",
    "overlap-param-gather": "",
    "recompute-activations": "",
    "bf16": "",
    "micro-batch-size": "1",
    "global-batch-size": "512",
    "train-iters": "100000",
    "lr": "3e-4",
    "min-lr": "3e-5",
    "lr-decay-style": "cosine",
    "lr-warmup-iters": "2000",
    "weight-decay": "0.1",
    "adam-beta1": "0.9",
    "adam-beta2": "0.95",
    "clip-grad": "1.0",
    "save": "/ckpt",
    "save-interval": "250",
    "async-save": "",
    "data-path": "/data/text_document",
}
DEEPSPEED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2000, "total_num_steps": 100_000}},
}
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 2000
[training]
local_batch_size = 1
global_batch_size = 512
seq_len = 8192
max_norm = 1.0
steps = 100000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[checkpoint]
enable = true
interval = 250
async_mode = "async_with_pinned_mem"
[activation_checkpoint]
mode = "selective"
"""
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_machines: 16
num_processes: 128
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""
MODEL = ("model.preset=llama-3-8b", "data.sequence=8192", "parallel.recompute=selective", "checkpoint.interval_s=1500")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """One mistake: the file with it, and the rule that must find it. `line` is a word of the line it stands on."""

    name: str
    text: str
    file: str
    rule: str
    sets: tuple[str, ...] = ()
    cluster: str = "8xH100:16"
    line: str = ""


def megatron(env: Sequence[str] = (), *, without: Sequence[str] = (), **flags: str) -> str:
    """A launch script, one flag per line."""
    said = {**MEGATRON, **{name.replace("_", "-"): value for name, value in flags.items()}}
    lines = [f"--{name} {value}".rstrip() for name, value in said.items() if name not in without]
    exports = "".join(f"export {one}\n" for one in env)
    launch = "torchrun --nnodes 16 --nproc_per_node 8 pretrain_gpt.py"
    return f"#!/bin/bash\n{exports}{launch} \\\n  " + " \\\n  ".join(lines) + "\n"


def script(name: str, rule: str, text: str, line: str = "", cluster: str = "8xH100:16") -> Bad:
    return Bad(name=name, rule=rule, text=text, file="run.sh", line=line, cluster=cluster)


def deepspeed(name: str, rule: str, line: str = "", sets: Sequence[str] = (), **changes: object) -> Bad:
    text = json.dumps({**DEEPSPEED, **changes}, indent=1)
    return Bad(name=name, rule=rule, text=text, file="ds.json", line=line, sets=(*MODEL, *sets))


def titan(name: str, rule: str, old: str, new: str, *, cluster: str = "8xH100:16", line: str | None = None) -> Bad:
    assert old in TITAN
    word = new.split("\n")[-1] if line is None else line
    return Bad(name=name, rule=rule, text=TITAN.replace(old, new), file="run.toml", cluster=cluster, line=word)


HALF = {"enabled": True, "loss_scale": 128}
OFFLOADED = {"stage": 2, "offload_param": {"device": "cpu"}}
DECAYED = {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 5.0}}
MOE = {"num_experts": "8", "moe_router_topk": "2", "moe_ffn_hidden_size": "1024", "tensor_model_parallel_size": "2"}
BAD = [
    script("learning rate 10", "OPT001", megatron(lr="10"), "--lr 10"),
    script("weight decay 10", "OPT001", megatron(weight_decay="10"), "--weight-decay"),
    script("epsilon 0.5", "OPT001", megatron(adam_eps="0.5"), "--adam-eps"),
    script("beta2 of 0.5", "OPT001", megatron(adam_beta2="0.5"), "--adam-beta1"),
    script("no warm-up", "OPT001", megatron(without=("lr-warmup-iters",)), "--lr "),
    script("NCCL_IB_DISABLE", "ENV001", megatron(["NCCL_IB_DISABLE=1"]), "NCCL_IB"),
    script("NCCL_P2P_DISABLE", "ENV001", megatron(["NCCL_P2P_DISABLE=1"]), "NCCL_P2P"),
    script("CUDA_LAUNCH_BLOCKING", "ENV001", megatron(["CUDA_LAUNCH_BLOCKING=1"]), "CUDA_LAUNCH"),
    script("NCCL_DEBUG=TRACE", "ENV001", megatron(["NCCL_DEBUG=TRACE"]), "NCCL_DEBUG"),
    script("queues", "ENV001", megatron(["CUDA_DEVICE_MAX_CONNECTIONS=8"]), "CUDA_DEVICE"),
    script("no error handling", "ENV001", megatron(["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"]), "TORCH_NCCL"),
    script("fp16 and bf16", "TOP005", megatron(fp16=""), "--fp16"),
    script("interleaving alone", "TOP005", megatron(num_layers_per_virtual_pipeline_stage="4"), "virtual"),
    script("experts, tensor, no sequence", "TOP005", megatron(without=("sequence-parallel",), **MOE), "--num-experts"),
    script("expert ranks alone", "TOP005", megatron(expert_model_parallel_size="8"), "--expert-model"),
    script("iterations and samples", "TOP005", megatron(train_samples="1000000"), "--train-samples"),
    script("min-lr above lr", "TOP005", megatron(min_lr="3e-3"), "--min-lr"),
    script("positions", "TOP005", megatron(max_position_embeddings="4096"), "--seq-length"),
    script("gather without shards", "TOP005", megatron(without=("use-distributed-optimizer",)), "--overlap-param"),
    script("save without interval", "TOP005", megatron(without=("save-interval",)), "--save"),
    script("heads", "TOP001", megatron(tensor_model_parallel_size="3"), ""),
    script("batch", "BAT001", megatron(global_batch_size="500"), "--global-batch-size"),
    script("memory", "MEM001", megatron(micro_batch_size="4", without=("recompute-activations",)), "--micro"),
    script("never saved", "CKP001", megatron(without=("save", "save-interval")), ""),
    script("saved once a month", "CKP001", megatron(save_interval="90000"), "--save-interval"),
    script("sums in bf16", "PRC002", megatron(grad_reduce_in_bf16=""), "--grad-reduce"),
    script("no data", "DAT001", megatron(without=("data-path",)), ""),
    script("a pipeline of 16 with full recompute", "EFF005", megatron(
        pipeline_model_parallel_size="16", recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers="1", global_batch_size="64", without=("recompute-activations",)), ""),
    script("pickles", "SEC001", megatron(ckpt_format="torch"), "--ckpt-format"),
    deepspeed("batch identity", "TOP005", "train_batch_size", train_batch_size=1024),
    deepspeed("fp16 and bf16 at once", "TOP005", '"enabled"', fp16={"enabled": True}),
    deepspeed("moments in bf16", "PRC002", "optimizer_states", bf16={"enabled": True, "bf16_optimizer_states": True}),
    deepspeed("a fixed loss scale", "PRC001", "loss_scale", bf16={"enabled": False}, fp16=HALF),
    deepspeed("parameters offloaded at stage 2", "TOP005", "device", zero_optimization=OFFLOADED),
    deepspeed("decay", "OPT001", "weight_decay", optimizer=DECAYED),
    deepspeed("no clipping", "PRC004", "", gradient_clipping=0.0),
    titan("tokens beyond the corpus", "DAT002", 'dataset = "c4"', 'dataset = "c4_test"'),
    titan("a wide area network", "EFF005", "= true", "= true", cluster="wan.toml", line="local_batch_size"),
    titan("checkpoints off", "CKP001", "enable = true", "enable = false"),
    titan("weights in bf16", "PRC002", "max_norm = 1.0", 'max_norm = 1.0\ndtype = "bfloat16"'),
    titan("rate", "OPT001", "lr = 3e-4", "lr = 3"),
    Bad(
        name="a whole state of 405B",
        rule="CKP007",
        text=ACCELERATE.replace("SHARDED", "FULL").replace("16\n", "64\n").replace("128", "512"),
        file="a.yaml",
        sets=("model.preset=llama-3.1-405b", "batch.global_sequences=512", "batch.micro=1", "data.tokens=1T",
              "parallel.recompute=full", "checkpoint.interval_s=1500"),
        cluster="8xH100:64",
        line="FULL_STATE",
    ),
]  # fmt: skip


def judged(tmp_path: Path, one: Bad) -> CheckReport:
    path = tmp_path / one.file
    path.write_text(one.text, encoding="utf-8")
    cluster = one.cluster
    if cluster == "wan.toml":
        cluster = str(tmp_path / "wan.toml")
        Path(cluster).write_text(WAN, encoding="utf-8")
    return check(path, cluster=cluster, overrides=one.sets)


def problem_with(tmp_path: Path, one: Bad) -> str:
    """Why the mistake counts as missed; empty where it was found, placed, and fails the check."""
    try:
        report = judged(tmp_path, one)
    except UserError as error:
        return f"cannot be read: {error}"
    found = [finding for finding in report.problems if finding.rule.id == one.rule and finding.severity != "info"]
    if not found or report.exit_code != 1:
        return f"found only {[str(finding) for finding in report.problems]}"
    lines = one.text.splitlines()
    told = [lines[finding.line - 1] for finding in found if 0 < finding.line <= len(lines)]
    return "" if not one.line or any(one.line in line for line in told) else f"placed at {told}"


def test_there_are_forty() -> None:
    assert len(BAD) >= 40
    assert len({one.name for one in BAD}) == len(BAD)


@pytest.mark.parametrize("one", BAD, ids=lambda one: one.name.replace(" ", "-"))
def test_a_known_mistake_is_found_and_placed(tmp_path: Path, one: Bad) -> None:
    assert problem_with(tmp_path, one) == ""


SOUND = {
    "run.sh": (megatron(), ()),
    "ds.json": (json.dumps(DEEPSPEED, indent=1), MODEL),
    "run.toml": (TITAN, ()),
    "a.yaml": (ACCELERATE, (*MODEL, "batch.global_sequences=512", "batch.micro=1", "data.tokens=1T")),
}


@pytest.mark.parametrize("name", SOUND)
def test_the_same_file_without_a_mistake_passes(tmp_path: Path, name: str) -> None:
    text, sets = SOUND[name]
    report = judged(tmp_path, Bad(name="sound", rule="", text=text, file=name, sets=sets))
    assert [str(one) for one in report.problems if one.severity != "info"] == []
    assert report.exit_code == 0
    assert report.habits, "what the trainer lacks is told, apart"
    assert "notes about" in str(report)
