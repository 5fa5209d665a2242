"""From a slow RMSNorm to a fast one by `phalanx evolve kernels`: share of the speed of light, and the time it took.

    PYTHONPATH=src python benchmarks/evolve_kernels.py [--device cuda] [--evaluations 120] [--seeds 3] [--archive FILE]

Every batch of sources is checked and timed in a process of its own (phalanx.train.kernels.candidate_timing). Prints the
first kernel's share, the best after every batch, and the seconds in which a device was held.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import phalanx
from phalanx.api.evolve_kernels import SHAPES, ProcessEvaluator
from phalanx.evolve.kernel_problem import KernelMeasurement


def main() -> None:
    """One search per seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--evaluations", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--archive", default="")
    args = parser.parse_args()
    tokens, width = args.tokens or SHAPES[args.device][0], args.width or SHAPES[args.device][1]
    own = ProcessEvaluator(op="rms-norm", device=args.device, shape={"tokens": tokens, "width": width})
    print(f"rms-norm, {tokens:,} × {width:,} on {own.about()}")
    for seed in range(args.seeds):
        held_s, refused = 0.0, 0

        def measure(sources: list[str]) -> list[KernelMeasurement]:
            nonlocal held_s, refused
            start = time.monotonic()
            found = own(sources)
            held_s += time.monotonic() - start
            refused += sum(not one.accepted for one in found)
            return found

        found = phalanx.evolve.kernels(
            "rms-norm",
            device=args.device,
            tokens=tokens,
            width=width,
            evaluations=args.evaluations,
            seed=seed,
            archive=Path(f"{args.archive}.{seed}") if args.archive else None,
            evaluate=measure,
            progress=print,
        )
        best = f"{found.light_share:.1%}" if found.light_share else "none"
        first = f"{found.first_share:.1%}" if found.first_share else "none"
        count = len(found.search.archive.entries)
        print(
            f"seed {seed}: first {first}, best {best} of light, {count} evaluations, {refused} refused, {held_s:.0f} s"
        )
        print(found)


if __name__ == "__main__":
    main()
