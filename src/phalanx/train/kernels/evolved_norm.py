"""RMSNorm by the winner of `phalanx evolve kernels`: a template of ours with the numbers that a search found.

The user's cache has the numbers only. The text around them is ours, whatever the cache says, and values that are not of
the template's lists are no winner. Forward is the winner's, backward the kernel of rms_norm.py, which makes 1 / rms of
each row again.
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

SEARCHED_TYPE = torch.bfloat16  # of the rows that a search on a GPU measures (candidate_timing.py)
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
    text = source.replace("EPS = 1e-5", f"EPS = {float(eps)!r}", 1)
    name = f"phalanx_evolved_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    found: Callable[[Tensor, Tensor], Tensor] = load_source(name, text).kernel
    return found


def evolved_norm(source: str) -> NormKernel:
    """RMSNorm with gradients by a template's source."""

    def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        found: Tensor = _EvolvedNorm.apply(x, weight_D, eps, source)
        return found

    return norm


def remember_winner(op: str, genome: Mapping[str, Any], width: int, device: str, folder: Path | None) -> None:
    """Put the numbers of a search's winner into the user's cache: the selector measures it from now on."""
    values = {name: value for name, value in genome.items() if name != "source"}
    write_winner(choice_key(op, {"width": width}, SEARCHED_TYPE, torch.device(device)), values, folder)


def find_winner(op: str, width: int, dtype: torch.dtype, device: torch.device, folder: Path | None) -> str:
    """The source of the winner for rows of this width on this device; empty where there is none."""
    genome = read_winners(folder).get(choice_key(op, {"width": width}, dtype, device))
    if genome is None:
        return ""
    try:
        return render_source(genome, device.type)
    except (ValueError, KeyError, TypeError):
        return ""


def winner_name(source: str) -> str:
    """As a variant: another winner is measured anew."""
    return f"evolved-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def with_winner(op: KernelOp, source: str) -> KernelOp:
    """The operation with one variant more, which the selector judges and times like the others."""
    norm = evolved_norm(source)
    return replace(op, variants={**op.variants, winner_name(source): lambda x, weight: (norm(x, weight, EPS),)})
