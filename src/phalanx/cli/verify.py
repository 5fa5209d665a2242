"""`phalanx verify`: prove on this machine that a job's layout computes what one process computes."""

from __future__ import annotations

import argparse
import os
import time

from phalanx.cli.options import add_job, add_json, add_ranks_per_gpu, take_ranks_per_gpu
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake
from phalanx.hardware.local import MOST_RANKS_PER_GPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.verify.terms import Terms

MOST_STEPS = 1000
FORMATS = {"float64": "fp64", "fp32": "fp32", "bf16": "bf16", "fp8": "fp8"}
TIMEOUT_S, LONG_TIMEOUT_S = 120.0, 600.0  # compiling for 8 ranks on 2 cores takes minutes


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx verify`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="the layout for this cluster instead of the job's")
    parser.add_argument("--plan", metavar="FILE", help="the layout of this plan, as phalanx plan --out wrote it")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks run: cuda is over NCCL (cpu)"
    )
    add_ranks_per_gpu(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks, and start again from the compile cache"
    )
    parser.add_argument(
        "--precision",
        choices=tuple(FORMATS),
        default="float64",
        help="arithmetic of both sides; float64 proves to 1e-12, the others to their rounding (float64)",
    )
    parser.add_argument(
        "--full-size", action="store_true", help="the model, its sequences and its layout as they are, not made smaller"
    )
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="optimizer steps compared (5)")
    parser.add_argument(
        "--timeout", metavar="S", type=float, help="longest wait for a rank, in seconds (120; compiled or whole 600)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the layout is proven, 1 when something differs."""
    _check_call(args)
    if not args.plan:  # a plan is settled; how many ranks share a GPU here is no part of it
        take_ranks_per_gpu(args)
    began_s = time.monotonic()
    from phalanx.train.prepare import load_job, make, need_torch, read_plan

    need_torch()
    resolved = load_job(args.job, overrides=args.overrides, cluster=args.cluster, steps=0)
    plan = read_plan(args.plan, resolved) if args.plan else make(resolved)
    from phalanx.train.models.support import refuse_untrainable
    from phalanx.train.verify.ranks import warm_up
    from phalanx.train.verify.small_trial import refuse_own_model

    refuse_own_model(plan.job)
    refuse_untrainable(plan.job.model)
    terms, gpus = _terms(plan, args)
    warm_up()  # both processes import torch, side by side
    from phalanx.train.verify.proof import prove_layout, render_proof

    proof = prove_layout(
        plan.job,
        plan.layout,
        steps=args.steps,
        terms=terms,
        on_gpu=plan.cluster.accelerator.family != "cpu",
        gpus=gpus,
        limit_s=args.timeout or (LONG_TIMEOUT_S if args.compile or args.full_size else TIMEOUT_S),
        debug=os.environ.get("PHALANX_DEBUG") == "1",
        tell=note,
        began_s=began_s,
    )
    if args.json:
        print_json({"proven": proof.holds, "proof": proof})
    else:
        say(render_proof(proof))
    return 0 if proof.holds else 1


def _terms(plan: Plan, args: argparse.Namespace) -> tuple[Terms, int]:
    """How it is proven, and on how many GPUs; what speaks against that is said before torch is imported."""
    from phalanx.hardware.local import allowed_ranks
    from phalanx.train.prepare import check_gpus
    from phalanx.train.verify.terms import RANKS, Terms, refuse_terms

    gpus, ranks = 0, RANKS
    if args.device == "cuda":
        allowed = max(args.ranks_per_gpu or 1, allowed_ranks(plan.job.train.ranks_per_gpu, os.environ))
        gpus = check_gpus(allowed, where="--device cuda", tell=note)
        ranks = gpus * allowed
    terms = Terms(
        device=args.device,
        precision=FORMATS[args.precision],
        compile=args.compile,
        full_size=args.full_size,
        ranks=ranks,
    )
    refuse_terms(terms, layout_ranks=plan.layout.devices)
    return terms, gpus


def _check_call(args: argparse.Namespace) -> None:
    if not 1 <= args.steps <= MOST_STEPS:
        raise mistake("phalanx verify", f"--steps {args.steps} is not between 1 and {MOST_STEPS:,}", fix="use 5")
    if args.timeout is not None and not args.timeout > 0:
        raise mistake("phalanx verify", f"--timeout {args.timeout:g} is not above 0", fix="use 120")
    if args.ranks_per_gpu is not None and args.device == "cpu":
        raise mistake(
            "phalanx verify",
            f"--ranks-per-gpu {args.ranks_per_gpu} without --device cuda has no effect",
            fix="add --device cuda, or leave it out",
        )
    if args.ranks_per_gpu is not None and not 1 <= args.ranks_per_gpu <= MOST_RANKS_PER_GPU:
        raise mistake(
            "phalanx verify",
            f"--ranks-per-gpu {args.ranks_per_gpu} is not between 1 and {MOST_RANKS_PER_GPU}",
            fix="use 4",
        )
    if args.plan and args.cluster:
        raise mistake("phalanx verify", "--plan and --cluster exclude each other", fix="give one of them")
