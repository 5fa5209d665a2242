"""How often a published figure lies in the range that other sites give: every site left out in turn.

Run: python benchmarks/site_spread.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
About two minutes on one core: every run of a job is planned and simulated as `phalanx sim JOB --days N` does.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.failures import (
    SiteSpread,
    host_failure_spread,
    known_rate,
    recovery_spread,
    repair_spread,
    site_figures,
)
from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import REPAIR_S
from phalanx.sim.months.forecast import forecast_spread, site_range, site_spreads
from phalanx.sim.months.policy import months_policy
from phalanx.sim.months.simulate_run import simulate_runs

EXAMPLES = Path(__file__).parent.parent / "examples"
LLAMA, BLOOM = "llama-3.1-405b-16384xH100.toml", "bloom-176b-48x8xA100.toml"
GPU_SHARE = 0.6253  # of Llama 3's interruptions: 262 of 419 by devices and their memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A published figure of a job: interruptions of `days`, or the share of time that trained.

    `sites` are left out. Recovery times that the source states are `detect_s` and `restart_s`; 0 is not stated.
    """

    name: str
    sites: tuple[str, ...]
    job: str
    cluster: str
    days: float
    quantity: str
    value: float
    at_least: bool = False
    detect_s: float = 0.0
    restart_s: float = 0.0
    scale: float = 1.0  # of our count, as the share of GPU failures in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One fact beside what we say without its site."""

    name: str
    value: float
    at_least: bool
    point: float
    low: float
    high: float
    luck: tuple[float, float] | None
    shown_as: str

    @property
    def covered(self) -> bool:
        """In the range; a lower bound where the range reaches above it."""
        return self.high >= self.value if self.at_least else self.low <= self.value <= self.high

    @property
    def within_luck(self) -> bool:
        """What 0.6 printed: the spread of runs at one rate."""
        if self.luck is None:
            return False
        return self.luck[1] >= self.value if self.at_least else self.luck[0] <= self.value <= self.luck[1]


FACTS = (
    Fact(name="Llama 3 405B: interruptions in 54 days", sites=("Llama 3 405B",), job=LLAMA, cluster="8xH100:2048",
         days=54, quantity="interruptions", value=419),
    Fact(name="Llama 3 405B: effective time", sites=("Llama 3 405B",), job=LLAMA, cluster="8xH100:2048", days=54,
         quantity="effective", value=0.90, at_least=True),
    Fact(name="OPT-175B: restarts in 57 days", sites=("OPT-175B",), job=BLOOM, cluster="8xA100:128", days=57,
         quantity="interruptions", value=90),
    Fact(name="OPT-175B: 33 of 57 days trained", sites=("OPT-175B",), job=BLOOM, cluster="8xA100:128", days=57,
         quantity="effective", value=33 / 57),
    Fact(name="Meta RSC-1, jobs of 1,024: failures in 30 days", sites=("Meta RSC-1",), job=BLOOM, cluster="8xA100:128",
         days=30, quantity="interruptions", value=30 * 24 / 7.9),
    Fact(name="BLOOM-176B: GPU failures in 15 weeks", sites=("BLOOM-176B",), job=BLOOM, cluster="8xA100:48", days=105,
         quantity="interruptions", value=15, scale=GPU_SHARE),
    Fact(name="MegaScale: restarts in several (six) weeks", sites=(), job=BLOOM, cluster="8xA100:1250", days=42,
         quantity="interruptions", value=100, at_least=True, detect_s=600, restart_s=900),
    Fact(name="MegaScale: effective time", sites=(), job=BLOOM, cluster="8xA100:1250", days=42, quantity="effective",
         value=0.90, at_least=True, detect_s=600, restart_s=900),
    Fact(name="ByteRobust, 9,600 GPUs, 90 days: effective time", sites=("ByteRobust fleet",), job=LLAMA,
         cluster="8xH100:1200", days=90, quantity="effective", value=0.97, detect_s=10, restart_s=65),
    Fact(name="FT-HSDP, 100,000 GPUs, synchronous, 600 s: effective time", sites=("FT-HSDP reference run",), job=LLAMA,
         cluster="8xH100:12500", days=30, quantity="effective", value=0.44, detect_s=30, restart_s=570),
    Fact(name="FT-HSDP, 100,000 GPUs, 180 s: effective time", sites=("FT-HSDP reference run",), job=LLAMA,
         cluster="8xH100:12500", days=30, quantity="effective", value=0.80, detect_s=30, restart_s=150),
    Fact(name="AWS HLAT, 4,096 accelerators: effective time", sites=(), job=LLAMA, cluster="8xH100:512", days=30,
         quantity="effective", value=0.9881),
)  # fmt: skip


@functools.cache
def planned(job: str, cluster: str, detect_s: float, restart_s: float) -> Plan:
    """The example's job on the fact's cluster, a sequence per host or more."""
    hosts = int(cluster.partition(":")[2])
    overrides = [f"batch.global_sequences={max(16, hosts)}"]
    if detect_s:
        overrides += [f"fault.detect_s={detect_s}", f"fault.restart_s={restart_s}"]
    return make_plan(load(EXAMPLES / job, overrides=overrides), cluster, allow_unfinishable=True)


def simulated(fact: Fact) -> Line:
    """A fact beside the simulation that does not know its site."""
    plan = planned(fact.job, fact.cluster, fact.detect_s, fact.restart_s)
    made = months_policy(plan)
    rate = host_failure_spread(plan.cluster.accelerator, plan.cluster.host_devices, without=fact.sites)
    recovery = site_spreads(plan, made)[1] if fact.detect_s else recovery_spread(without=fact.sites)
    found = site_range(plan, made, days=fact.days, seed=0, among=(rate, recovery, repair_spread(REPAIR_S)))
    assert found is not None
    outcomes = list(simulate_runs(made, days=fact.days, count=20, seed=0))
    if fact.quantity == "effective":
        one, (low, high) = forecast_spread([each.effective for each in outcomes]), found.effective
    else:
        one, (low, high) = forecast_spread([each.unexpected for each in outcomes]), found.interruptions
    return Line(
        name=fact.name,
        value=fact.value,
        at_least=fact.at_least,
        point=fact.scale * one.mean,
        low=fact.scale * low,
        high=fact.scale * high,
        luck=(fact.scale * one.run_low, fact.scale * one.run_high),
        shown_as=".1%" if fact.quantity == "effective" else ",.0f",
    )


def from_spread(name: str, value: float, among: SiteSpread, point: float) -> Line:
    """A rate or a time beside the spread of the others."""
    low, high = among.interval
    form = ",.0f" if high > 1 else ".2g"
    return Line(
        name=name, value=value, at_least=False, point=point, low=low, high=high, luck=None, shown_as=form
    )  # fmt: skip


def rate_lines() -> Iterator[Line]:
    """Every figure of the table, its site left out; rates are per host of 8 GPUs and day, recoveries in seconds."""
    h100 = find_accelerator("H100")
    simulated_too = {"Llama 3 405B", "OPT-175B", "BLOOM-176B"}
    for one in site_figures():
        without: Collection[str] = (one.site,)
        if one.quantity == "recovery_s":
            yield from_spread(f"{one.site}: recovery, s", one.value, recovery_spread(without=without), 330.0)
        elif one.kind == "gpu" and one.site not in simulated_too and one.devices != 1024:
            usual = host_failure_spread(h100, 8, without=without)
            yield from_spread(f"{one.site}: failures per host and day", 8 * one.per_device_day, usual, math.nan)


def table(lines: Sequence[Line]) -> list[str]:
    """Markdown."""
    rows = ["| figure | published | ours | luck alone | 80 % of sites | covered |", "|---|---|---|---|---|---|"]
    for one in lines:
        form = one.shown_as
        luck = f"{one.luck[0]:{form}} to {one.luck[1]:{form}}" if one.luck else ""
        point = "" if math.isnan(one.point) else f"{one.point:{form}}"
        at_least = "> " if one.at_least else ""
        mark = "yes" if one.covered else "**no**"
        told = f"{one.low:{form}} to {one.high:{form}}"
        rows.append(f"| {one.name} | {at_least}{one.value:{form}} | {point} | {luck} | {told} | {mark} |")
    return rows


def tally(lines: Sequence[Line]) -> str:
    """Covered of all."""
    return f"{sum(one.covered for one in lines)} of {len(lines)}"


def page() -> str:
    """The dated page."""
    jobs, figures = [simulated(fact) for fact in FACTS], list(rate_lines())
    everything = [*jobs, *figures]
    bounds = [one for one in everything if one.at_least]
    exact = [one for one in everything if not one.at_least]
    share = sum(one.covered for one in exact) / len(exact)
    rates, recoveries = host_failure_spread(find_accelerator("H100"), 8), recovery_spread()
    assert known_rate(1.0).interval == (1.0, 1.0)
    lines = [
        f"# Spread between sites, {datetime.date.today():%Y-%m-%d}",
        "",
        "`python benchmarks/site_spread.py`. Each published figure beside the range of 80 % of sites that all *other*",
        "sites give (`hardware/data/failure_sites.csv`; decision 0026). Luck alone is what 80 % of 20 runs at one rate",
        "see: the range that 0.6 printed. Lower bounds count as covered where the range reaches above them, which says",
        "little, so they are counted apart.",
        "",
        f"Covered: **{tally(exact)} ({share:.0%})** of the two-sided figures, {tally(bounds)} of the lower bounds. "
        f"Luck alone holds {sum(one.within_luck for one in jobs)} of {len(jobs)} figures of jobs, "
        "of them Llama 3's interruptions, which set its rate.",
        "",
        f"All sites: {rates.sites} with failures, 80 % between {rates.interval[0]:.2g} and {rates.interval[1]:.2g} per "
        f"host of 8 and day (middle {rates.median:.2g}, log spread {rates.log_spread:.2f}); {recoveries.sites} with "
        f"recovery times, 80 % between {recoveries.interval[0]:.0f} and {recoveries.interval[1]:,.0f} s (middle "
        f"{recoveries.median:.0f}, log spread {recoveries.log_spread:.2f}).",
        "",
        "## Jobs, simulated",
        "",
        *table(jobs),
        "",
        "MegaScale, ByteRobust and FT-HSDP state their recovery times (MegaScale as upper limits), so there only the",
        "failure rate spreads. OPT's restarts were made by hand, over nights: sites whose jobs start again by",
        "themselves, which the spread of recovery is made of, never lose as much. AWS HLAT's Trainium (98.81 %, by",
        "glennklockwood.com/garden/job-reliability) stands as 4,096 H100.",
        "",
        "## Rates and times",
        "",
        *table(figures),
        "",
        "Not used: Alibaba C4's downtime and Gemini's goodput (no device count with them in our table), Meta's",
        "projections for 16,384 and 131,072 GPUs (a model's, not a measurement), TPU v4 (the only one of its kind).",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page()
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today():%Y-%m-%d}-site-spread.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
