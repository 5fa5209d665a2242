"""A plan on a cluster of sites: each site's own layout, and the effect of the slow links between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.errors import Problem
from phalanx.hardware.types import Cluster, Site
from phalanx.job.schema import Job
from phalanx.job.sync_section import CODECS, SyncSettings
from phalanx.plan.bill import Bill, run_bill
from phalanx.plan.loss_penalty import expected_penalty
from phalanx.plan.peer_share import job_of_peer, planned_share
from phalanx.plan.plan import Plan
from phalanx.plan.prediction import Duration
from phalanx.plan.site_forecast import CodecRow, ModeRow, SiteForecast, SiteRow
from phalanx.plan.slow_exchange import peer_link
from phalanx.plan.slow_modes import TARGET_UTILISATION, SitePace, predict_mode, smallest_inner_steps
from phalanx.units import HOUR_S, format_seconds, plural

GRID_INNER_STEPS = (1, 10, 20, 50, 100, 200, 500)  # of the grid; DiLoCo used 500, INTELLECT-1 100
POOR_UTILISATION = 0.5  # below it, more than half of the cost pays for waiting

PlanOn = Callable[[Job, Cluster], Plan]


def plan_sites(job: Job, cluster: Cluster, plan_on: PlanOn) -> Plan:
    """Return the plan of the first site with its share of the batch, and the forecast of all sites.

    `plan_on` plans a job on one cluster. Time and cost are those of the whole run on all sites.
    """
    sites = cluster.sites
    planned: dict[int, Plan] = {}  # sites with equal devices need only one search
    plans: list[Plan] = []
    for site in sites:
        index_of_equal = next((index for index, plan in planned.items() if sites[index].cluster == site.cluster), None)
        plan = (
            plan_on(job_of_peer(job, len(sites), site.cluster.devices), site.cluster)
            if index_of_equal is None
            else planned[index_of_equal]
        )
        planned.setdefault(len(plans), plan)
        plans.append(plan)
    first = plans[0]
    forecast = forecast_sites(job, sites, plans)
    duration = _run_duration(first, forecast)
    return replace(
        first,
        job=job,
        cluster=cluster,
        duration=duration,
        bill=_sum_bills(job, plans, duration),
        sites=forecast,
        # The front of one site with a share of the batch offers no choice between whole runs.
        pareto=(),
        warnings=(*first.warnings, *(problem.render() for problem in _advice(job, cluster, forecast))),
    )


def plan_peer(job: Job, cluster: Cluster, plan_on: PlanOn) -> Plan:
    """Return the plan of one of `sync.peers` equal peers, which has this cluster to itself: its share of every batch.

    Time and cost are those of this peer over the whole run, without exchanges, because the links are unknown here.
    """
    peers, share = job.sync.peers, planned_share(job, cluster)
    plan = plan_on(share, cluster)
    if share is job:
        return plan
    duration_alone = plan.duration
    duration = replace(
        duration_alone,
        steps=round(duration_alone.steps / peers),
        training_s=duration_alone.training_s / peers,
        wall_s=duration_alone.wall_s / peers,
        wall_s_low=duration_alone.wall_s_low / peers,
        wall_s_high=duration_alone.wall_s_high / peers,
    )
    return replace(plan, job=job, duration=duration, bill=_sum_bills(job, [plan], duration), pareto=())


def site_pace(site: Site, plan: Plan, tokens_per_step: float) -> SitePace:
    """Return a site at the pace that its own plan predicts, for its part of the global batch."""
    price = plan.bill.usd_per_device_hour
    return SitePace(
        name=site.name,
        devices=plan.layout.devices,
        step_s=tokens_per_step / plan.prediction.tokens_per_s,
        tokens_per_step=tokens_per_step,
        link=peer_link(site),
        usd_per_hour=price[1] * plan.layout.devices if price else None,
    )


def forecast_sites(job: Job, sites: Sequence[Site], plans: Sequence[Plan]) -> SiteForecast:
    """Forecast every mode and codec at the job's H, and every codec at several H."""
    site_tokens = job.batch.global_tokens / len(sites)
    paces = [site_pace(site, plan, site_tokens) for site, plan in zip(sites, plans, strict=True)]
    values = plans[0].prediction.parameters
    tokens = plans[0].duration.tokens
    chosen = job.sync
    rows = tuple(_mode_row(paces, values, sync, tokens=tokens, chosen=chosen) for sync in _shown_modes(chosen))
    rounds_sync = replace(chosen, mode=chosen.mode if chosen.mode in ("diloco", "quorum") else "diloco")
    inner_steps = tuple(sorted({*GRID_INNER_STEPS, chosen.inner_steps}))
    grid = tuple(
        CodecRow(
            codec=codec,
            utilisation=tuple(
                predict_mode(paces, values, _with_inner_steps(rounds_sync, codec, steps)).utilisation
                for steps in inner_steps
            ),
            smallest_inner_steps=smallest_inner_steps(paces, values, replace(rounds_sync, codec=codec)),
        )
        for codec in CODECS
    )
    return SiteForecast(
        sites=tuple(
            SiteRow(
                name=site.name,
                cluster=plan.cluster.name,
                devices=pace.devices,
                layout=plan.layout.short,
                step_s=pace.step_s,
                tokens_per_s=pace.tokens_per_s,
                up_bytes_per_s=site.up_bytes_per_s,
                down_bytes_per_s=site.down_bytes_per_s,
                latency_s=site.latency_s,
                loss=site.loss,
                client_only=site.client_only,
                usd_per_hour=pace.usd_per_hour,
            )
            for site, plan, pace in zip(sites, plans, paces, strict=True)
        ),
        values=values,
        target_utilisation=TARGET_UTILISATION,
        rows=rows,
        chosen=next(index for index, row in enumerate(rows) if row.sync == chosen),
        inner_steps=inner_steps,
        grid=grid,
    )


def _shown_modes(chosen: SyncSettings) -> list[SyncSettings]:
    """Return the settings that are compared: the plain modes, DiLoCo with each codec, and the job's own."""
    plain = replace(chosen, codec="fp32")
    settings = [
        replace(plain, mode="every-step"),
        *(replace(chosen, mode="target-batch", codec=codec) for codec in ("fp32", "bf16", "int8")),
        *(replace(chosen, mode="diloco", codec=codec) for codec in CODECS),
    ]
    if chosen.mode == "quorum":
        settings += [replace(chosen, codec=codec) for codec in CODECS]
    return list(dict.fromkeys([*settings, chosen]))


def _with_inner_steps(sync: SyncSettings, codec: str, steps: int) -> SyncSettings:
    """Return the settings with another H and codec; fragments and delay as far as H allows."""
    fragments = min(sync.fragments, steps)
    delay = min(sync.delay_steps, steps // fragments - 1)
    return replace(sync, codec=codec, inner_steps=steps, fragments=fragments, delay_steps=delay)


def _mode_row(
    paces: Sequence[SitePace], values: int, sync: SyncSettings, *, tokens: int, chosen: SyncSettings
) -> ModeRow:
    """Return the row of one mode over the whole run, including its synchronous steps at the start."""
    prediction = predict_mode(paces, values, sync)
    steps = math.ceil(tokens / sum(pace.tokens_per_step for pace in paces))
    warm_steps = sync.warm_up_steps(steps)
    warm_s = (
        warm_steps * predict_mode(paces, values, replace(sync, mode="every-step", codec=warm_up_codec(sync))).step_s
    )
    # By tokens, not steps: the model did not learn from what a quorum drops.
    remaining_tokens = max(0.0, tokens - warm_steps * sum(pace.tokens_per_step for pace in paces))
    wall_s = warm_s + remaining_tokens / prediction.tokens_per_s
    prices = [pace.usd_per_hour for pace in paces]
    usd = sum(price for price in prices if price is not None) * wall_s / HOUR_S if None not in prices else None
    penalty = expected_penalty(sync, warm=warm_steps > 0, steps=steps - warm_steps)
    ideal_s = tokens / sum(pace.tokens_per_s for pace in paces)
    return ModeRow(
        sync=sync,
        prediction=prediction,
        steps=steps,
        warm_up_steps=warm_steps,
        warm_up_s=warm_s,
        training_s=wall_s,
        run_utilisation=ideal_s / wall_s,
        usd=usd,
        penalty=penalty,
    )


def warm_up_codec(sync: SyncSettings) -> str:
    """Return the codec of the synchronous steps: that of the later updates, except that top-k would spoil Adam."""
    return "int8" if sync.codec in ("int4", "topk-2bit") else sync.codec


def _run_duration(first: Plan, forecast: SiteForecast) -> Duration:
    """Return the duration of the whole run in the job's mode, with the first site's uncertainty and failures."""
    row, site_duration = forecast.rows[forecast.chosen], first.duration
    factor = row.training_s / site_duration.training_s if site_duration.training_s else 1.0
    return replace(
        site_duration,
        steps=row.steps,
        training_s=row.training_s,
        wall_s=site_duration.wall_s * factor,
        wall_s_low=site_duration.wall_s_low * factor,
        wall_s_high=site_duration.wall_s_high * factor,
    )


def _sum_bills(job: Job, plans: Sequence[Plan], duration: Duration) -> Bill:
    """Return the bill of all sites over the whole run; unknown where one site's is.

    Hourly prices are the first site's.
    """
    bills = [
        run_bill(
            plan.cluster,
            cost=job.cost,
            wall_s=duration.wall_s,
            wall_interval_s=(duration.wall_s_low, duration.wall_s_high),
            spares=plan.reliability.spares,
            devices=plan.layout.devices,
        )
        for plan in plans
    ]
    usd = [bill.usd for bill in bills]
    kwh, carbon, ranges = ([getattr(bill, name) for bill in bills] for name in ("kwh", "kgco2e", "kwh_interval"))
    return replace(
        bills[0],
        device_hours=sum(bill.device_hours for bill in bills),
        usd=None if None in usd else tuple(sum(column) for column in zip(*usd, strict=True)),
        kwh=None if None in kwh else sum(kwh),
        kgco2e=None if None in carbon else sum(carbon),
        kwh_interval=None if None in ranges else tuple(sum(column) for column in zip(*ranges, strict=True)),
    )


def _advice(job: Job, cluster: Cluster, forecast: SiteForecast) -> list[Problem]:
    """Return warnings that follow from the tables for this job."""
    row, problems = forecast.rows[forecast.chosen], []
    if job.sync.peers not in (0, len(cluster.sites)):
        what = f"sync.peers = {job.sync.peers}, and {cluster.name} has {plural(len(cluster.sites), 'site')}"
        problems.append(Problem(where=cluster.name, what=what, fix="the plan counts the sites; leave sync.peers out"))
    if row.warm_up_s > POOR_UTILISATION * row.training_s:
        share = row.warm_up_s / row.training_s
        problems.append(
            Problem(
                where=cluster.name,
                what=f"the {row.warm_up_steps:,} synchronous steps at the start take {share:.0%} of the time",
                why=f"each exchanges gradients, {format_seconds(row.warm_up_s / row.warm_up_steps)} a step",
                fix="train them at one site and let the others join, or set sync.synchronous_steps; our runs, which "
                "were short, needed 20 % of the steps",
            )
        )
    if row.prediction.utilisation < POOR_UTILISATION:
        int8_row = next(
            (row_of_codec for row_of_codec in forecast.grid if row_of_codec.codec == "int8"), forecast.grid[0]
        )
        steps = int8_row.smallest_inner_steps
        fix = (
            f'sync.mode = "diloco" with codec = "int8" and inner_steps = {steps:,} reaches '
            f"{forecast.target_utilisation:.0%}"
            if steps
            else "no H reaches 90 %: the sites differ too much in speed, or their links are too slow"
        )
        problems.append(
            Problem(
                where=cluster.name,
                what=f"sites compute {row.prediction.utilisation:.0%} of the time with sync.mode = "
                f'"{job.sync.mode}": an exchange takes {format_seconds(row.prediction.exchange_s)}',
                fix=fix,
            )
        )
    return problems
