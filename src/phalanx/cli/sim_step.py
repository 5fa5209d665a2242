"""`phalanx sim JOB [--fabric F]`: one step of the plan on a fabric, as a timeline."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli import sim_months
from phalanx.cli.fabric_files import named_fabric
from phalanx.cli.output import note, print_json, say
from phalanx.errors import Problem, UserError
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.plan.plan import Plan
    from phalanx.sim.step.breaks import Aftermath
    from phalanx.sim.step.report import StepReport

WHERE = "phalanx sim"
BREAKS = ("link", "t1", "t0", "nic", "transceiver", "grey")  # sim.step.breaks.PARTS, without numpy for --help
ROUTINGS = ("spray", "ecmp")
MOST_OUTAGE_S = 86400.0
DEVICES_PER_S = 30_000  # on one busy core, of a step on a fabric (docs/simulation/step.md)


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the step."""
    group = parser.add_argument_group("one step on a fabric (without --days)")
    group.add_argument("--routing", choices=ROUTINGS, help="packets over 256 paths, or 16 hashed QPs (spray)")
    group.add_argument("--break", dest="broken", choices=BREAKS, help="also the step when such a part fails")
    group.add_argument("--outage", metavar="S", type=float, help="seconds until it is back (docs/simulation/step.md)")
    group.add_argument("--trace", metavar="FILE.json", help="write the timeline; ui.perfetto.dev opens it")


def check(args: argparse.Namespace) -> None:
    """Options that have no effect on one step; raises UserError."""
    problems = [
        Problem(where=WHERE, what=f"{option} belongs to months, not to one step", fix="add --days 90, or leave it out")
        for option, (name, usual) in sim_months.OPTIONS.items()
        if getattr(args, name) != usual
    ]
    if args.outage is not None and args.broken is None:
        problems.append(Problem(where=WHERE, what="--outage without --break: nothing fails", fix="add --break nic"))
    elif args.outage is not None and not 0 < args.outage <= MOST_OUTAGE_S:
        what = f"--outage {args.outage:g} is out of range"
        problems.append(Problem(where=WHERE, what=what, fix=f"use seconds above 0, up to {MOST_OUTAGE_S:g}"))
    if problems:
        raise UserError(problems)


def run_step(plan: Plan, args: argparse.Namespace) -> int:
    """Simulate, tell, and write the trace. Ctrl-C during --break leaves the step."""
    from phalanx.sim.step.paths import Transport
    from phalanx.sim.step.report import step_report

    fabric = named_fabric(args.fabric) if args.fabric is not None else None
    _check_break(plan, fabric, args)
    _announce(plan, args)
    report = step_report(plan, fabric, Transport(edge=args.routing != "ecmp"))
    if args.trace:
        _write_trace(plan, report, args.trace)
    found, code = _broken(plan, report, args)
    if args.json:
        print_json(_plain(report, args.broken, found))
    else:
        _show(report, args.broken, found)
    return code


def _check_break(plan: Plan, fabric: Fabric | None, args: argparse.Namespace) -> None:
    """Before anything is simulated: a fabric may lack the part."""
    from phalanx.sim.step.breaks import broken
    from phalanx.sim.step.paths import derived_fabric

    if args.broken is not None:
        broken(fabric or derived_fabric(plan.layout.devices, plan.cluster.nic_bytes_per_s), args.broken)


def _announce(plan: Plan, args: argparse.Namespace) -> None:
    seconds = plan.layout.devices / DEVICES_PER_S * (3 if args.broken else 1)
    if seconds > sim_months.TELL_S and args.fabric is not None:
        note(f"{plural(plan.layout.devices, 'device')} on {args.fabric}: about {seconds:.0f} s")


def _broken(plan: Plan, report: StepReport, args: argparse.Namespace) -> tuple[list[Aftermath], int]:
    """Both ways of recovering, or those that Ctrl-C left finished."""
    if args.broken is None:
        return [], 0
    from phalanx.sim.step.breaks import aftermath

    found: list[Aftermath] = []
    try:
        for edge in (False, True):
            healthy = report if report.edge == edge else None
            found.append(aftermath(plan, report.fabric, args.broken, edge=edge, outage_s=args.outage, healthy=healthy))
    except KeyboardInterrupt:
        note("stopped by Ctrl-C: the step is finished, and shown; what a failure does to it is not")
        return found, sim_months.INTERRUPTED
    return found, 0


def _write_trace(plan: Plan, report: StepReport, name: str) -> None:
    from phalanx.io.files import write_text
    from phalanx.sim.step.trace import MOST_EVENTS, trace_json

    write_text(Path(name), trace_json(report, link=plan.cluster.accelerator.link), fix="name another --trace")
    spans = len(report.timeline.spans)
    cut = f", the first of {spans:,}" if spans > MOST_EVENTS else ""
    note(f"wrote {name}: {min(spans, MOST_EVENTS):,} spans{cut}; ui.perfetto.dev opens it")


def _show(report: StepReport, kind: str | None, found: list[Aftermath]) -> None:
    from phalanx.sim.step.step_text import break_text, step_text

    say(step_text(report))
    if kind is not None and found:
        say("\n" + break_text(kind, found))


def _plain(report: StepReport, kind: str | None, found: list[Aftermath]) -> dict[str, object]:
    """Everything but the spans, which --trace writes; seconds of every stage by part."""
    made = {item.name: getattr(report, item.name) for item in fields(report) if item.name != "timeline"}
    made["stages_s"] = report.timeline.device_s
    return {**made, **({"break": kind, "aftermath": found} if kind is not None else {})}
