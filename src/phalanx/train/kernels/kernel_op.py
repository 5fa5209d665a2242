"""What an operation with kernels of our own is: its truth, its variants, its shapes, its work and its error bound.

The selector takes the fastest variant by measurement, `phalanx kernels` lists, measures and verifies them. All of them
ask this one description.
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
    """The least an operation must do, whatever its kernel: what "speed of light" is counted from."""

    read_bytes: int
    written_bytes: int
    flops: int


@dataclass(frozen=True)
class ResultFormat:
    """Of an operation whose results are codes of numbers, such as fp8 rows with their scales."""

    encode: Callable[..., Outputs]  # inputs -> results, in plain PyTorch: their types and shapes, and a template's code
    decode: Callable[[Outputs, Inputs], Outputs]  # the numbers that results stand for, in float64
    # Of each number so decoded, relative to the largest of all, not of its row: what one scale for all rows loses.
    steps: Sequence[float] = ()


@dataclass(frozen=True)
class KernelOp:
    """One operation, such as RMSNorm: a reference in plain PyTorch, and variants that compute the same."""

    name: str
    summary: str  # one line
    # Plain operations that are right in any floating-point type; in float64 it is the truth that variants are held to.
    reference: Callable[..., Outputs]
    # By name; "builtin" is what PyTorch itself offers and what the trainer used before. A variant never changes inputs.
    variants: Mapping[str, Callable[..., Outputs]]
    # Inputs of a shape, drawn from a seed: (shape, dtype, device, seed).
    make_inputs: Callable[[Shape, torch.dtype, torch.device, int], Inputs]
    shapes: Sequence[Shape]  # at least twelve of real models: what it is measured on
    odd_shapes: Sequence[Shape]  # small, with sizes that no tile divides: what it is verified on
    count_work: Callable[[Shape, torch.dtype], KernelWork]
    error_bound: Callable[
        [torch.dtype], float
    ]  # |result - truth| at most this, relative to the largest of the truth's row
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    gradients: Sequence[int] = ()  # inputs, by place, that have gradients
    devices: Sequence[str] = ("cuda", "cpu")  # where its variants other than the reference run
    # By name of a variant, what is timed instead: the same in place, where a trainer runs it so. It changes its inputs.
    timed_in_place: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    # By name, inputs with structure that random ones lack, such as one dominant class; drawn like `make_inputs`.
    structured_inputs: Mapping[str, Callable[[Shape, torch.dtype, torch.device, int], Inputs]] = field(
        default_factory=dict
    )
    # General patterns of values (`trial_inputs`) in which the operation's own conditioning leaves nothing to compare.
    unfit_patterns: Sequence[str] = ()
    # Numbers in the longest sum of a shape: rounding errors of a sum in float32 grow with its root.
    reduction_length: Callable[[Shape], int] = lambda shape: max(shape.values())
    # Where results are codes: the reference is then what they should stand for.
    format: ResultFormat | None = None

    @property
    def plain(self) -> Callable[..., Outputs]:
        """Plain PyTorch whose results have the types and shapes that every kernel's have."""
        return self.format.encode if self.format else self.reference

    def decoded(self, results: Outputs, inputs: Inputs) -> Outputs:
        """What is compared with the reference: the results, or the numbers that they stand for."""
        return self.format.decode(results, inputs) if self.format else results


# Filled by the modules of this folder when they are imported (`operations.load_all` imports them).
KERNELS: dict[str, KernelOp] = {}


def register_kernel(op: KernelOp) -> KernelOp:
    """Add an operation to the catalogue; its name must be new."""
    if op.name in KERNELS:
        raise ValueError(f"two kernels are called {op.name}")
    KERNELS[op.name] = op
    return op
