"""Forecast of many simulated runs of peers that come and go, as values and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.io.tables import text_table
from phalanx.plan.plan import Plan
from phalanx.sim.months.forecast import ForecastSpread, forecast_spread
from phalanx.sim.peer_churn import ChurnOutcome, ChurnPolicy
from phalanx.units import DAY_S, HOUR_S, format_count, format_money, format_seconds, plural

WIDTH = 98


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteChurn:
    """One site over all runs."""

    name: str
    session_s: float  # 0: stays to the end
    absence_s: float
    present: float  # share of the time
    credit: float  # share of the tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerForecast:
    """The forecast of days of a plan on a cluster of sites. Shares are of wall-clock time; unknown money is None."""

    days: float
    runs: int
    seed: int
    mode: str
    inner_steps: int
    codec: str
    goodput: ForecastSpread  # tokens over those of all sites computing all the time
    planned: float  # utilisation with all sites present
    available: float  # share of the sites' compute that was present
    tokens: ForecastSpread
    sites: tuple[SiteChurn, ...]
    departures: ForecastSpread
    lost_tokens: float  # per run: unfinished rounds of peers that left
    # Remaining peers waited until a death was noticed, or repeated an exchange.
    stalled: float
    waiting: float  # no round could commit
    fetching_s: float  # per departure: fetching the state on return
    rent_usd: float | None  # for the time that sites were present, at the middle price


def forecast_peers(plan: Plan, policy: ChurnPolicy, outcomes: Sequence[ChurnOutcome], *, seed: int) -> PeerForecast:
    """Return the forecast of at least one run."""
    assert plan.sites is not None
    runs, wall_s = len(outcomes), outcomes[0].wall_s
    rates = [pace.tokens_per_s for pace in policy.paces]
    present = [sum(outcome.present[index] for outcome in outcomes) / runs for index in range(len(rates))]
    prices = [pace.usd_per_hour for pace in policy.paces]
    rent = None
    if None not in prices:
        hours = wall_s / HOUR_S
        rent = sum((price or 0.0) * share * hours for price, share in zip(prices, present, strict=True))
    departures = sum(outcome.departures for outcome in outcomes)
    return PeerForecast(
        days=wall_s / DAY_S,
        runs=runs,
        seed=seed,
        mode=policy.sync.mode,
        inner_steps=plan.sites.row.prediction.inner_steps,
        codec=policy.sync.codec,
        goodput=forecast_spread([outcome.goodput for outcome in outcomes], most=1.0),
        planned=plan.sites.row.prediction.utilisation,
        available=sum(rate * share for rate, share in zip(rates, present, strict=True)) / sum(rates),
        tokens=forecast_spread([outcome.tokens for outcome in outcomes]),
        sites=tuple(
            SiteChurn(
                name=site.name,
                session_s=site.session_s,
                absence_s=site.absence_s,
                present=present[index],
                credit=sum(outcome.credit[index] for outcome in outcomes) / runs,
            )
            for index, site in enumerate(policy.sites)
        ),
        departures=forecast_spread([float(outcome.departures) for outcome in outcomes]),
        lost_tokens=sum(outcome.lost_tokens for outcome in outcomes) / runs,
        stalled=sum(outcome.stalled_s for outcome in outcomes) / runs / wall_s,
        waiting=sum(outcome.waiting_s for outcome in outcomes) / runs / wall_s,
        fetching_s=sum(outcome.fetching_s for outcome in outcomes) / departures if departures else 0.0,
        rent_usd=rent,
    )


def peer_forecast_text(plan: Plan, policy: ChurnPolicy, made: PeerForecast) -> str:
    """Format the whole page."""
    g, sync = made.goodput, policy.sync
    spread = "" if math.isnan(g.low) else f" (80% of runs: {g.run_low:.1%} to {g.run_high:.1%})"
    h = f", H = {made.inner_steps:,}" if made.inner_steps > 1 else ""
    lines = [
        f"{plan.job.name}: {plural(made.days, 'day')} on {plan.cluster.name} "
        f"({plural(len(made.sites), 'site')}), {plural(made.runs, 'run')}, seed {made.seed}",
        f"  goodput {g.mean:.1%}{spread} of all sites computing all the time",
        f"  {made.planned:.1%} with everybody there ({made.mode}{h}, {made.codec}); sites were there for "
        f"{made.available:.1%} of their compute",
        f"  {format_count(made.tokens.mean)} tokens",
        "",
        "PEERS",
    ]
    rows = [("site", "stays", "away", "there", "credit")]
    for site in made.sites:
        stays = format_seconds(site.session_s) if site.session_s else "to the end"
        rows.append((site.name, stays, format_seconds(site.absence_s) if site.session_s else "-", f"{site.present:.1%}",
                     f"{site.credit:.1%}"))  # fmt: skip
    lines += text_table(rows, right=(1, 2, 3, 4), indent=2)
    quorum = f"{sync.quorum} of {len(made.sites)}" if sync.mode == "quorum" and sync.quorum else "a majority"
    remarks = [
        f"{made.departures.mean:,.1f} departures: survivors stalled for {made.stalled:.2%} of the time "
        f"(a death is noticed after {format_seconds(sync.dead_after_s)}), "
        f"{format_count(made.lost_tokens)} tokens of unfinished rounds were lost",
        f"{made.waiting:.2%} of the time nobody could commit: a round needs {quorum}",
        f"a peer that returns fetches the state of {policy.state_bytes / 1e9:,.3g} GB in "
        f"{format_seconds(made.fetching_s)}",
        "failures of hosts inside a site are not simulated here: phalanx sim JOB --days N --cluster SITE does",
    ]
    if made.rent_usd is not None:
        remarks.insert(3, f"{format_money(made.rent_usd)} for the time that sites were there, at the middle price")
    lines += ["", "WHERE THE TIME GOES"]
    return "\n".join([*lines, *(f"  {wrapped}" for line in remarks for wrapped in textwrap.wrap(line, WIDTH))])
