"""Description of an operation with kernels: its reference, variants, shapes, work and error bound.

The selector picks the fastest variant by measurement; `phalanx kernels` lists, measures and verifies them. All of
these use the same description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Shape = Mapping[str, int]  # sizes by name, such as {"tokens": 4096, "width": 2048}
Inputs = tuple[Tensor, ...]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class KernelWork:
    """The minimum work of an operation, whatever its kernel: the basis of its "speed of light"."""

    read_bytes: int
    written_bytes: int
    flops: int


@dataclass(frozen=True)
class ResultFormat:
    """The encoding of an operation whose results are codes of numbers, such as fp8 rows with their scales."""

    # Inputs -> results in plain PyTorch: gives the types and shapes of results, and the code of a template.
    encode: Callable[..., Outputs]
    decode: Callable[[Outputs, Inputs], Outputs]  # the numbers that results represent, in float64
    # Allowed rounding error of each decoded result, relative to the largest number of all rows: the loss of one scale.
    steps: Sequence[float] = ()


@dataclass(frozen=True)
class KernelOp:
    """One operation, such as RMSNorm: a reference in plain PyTorch, and variants that compute the same."""

    name: str
    summary: str  # one line
    # Plain operations, correct in any floating-point type; variants are compared with its results in float64.
    reference: Callable[..., Outputs]
    # By name; "builtin" is PyTorch's own, which the trainer uses by default. A variant never changes its inputs.
    variants: Mapping[str, Callable[..., Outputs]]
    # Draws the inputs of a shape: (shape, dtype, device, seed).
    make_inputs: Callable[[Shape, torch.dtype, torch.device, int], Inputs]
    shapes: Sequence[Shape]  # at least twelve of real models, for measurements
    odd_shapes: Sequence[Shape]  # small, with sizes that no tile divides, for verification
    count_work: Callable[[Shape, torch.dtype], KernelWork]
    error_bound: Callable[
        [torch.dtype], float
    ]  # largest |result - exact|, relative to the largest exact value in the row
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    gradients: Sequence[int] = ()  # indices of inputs that have gradients
    devices: Sequence[str] = ("cuda", "cpu")  # where its variants other than the reference run
    # By name of a variant, the function to time instead: in place, as the trainer runs it. It changes its inputs.
    timed_in_place: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    # By name, inputs with structure that random ones lack, such as one dominant class; drawn like `make_inputs`.
    structured_inputs: Mapping[str, Callable[[Shape, torch.dtype, torch.device, int], Inputs]] = field(
        default_factory=dict
    )
    # General patterns of values (`trial_inputs`) for which the operation is so ill-conditioned that no digit is left.
    unfit_patterns: Sequence[str] = ()
    # Numbers in the longest sum of a shape: rounding errors of a sum in float32 grow with the square root.
    reduction_length: Callable[[Shape], int] = lambda shape: max(shape.values())
    # Set where results are codes; the reference then gives the numbers that they should represent.
    format: ResultFormat | None = None

    @property
    def plain(self) -> Callable[..., Outputs]:
        """The operation in plain PyTorch, with the types and shapes of results that every kernel must have."""
        return self.format.encode if self.format else self.reference

    def decoded(self, results: Outputs, inputs: Inputs) -> Outputs:
        """Return the results as they are compared with the reference: decoded where they are codes."""
        return self.format.decode(results, inputs) if self.format else results


# Filled by the modules of this folder when they are imported (`operations.load_all` imports them).
KERNELS: dict[str, KernelOp] = {}


def register_kernel(op: KernelOp) -> KernelOp:
    """Add an operation to the catalogue; its name must be new."""
    if op.name in KERNELS:
        raise ValueError(f"two kernels are called {op.name}")
    KERNELS[op.name] = op
    return op
