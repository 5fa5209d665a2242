"""The constants of the cost model: few, named, each with its meaning. `benchmarks/fit_physics.py` refits them.

Values come from a robust fit over the published runs in `throughput_public.csv` (equal weight per source, weak priors
at the textbook value given in the comment); `docs/validation.md` shows the result when each source is left out.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from phalanx.io.files import shipped_text
from phalanx.plan.cases import Floats

Number = float | Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Physics:
    """Constants that hold for every device, model and framework."""

    # matmul
    sustained: Number  # share of the best measured matmul rate that long training sustains (power, clocks)
    throttled: Number  # the same on devices that reach their power limit sooner (Cases.dense_power)
    fp8: Number  # the same for fp8, relative to 16-bit: scaling factors and unquantised layers
    fp4: Number
    tail: Number  # idle share of the last wave of tiles, 0.5 on average when tiles do not fill the units
    start_s: Number  # prologue and epilogue of one matmul kernel
    unaligned: Number  # extra time when an inner width is not a multiple of 64 elements (cuBLAS 128-byte rule)
    grouped: Number  # grouped (expert) matmuls relative to one large matmul
    expert_rows: Number  # tokens per expert at which a grouped matmul reaches half its rate
    # attention
    flash: Number  # fused attention relative to a matmul of the same FLOPs
    flash_lag: Number  # its further share on devices that reach their power limit sooner
    flash_dim: Number  # head width at which fused attention reaches half its rate
    flash_length: Number  # sequence length at which fused attention reaches half its rate
    flash_backward: Number  # backward of fused attention relative to 2.5 x forward
    batched: Number  # unfused attention matmuls relative to a large matmul
    batched_dim: Number  # head width at which they reach half their rate
    odd_head: Number  # slow-down when the head width is not a multiple of 8 (no tensor cores)
    softmax_bytes: Number  # memory traffic per attention score, unfused forward
    # memory-bound work, in passes over the tensor
    memory: Number  # share of memory bandwidth that streaming kernels reach
    hidden_passes: Number  # norms, residuals, dropout: passes over [tokens, hidden] per layer forward
    qkv_passes: Number  # rotary embedding, splits
    ffn_passes: Number  # activation function
    expert_passes: Number  # permute, unpermute, weighting of routed tokens
    cast_bytes: Number  # quantising to fp8/fp4 per element of a matmul input
    loss_bytes: Number  # softmax cross-entropy in fp32, per logit, forward and backward
    selective: Number  # share of memory-bound forward work that selective recompute repeats besides attention
    # launch
    kernels: Number  # device operations per layer forward
    tensor_kernels: Number  # more of them under tensor parallelism, as a share
    expert_kernels: Number  # more of them in a mixture-of-experts layer
    # network
    link: Number  # share of the fast-domain line rate a collective reaches
    nic: Number  # share of the NIC line rate
    link_latency: Number  # multiple of the cluster's link latency per ring step
    nic_latency: Number  # multiple of the cluster's network latency per ring step
    pacing: Number  # share of a ring's steps inside a domain that wait for the network hop


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Differences between frameworks (and their versions); the defaults describe an unknown framework."""

    gemm: Number = 1.0  # matmul efficiency relative to Physics.sustained
    elementwise: Number = 1.0  # memory-bound work; below 1 is better fusion
    flash: Number = 1.0
    expert: Number = 1.0  # grouped matmul quality
    loss: Number = 1.0  # memory traffic of the loss; below 1 where it is fused
    cast: Number = 1.0  # quantising to fp8 and fp4
    plain_elementwise: Number = 1.0  # memory-bound work of layers that are not compiled, relative to those that are
    plain_cast: Number = 1.0  # the same for quantising
    selective_attention: Number = 1.0  # share of attention's forward that selective recompute repeats
    selective_streams: Number = 1.0  # memory-bound work it repeats, relative to Physics.selective
    early_stop: Number = (
        0.0  # 1: full recompute stops before a layer's last matrix, whose result backward does not need
    )
    # Share of a layer's matmul FLOPs done in fp8 or fp4; all of them in our own trainer.
    narrow_share: Number = 1.0
    # 1: a head whose loss is computed in chunks has the layers' format, as our trainer does where a job asks for it.
    narrow_head: Number = 0.0
    launch_s: Number = 10e-6  # host time to issue one device operation
    narrow_kernels: Number = 0.0  # more of them per layer in fp8 and fp4, as a share: rounding and transposing
    # p of the p-norm that joins device time and the host's: how well the host runs ahead.
    launch_sharpness: Number = 4.0
    fabric_loss: Number = 0.05  # exponent by which NIC bandwidth falls with the domains a collective spans
    tensor_exposed: Number = 1.0  # share of tensor-parallel traffic not hidden behind compute
    expert_exposed: Number = 0.5
    pipeline_exposed: Number = 0.5
    data_overlap: Number = 0.5  # share of an all-reduce of gradients that may hide behind the last backward
    scatter_overlap: Number = 0.5  # the same where ZeRO scatters them instead
    gather_overlap: Number = 0.5  # share of updated parameters gathered behind the next forward
    shard_traffic: Number = 1.0  # ZeRO-3 traffic relative to two gathers and one scatter
    shard_sharpness: Number = 4.0  # how well ZeRO-3 gathers hide: p of the p-norm of compute and traffic
    micro_s: Number = 1e-3  # host work per micro-batch
    pipeline_s: Number = 1e-3  # additional host work per micro-batch in a pipeline
    tensor_pipeline_s: Number = 1e-5  # host time per layer and tensor rank where a pipeline blocks tensor collectives
    step_s: Number = 0.02  # logging, clipping, loss reduction, data: once per step
    step_log_devices_s: Number = 1e-3  # waiting for the slowest of more ranks, per doubling of devices
    optimizer_bytes: Number = 34.0  # memory traffic of the optimizer per parameter
    newton_schulz: Number = 0.0  # iterations by which the optimizer makes each weight matrix orthogonal (Muon)
    balanced_stages: Number = 1.0  # 1: the split into stages counts the embedding and the head
    gradient_bytes: Number = 4.0  # width of the gradients that are reduced
    # 1: selective recompute exchanges the experts' tokens and the ring's keys and values again.
    exchange_again: Number = 0.0
    accumulate_bytes: Number = 0.0  # memory traffic per parameter of adding up gradients, after every micro-batch


PROFILE_FIELDS = tuple(f.name for f in fields(Profile))


@cache
def shipped_table() -> dict[str, Any]:
    """Return the constants file, parsed."""
    return tomllib.loads(shipped_text(__file__, "physics.toml"))


@cache
def shipped_physics() -> Physics:
    """Return the shipped constants."""
    return Physics(**shipped_table()["physics"])


@cache
def shipped_profiles() -> dict[str, Profile]:
    """Return the shipped framework profiles by name, including `default`."""
    return {name: Profile(**values) for name, values in shipped_table()["profile"].items()}


# The profile of a framework's name, first match wins; the second column is the first version (or year) it holds for.
_FAMILIES: tuple[tuple[str, str, str], ...] = (
    (r"nanotron", "", "nanotron"),
    (r"composer|llm-?foundry|mosaic", "", "composer-fsdp"),
    (r"megatron-?deepspeed|neox", "", "megatron-deepspeed"),
    (r"deepspeed|zero", "", "deepspeed"),
    (r"^phalanx", "", "phalanx"),
    (r"^pytorch|^torch\b", "2026", "pytorch"),
    (r"titan|fsdp2?$|^fsdp|^pytorch|accelerate|lightning", "", "torchtitan"),
    (r"bridge", "26.05", "megatron-bridge"),
    (r"bridge|nemo|megatron-?core|mcore|primus|transformer-?engine", "", "megatron-core"),
    (r"megatron", "2023", "megatron-core"),
    (r"megatron", "", "megatron-lm"),
)


def profile_name(framework: str, version: str = "") -> str:
    """Return the profile for a framework and its version or date; `default` for an unknown one.

    >>> profile_name("megatron-lm", "2021-04"), profile_name("Megatron-Bridge", "26.06"), profile_name("abc")
    ('megatron-lm', 'megatron-bridge', 'default')
    """
    name = framework.strip().lower()
    stamp = re.match(r"\d+(\.\d+)?", version.strip())
    for pattern, since, profile in _FAMILIES:
        if re.search(pattern, name) and (not since or (stamp is not None and _is_recent(stamp.group(), since))):
            return profile
    return "default"


def _is_recent(stamp: str, since: str) -> bool:
    # Years and container versions (25.09) are both dates; a table may have either.
    def year(text: str) -> float:
        value = float(text)
        return value if value > 1000 else 2000.0 + value

    return year(stamp) >= year(since)


def stack_profiles(chosen: list[Profile]) -> Profile:
    """Return one profile whose fields are arrays with one entry per given profile."""
    columns = {
        name: np.asarray([getattr(profile, name) for profile in chosen], dtype=np.float64) for name in PROFILE_FIELDS
    }
    return Profile(**columns)
