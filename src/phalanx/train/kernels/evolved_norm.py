"""RMSNorm by the winner of `phalanx evolve kernels`: a kernel template filled with the values that the search found.

The user's cache holds the values only. The source text is the shipped template, whatever the cache contains, and
values outside the template's lists are ignored. The forward pass is the winner's kernel; the backward pass is the
kernel of rms_norm.py, which recomputes 1 / rms of each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.evolve.kernel_templates import render_source
from phalanx.hardware.kernel_choices import read_winners, write_winner
from phalanx.train.kernels.kernel_op import KernelOp
from phalanx.train.kernels.rms_norm import EPS, norm_gradients
from phalanx.train.kernels.selector import choice_key
from phalanx.train.kernels.source_module import load_source

SEARCHED_TYPE = torch.bfloat16  # the dtype that a search on a GPU measures (candidate_timing.py)
NormKernel = Callable[[Tensor, Tensor, float], Tensor]


class _EvolvedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, source: str) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        normed: Tensor = _loaded_kernel(source, eps)(x, weight_D)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_D = ctx.saved_tensors
        return *norm_gradients(grads[0], x, weight_D, ctx.eps), None, None


@cache
def _loaded_kernel(source: str, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Load a source with its epsilon replaced, as a module named by its digest; return its kernel."""
    text = source.replace("EPS = 1e-5", f"EPS = {float(eps)!r}", 1)
    name = f"phalanx_evolved_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    kernel: Callable[[Tensor, Tensor], Tensor] = load_source(name, text).kernel
    return kernel


def evolved_norm(source: str) -> NormKernel:
    """Return an RMSNorm with gradients whose forward pass is the kernel of `source`."""

    def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        normed: Tensor = _EvolvedNorm.apply(x, weight_D, eps, source)
        return normed

    return norm


def remember_winner(op: str, genome: Mapping[str, Any], width: int, device: str, folder: Path | None) -> None:
    """Store the values of a search's winner in the user's cache, so that later runs measure it as a variant."""
    values = {name: value for name, value in genome.items() if name != "source"}
    write_winner(choice_key(op, {"width": width}, SEARCHED_TYPE, torch.device(device)), values, folder)


def find_winner(op: str, width: int, dtype: torch.dtype, device: torch.device, folder: Path | None) -> str:
    """Return the source of the winner for rows of this width on this device; empty if there is none."""
    genome = read_winners(folder).get(choice_key(op, {"width": width}, dtype, device))
    if genome is None:
        return ""
    try:
        return render_source(genome, device.type)
    except (ValueError, KeyError, TypeError):
        return ""


def winner_name(source: str) -> str:
    """Return the variant's name, which changes with the source so that another winner is measured anew."""
    return f"evolved-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def with_winner(op: KernelOp, source: str) -> KernelOp:
    """Return the operation with the winner as another variant, which the selector verifies and times like the rest."""
    norm = evolved_norm(source)
    return replace(op, variants={**op.variants, winner_name(source): lambda x, weight: (norm(x, weight, EPS),)})
