"""The list of all operations that have kernels of Phalanx."""

from __future__ import annotations

from importlib import import_module

from phalanx.train.kernels.kernel_op import KERNELS, KernelOp

MODULES: tuple[str, ...] = (
    "adamw",
    "block_codec",
    "float8_catalogue",
    "linear_cross_entropy",
    "moe_permute",
    "rms_norm",
    "rope",
    "swiglu",
)  # in this folder; each registers its operations on import


def load_all() -> dict[str, KernelOp]:
    """Import all modules with operations and return the operations by name."""
    for module in MODULES:
        import_module(f"phalanx.train.kernels.{module}")
    return dict(sorted(KERNELS.items()))
