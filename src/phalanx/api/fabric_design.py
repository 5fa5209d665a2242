"""Fabrics for N GPUs or for a job: every design, the recommended one, the decisions behind it, and its weak points."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.fabric_inputs import named_fabric
from phalanx.api.results import INTERRUPTED, Overrides, PublicResult, Tell, teller, warn
from phalanx.errors import Problem, UserError, mistake
from phalanx.io.codec import json_values
from phalanx.io.limits import MAX_SHOWN_ROWS
from phalanx.units import number_text, parse_count, plural

if TYPE_CHECKING:
    from phalanx.api.jobs import AnyJob
    from phalanx.network.fabric.decisions import Decisions
    from phalanx.network.fabric.design import Design, DesignRequest
    from phalanx.network.fabric.design_verdict import DesignVerdict, Prices
    from phalanx.network.fabric.fabric_types import Fabric, Switch
    from phalanx.plan.plan import Plan

WHERE = "phalanx fabric design"
NIC_GBPS = 800.0  # default of a NIC: ConnectX-8 and similar
# The simulation engine routes at most three (sim.links).
MOST_TIERS = 3
# After this no further design is simulated; 16,384 GPUs take about a second each.
BUDGET_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FabricDesigns(PublicResult):
    """Every fabric for a number of GPUs, the recommended one, and the step of a job on the best of each kind."""

    designs: tuple[Design, ...]
    verdict: DesignVerdict | None
    job: JobSteps | None
    top: int = 6

    @property
    def pick(self) -> Fabric:
        """The recommended fabric."""
        return (self.verdict.pick.design if self.verdict is not None else self.designs[0]).fabric

    def __str__(self) -> str:
        return self.page()

    def page(self, width: int | None = None) -> str:
        """Return the page, folded to `width` columns."""
        from phalanx.network.fabric.design_verdict import show_verdict
        from phalanx.network.fabric.fabric_text import fold_lines, show_designs

        parts = []
        if self.verdict is not None:
            parts.append(show_verdict(self.verdict, width=width) + "\n")
        if self.job is not None:
            parts.append(fold_lines(self.job.text(), width) + "\n")
        return "\n".join([*parts, show_designs(self.designs, top=self.top, width=width)])

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict, the steps of the job, and every design."""
        from phalanx.network.fabric.design_verdict import show_verdict

        steps = self.job
        return {
            "verdict": json_values(self.verdict),
            "verdict_text": show_verdict(self.verdict) if self.verdict is not None else None,
            "job": steps and {"job": steps.job, "layout": steps.layout, "steps": json_values(steps.rows)},
            "designs": [{**json_values(entry), "fabric": fabric_values(entry.fabric)} for entry in self.designs],
        }

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left designs out."""
        return INTERRUPTED if self.job is not None and self.job.interrupted else 0

    def write_csv(self, path: str | Path) -> None:
        """Write every design as a line of CSV."""
        from phalanx.io.files import write_text
        from phalanx.network.fabric.design import designs_csv

        write_text(Path(path), designs_csv(self.designs), fix="name another --csv")

    def save(self, path: str | Path) -> None:
        """Write the recommended fabric to a file that `show`, `simulate` and `phalanx.simulate` read."""
        from phalanx.io.files import write_text
        from phalanx.network.fabric.design import fabric_toml

        write_text(Path(path), fabric_toml(self.pick), fix="name another --save")


def design(
    gpus: int | str | None = None,
    *,
    nic_gbps: float | None = None,
    switch: str | None = None,
    tiers: int | None = None,
    planes: int | None = None,
    oversubscription: float | None = None,
    rails: int | None = None,
    catalogue: str | Path | None = None,
    job: AnyJob | None = None,
    cluster: str | None = None,
    overrides: Overrides = (),
    gpu_hour_usd: float | None = None,
    kwh_usd: float | None = None,
    years: float | None = None,
    recovery_s: float | None = None,
    top: int = 6,
    progress: bool | Tell = False,
) -> FabricDesigns:
    """Design every fabric for `gpus` GPUs with one NIC of `nic_gbps` (800) each, and recommend one.

    With `job` the numbers are those of its cluster, and its step is simulated on the cheapest design of each kind.
    `gpu_hour_usd`, `kwh_usd`, `years` and `recovery_s` weigh the choice. `top` of each oversubscription are printed.

    >>> designs = design(4096, nic_gbps=400)
    >>> designs.pick.hosts >= 4096
    True
    """
    from phalanx.network.fabric.design import DesignRequest, design_fabrics
    from phalanx.network.fabric.design_verdict import choose_design

    tell = teller(progress)
    if top < 1:
        raise mistake(WHERE, f"--top {top} shows nothing", fix="use 1 or more")
    if top > MAX_SHOWN_ROWS:
        raise mistake(WHERE, f"--top {number_text(top)} is above {MAX_SHOWN_ROWS:,}", fix="--csv writes all designs")
    switches: tuple[Switch, ...] = ()
    if catalogue is not None:
        from phalanx.network.fabric.switch_catalogue import read_catalogue

        switches = read_catalogue(Path(catalogue))
    plan = _job_plan(job, overrides, cluster, tell) if job is not None else None
    known_gpus = plan.cluster.devices if plan is not None else None
    known_gbps = round(plan.cluster.nic_bytes_per_s * 8 / 1e9, 6) if plan is not None else None
    if gpus is None and not known_gpus:
        fix = "give --gpus, as --gpus 131072 --nic-gbps 800, or --job JOB, whose cluster says it"
        raise mistake(WHERE, "--gpus is missing", fix=fix)
    request: DesignRequest = DesignRequest(
        gpus=whole_gpus(gpus, WHERE) if gpus is not None else known_gpus or 0,
        nic_gbps=nic_gbps if nic_gbps is not None else known_gbps or NIC_GBPS,
        switch=switch,
        tiers=tiers,
        planes=planes,
        oversubscription=oversubscription,
        rails=rails,
        catalogue=switches,
    )
    weights = {"gpu_hour_usd": gpu_hour_usd, "kwh_usd": kwh_usd, "years": years, "recovery_s": recovery_s}
    if plan is None:
        prices = _unit_prices(weights)
        designs_of_job = design_fabrics(request)
        return FabricDesigns(designs=designs_of_job, verdict=choose_design(designs_of_job, prices), job=None, top=top)
    if request.gpus < plan.layout.devices:
        message = f"{request.gpus:,} GPUs, but the job runs on {plan.layout.devices:,}"
        raise mistake(WHERE, message, fix="leave out --gpus, or name a smaller --cluster")
    from phalanx.sim.months.causes import network_share

    if gpu_hour_usd is None and plan.bill.usd_per_device_hour:
        weights["gpu_hour_usd"] = plan.bill.usd_per_device_hour[1]
    prices = _unit_prices({**weights, "waits": network_share(plan)})
    designs_of_job = design_fabrics(request)
    steps = job_steps(plan, designs_of_job, prices, tell)
    return FabricDesigns(
        designs=designs_of_job, verdict=choose_design(designs_of_job, prices, steps_s=steps.steps_s), job=steps, top=top
    )


def _unit_prices(weights: dict[str, float | None]) -> Prices:
    from phalanx.network.fabric.design_verdict import Prices, check_prices

    prices = Prices(**{name: value for name, value in weights.items() if value is not None})
    check_prices(prices, where=WHERE)
    return prices


def whole_gpus(count: int | str, where: str) -> int:
    """Return a number of GPUs as an integer; `64k` is 64,000, as everywhere in Phalanx."""
    try:
        number = parse_count(str(count))
    except ValueError as error:
        raise mistake(where, f"--gpus: {error}"[:160], fix="write it as 131072") from None
    if number != number // 1 or abs(number) > 1e18:
        raise mistake(where, f"--gpus {str(count)[:40]} is not a whole number of GPUs", fix="write it as 131072")
    return int(number)


def fabric_values(fabric: Fabric) -> dict[str, Any]:
    """Return a fabric as JSON values, with the numbers that follow from its fields."""
    derived = {
        "port_gbps": fabric.port_gbps,
        "switches": fabric.switches,
        "hops": fabric.hops,
        "paths": fabric.paths,
        "hosts_one_switch_away": fabric.hosts_per_t0,
    }
    return {**json_values(fabric), **derived}


# ---- the step of a job -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """The step time on one fabric, and its slowest axis."""

    fabric: str
    step_s: float
    slowest_axis: str  # empty if no axis leaves its fast domain
    slowest_share: float  # of line rate
    crossing_share: float  # share of the flows of all axes that leave their T0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSteps:
    """The steps of a job on all simulated designs."""

    job: str
    layout: str
    rows: tuple[JobStep, ...]
    steps_s: dict[Fabric, float]
    interrupted: bool

    def text(self) -> str:
        """Return a table, fastest first."""
        from phalanx.io.tables import folded_table
        from phalanx.network.fabric.fabric_text import format_percent
        from phalanx.units import format_seconds

        best = min(row.step_s for row in self.rows)
        head = (f"step of {self.job}, {self.layout}", "step", "slower", "flows that leave their T0", "slowest axis")
        rows = [
            (
                f"  {row.fabric}",
                format_seconds(row.step_s),
                format_percent(row.step_s / best - 1),
                format_percent(row.crossing_share),
                f"{row.slowest_axis} at {row.slowest_share:.2f} of line rate" if row.slowest_axis else "-",
            )
            for row in sorted(self.rows, key=lambda row: row.step_s)
        ]
        return folded_table([head, *rows])


def _job_plan(job: AnyJob, overrides: Overrides, cluster: str | None, tell: Tell) -> Plan:
    """Return the job's plan on its own cluster or another one."""
    from phalanx.api.jobs import read_job
    from phalanx.plan.make import make_plan

    plan = make_plan(read_job(job, overrides, where="phalanx.fabric.design"), cluster, allow_unfinishable=True)
    warn((Problem(where="", what=line) for line in plan.warnings), tell)
    return plan


def job_steps(plan: Plan, found: Sequence[Design], prices: Prices, tell: Tell) -> JobSteps:
    """Simulate the step on the cheapest design of each oversubscription, with rails and without, and on one plane.

    Results finished before the time limit or Ctrl-C are kept.
    """
    steps: dict[Fabric, JobStep] = {}
    refused: UserError | None = None
    interrupted = False
    started = time.perf_counter()
    for fabric in _step_candidates(found, prices):
        if steps and time.perf_counter() - started > BUDGET_S:
            tell(f"stopped after {BUDGET_S:.0f} s: the other designs are not compared")
            break
        tell(f"step on {fabric.name}")
        try:
            steps[fabric] = _job_step(plan, fabric)
        except UserError as error:
            # Too large for the engine; other designs may not be.
            refused = error
        except KeyboardInterrupt:
            if not steps:
                raise
            tell(f"stopped by Ctrl-C: {plural(len(steps), 'design')} {'is' if len(steps) == 1 else 'are'} compared")
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


def _step_candidates(found: Sequence[Design], prices: Prices) -> list[Fabric]:
    """Return one design of each kind, the cheapest over its life; full bisection first."""
    from phalanx.network.fabric.design import nominal_ratio
    from phalanx.network.fabric.design_verdict import choose_design

    kinds: dict[tuple[float, int, bool], list[Design]] = {}
    for entry in found:
        fabric = entry.fabric
        if fabric.tiers <= MOST_TIERS:
            kinds.setdefault((nominal_ratio(fabric), fabric.rails, fabric.planes == 1), []).append(entry)
    picks = []
    for kind in sorted(kinds, key=lambda kind_key: (kind_key[2], kind_key[0], kind_key[1])):
        choice = choose_design(kinds[kind], prices)
        picks.append(choice.pick.design.fabric if choice is not None else kinds[kind][0].fabric)
    return picks


def _job_step(plan: Plan, fabric: Fabric) -> JobStep:
    from phalanx.sim.step.step_report import step_report

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


# ---- decisions, show -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FabricDecisions(PublicResult):
    """The three decisions behind a fabric, in numbers: planes, paths and recovery."""

    decisions: Decisions

    def __str__(self) -> str:
        return self.page()

    def page(self, width: int | None = None) -> str:
        """Return the page, folded to `width` columns."""
        from phalanx.network.fabric.decisions_text import show_decisions

        return show_decisions(self.decisions, width=width)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {**json_values(self.decisions), "fabric": fabric_values(self.decisions.fabric)}

    def picture(self) -> str:
        """Return the three decisions as an SVG."""
        from phalanx.network.fabric.decisions_picture import decisions_svg

        return decisions_svg(self.decisions)

    def _repr_html_(self) -> str:
        return self.picture()


def decisions(
    gpus: int | str | None = None,
    *,
    fabric: str | Path | None = None,
    nic_gbps: float | None = None,
    switch: str | None = None,
    planes: int | None = None,
    paths: int = 256,
    recovery_s: float | None = None,
    restart_s: float | None = None,
    progress: bool | Tell = False,
) -> FabricDecisions:
    """Compute the decisions on planes, paths and recovery, for a number of GPUs or for an existing fabric.

    >>> print(decisions(512))  # doctest: +ELLIPSIS
    1. 8 planes of 512 ports reach 131,072 hosts in 2 tiers, one plane of 64 only 2,048
    ...
    """
    from phalanx.network.fabric.decisions import BOX, decisions_of
    from phalanx.network.fabric.decisions import fabric_decisions as decide
    from phalanx.network.fabric.failure_budget import EDGE_RECOVERY_S, RESTART_S

    tell = teller(progress)
    where = "phalanx fabric decisions"
    bypass_s = EDGE_RECOVERY_S if recovery_s is None else recovery_s
    start_s = RESTART_S[0] if restart_s is None else restart_s
    if fabric is not None:
        options = {"--gpus": gpus, "--nic-gbps": nic_gbps, "--switch": switch, "--planes": planes}
        for option, value in options.items():
            if value is not None:
                raise mistake(where, f"--fabric already says {option}", fix="leave one of them out")
        result = decisions_of(named_fabric(str(fabric), tell), paths=paths, recovery_s=bypass_s, restart_s=start_s)
        return FabricDecisions(decisions=result)
    if gpus is None:
        raise mistake(where, "--gpus is missing", fix="give --gpus 131072, or --fabric F")
    result = decide(
        whole_gpus(gpus, where),
        nic_gbps=800.0 if nic_gbps is None else nic_gbps,
        box=switch if switch is not None else BOX,
        planes=planes,
        paths=paths,
        recovery_s=bypass_s,
        restart_s=start_s,
    )
    return FabricDecisions(decisions=result)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FabricPage(PublicResult):
    """One fabric: its parts, weak points and failures per day."""

    fabric: Fabric

    def __str__(self) -> str:
        return self.page()

    def page(self, width: int | None = None) -> str:
        """Return the page, folded to `width` columns."""
        from phalanx.network.fabric.fabric_text import show_fabric

        return show_fabric(self.fabric, width=width)

    def to_dict(self) -> dict[str, Any]:
        """Return parts, bill, the loss by each failure, and failures per day."""
        from phalanx.network.fabric.fabric_bill import fabric_bill, failure_loss
        from phalanx.network.fabric.failure_budget import failure_budget

        shown_fabric = self.fabric
        values = {
            "bill": fabric_bill(shown_fabric),
            "loss": failure_loss(shown_fabric),
            "budget": failure_budget(shown_fabric),
        }
        return {"fabric": fabric_values(shown_fabric), **json_values(values)}


def show(fabric: str | Path, *, progress: bool | Tell = False) -> FabricPage:
    """Return one fabric by its short form, file or name.

    >>> show("clos2:131072x800G/8p/512").fabric.planes
    8
    """
    tell = teller(progress)
    return FabricPage(fabric=named_fabric(str(fabric), tell))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FabricCatalogue(PublicResult):
    """The fabrics and switches that have names."""

    fabrics: dict[str, tuple[str, str]]  # name -> short form, source
    switches: tuple[Switch, ...]

    def __str__(self) -> str:
        return self.page()

    def page(self, width: int | None = None) -> str:
        """Return the page, folded to `width` columns."""
        from phalanx.io.tables import folded_table
        from phalanx.network.fabric.fabric_text import fold_lines, money_range

        fabrics = [(f"  {name}", spec, source) for name, (spec, source) in self.fabrics.items()]
        boxes = [
            (
                f"  {switch.name}",
                switch.kind,
                f"{switch.watts:,.0f} W" if switch.watts else "unknown",
                money_range(switch.usd),
                switch.evidence,
                switch.also,
            )
            for switch in self.switches
        ]
        head = "switches (power without optics, list price, how far both can be trusted)"
        return fold_lines(f"fabrics\n{folded_table(fabrics, left=3)}\n\n{head}\n{folded_table(boxes, left=2)}", width)

    def to_dict(self) -> dict[str, Any]:
        """Return the names and their definitions."""
        names = [{"name": name, "spec": spec, "source": source} for name, (spec, source) in self.fabrics.items()]
        return {"fabrics": names, "switches": json_values(self.switches)}


def catalogue() -> FabricCatalogue:
    """Return the fabrics and switches that have names.

    >>> sorted(catalogue().fabrics)[0]
    'fat-tree-64k'
    """
    from phalanx.network.fabric.switch_catalogue import known_switches, named_fabrics

    return FabricCatalogue(fabrics=dict(named_fabrics()), switches=tuple(known_switches()))
