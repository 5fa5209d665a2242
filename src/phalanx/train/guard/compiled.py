"""Compiled code held against the same code uncompiled, once, before a rank learns anything from it.

Twice torch.compile trained wrong models without a word (benchmarks/torch_compile_errors.py): gradient norms of 2.370
and 2.095 for 3.569. So the first micro-batch is computed twice, compiled and eager, from the same weights, buffers and
random state, and loss and gradients are compared. Nothing stays of either pass: a run with the comparison has the bits
of one without.

How far the two may differ. Compiled code keeps intermediate results in float32 where eager code rounds each of them, so
the two differ by roundings: u each (half the distance of neighbouring numbers), about ROUNDINGS of them one after the
other in a layer and its backward, over all layers as a random walk. That bounds |g - g'|; norms differ by as much only
if all errors point along the gradient, and by the square of it if they point anywhere: on an H200 4.3e-8 in fp32 and
2.2e-5 in bf16 for bounds of 1.2e-6 and 0.038 (benchmarks/2026-11-16-compile-check.md). SAFETY is for products whose
terms cancel, CEILING half the smallest error that we have met. A gradient that is zero on one side alone is lost,
however small the tensor.
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
# TF32, which torch takes for float32 convolutions on GPUs unless told otherwise: the same with s = 2^-10, d = 2^-24.
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-17, "fp16": 2.0**-11, "bf16": 2.0**-9, "fp8": 2.0**-6}
ROUNDINGS = 24  # norms, products, rotations, softmax, activation and residual sums of a block, forward and backward
SAFETY = 2.0
CEILING = 0.17  # the gradient norm 2.370 for 3.569 is 34 % off
LOST_SHARE = 1 / 8  # of the bound: a gradient that is zero on one side counts as lost above so much of the whole norm
LEAST_LOSS = 1.0  # nats: of a smaller loss the difference is taken in nats
EAGER_SHARE = 1.5  # memory of the eager pass over that of the compiled one, the loss apart
LOSS_BYTES = 12  # of the eager loss for each logit: a float32 copy, its log-softmax and its gradient


def rounding_bound(compute: str, layers: int) -> float:
    """The largest relative difference of loss or gradients that rounding explains.

    >>> [f"{rounding_bound(kind, 32):.2g}" for kind in ("fp32", "bf16", "fp8")]
    ['3.3e-06', '0.11', '0.17']
    """
    return min(CEILING, SAFETY * ROUNDOFF[compute] * math.sqrt(ROUNDINGS * layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPass:
    """What a pass over one micro-batch gave on this rank; nothing was learnt from it."""

    loss_sum: torch.Tensor  # nats, 0 where this rank does not speak for its sequences
    valid: torch.Tensor  # tokens behind it
    norms_P: torch.Tensor  # of the gradient of the summed loss, of each shard
    random: torch.Tensor  # the state of the random numbers after it


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledComparison:
    """Compiled beside eager, the same on every rank but for `worst`."""

    loss: float
    eager_loss: float
    grad_norm: float
    eager_grad_norm: float
    loss_difference: float  # relative, of the rank where it is largest
    gradient_difference: (
        float  # Σ (|g| - |g'|)² over all tensors, against the whole norm: no less than that of the norms
    )
    bound: float
    worst: str  # tensor of this rank whose norms lie furthest apart
    is_lost: bool = False  # some tensor has no gradient at all on one side
    unclear: str = ""  # why nothing can be said

    @property
    def passes(self) -> bool:
        """Whether rounding explains it all; not a number does not pass."""
        differences = (self.loss_difference, self.gradient_difference)
        return bool(self.unclear) or (not self.is_lost and all(one <= self.bound for one in differences))


def is_comparison_due(engine: Engine, compared: set[str]) -> bool:
    """Whether some rank runs code that was never compared in its process. Every rank must call this."""
    if not engine.settings.compile:
        return False
    wanted = torch.tensor([float(code_key(engine) not in compared)], device=engine.device)
    if engine.dims.world > 1:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
    return bool(wanted.item())


def code_key(engine: Engine) -> str:
    """What compiled code depends on: a process that compiled it once loads the same again."""
    from phalanx.train.parallel.compiling import place_name

    return f"{place_name(engine.meshes)} {engine.settings} {engine.shape}"


def compare_compiled(engine: Engine, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> CompiledComparison | str:
    """Compute the first micro-batch compiled and eager; why it could not be done, where it could not.

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
    apart_P = (compiled.norms_P - eager.norms_P).square()
    mine_P = torch.tensor([float(shard.owner) for shard in engine.shards], dtype=torch.float64, device=apart_P.device)
    names = [shard.name for shard in engine.shards]
    worst = names[int(torch.nan_to_num(apart_P, nan=math.inf).argmax())] if names else ""
    sums = torch.stack(
        [
            *((norms_P.square() * mine_P).sum() for norms_P in (compiled.norms_P, eager.norms_P)),
            (apart_P * mine_P).sum(),
            compiled.loss_sum,
            eager.loss_sum,
            eager.valid,
        ]
    )
    if engine.dims.world > 1:
        dist.all_reduce(sums)
    squared, eager_squared, apart, loss, eager_loss, valid = sums.tolist()
    valid, bound = max(valid, 1.0), rounding_bound(_product_precision(engine), engine.shape.layers)
    loss_difference, is_lost, other_random = _worst_rank(
        engine, compiled, eager, least_norm=LOST_SHARE * bound * math.sqrt(eager_squared)
    )
    norm, eager_norm = math.sqrt(squared) / valid, math.sqrt(eager_squared) / valid
    unclear = ""
    if other_random:
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
        gradient_difference=math.sqrt(apart) / valid / eager_norm if eager_norm else math.inf,
        bound=bound,
        worst=worst,
        is_lost=is_lost > 0,
        unclear=unclear,
    )


def _worst_rank(engine: Engine, compiled: TrialPass, eager: TrialPass, *, least_norm: float) -> list[float]:
    """The largest of all ranks: relative difference of the loss, whether a gradient is lost, whether randomness is.

    Losses rank by rank: in a mean over a thousand of them one wrong rank would not show.
    """
    tokens = eager.valid.clamp(min=1.0)
    loss_apart = (compiled.loss_sum - eager.loss_sum).abs() / tokens
    own_loss = (eager.loss_sum / tokens).abs().clamp(min=LEAST_LOSS)
    larger_P = torch.maximum(compiled.norms_P, eager.norms_P)
    is_lost = (((compiled.norms_P == 0) != (eager.norms_P == 0)) & (larger_P > least_norm)).any()
    other_random = float(not torch.equal(compiled.random, eager.random))
    found = torch.stack([loss_apart / own_loss, is_lost.to(loss_apart), torch.full_like(loss_apart, other_random)])
    if engine.dims.world > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(one) for one in found.tolist()]


def _product_precision(engine: Engine) -> str:
    """What matrix products are computed in: float32 may be TF32 on a GPU, in convolutions without a word."""
    compute = engine.settings.compute
    if compute != "fp32" or engine.device.type != "cuda":
        return compute
    return "tf32" if engine.outline is not None or torch.get_float32_matmul_precision() != "highest" else "fp32"


def drawn_so_far(device: torch.device) -> torch.Tensor:
    """The state of the random numbers of this rank: equal states mean that equal numbers were drawn."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat(states)


@contextmanager
def restore_after(engine: Engine) -> Iterator[None]:
    """Put back what a pass changes: random numbers, buffers, attributes of own networks.

    Gradients the pass clears itself. Lists and dictionaries that a user's own forward changes in place stay changed.
    """
    on_gpu = engine.device.type == "cuda"
    random = torch.get_rng_state()
    random_gpu = torch.cuda.get_rng_state(engine.device) if on_gpu else None
    models = [part.model for part in engine.parts]
    buffers = [
        (module, key, one, one.clone())
        for model in models
        for module in model.modules()
        for key, one in module._buffers.items()
        if one is not None
    ]
    own = [(module, dict(vars(module))) for model in models for module in model.modules()] if engine.outline else []
    try:
        yield
    finally:
        with torch.no_grad():
            for module, key, one, before in buffers:
                one.copy_(before)
                module._buffers[key] = one
        for module, attributes in own:
            for name in vars(module).keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)
        torch.set_rng_state(random)
        if random_gpu is not None:
            torch.cuda.set_rng_state(random_gpu, engine.device)


@contextmanager
def run_eagerly(engine: Engine) -> Iterator[None]:
    """Run compiled modules uncompiled. Our own blocks recompute in backward, which bounds what they keep."""
    ours = [] if engine.outline is not None else engine.parts
    compiled = [block for part in ours for block in part.model.layers.values() if block._compiled_call_impl]
    blocks = [block for block in compiled if "forward" not in vars(block)]  # the others recompute or offload as it is
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block in blocks:
            del block.forward  # not set again: compiled code looks whether it is the class's


def _device_memory(engine: Engine) -> tuple[int, int]:
    """Bytes of the GPU that can still be had, and those in use; from now on the peak is counted anew."""
    if engine.device.type != "cuda":
        return 0, 0
    torch.cuda.reset_peak_memory_stats(engine.device)
    used = torch.cuda.memory_allocated(engine.device)
    cached = torch.cuda.memory_reserved(engine.device) - used
    return torch.cuda.mem_get_info(engine.device)[0] + cached, used


def _short_of_memory(engine: Engine, free_bytes: int, used_bytes: int) -> str:
    """Why the eager pass may not fit on some rank; empty where it does."""
    if engine.device.type != "cuda":
        return ""
    taken = torch.cuda.max_memory_allocated(engine.device) - used_bytes
    settings, dims = engine.settings, engine.dims
    tokens = settings.layout.micro_batch * settings.sequence // dims.context
    has_head = any(part.model.head is not None for part in engine.parts)
    has_head = has_head and not settings.chunks_loss(engine.shape, engine.device)  # that loss is never compiled
    logits = tokens * engine.shape.vocab // (dims.tensor if settings.loss_parallel else 1) if has_head else 0
    need = int(EAGER_SHARE * taken) + LOSS_BYTES * logits
    lacking = torch.tensor([float(need - free_bytes), float(need)], device=engine.device, dtype=torch.float64)
    if dims.world > 1:
        dist.all_reduce(lacking, op=dist.ReduceOp.MAX)
    short, need_most = lacking.tolist()
    if short <= 0:
        return ""
    return f"an eager micro-batch may need {format_bytes(need_most)}, {format_bytes(short)} more than is free"


def compiled_refusal(found: CompiledComparison, *, compute: str, where: str) -> UserError:
    """What a person is told when compiled code is wrong; the same words on every rank."""
    off = max(found.loss_difference, found.gradient_difference, key=lambda one: math.inf if math.isnan(one) else one)
    return mistake(
        where,
        f"compiled code computes something else than the same code uncompiled: on one micro-batch gradient norm "
        f"{found.grad_norm:.4g} for {found.eager_grad_norm:.4g}, loss {found.loss:.5g} for {found.eager_loss:.5g}",
        why=f"tensor by tensor they differ by {_share_text(off)}"
        + (", and some tensor has no gradient at all on one side" if found.is_lost else "")
        + f"; rounding in {compute} explains {_share_text(found.bound)}. The run would learn from wrong gradients",
        fix=f"set train.compile = false; or clear the compile cache, {cache_folder()}, and start again; please report "
        f"it with the job file (torch {torch.__version__}). train.compile_check = false trains without the comparison",
    )


def _share_text(value: float) -> str:
    """A relative difference as people read it.

    >>> _share_text(0.41), _share_text(4.7e-6), _share_text(math.inf)
    ('41.0%', '4.7e-06', 'inf')
    """
    return f"{value:.1%}" if 1e-3 <= value < math.inf else f"{value:.1e}" if value < 1e-3 else str(value)


def cache_folder() -> str:
    """Where torch keeps compiled code."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return named
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return str(default_cache_dir())
    except (ImportError, AttributeError):
        return "TORCHINDUCTOR_CACHE_DIR"


def event_fields(found: CompiledComparison | str) -> dict[str, Any]:
    """What the record tells of it."""
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
