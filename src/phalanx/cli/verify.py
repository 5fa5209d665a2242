"""`phalanx verify`: prove on this machine that a job's layout computes what one process computes."""

from __future__ import annotations

import argparse
import os
import time

from phalanx.cli.options import add_job, add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake

MOST_STEPS = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx verify`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="the layout for this cluster instead of the job's")
    parser.add_argument("--plan", metavar="FILE", help="the layout of this plan, as phalanx plan --out wrote it")
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="optimizer steps compared (5)")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=120.0, help="longest wait for a rank, in seconds (120)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the layout is proven, 1 when something differs."""
    _check_call(args)
    began_s = time.monotonic()
    from phalanx.train.supervise.prepare import load_job, make, need_torch, read_plan

    need_torch()
    resolved = load_job(args.job, overrides=args.overrides, cluster=args.cluster, steps=0)
    plan = read_plan(args.plan, resolved) if args.plan else make(resolved)
    from phalanx.train.models.support import refuse_untrainable
    from phalanx.train.verify.ranks import warm_up
    from phalanx.train.verify.shrink import refuse_own

    refuse_own(plan.job)
    refuse_untrainable(plan.job.model)
    warm_up()  # both processes import torch, side by side
    from phalanx.train.verify.page import render
    from phalanx.train.verify.prove import prove

    proof = prove(
        plan.job,
        plan.layout,
        steps=args.steps,
        on_gpu=plan.cluster.accelerator.family != "cpu",
        limit_s=args.timeout,
        debug=os.environ.get("PHALANX_DEBUG") == "1",
        tell=note,
        began_s=began_s,
    )
    if args.json:
        print_json({"proven": proof.holds, "proof": proof})
    else:
        say(render(proof))
    return 0 if proof.holds else 1


def _check_call(args: argparse.Namespace) -> None:
    if not 1 <= args.steps <= MOST_STEPS:
        raise mistake("phalanx verify", f"--steps {args.steps} is not between 1 and {MOST_STEPS:,}", fix="use 5")
    if not args.timeout > 0:
        raise mistake("phalanx verify", f"--timeout {args.timeout:g} is not above 0", fix="use 120")
    if args.plan and args.cluster:
        raise mistake("phalanx verify", "--plan and --cluster exclude each other", fix="give one of them")
