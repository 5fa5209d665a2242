"""`phalanx trace`: the real training step of ranks of a job of any size, without the ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.options import add_job, add_json
from phalanx.cli.output import note, print_json, say, warn
from phalanx.errors import mistake
from phalanx.io.files import write_text

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.tracing.hang_check import TraceHang
    from phalanx.train.tracing.log import RankTrace
    from phalanx.train.tracing.trace_report import PlanLine, TracedFit
    from phalanx.train.tracing.traced_ranks import TracedStep

MOST_RANKS = 64  # of --all-ranks: a minute or two each for a large model


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx trace`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="trace on this cluster instead of the job's, as 8xH100:16")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", metavar="R", type=int, default=None, help="the rank to trace (0)")
    which.add_argument(
        "--all-stages", action="store_true", help="one rank of every pipeline stage, and whether they would meet"
    )
    which.add_argument("--all-ranks", action="store_true", help=f"every rank of a job of up to {MOST_RANKS}")
    parser.add_argument(
        "--against-plan", action="store_true", help="all stages, beside the plan, and whether they fit; exit 1 if off"
    )
    parser.add_argument("--workers", metavar="N", type=int, default=0, help="ranks traced at a time (one per core)")
    parser.add_argument("--allow-code", action="store_true", help="let the job import a model of your own")
    parser.add_argument("--log", metavar="FILE", help="write every operation of every traced rank, one JSON per line")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Trace, print, and exit 1 when ranks would not meet, the plan is off or does not fit."""
    from phalanx.train.prepare import check_code, need_torch

    need_torch()
    if args.workers < 0:
        raise mistake("phalanx trace", f"--workers {args.workers} is below 0", fix="use 1 or more")
    plan = _plan(args)
    check_code(plan.job, allowed=args.allow_code)
    from phalanx.train.tracing.hang_check import find_hang
    from phalanx.train.tracing.traced_ranks import TracedStep, trace_ranks

    step = TracedStep.of(
        plan.job, plan.layout, on_gpu=plan.cluster.accelerator.family != "cpu", allow_code=args.allow_code
    )
    ranks = _ranks(args, plan)
    _say_what_differs(step)
    note(f"{plan.job.name}: {plan.layout.name}, {len(ranks)} of {plan.layout.devices:,} ranks")
    traces = trace_ranks(step, ranks, workers=args.workers, done=_progress if len(ranks) > 1 else lambda _: None)
    if args.log:
        write_text(Path(args.log), "".join(_log_lines(traces)), fix="name another --log")
    hang = find_hang(traces) if len(traces) > 1 else None
    lines, fit = _against(plan, traces) if args.against_plan else ([], None)
    _print(args, plan, traces, hang, lines, fit)
    return 1 if hang is not None or not all(line.agrees for line in lines) or (fit and not fit.fits) else 0


def _plan(args: argparse.Namespace) -> Plan:
    from phalanx.hardware.cluster import resolve
    from phalanx.job.load import load
    from phalanx.plan.make import plan as make_plan
    from phalanx.train.prepare import with_absolute_files

    resolved = with_absolute_files(load(args.job, overrides=args.overrides))
    warn(resolved.warnings)
    return make_plan(resolved, resolve(args.cluster) if args.cluster is not None else None)


def _ranks(args: argparse.Namespace, plan: Plan) -> list[int]:
    from phalanx.train.tracing.traced_ranks import check_rank, stage_ranks

    if args.all_ranks:
        if plan.layout.devices > MOST_RANKS:
            raise mistake(
                "phalanx trace --all-ranks",
                f"{plan.layout.name} has {plan.layout.devices:,} ranks, more than {MOST_RANKS}",
                why="only pipeline stages make ranks differ",
                fix="use --all-stages",
            )
        return list(range(plan.layout.devices))
    if args.all_stages or args.against_plan:
        return stage_ranks(plan.layout)
    rank = args.rank or 0
    check_rank(rank, plan.layout)
    return [rank]


def _say_what_differs(step: TracedStep) -> None:
    """Where the traced step is not quite the one a GPU runs."""
    if step.settings.compute == "fp8":
        note("fp8 is traced as bf16: a CPU has no fp8 products")
    if step.settings.layout.offload == "activations":
        note("offloaded activations are counted on the device: on a CPU host and device are one")
    if step.settings.layout.compression != "none":
        note("compressed gradient exchange of replicated weights runs in a thread of its own and is not seen")


def _progress(trace: RankTrace) -> None:
    note(f"rank {trace.rank:,} traced in {trace.seconds:.0f} s")


def _against(plan: Plan, traces: Sequence[RankTrace]) -> tuple[list[PlanLine], TracedFit]:
    from phalanx.plan.request import request_from_job
    from phalanx.train.tracing.trace_report import against_plan, traced_fit

    ask, _ = request_from_job(plan.job, plan.cluster)
    return against_plan(ask, plan.layout, traces), traced_fit(plan.memory, traces)


def _log_lines(traces: Sequence[RankTrace]) -> Iterator[str]:
    for trace in traces:
        for index, one in enumerate(trace.operations):
            value = {
                "rank": trace.rank,
                "index": index,
                "kind": one.kind,
                "bytes": one.nbytes,
                "dtype": one.dtype,
                "axis": one.group.axis,
                "ranks": len(one.group.ranks),
                "first_rank": one.group.ranks[0],
                "stride": one.group.stride,
                "phase": one.phase,
            }
            if one.is_message:
                value |= {"peer": one.peer, "batch": one.batch}
            yield json.dumps(value) + "\n"


def _print(
    args: argparse.Namespace,
    plan: Plan,
    traces: Sequence[RankTrace],
    hang: TraceHang | None,
    lines: Sequence[PlanLine],
    fit: TracedFit | None,
) -> None:
    from phalanx.train.tracing import trace_report

    if args.json:
        print_json(_as_json(plan, traces, hang, lines, fit))
        return
    if len(traces) == 1:
        say(trace_report.render_rank(traces[0]))
    else:
        fullest = max(traces, key=lambda trace: trace.peak.nbytes)
        say("\n".join(["RANKS", trace_report.SHORT_HEAD, *(trace_report.render_short(trace) for trace in traces), ""]))
        say("FULLEST: " + trace_report.render_rank(fullest) + "\n")
        say(f"HANG: {hang.render()}" if hang is not None else "the traced ranks meet in every operation")
    if lines:
        say("\n" + trace_report.render_against(lines))
    if fit is not None:
        say("\n" + trace_report.render_fit(fit, recompute=plan.layout.recompute))


def _as_json(
    plan: Plan, traces: Sequence[RankTrace], hang: TraceHang | None, lines: Sequence[PlanLine], fit: TracedFit | None
) -> dict[str, object]:
    from phalanx.cli.output import plain
    from phalanx.train.tracing.log import message_rows

    ranks = [
        {
            "rank": trace.rank,
            "place": {axis: list(place) for axis, place in trace.place.items()},
            "stages": trace.stages,
            "layers": trace.layers,
            "operations": len(trace.operations),
            "messages": [plain(row) for row in message_rows(trace)],
            "flops": trace.flops,
            "peak": plain(trace.peak),
            "seconds": trace.seconds,
            "rss_bytes": trace.rss_bytes,
        }
        for trace in traces
    ]
    return {
        "layout": plan.layout.name,
        "devices": plan.layout.devices,
        "ranks": ranks,
        "hang": None if hang is None else hang.render(),
        "fit": None if fit is None else plain(fit) | {"fits": fit.fits},  # type: ignore[operator]
        "against_plan": [plain(line) | {"difference": line.difference, "agrees": line.agrees} for line in lines],  # type: ignore[operator]
    }
