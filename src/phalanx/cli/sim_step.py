"""`phalanx sim JOB [--fabric F]`: one step of the plan on a fabric, as a timeline."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.output import note, print_json
from phalanx.errors import Problem, UserError

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.sim.step.breaks import Aftermath
    from phalanx.sim.step.report import StepReport

BREAKS = ("link", "t1", "t0", "nic")  # sim.step.breaks.PARTS, without importing numpy for --help


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the step."""
    group = parser.add_argument_group("one step on a fabric (without --days)")
    group.add_argument("--fabric", metavar="F", help="as clos2:131072x800G/8p/512, a .toml file or a name")
    group.add_argument(
        "--routing", choices=("spray", "ecmp"), default="spray", help="packets over 256 paths, or 16 hashed QPs (spray)"
    )
    group.add_argument("--break", dest="broken", choices=BREAKS, help="also the step when such a part fails")
    group.add_argument("--trace", metavar="FILE.json", help="write the timeline; ui.perfetto.dev opens it")


def check_days(args: argparse.Namespace, where: str) -> None:
    """With --days there is no step to show; raises UserError."""
    given = {"--fabric": args.fabric, "--break": args.broken, "--trace": args.trace}
    problems = [
        Problem(where=where, what=f"{option} belongs to one step, --days to months", fix="leave one of them out")
        for option, value in given.items()
        if value is not None
    ]
    if problems:
        raise UserError(problems)


def run_step(plan: Plan, args: argparse.Namespace) -> int:
    """Simulate, tell, and write the trace."""
    from phalanx.network.fabric.parse import parse_fabric
    from phalanx.sim.step.paths import Transport
    from phalanx.sim.step.report import step_report

    fabric = parse_fabric(args.fabric) if args.fabric is not None else None
    report = step_report(plan, fabric, Transport(edge=args.routing == "spray"))
    found = _broken(plan, report, args.broken)
    if args.trace:
        _write_trace(plan, report, args.trace)
    if args.json:
        print_json(_plain(report, args.broken, found))
    else:
        _show(report, args.broken, found)
    return 0


def _broken(plan: Plan, report: StepReport, kind: str | None) -> list[Aftermath]:
    if kind is None:
        return []
    from phalanx.sim.step.breaks import aftermath

    return [aftermath(plan, report.fabric, kind, edge=edge) for edge in (False, True)]


def _write_trace(plan: Plan, report: StepReport, name: str) -> None:
    from phalanx.files import write_text
    from phalanx.sim.step.trace import MOST_EVENTS, trace_json

    write_text(Path(name), trace_json(report, link=plan.cluster.accelerator.link), fix="name another --trace")
    spans = len(report.timeline.spans)
    cut = f", the first of {spans:,}" if spans > MOST_EVENTS else ""
    note(f"wrote {name}: {min(spans, MOST_EVENTS):,} spans{cut}; ui.perfetto.dev opens it")


def _show(report: StepReport, kind: str | None, found: list[Aftermath]) -> None:
    from phalanx.sim.step.text import render, render_break

    print(render(report))
    if kind is not None:
        print("\n" + render_break(kind, found))


def _plain(report: StepReport, kind: str | None, found: list[Aftermath]) -> dict[str, object]:
    """Everything but the spans, which --trace writes; seconds of every stage by part."""
    made = {item.name: getattr(report, item.name) for item in fields(report) if item.name != "timeline"}
    made["stages_s"] = report.timeline.device_s
    return {**made, **({"break": kind, "aftermath": found} if kind is not None else {})}
