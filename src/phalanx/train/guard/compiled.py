"""Compares compiled code with the same code uncompiled, once, before a rank learns anything from it.

torch.compile has twice trained wrong models without an error (benchmarks/torch_compile_errors.py): gradient norms
were 2.370 and 2.095 instead of 3.569. So the first micro-batch is computed twice, compiled and eager, from the same
weights, buffers and random state, and loss and gradients are compared. Neither pass leaves a trace: a run with the
comparison has the same bits as a run without.

How far the two may differ. Compiled code keeps intermediate results in float32 where eager code rounds each of them,
so the two differ by roundings: u each (half the distance of neighbouring numbers), about ROUNDINGS of them one after
the other in a layer and its backward, over all layers as a random walk. That bounds |g - g'|. Norms differ by as much
only if all errors point along the gradient, and by its square if they point in random directions: on an H200 by
4.3e-8 in fp32 and 2.2e-5 in bf16, for bounds of 1.2e-6 and 0.038 (benchmarks/2026-11-16-compile-check.md). SAFETY
allows for products whose terms cancel; CEILING is half the smallest real error met so far. A gradient that is zero on
one side only counts as an error, however small the tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from phalanx.errors import UserError, mistake
from phalanx.units import format_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

# Unit roundoffs. fp8: both sides round to e4m3 in the same places, but a difference d of their bf16 inputs makes a
# share d / s of the values fall on the other side, each by a whole distance s = 1/8: sqrt(d s) = 2^-6 in mean square.
# TF32, torch's default for float32 convolutions on GPUs: the same with s = 2^-10, d = 2^-24.
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-17, "fp16": 2.0**-11, "bf16": 2.0**-9, "fp8": 2.0**-6}
# Norms, products, rotations, softmax, activation and residual sums of a block, forward and backward.
ROUNDINGS = 24
SAFETY = 2.0
CEILING = 0.17  # the gradient norm 2.370 for 3.569 is 34 % off
# A gradient that is zero on one side only counts as lost if the other exceeds this share of the bound, times the norm
# of the whole gradient.
LOST_SHARE = 1 / 8
# Nats; for a smaller loss the absolute difference counts, not the relative one.
LEAST_LOSS = 1.0
# Memory of the eager pass over that of the compiled one, without the loss.
EAGER_SHARE = 1.5
# Bytes of the eager loss per logit: a float32 copy, its log-softmax and its gradient.
LOSS_BYTES = 12


def rounding_bound(compute: str, layers: int) -> float:
    """Return the largest relative difference of loss or gradients that rounding explains.

    >>> [f"{rounding_bound(kind, 32):.2g}" for kind in ("fp32", "bf16", "fp8")]
    ['3.3e-06', '0.11', '0.17']
    """
    return min(CEILING, SAFETY * ROUNDOFF[compute] * math.sqrt(ROUNDINGS * layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPass:
    """The sums and norms of a pass over one micro-batch on this rank, without an update."""

    loss_sum: torch.Tensor  # nats; 0 where another rank counts the same sequences
    valid: torch.Tensor  # valid tokens that loss_sum is over
    norms_P: torch.Tensor  # norm of each shard's gradient of the summed loss
    random: torch.Tensor  # state of the random number generators after the pass


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledComparison:
    """The comparison of compiled and eager code; the same on every rank except for `worst`."""

    loss: float
    eager_loss: float
    grad_norm: float
    eager_grad_norm: float
    loss_difference: float  # relative; of the rank where it is largest
    # √(Σ (|g| - |g'|)²) over all tensors, relative to the norm of the whole; at least the difference of those norms.
    gradient_difference: float
    bound: float
    worst: str  # name of this rank's tensor whose norms differ most
    is_lost: bool = False  # True if some tensor has a zero gradient on one side only
    unclear: str = ""  # reason why the passes cannot be compared

    @property
    def passes(self) -> bool:
        """True if rounding explains all differences, or they cannot be judged (`unclear`); NaN does not pass."""
        differences = (self.loss_difference, self.gradient_difference)
        return bool(self.unclear) or (not self.is_lost and all(difference <= self.bound for difference in differences))


def is_comparison_due(engine: Engine, compared: set[str]) -> bool:
    """Return True if some rank runs code that was never compared in its process.

    Every rank must call this together.
    """
    if not engine.settings.compile:
        return False
    is_due = torch.tensor([float(code_key(engine) not in compared)], device=engine.device)
    if engine.dims.world > 1:
        dist.all_reduce(is_due, op=dist.ReduceOp.MAX)
    return bool(is_due.item())


def code_key(engine: Engine) -> str:
    """Return a key of all that compiled code depends on; in one process the same key means the same code."""
    from phalanx.train.parallel.compiling import place_name

    return f"{place_name(engine.meshes)} {engine.settings} {engine.shape}"


def compare_compiled(engine: Engine, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> CompiledComparison | str:
    """Compute the first micro-batch compiled and eager; return the comparison, or why there is none.

    Every rank must call this together, before its first step.
    """
    free_bytes, used_bytes = _device_memory(engine)
    with restore_after(engine):
        compiled = engine.trial_pass(tokens_BS, targets_BS)
    if short := _short_of_memory(engine, free_bytes, used_bytes):
        return short
    with restore_after(engine), run_eagerly(engine):
        eager = engine.trial_pass(tokens_BS, targets_BS)
    return _compare_passes(engine, compiled, eager)


def _compare_passes(engine: Engine, compiled: TrialPass, eager: TrialPass) -> CompiledComparison:
    """Sum both passes over the ranks and compare them."""
    squared_difference_P = (compiled.norms_P - eager.norms_P).square()
    is_owner_P = torch.tensor(
        [float(shard.owner) for shard in engine.shards], dtype=torch.float64, device=squared_difference_P.device
    )
    names = [shard.name for shard in engine.shards]
    worst = names[int(torch.nan_to_num(squared_difference_P, nan=math.inf).argmax())] if names else ""
    sums = torch.stack(
        [
            *((norms_P.square() * is_owner_P).sum() for norms_P in (compiled.norms_P, eager.norms_P)),
            (squared_difference_P * is_owner_P).sum(),
            compiled.loss_sum,
            eager.loss_sum,
            eager.valid,
        ]
    )
    if engine.dims.world > 1:
        dist.all_reduce(sums)
    squared, eager_squared, squared_difference, loss, eager_loss, valid = sums.tolist()
    valid, bound = max(valid, 1.0), rounding_bound(_product_precision(engine), engine.shape.layers)
    loss_difference, is_lost, random_differs = _worst_rank(
        engine, compiled, eager, least_norm=LOST_SHARE * bound * math.sqrt(eager_squared)
    )
    norm, eager_norm = math.sqrt(squared) / valid, math.sqrt(eager_squared) / valid
    unclear = ""
    if random_differs:
        unclear = "compiled code drew other random numbers than eager code"
    elif not math.isfinite(eager_norm) or (engine.settings.compute == "fp16" and not math.isfinite(norm)):
        unclear = f"the eager gradient norm is {eager_norm:g}, the compiled one {norm:g}"
    elif not eager_norm and not norm:
        unclear = "the gradient is zero"
    return CompiledComparison(
        loss=loss / valid,
        eager_loss=eager_loss / valid,
        grad_norm=norm,
        eager_grad_norm=eager_norm,
        loss_difference=loss_difference,
        gradient_difference=math.sqrt(squared_difference) / valid / eager_norm if eager_norm else math.inf,
        bound=bound,
        worst=worst,
        is_lost=is_lost > 0,
        unclear=unclear,
    )


def _worst_rank(engine: Engine, compiled: TrialPass, eager: TrialPass, *, least_norm: float) -> list[float]:
    """Return the maximum over ranks of: the loss's relative difference, lost gradient (0/1), other randomness (0/1).

    Losses are compared rank by rank: in a mean over a thousand ranks one wrong rank would not show.
    """
    tokens = eager.valid.clamp(min=1.0)
    loss_apart = (compiled.loss_sum - eager.loss_sum).abs() / tokens
    own_loss = (eager.loss_sum / tokens).abs().clamp(min=LEAST_LOSS)
    larger_P = torch.maximum(compiled.norms_P, eager.norms_P)
    is_lost = (((compiled.norms_P == 0) != (eager.norms_P == 0)) & (larger_P > least_norm)).any()
    random_differs = float(not torch.equal(compiled.random, eager.random))
    maxima = torch.stack([loss_apart / own_loss, is_lost.to(loss_apart), torch.full_like(loss_apart, random_differs)])
    if engine.dims.world > 1:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return [float(maximum) for maximum in maxima.tolist()]


def _product_precision(engine: Engine) -> str:
    """Return the precision of matrix products: on a GPU float32 may be TF32, in convolutions by default."""
    compute = engine.settings.compute
    if compute != "fp32" or engine.device.type != "cuda":
        return compute
    return "tf32" if engine.outline is not None or torch.get_float32_matmul_precision() != "highest" else "fp32"


def drawn_so_far(device: torch.device) -> torch.Tensor:
    """Return the state of this rank's random generators; equal states mean that equal numbers were drawn."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat(states)


@contextmanager
def restore_after(engine: Engine) -> Iterator[None]:
    """Context that afterwards restores what a pass changes: random state, buffers, attributes of own networks.

    The pass clears gradients itself. Lists and dictionaries that a user's own forward changes in place stay changed.
    """
    on_gpu = engine.device.type == "cuda"
    random = torch.get_rng_state()
    random_gpu = torch.cuda.get_rng_state(engine.device) if on_gpu else None
    models = [part.model for part in engine.parts]
    buffers = [
        (module, key, buffer, buffer.clone())
        for model in models
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    own_modules = (
        [(module, dict(vars(module))) for model in models for module in model.modules()] if engine.outline else []
    )
    try:
        yield
    finally:
        with torch.no_grad():
            for module, key, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[key] = buffer
        for module, attributes in own_modules:
            for name in vars(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)
        torch.set_rng_state(random)
        if random_gpu is not None:
            torch.cuda.set_rng_state(random_gpu, engine.device)


@contextmanager
def run_eagerly(engine: Engine) -> Iterator[None]:
    """Context that runs compiled modules uncompiled.

    Phalanx's own blocks recompute in backward meanwhile, which limits the memory of the eager pass.
    """
    parts = [] if engine.outline is not None else engine.parts
    compiled = [block for part in parts for block in part.model.layers.values() if block._compiled_call_impl]
    blocks = [
        block for block in compiled if "forward" not in vars(block)
    ]  # blocks with their own forward recompute or offload already
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block in blocks:
            # Deleted, not assigned: compiled code checks that forward is the class's.
            del block.forward


def _device_memory(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the GPU still available, and those in use; reset its peak. (0, 0) on a CPU."""
    if engine.device.type != "cuda":
        return 0, 0
    torch.cuda.reset_peak_memory_stats(engine.device)
    used = torch.cuda.memory_allocated(engine.device)
    cached = torch.cuda.memory_reserved(engine.device) - used
    return torch.cuda.mem_get_info(engine.device)[0] + cached, used


def _short_of_memory(engine: Engine, free_bytes: int, used_bytes: int) -> str:
    """Return why the eager pass may not fit on some rank, or "" if it fits."""
    if engine.device.type != "cuda":
        return ""
    pass_bytes = torch.cuda.max_memory_allocated(engine.device) - used_bytes
    settings, dims = engine.settings, engine.dims
    tokens = settings.layout.micro_batch * settings.sequence // dims.context
    has_head = any(part.model.head is not None for part in engine.parts)
    # The loss in chunks is never compiled.
    has_head = has_head and not settings.chunks_loss(engine.shape, engine.device)
    logits = tokens * engine.shape.vocab // (dims.tensor if settings.loss_parallel else 1) if has_head else 0
    need = int(EAGER_SHARE * pass_bytes) + LOSS_BYTES * logits
    lacking = torch.tensor([float(need - free_bytes), float(need)], device=engine.device, dtype=torch.float64)
    if dims.world > 1:
        dist.all_reduce(lacking, op=dist.ReduceOp.MAX)
    short, need_most = lacking.tolist()
    if short <= 0:
        return ""
    return f"an eager micro-batch may need {format_bytes(need_most)}, {format_bytes(short)} more than is free"


def compiled_refusal(found: CompiledComparison, *, compute: str, where: str) -> UserError:
    """Return the error for wrong compiled code; the same text on every rank."""
    difference = max(
        found.loss_difference, found.gradient_difference, key=lambda value: math.inf if math.isnan(value) else value
    )
    return mistake(
        where,
        f"compiled code computes something else than the same code uncompiled: on one micro-batch gradient norm "
        f"{found.grad_norm:.4g} for {found.eager_grad_norm:.4g}, loss {found.loss:.5g} for {found.eager_loss:.5g}",
        why=f"tensor by tensor they differ by {_share_text(difference)}"
        + (", and some tensor has no gradient at all on one side" if found.is_lost else "")
        + f"; rounding in {compute} explains {_share_text(found.bound)}. The run would learn from wrong gradients",
        fix=f"set train.compile = false; or clear the compile cache, {cache_folder()}, and start again; please report "
        f"it with the job file (torch {torch.__version__}). train.compile_check = false trains without the comparison",
    )


def _share_text(value: float) -> str:
    """Format a relative difference for messages.

    >>> _share_text(0.41), _share_text(4.7e-6), _share_text(math.inf)
    ('41.0%', '4.7e-06', 'inf')
    """
    return f"{value:.1%}" if 1e-3 <= value < math.inf else f"{value:.1e}"


def cache_folder() -> str:
    """Return the folder of torch's compile cache."""
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return folder
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return str(default_cache_dir())
    except (ImportError, AttributeError):
        return "TORCHINDUCTOR_CACHE_DIR"


def event_fields(found: CompiledComparison | str) -> dict[str, Any]:
    """Return the fields of the event that records a comparison."""
    if isinstance(found, str):
        return {"passed": None, "reason": found}
    return {
        "passed": None if found.unclear else found.passes,
        "reason": found.unclear or None,
        "loss": found.loss,
        "eager_loss": found.eager_loss,
        "grad_norm": found.grad_norm,
        "eager_grad_norm": found.eager_grad_norm,
        "loss_difference": found.loss_difference,
        "gradient_difference": found.gradient_difference,
        "bound": found.bound,
        "tensor": found.worst,
    }
