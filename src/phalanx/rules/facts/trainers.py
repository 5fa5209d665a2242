"""Behaviour of the trainer that runs the job, where the job has no key for it: part of evidence J.

The behaviour of Phalanx cites the document that describes it; that of another trainer its documentation or code.
None means not known, and never counts as good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """The default behaviour of a trainer."""

    trainer: str  # "phalanx", "torchtitan", "megatron", "deepspeed", "accelerate", "nemo"
    loss_scale: str | None = None  # "dynamic", "static" or "none"
    # Number format of gradients while they are summed, where the job schema has no key for it.
    sums_in: str | None = None
    # Micro-batches after which a pipeline is drained; None means those of a whole step.
    pipeline_fill: int | None = None
    token_weighted_loss: bool | None = None  # accumulated loss is divided by all valid tokens
    fp8_spares_sensitive: bool | None = None  # embeddings, norms, head and router stay in 16 bit or more
    skips_together: bool | None = None  # a step that is not finite is skipped by all ranks
    error_feedback: bool | None = None  # of biased gradient compression
    saves: bool | None = None  # False: configured to save no checkpoints at all
    checkpoint_format: str | None = None  # "safetensors", "dcp", "torch-pickle", "zarr" …
    atomic_commit: bool | None = None  # a checkpoint is visible only when it is complete
    verifies_digests: bool | None = None
    # Parts of the state that a resume restores, named as in CKP006.
    resumes_exactly: tuple[str, ...] | None = None
    heartbeat_s: float | None = None  # seconds between heartbeats of a rank; 0: there are none
    memory_copies: str | None = None  # place: "other rack" (if there is one), "other host", "other process", "none"
    preflight: bool | None = None  # every start and restart checks its hosts first
    step_transaction: bool | None = None  # old generations are fenced, steps commit or do not
    bounded_restarts: int | None = None  # failures in a row before it gives up
    telemetry: tuple[str, ...] | None = None  # series it writes: utilization, memory, peers, noise, energy, steps
    listens: tuple[str, ...] | None = None  # addresses it listens on by default
    authenticated: bool | None = None  # its control sockets authenticate the other side
    sources: Mapping[str, str] | None = None  # field -> the document or code that states it


# Behaviour of Phalanx itself.


# Read in the code on 2026-11-15; each source names a page, which names the file, or the file itself.
PHALANX = Practice(
    trainer="phalanx",
    loss_scale="dynamic",
    token_weighted_loss=True,
    fp8_spares_sensitive=True,
    skips_together=True,
    error_feedback=True,
    checkpoint_format="safetensors",
    atomic_commit=True,
    verifies_digests=True,
    resumes_exactly=("weights", "moments", "scheduler", "scaler", "rng", "sampler", "tokens", "layout"),
    heartbeat_s=0.25,
    memory_copies="other rack",
    preflight=True,
    step_transaction=True,
    bounded_restarts=3,
    telemetry=("utilization", "memory", "peers", "noise", "energy", "steps"),
    listens=("127.0.0.1",),
    authenticated=True,
    sources={
        "loss_scale": "docs/optimizers.md; train/optim/scaler.py: dynamic in fp16, none in other formats",
        "token_weighted_loss": "docs/telemetry.md; train/engine.py: summed loss over the valid tokens of the batch",
        "fp8_spares_sensitive": "train/parallel/float8.py: linears of the blocks alone; head, embedding, norms and "
        "router (fp32, train/models/moe.py) are not",
        "skips_together": "docs/recovery.md; train/engine.py: every rank decides on the same summed norm",
        "error_feedback": "docs/decisions/0013-gradient-compression.md; train/parallel/compress.py",
        "checkpoint_format": "docs/checkpoints.md: safetensors and JSON, never code",
        "atomic_commit": "docs/checkpoints.md: all or nothing",
        "verifies_digests": "docs/checkpoints.md: every shard is verified before a number changes",
        "resumes_exactly": "docs/checkpoints.md: what is in it; train/state/training_state.py",
        "heartbeat_s": "docs/recovery.md; rank to agent 0.1 s (elastic/rank_link.py), agent to coordinator 0.25 s "
        "(elastic/host_agent.py)",
        "memory_copies": "docs/in-memory-checkpoints.md: on another host, and rack if there are two",
        "preflight": "docs/security.md: before a host takes part, and before every later membership",
        "step_transaction": "docs/recovery.md, docs/checkpoints.md: generations, and the fence of a commit",
        "bounded_restarts": "docs/recovery.md: fault.restarts",
        "telemetry": "docs/telemetry.md: every series",
        "listens": "docs/security.md: where it listens; loopback on one machine, fault.interface with several hosts",
        "authenticated": "docs/security.md: HMAC-SHA256 of a secret per launch, both ways; torch's store and the "
        "collectives are torch's own and are not",
    },
)


# Behaviour of other trainers. Values that were not looked up stay None and never count as good. Read on 2026-11-15:
# torchtitan's config/job_config.py and components/checkpoint.py, DeepSpeed's runtime/constants.py and
# runtime/engine.py, Megatron's arguments.py and a dump of Megatron-Bridge. A source that ends in "(recalled)" is
# named from memory and was not read again.


_SOCKETS = (
    "PyTorch SECURITY.md: distributed communication is unauthenticated and for trusted networks; TCPStore binds all"
)
_TORCHRUN = "torchrun: --max-restarts is 0 unless given (recalled)"
_TE = "Megatron Core, gpt_layer_specs.py: linears of the layers; embedding, head and router are not (recalled)"
_NO_BEAT = "no heartbeat between ranks: a hang is noticed by the timeout of a collective"

TORCHTITAN = Practice(
    trainer="torchtitan",
    loss_scale="none",
    checkpoint_format="dcp",
    atomic_commit=True,
    verifies_digests=False,
    resumes_exactly=("weights", "moments", "scheduler", "sampler", "tokens", "layout"),
    heartbeat_s=0.0,
    memory_copies="none",
    preflight=False,
    step_transaction=False,
    bounded_restarts=1,
    telemetry=("utilization", "memory", "steps"),
    listens=("0.0.0.0",),
    authenticated=False,
    sources={
        "loss_scale": "config/job_config.py: mixed_precision_param is bfloat16 or float32, never fp16",
        "checkpoint_format": "components/checkpoint.py: torch.distributed.checkpoint",
        "atomic_commit": "components/checkpoint.py: a folder without .metadata, which is written last, is not loaded",
        "verifies_digests": "torch.distributed.checkpoint keeps no digests (recalled)",
        "resumes_exactly": "components/checkpoint.py: model, optimizer, lr_scheduler, dataloader, train_state, no rng; "
        "torch.distributed.checkpoint reshards on load",
        "heartbeat_s": _NO_BEAT,
        "memory_copies": "async_with_pinned_mem stages to memory and keeps no copy to restore from",
        "preflight": "train.py starts without one",
        "step_transaction": "only with torchft (fault_tolerance.enable)",
        "bounded_restarts": _TORCHRUN,
        "telemetry": "components/metrics.py: memory, throughput, TFLOPS and MFU every log_freq steps (recalled)",
        "listens": _SOCKETS,
        "authenticated": _SOCKETS,
    },
)
MEGATRON = Practice(
    trainer="megatron",
    loss_scale="dynamic",
    token_weighted_loss=False,
    fp8_spares_sensitive=True,
    skips_together=True,
    checkpoint_format="dcp",
    verifies_digests=False,
    resumes_exactly=("weights", "moments", "scheduler", "scaler", "rng", "sampler", "tokens", "layout"),
    heartbeat_s=0.0,
    memory_copies="none",
    preflight=False,
    step_transaction=False,
    bounded_restarts=1,
    telemetry=("steps",),
    listens=("0.0.0.0",),
    authenticated=False,
    sources={
        "loss_scale": "arguments.py: --loss-scale unset is dynamic with --fp16",
        "token_weighted_loss": "arguments.py: --calculate-per-token-loss is off unless given",
        "fp8_spares_sensitive": _TE,
        "skips_together": "core/optimizer/optimizer.py: found_inf is reduced over the group (recalled)",
        "checkpoint_format": "arguments.py: --ckpt-format torch_dist, which is torch.distributed.checkpoint",
        "verifies_digests": "torch.distributed.checkpoint keeps no digests (recalled)",
        "resumes_exactly": "checkpointing.py: args, iteration, optimizer, scheduler, rng_state (recalled)",
        "heartbeat_s": _NO_BEAT + "; --enable-ft-package adds NVRx's",
        "memory_copies": "--non-persistent-ckpt-type local with --replication adds them",
        "preflight": "pretrain_gpt.py starts without one",
        "step_transaction": "every rank steps on its own",
        "bounded_restarts": _TORCHRUN,
        "telemetry": "training.py: iteration time, loss, norm every --log-interval iterations (recalled)",
        "listens": _SOCKETS,
        "authenticated": _SOCKETS,
    },
)
DEEPSPEED = Practice(
    trainer="deepspeed",
    loss_scale="dynamic",
    token_weighted_loss=False,
    checkpoint_format="torch-pickle",
    verifies_digests=False,
    heartbeat_s=0.0,
    memory_copies="none",
    preflight=False,
    step_transaction=False,
    telemetry=("steps",),
    listens=("0.0.0.0",),
    authenticated=False,
    sources={
        "loss_scale": "runtime/constants.py: fp16.loss_scale 0 is dynamic",
        "token_weighted_loss": "runtime/engine.py: the loss is divided by gradient_accumulation_steps (recalled)",
        "checkpoint_format": "runtime/engine.py: save_checkpoint writes *.pt with torch.save (recalled)",
        "verifies_digests": "runtime/engine.py: load_checkpoint compares no digests (recalled)",
        "heartbeat_s": _NO_BEAT,
        "memory_copies": "none documented",
        "preflight": "the launcher starts without one",
        "step_transaction": "every rank steps on its own",
        "telemetry": "monitor/: loss, learning rate, scale every step (recalled)",
        "listens": _SOCKETS,
        "authenticated": _SOCKETS,
    },
)
ACCELERATE = Practice(
    trainer="accelerate",
    loss_scale="dynamic",
    checkpoint_format="torch-pickle",
    verifies_digests=False,
    heartbeat_s=0.0,
    memory_copies="none",
    preflight=False,
    step_transaction=False,
    bounded_restarts=1,
    listens=("0.0.0.0",),
    authenticated=False,
    sources={
        "loss_scale": "accelerator.py: fp16 uses torch's GradScaler (recalled)",
        "checkpoint_format": "checkpointing.py: safetensors for weights, torch.save for the rest (recalled)",
        "verifies_digests": "checkpointing.py: load_state compares no digests (recalled)",
        "heartbeat_s": _NO_BEAT,
        "memory_copies": "none documented",
        "preflight": "accelerate launch starts without one",
        "step_transaction": "every rank steps on its own",
        "bounded_restarts": "accelerate launch: --max_restarts is 0 unless given (recalled)",
        "listens": _SOCKETS,
        "authenticated": _SOCKETS,
    },
)
NEMO = Practice(
    trainer="nemo",
    loss_scale="dynamic",
    fp8_spares_sensitive=True,
    skips_together=True,
    checkpoint_format="dcp",
    verifies_digests=False,
    heartbeat_s=0.0,
    memory_copies="none",
    preflight=False,
    step_transaction=False,
    bounded_restarts=1,
    telemetry=("steps",),
    listens=("0.0.0.0",),
    authenticated=False,
    sources={
        "loss_scale": "mixed_precision: loss_scale null is dynamic with fp16",
        "fp8_spares_sensitive": _TE,
        "skips_together": "Megatron Core: core/optimizer/optimizer.py (recalled)",
        "checkpoint_format": "checkpoint.ckpt_format torch_dist, which is torch.distributed.checkpoint",
        "verifies_digests": "torch.distributed.checkpoint keeps no digests (recalled)",
        "heartbeat_s": _NO_BEAT + "; the ft section adds NVRx's",
        "memory_copies": "checkpoint.non_persistent_ckpt_type local with replication adds them",
        "preflight": "recipes start without one",
        "step_transaction": "every rank steps on its own",
        "bounded_restarts": _TORCHRUN,
        "telemetry": "logger section: iteration time, loss, norm",
        "listens": _SOCKETS,
        "authenticated": _SOCKETS,
    },
)
_BY_NAME = {practice.trainer: practice for practice in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, NEMO)}
_BY_FRAMEWORK = {"megatron-core": MEGATRON, "megatron-lm": MEGATRON, "megatron-bridge": NEMO}


def habits_of(name: str) -> Practice:
    """Return the behaviour of a trainer by its name or a framework's name; an unknown one gets no assumptions."""
    # A framework's name may state the year of its profile.
    name = re.sub(r"-20\d\d$", "", name)
    return _BY_NAME.get(name) or _BY_FRAMEWORK.get(name) or Practice(trainer=name)
