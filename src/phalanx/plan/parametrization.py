"""The scaling of each parameter's initial values and updates with the model's size: standard, muP and CompleteP.

muP is Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466, table 8); CompleteP is Dey et al. 2025
(arXiv:2505.01618, table 1 with alpha = 1), which adds depth. Both papers put multipliers into the forward pass: logits
times base_width / width, attention scores over head_dim instead of its root, branches of a block times base_depth /
depth. A multiplier on a weight is the same as a smaller weight that learns as much more slowly, exactly so for updates
that do not depend on the gradient's size (Adam's, Adafactor's, Muon's). So Phalanx puts them into the initial values,
learning rates, weight decay and epsilon of the parameter they act on; the model, its layouts and its exported weights
are unchanged. The multiplier of the logits is the gain of the last norm, which models with tied embeddings have as
well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.job.model import ModelShape
from phalanx.job.schema import Job, Scale

INTO_THE_STREAM = (".attn.wo.", ".mlp.down.")  # projections whose results blocks add to the residual stream


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterScale:
    """Multipliers of a parameter's initial values and of its optimizer settings; 1 is the standard."""

    init: float = 1.0
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


STANDARD = ParameterScale()
ParameterScales = Callable[[str, int], ParameterScale]


def standard_scales(name: str, dims: int) -> ParameterScale:
    """Return the standard scale for every parameter."""
    return STANDARD


def parameter_scales(shape: ModelShape, scale: Scale, *, optimizer: str) -> ParameterScales:
    """Return the function from a parameter's name and number of dimensions to its scale in this model."""
    if scale.parametrization == "standard":
        return standard_scales
    width = shape.hidden / scale.base_width
    depth = shape.layers / scale.base_depth if scale.parametrization == "completep" else 1.0
    query = math.sqrt(scale.base_head_dim / shape.head_dim)
    # Updates of Adam and Adafactor add up over the inputs of a neuron, which grow with the width. Those of Muon have
    # full rank: entries of equal size grow only with its root (spectral condition, Yang et al. 2023,
    # arXiv:2310.17813).
    hidden_lr = 1.0 / math.sqrt(width) if optimizer == "muon" else 1.0 / width

    def scale_of(name: str, dims: int) -> ParameterScale:
        if not name.startswith("layers."):
            if name.startswith("norm."):  # carries the multiplier of the logits
                return _made(init=1.0 / width, lr=1.0 / width, eps=1.0)
            return _made(init=1.0, lr=1.0, eps=1.0 / width)
        init, lr = (1.0 / math.sqrt(width), hidden_lr) if dims > 1 else (1.0, 1.0)
        eps = 1.0 / (width * depth)
        # A norm of the queries undoes any scale before it, so the factor is put into the norm's gain.
        if (".attn.q_norm." if shape.qk_norm else ".attn.wq.") in name:
            return _made(init=init * query, lr=lr * query, eps=eps / query)
        if any(part in name for part in INTO_THE_STREAM):
            # The standard divides these initial values by √(2 · layers); the base's √(2 · base_depth) takes its place.
            return _made(init=init / math.sqrt(depth), lr=lr / depth, eps=eps * depth)
        return _made(init=init, lr=lr, eps=eps)

    return scale_of


def _made(*, init: float, lr: float, eps: float) -> ParameterScale:
    """Return a scale that keeps lr · weight_decay, the share of a weight that a step removes, as at the base."""
    return ParameterScale(init=init, lr=lr, weight_decay=1.0 / lr, eps=eps)


def describe_parametrization(job: Job) -> str:
    """Describe the multipliers in one line for the plan; empty for the standard."""
    scale, shape = job.scale, job.model
    if scale.parametrization == "standard":
        return ""
    scales = parameter_scales(shape, scale, optimizer=job.optim.name)
    hidden, branch = scales("layers.0.mlp.up.weight", 2), scales("layers.0.mlp.down.weight", 2)
    attention = math.sqrt(scale.base_head_dim) / shape.head_dim
    text = (
        f"{scale.parametrization} from width {scale.base_width:,}"
        + (f" and depth {scale.base_depth:,}" if scale.parametrization == "completep" else "")
        + f": hidden matrices lr × {hidden.lr:.3g}, first values × {hidden.init:.3g}, logits × "
        f"{scales('norm.weight', 1).init:.3g}, attention scale {attention:.3g}"
    )
    if scale.parametrization == "completep":
        text += f", branches × {branch.lr / hidden.lr:.3g}"
    return text
