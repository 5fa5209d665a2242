"""Causal self-attention by one named kernel, selected by measurement at the job's own shape.

`F.scaled_dot_product_attention` selects its kernel by a priority that is global to the process, and that priority
depends on history: torch 2.11 puts cuDNN first when the first call is dispatched, and leaving a `sdpa_kernel` context
restores the order of before, FlashAttention 2 first. A compiled block keeps the kernel it was traced with, and the key
of the compile cache does not name the priority. On an H200 an 8B layer at 32,768 tokens takes 101 ms with one and
140 ms with the other (benchmarks/2026-11-19-attention-choice.md). The functions of this file call one kernel each, by
its own operator, so the graph names the kernel.

B batch, S sequence, N query heads, K key/value heads, H head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.job.model import ModelShape
from phalanx.train.kernels.selector import BUILTIN, KernelChoice, Timing, choice_key, choose_measured, time_in_turn
from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.layers import Core, causal_attention, repeat_heads
from phalanx.train.parallel.context import UlyssesCore, kv_copies
from phalanx.train.rank_settings import Settings

ATTENTION = "attention"
HALVES = (torch.bfloat16, torch.float16)
# In epsilons of the dtype: a kernel rounds probabilities and score gradients to 16 bit before their products.
ERROR_BOUND = 4


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context with the kernel priority for attention outside this file, such as a user's own network."""
    if device.type != "cuda":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


def cudnn_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Compute causal attention with cuDNN's fused kernel."""
    out_BNSH: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BNSH, k_BKSH, v_BKSH, None, True, 0.0, True, False
    )[0]
    return out_BNSH


def flash_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Compute causal attention with FlashAttention 2, as torch ships it."""
    out_BNSH: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSH, k_BKSH, v_BKSH, 0.0, True, False)[0]
    return out_BNSH


def efficient_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Compute causal attention with the memory-efficient kernel, which also runs on GPUs before Ampere."""
    heads = q_BNSH.shape[1]
    # The kernel needs as many key heads as query heads.
    if heads != k_BKSH.shape[1]:
        k_BKSH, v_BKSH = repeat_heads(k_BKSH, heads), repeat_heads(v_BKSH, heads)
    out_BNSH: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BNSH, k_BKSH, v_BKSH, None, True, 0.0, True
    )[0]
    return out_BNSH


# FlashAttention first, as the tie-breaker: torch has shipped it for longest.
CORES: Mapping[str, Core] = {
    "flash": flash_attention,
    "cudnn": cudnn_attention,
    "efficient": efficient_attention,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """Sizes of the attention that one kernel call of a rank computes."""

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    head: int

    @classmethod
    def of(cls, shape: ModelShape, settings: Settings) -> AttentionSizes:
        """Return the sizes of a model's attention on one tensor and context rank."""
        layout = settings.layout
        heads, kv_heads = shape.heads // layout.tensor, max(shape.kv_heads // layout.tensor, 1)
        if layout.context > 1:  # Ulysses: the whole sequence of some heads
            kv_heads = kv_heads * kv_copies(heads, kv_heads, layout.context) // layout.context
            heads //= layout.context
        return cls(
            batch=layout.micro_batch,
            sequence=settings.sequence,
            heads=heads,
            kv_heads=kv_heads,
            head=shape.head_dim,
        )


def measure_attention(sizes: AttentionSizes, dtype: torch.dtype, device: torch.device) -> dict[str, Timing]:
    """Time forward and backward of every kernel that runs here and is correct, in turn."""
    calls: dict[str, Callable[[], object]] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        calls = {name: _timed_call(core, sizes, dtype, device) for name, core in CORES.items()
                 if is_right(core, sizes, dtype, device)}  # fmt: skip
    return time_in_turn(calls, device)


def is_right(core: Core, sizes: AttentionSizes, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a kernel runs here and agrees with float64 on the job's heads, at lengths no tile divides too."""
    group = sizes.heads // sizes.kv_heads
    try:
        for seed, length in enumerate((129, 300, min(sizes.sequence, 1024))):
            small = replace(sizes, batch=2, sequence=length, heads=2 * group, kv_heads=2)
            if not largest_error(core, make_inputs(small, dtype, device, seed)) <= ERROR_BOUND * torch.finfo(dtype).eps:
                return False
    except RuntimeError:  # no such kernel for this GPU, type or head size; or no memory
        return False
    return True


def largest_error(core: Core, inputs: Sequence[Tensor]) -> float:
    """Return the largest error of output and gradients against float64, relative to the largest value of each tensor.

    It is not relative to each row, because the gradient of the first position's query is zero.
    """
    q_BNSH, k_BKSH, v_BKSH = (tensor.detach().double().requires_grad_() for tensor in inputs)
    sources = [tensor.detach().requires_grad_() for tensor in inputs]
    out = core(*sources)
    truth = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, sources, grad)
    true_grads = torch.autograd.grad(truth, (q_BNSH, k_BKSH, v_BKSH), grad.double())
    pairs = [(out.detach(), truth.detach()), *zip(grads, true_grads, strict=True)]
    if any(result.shape != expected.shape for result, expected in pairs):
        return math.inf
    errors = [float((result.double() - expected).abs().max() / expected.abs().max()) for result, expected in pairs]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def choose_attention(
    models: Sequence[nn.Module], settings: Settings, device: torch.device, *, world: int, folder: Path | None
) -> KernelChoice | None:
    """Select the attention kernel of all layers; every rank must call this and uses the choice of rank 0.

    Returns None where torch selects: on a CPU, in fp32, for a user's own network, and where a ring or a gather splits
    the sequence (these call FlashAttention by its own operator).
    """
    blocks = [block for model in models if isinstance(model, Decoder) for block in model.layers.values()]
    cores = [block.attn.core for block in blocks if isinstance(block, Block)]
    is_supported = device.type == "cuda" and settings.compute_dtype in HALVES and bool(cores)
    is_supported = is_supported and all(core is causal_attention or isinstance(core, UlyssesCore) for core in cores)
    if world > 1 and device.type == "cuda":
        votes = torch.tensor([float(is_supported)], device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        is_supported = bool(votes.item())
    if not is_supported:
        return None
    shape = next(model.shape for model in models if isinstance(model, Decoder))
    sizes = AttentionSizes.of(shape, settings)
    names, choice = list(CORES), None
    if world == 1 or dist.get_rank() == 0:
        dtype = settings.compute_dtype
        choice = choose_measured(
            ATTENTION,
            choice_key(ATTENTION, asdict(sizes), dtype, device),
            names,
            lambda: measure_attention(sizes, dtype, device) or {BUILTIN: Timing(median_ms=math.inf)},
            folder=folder,
        )
        torch.cuda.reset_peak_memory_stats(device)  # the measurement is not part of a step
    index = torch.tensor([names.index(choice.variant) if choice and choice.variant in names else -1], device=device)
    if world > 1:
        dist.broadcast(index, 0)
    if index.item() < 0:  # none of them is right here, or none fits into memory
        return choice
    name = names[int(index)]
    use_attention(blocks, CORES[name])
    return choice or KernelChoice(op=ATTENTION, variant=name, times_ms={})


def use_attention(blocks: Sequence[nn.Module], core: Core) -> None:
    """Let blocks compute attention by `core`, between the exchanges of Ulysses where it splits the sequence."""
    for block in blocks:
        assert isinstance(block, Block)
        if isinstance(block.attn.core, UlyssesCore):
            block.attn.core.local = core
        else:
            block.attn.core = core


def make_inputs(sizes: AttentionSizes, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """Draw queries, keys and values with the strides that a layer produces: heads of a token are adjacent."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    shapes = [(sizes.batch, sizes.sequence, count, sizes.head) for count in heads]
    return [torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2) for shape in shapes]


def _timed_call(core: Core, sizes: AttentionSizes, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    inputs = [tensor.requires_grad_() for tensor in make_inputs(sizes, dtype, device, 0)]
    grad_BNSH = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(core(*inputs), inputs, grad_BNSH)
