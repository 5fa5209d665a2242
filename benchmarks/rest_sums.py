"""What comparing memory between every two updates costs on the CPU, beside the step it guards.

python benchmarks/rest_sums.py [--steps 8] [--sequences 32] [--sequence 256]

One process trains phalanx-tiny's shape (829k parameters, fp32, AdamW: 10 MB of state) with one thread. Processor time
of the step and of the guard's two calls around its update; the median over steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.guard.divergence import ReplicaGuard
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.ranks import run_ranks
from phalanx.train.verify.trial import Trial, make_batch

TINY = ModelShape(name="tiny", layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=320, tied=True)


def trial(sequences: int, sequence: int) -> Trial:
    """A step of one rank, in micro-batches of 8 sequences."""
    layout = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=8, accumulation=sequences // 8, recompute="none", precision="fp32", schedule="1f1b", offload="none",
        compression="none",
    )  # fmt: skip
    settings = Settings(layout=layout, sequence=sequence, compute="fp32", reduce="fp32", master="fp32")
    return Trial(shape=TINY, settings=settings, sequences=sequences)


def measure(rank: int, given: Trial, steps: int) -> list[tuple[float, float]]:
    """(seconds of a step, seconds of the guard) for each step but the first."""
    torch.set_num_threads(1)
    engine = Engine(given.shape, given.settings, given.optim, device=torch.device("cpu"), state_dtype=given.state_dtype)
    engine.initialise()
    guard, found = ReplicaGuard(engine.state, every=10**9, each_step=True, at_rest=engine.at_rest), []
    for step in range(1, steps + 2):
        tokens, targets = make_batch(
            step, sequences=given.sequences, sequence=given.settings.sequence, vocab=given.shape.vocab
        )
        began_s = time.process_time()
        engine.step(tokens, targets, lr=1e-3)
        ended_s = time.process_time()
        assert guard.check(step) is None
        assert not guard.compare_memory()
        found.append((ended_s - began_s, time.process_time() - ended_s))
    return found[1:]


def main() -> None:
    """Print the share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=256)
    args = parser.parse_args()
    (found,) = run_ranks(measure, 1, trial(args.sequences, args.sequence), args.steps)
    step_s, guard_s = (statistics.median(row[place] for row in found) for place in (0, 1))
    tokens = args.sequences * args.sequence
    print(f"{tokens:,} tokens: step {step_s * 1e3:.0f} ms, guard {guard_s * 1e3:.2f} ms, {guard_s / step_s:.2%}")


if __name__ == "__main__":
    main()
