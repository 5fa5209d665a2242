"""Verdicts of the kernel lab's guard on a device: kernels that must pass, and cheats that must be refused.

    PYTHONPATH=src python benchmarks/kernel_guard.py [--device cuda] [--cheats] [--out FILE.json]

The cases are the tests' own: tests/train/kernels/gpu_kernels, and with --cheats tests/train/kernels/cheats. The first
line of each says what is expected; of cheats, on a GPU, only that they are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

KERNELS = Path(__file__).parents[1] / "tests" / "train" / "kernels"
sys.path.append(str(KERNELS.parents[1]))  # row_norm.py


def main() -> int:
    """A line for each; 1 where a verdict is wrong."""
    from row_norm import ROW_NORM

    from phalanx.train.kernels.lab.candidate_guard import judge_candidate
    from phalanx.train.kernels.lab.candidate_server import CandidateLimits, CandidateServer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cheats", action="store_true")
    parser.add_argument("--after", default="", help="only those whose names come after this")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    rows = []
    with CandidateServer() as server:
        for path in sorted((KERNELS / ("cheats" if args.cheats else "gpu_kernels")).glob("*.txt")):
            if path.stem <= args.after:
                continue
            source = path.read_text()
            head = source.partition(":")[0].removeprefix("# ").split()
            began = time.monotonic()
            verdict = judge_candidate(
                source,
                ROW_NORM,
                server=server,
                device=args.device,
                timed="timed" in head,
                shape={"tokens": 16384, "width": 4096} if args.device == "cuda" else None,
                limits=CandidateLimits(seconds=5.0 if head[0] == "time" else 60.0),
            )
            kind, expected = verdict.kind or "passes", head[0].split("|")
            right = not verdict.passed if args.cheats else kind in expected
            timing = verdict.timing
            rows.append(
                {
                    "kernel": path.stem,
                    "expected": expected,
                    "verdict": kind,
                    "right": right,
                    "reason": verdict.reason,
                    "barriers": list(verdict.barriers),
                    "light": timing.light if timing is not None else None,
                    "kernel_s": timing.seconds if timing is not None else None,
                    "seconds": round(time.monotonic() - began, 1),
                }
            )
            print(f"{'right' if right else 'WRONG'} {path.stem}: {kind} {verdict.reason}"[:400], flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(rows, indent=1))
    print(f"{sum(one['right'] for one in rows)} of {len(rows)} verdicts are right")
    return int(not all(one["right"] for one in rows))


if __name__ == "__main__":
    sys.exit(main())
