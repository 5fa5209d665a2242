"""Tokens to experts and back on one GPU: each kernel of `kernels/moe_permute.py` by warps, and the sorting.

    PYTHONPATH=src python benchmarks/expert_rows.py [--warps 2,4,8] [--all]

Milliseconds of each kernel alone with a cold L2 cache, bf16, and what of the speed of light (4.8 TB/s) that is; then of
the ways to sort visits. Without --all four of the catalogue's shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.train.kernels import moe_permute
from phalanx.train.kernels.selector import time_in_turn

SOME = (0, 5, 8, 11)
BYTES_S = 4.8e12


def kernel_calls(shape: dict[str, int], device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """By kernel, a call and the bytes it moves at least."""
    y_MD, _, back_M, weight_TK = moe_permute.EXPERT_COMBINE.make_inputs(shape, torch.bfloat16, device, 0)
    x_TD = torch.randn(shape["tokens"], shape["width"], device=device, dtype=torch.bfloat16)
    back_TK = back_M.view_as(weight_TK)
    tokens, visits = x_TD.numel() * 2, y_MD.numel() * 2
    ops = torch.ops.phalanx
    return {
        "gather": (lambda: ops.expert_gather(x_TD, back_TK), tokens + visits),
        "sum": (lambda: ops.expert_sum(y_MD, back_TK), tokens + visits),
        "combine": (lambda: ops.expert_combine(y_MD, back_TK, weight_TK), tokens + visits),
        "gradients": (lambda: ops.expert_combine_gradients(x_TD, y_MD, back_TK, weight_TK), tokens + 2 * visits),
    }


def time_sorting(shape: dict[str, int], device: torch.device) -> None:
    """Ways to the same order and its inverse."""
    scores_TE = torch.randn(shape["tokens"], shape["experts"], device=device)
    choice_M = scores_TE.topk(shape["chosen"]).indices.flatten()
    order_M = choice_M.argsort(stable=True)

    def scatter() -> Tensor:
        return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=device))

    ways: dict[str, Callable[[], Tensor]] = {
        "argsort": lambda: choice_M.argsort(stable=True),
        "argsort of int16": lambda: choice_M.to(torch.int16).argsort(stable=True),
        "inverse by argsort": order_M.argsort,
        "inverse by scatter": scatter,
    }
    assert torch.equal(ways["argsort"](), ways["argsort of int16"]())
    assert torch.equal(ways["inverse by argsort"](), scatter())
    timings = time_in_turn(ways, device)
    print("  " + ", ".join(f"{name} {timing.median_ms:.3f} ms" for name, timing in timings.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", default="2,4,8", help="the most that a program has")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    for place, shape in enumerate(moe_permute.SHAPES):
        if not args.all and place not in SOME:
            continue
        print(" × ".join(f"{name} {size:,}" for name, size in shape.items()), flush=True)
        calls = kernel_calls(dict(shape), device)
        for moe_permute.MOST_WARPS in map(int, args.warps.split(",")):
            timings = time_in_turn({name: call for name, (call, _) in calls.items()}, device)
            times = {name: (timings[name].median_ms, moved) for name, (_, moved) in calls.items()}
            cells = (f"{name} {ms:.3f} ms {moved / BYTES_S / ms * 1e5:.0f}%" for name, (ms, moved) in times.items())
            print(f"  {moe_permute.MOST_WARPS} warps: " + ", ".join(cells), flush=True)
        time_sorting(dict(shape), device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
