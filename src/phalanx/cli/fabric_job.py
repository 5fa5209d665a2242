"""The step of a job on the designs that could be chosen for it: which oversubscription is harmless to this job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.cli.output import note, warn
from phalanx.errors import Problem, UserError, mistake

if TYPE_CHECKING:
    from phalanx.network.fabric.design import Design
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.network.fabric.verdict import Prices
    from phalanx.plan.plan import Plan

WHERE = "phalanx fabric design"
MOST_TIERS = 3  # what the engine routes (sim.links)
BUDGET_S = 60.0  # after this no further design is begun; 16,384 GPUs take about a second each


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """The step on one shape of fabric, and how its slowest axis fares."""

    fabric: str
    step_s: float
    slowest_axis: str  # empty where no axis leaves its fast domain
    slowest_share: float  # of line rate
    crossing_share: float  # flows of all axes that leave their T0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSteps:
    """All that were simulated."""

    job: str
    layout: str
    rows: tuple[JobStep, ...]
    steps_s: dict[Fabric, float]
    interrupted: bool

    def text(self) -> str:
        """A table, quickest first."""
        from phalanx.network.fabric.fabric_text import percent, table
        from phalanx.units import format_seconds

        best = min(row.step_s for row in self.rows)
        head = (f"step of {self.job}, {self.layout}", "step", "slower", "flows that leave their T0", "slowest axis")
        rows = [
            (
                f"  {row.fabric}",
                format_seconds(row.step_s),
                percent(row.step_s / best - 1),
                percent(row.crossing_share),
                f"{row.slowest_axis} at {row.slowest_share:.2f} of line rate" if row.slowest_axis else "-",
            )
            for row in sorted(self.rows, key=lambda one: one.step_s)
        ]
        return table([head, *rows])


def job_plan(job: str, overrides: list[str], cluster: str | None) -> Plan:
    """The job's plan on its cluster or another."""
    from phalanx.hardware.cluster import resolve
    from phalanx.job.load import load
    from phalanx.plan.make import plan

    made = plan(load(job, overrides=overrides), resolve(cluster) if cluster is not None else None, hopeless=True)
    warn(Problem(where="", what=line) for line in made.warnings)
    return made


def job_steps(plan: Plan, found: Sequence[Design], prices: Prices) -> JobSteps:
    """The step on the cheapest design of each oversubscription, with rails and without, and on one plane.

    What is finished when the time is up or Ctrl-C comes is kept.
    """
    steps: dict[Fabric, JobStep] = {}
    refused: UserError | None = None
    interrupted = False
    started = time.perf_counter()
    for fabric in _candidates(found, prices):
        if steps and time.perf_counter() - started > BUDGET_S:
            note(f"stopped after {BUDGET_S:.0f} s: the other designs are not compared")
            break
        note(f"step on {fabric.name}")
        try:
            steps[fabric] = _step(plan, fabric)
        except UserError as error:  # too large for the engine: the others may not be
            refused = error
        except KeyboardInterrupt:
            if not steps:
                raise
            note(f"stopped by Ctrl-C: {len(steps)} designs are compared")
            interrupted = True
            break
    if not steps:
        raise refused or mistake(
            WHERE, "no design is small enough to simulate", fix="leave out --job, or use --tiers 3"
        )
    return JobSteps(
        job=plan.job.name,
        layout=plan.layout.name,
        rows=tuple(steps.values()),
        steps_s={fabric: row.step_s for fabric, row in steps.items()},
        interrupted=interrupted,
    )


def _candidates(found: Sequence[Design], prices: Prices) -> list[Fabric]:
    """One of each kind, by what it costs over its life; full bisection first."""
    from phalanx.network.fabric.design import nominal_ratio
    from phalanx.network.fabric.verdict import choose_design

    kinds: dict[tuple[float, int, bool], list[Design]] = {}
    for one in found:
        fabric = one.fabric
        if fabric.tiers <= MOST_TIERS:
            kinds.setdefault((nominal_ratio(fabric), fabric.rails, fabric.planes == 1), []).append(one)
    picks = []
    for kind in sorted(kinds, key=lambda one: (one[2], one[0], one[1])):
        choice = choose_design(kinds[kind], prices)
        picks.append(choice.pick.design.fabric if choice is not None else kinds[kind][0].fabric)
    return picks


def _step(plan: Plan, fabric: Fabric) -> JobStep:
    from phalanx.sim.step.report import step_report

    report = step_report(plan, fabric)
    slowest = min(report.paths, key=lambda path: path.share, default=None)
    flows = sum(path.flows for path in report.paths)
    return JobStep(
        fabric=f"{fabric.name} ({fabric.switch.box})",
        step_s=report.step_s,
        slowest_axis=slowest.axis if slowest is not None else "",
        slowest_share=slowest.share if slowest is not None else 1.0,
        crossing_share=sum(path.crossing for path in report.paths) / flows if flows else 0.0,
    )
