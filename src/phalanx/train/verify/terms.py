"""Terms of a proof: device, precision, size; and checks of them. Imports no torch, so that errors appear at once."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake

EXACT = "fp64"
# The most on CPUs, where no axis needs more: 8 take about 20 s on 2 cores
RANKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Device, format, compilation and size of a proof."""

    device: str = "cpu"  # or "cuda"
    precision: str = EXACT
    compile: bool = False
    full_size: bool = False
    ranks: int = RANKS  # the most ranks; a layout with fewer is kept


EXACTLY = Terms()


def format_name(precision: str) -> str:
    """Return a format's name for messages."""
    return "float64" if precision == EXACT else precision


def refuse_terms(terms: Terms, *, layout_ranks: int) -> None:
    """Raise UserError for terms that cannot be met; `layout_ranks` are those of the planned layout."""
    if terms.precision == "fp8" and terms.device == "cpu":
        raise mistake(
            "phalanx verify",
            "--precision fp8 on a CPU",
            why="only GPUs of compute capability 8.9 or newer have fp8 products",
            fix="add --device cuda, or use --precision bf16",
        )
    if terms.full_size and layout_ranks > terms.ranks:
        raise mistake(
            "phalanx verify",
            f"--full-size needs {layout_ranks:,} ranks, and {terms.ranks:,} can run here",
            why="the model is kept whole, and so is its layout",
            fix="leave --full-size out, raise --ranks-per-gpu, or verify a smaller layout with --set parallel.data=1",
        )


def refuse_ranks(terms: Terms, *, ranks: int, gpus: int) -> None:
    """Raise UserError if the small copy has more ranks than may run on the GPUs."""
    if terms.device == "cuda" and ranks > terms.ranks:
        share = f", {terms.ranks // gpus} ranks on each" if terms.ranks > gpus else ""
        available = f"{gpus} GPU{'s' if gpus > 1 else ''}{share}"
        raise mistake(
            "--device cuda",
            f"the proof needs {ranks} ranks, but this machine has {available}",
            why="every axis that the layout uses needs 2 ranks at least; ranks share a GPU only where you say so",
            fix=f"allow it with --ranks-per-gpu {-(-ranks // gpus)}, which needs NCCL 2.30, or use --device cpu",
        )
