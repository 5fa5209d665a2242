"""What `numerics.reproducible` costs: tokens/s with and without it, steps taken in turn by the same processes.

python benchmarks/reproducible_cost.py [--ranks 2] [--steps 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.ranks import run_ranks

SHAPE = ModelShape(
    name="bench", layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, vocab=4096
)  # 6.4 M parameters: gradients of 26 MB, as large as one bucket
SEQUENCE, MICRO_BATCH, MICRO_BATCHES, WARM_UP = 128, 2, 4, 2


def settings(ranks: int) -> Settings:
    """Data ranks only: the one layout that reproducible sums allow."""
    layout = Layout(
        data=ranks, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0,
        sequence_parallel=False, micro_batch=MICRO_BATCH, accumulation=MICRO_BATCHES, recompute="none",
        precision="fp32", schedule="1f1b", offload="none", compression="none",
    )  # fmt: skip
    return Settings(layout=layout, sequence=SEQUENCE)


def measure(rank: int, ranks: int, steps: int) -> dict[bool, list[float]]:
    """Seconds of every step, by whether sums were reproducible."""
    engines = {
        kind: Engine(SHAPE, replace(settings(ranks), reproducible=kind), Optim(), device=torch.device("cpu"))
        for kind in (False, True)
    }
    found: dict[bool, list[float]] = {False: [], True: []}
    drawn = torch.Generator().manual_seed(rank)
    for engine in engines.values():
        engine.initialise()
    for step in range(steps + WARM_UP):
        tokens_BS = torch.randint(0, SHAPE.vocab, (MICRO_BATCH * MICRO_BATCHES, SEQUENCE), generator=drawn)
        for kind, engine in engines.items():
            began_s = time.perf_counter()
            engine.step(tokens_BS, tokens_BS, lr=1e-3)
            if step >= WARM_UP:
                found[kind].append(time.perf_counter() - began_s)
    return found


def main() -> None:
    """Print one line per kind and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="data ranks, a power of two (2)")
    parser.add_argument("--steps", type=int, default=20, help="steps measured of each kind (20)")
    args = parser.parse_args()
    found = run_ranks(measure, args.ranks, args.ranks, args.steps, limit_s=600.0)
    tokens = args.ranks * MICRO_BATCH * MICRO_BATCHES * SEQUENCE
    rates = {kind: tokens / statistics.median(found[0][kind]) for kind in (False, True)}
    print(f"{args.ranks} data ranks, {MICRO_BATCHES} micro-batches each, {tokens:,} tokens per step")
    print(f"  fast sums          {rates[False]:>8,.0f} tokens/s")
    print(f"  reproducible sums  {rates[True]:>8,.0f} tokens/s")
    print(f"  ratio              {rates[True] / rates[False]:>8.3f}")


if __name__ == "__main__":
    main()
