"""How a layout is proven, and what of it is asked for in vain. Imports no torch: a wrong call is told at once."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake

EXACT = "fp64"
RANKS = 8  # at most on CPUs, where no axis needs more: 8 take about 20 s on 2 cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """On what, in which format, compiled or not, how large."""

    device: str = "cpu"  # or "cuda"
    precision: str = EXACT
    compile: bool = False
    full_size: bool = False
    ranks: int = RANKS  # degrees are kept while so many ranks do


EXACTLY = Terms()


def format_name(precision: str) -> str:
    """As people write a format."""
    return "float64" if precision == EXACT else precision


def refuse_terms(terms: Terms, *, layout_ranks: int) -> None:
    """Raises UserError for what cannot be proven so; `layout_ranks` of the planned layout."""
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
    """Raises UserError where the copy has more ranks than may run on the GPUs."""
    if terms.device == "cuda" and ranks > terms.ranks:
        share = f", {terms.ranks // gpus} ranks on each" if terms.ranks > gpus else ""
        may = f"{gpus} GPU{'s' if gpus > 1 else ''}{share}"
        raise mistake(
            "--device cuda",
            f"the proof needs {ranks} ranks, but this machine has {may}",
            why="every axis that the layout uses needs 2 ranks at least; ranks share a GPU only where you say so",
            fix=f"allow it with --ranks-per-gpu {-(-ranks // gpus)}, which needs NCCL 2.30, or use --device cpu",
        )
