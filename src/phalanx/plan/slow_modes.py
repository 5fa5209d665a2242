"""Utilisation of sites that train over slow links, for one mode, H and codec at a time.

Utilisation is the tokens of a second over those of a second in which every site computes all the time. It falls by the
time that is waited: for bytes that compute does not hide, and of faster sites for the one that the round waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.io.limits import MAX_INNER_STEPS
from phalanx.job.sync_section import SyncSettings
from phalanx.network.slow_codecs import encoded_bytes
from phalanx.network.slow_shares import pace_weights
from phalanx.plan.slow_exchange import PeerLink, SlowExchange, exchange_time

# Messages that wait for each other in one round (docs/slow-links.md): ready and begin, shares out and sums back, done
# and commit. Two peers send each other their values at once, and the commit follows the last of them.
ROUND_TRIPS, ROUND_TRIPS_OF_TWO = 3.0, 2.0
TARGET_UTILISATION = 0.90
# Values per second through one exchange on one core: half of what peers/codecs.py encodes and decodes once (228, 124,
# 64 and 59 million a second, numpy on a busy Xeon core), because a peer encodes what it sends and the sums that it
# owns. Sparse values are encoded once, without sums: 24 on a busy Neoverse core; 45 and more in exchanges of an idle
# Xeon.
CODEC_VALUES_PER_S = {"fp64": 110e6, "fp32": 110e6, "bf16": 60e6, "int8": 32e6, "int4": 25e6, "topk-2bit": 24e6}


@dataclass(frozen=True, kw_only=True, slots=True)
class SitePace:
    """A site as input of the modes: its step time, with its share of the batch, without any exchange."""

    name: str
    devices: int
    step_s: float
    tokens_per_step: float
    link: PeerLink
    usd_per_hour: float | None = None  # of all its devices

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second while the site computes."""
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteUse:
    """One site in one mode."""

    name: str
    share: float  # of the vector, averaged for the other sites
    bytes_per_step: float  # sent, and as many received, per optimizer step
    utilisation: float  # of its own compute
    counted: bool  # False: its results arrive too late and are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class ModePrediction:
    """The prediction for one mode with its H and codec."""

    mode: str
    inner_steps: int  # optimizer steps per exchange: 1 for every-step and target-batch
    codec: str
    step_s: float  # wall time per optimizer step, including its part of the exchange
    exchange_s: float  # seconds of one exchange (of one fragment)
    exposed_s: float  # the exposed part of the exchange
    limited_by: str
    utilisation: float
    tokens_per_s: float
    bytes_per_step: float  # sent by the busiest site, per optimizer step
    sites: tuple[SiteUse, ...]


def predict_mode(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """Predict the mode that `sync` describes on these sites, for a model of `values` values; warm-up left out."""
    if sync.mode in ("every-step", "target-batch"):
        return _each_step(sites, values, sync)
    return _each_round(sites, values, sync)


def mode_exchange(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> SlowExchange:
    """Return one exchange of the mode: of the whole vector, or of one fragment of it."""
    fragments = sync.fragments if sync.mode in ("diloco", "quorum") else 1
    num_values = math.ceil(values / fragments)
    return exchange_time(
        [site.link for site in sites],
        encoded_bytes(sync.codec, num_values, sync.sent_share()),
        round_trips=ROUND_TRIPS if len(sites) > 2 else ROUND_TRIPS_OF_TWO,
        values=num_values,
        values_per_s=CODEC_VALUES_PER_S[sync.codec],
        codec=sync.codec,
    )


def _each_step(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """Predict a mode that exchanges gradients in every step; nothing hides them, because the step needs their sum.

    Peers get parts of the batch in proportion to their pace; ranks of one job get equal parts.
    """
    exchange = mode_exchange(sites, values, sync)
    tokens = sum(site.tokens_per_step for site in sites)
    compute_s = [site.step_s for site in sites]
    weights = pace_weights([site.tokens_per_s for site in sites])
    if sync.mode == "target-batch" and len(set(weights)) > 1:
        site_tokens = (tokens * weight / sum(weights) for weight in weights)
        compute_s = [peer_tokens / site.tokens_per_s for peer_tokens, site in zip(site_tokens, sites, strict=True)]
    wall_s = max(compute_s) + exchange.seconds
    return ModePrediction(
        mode=sync.mode,
        inner_steps=1,
        codec=sync.codec,
        step_s=wall_s,
        exchange_s=exchange.seconds,
        exposed_s=exchange.seconds,
        limited_by=exchange.limited_by,
        utilisation=tokens / wall_s / sum(site.tokens_per_s for site in sites),
        tokens_per_s=tokens / wall_s,
        bytes_per_step=max(exchange.bytes_sent),
        sites=tuple(
            SiteUse(name=site.name, share=share, bytes_per_step=sent_bytes, utilisation=site_s / wall_s, counted=True)
            for site, share, sent_bytes, site_s in zip(
                sites, exchange.shares, exchange.bytes_sent, compute_s, strict=True
            )
        ),
    )


def _each_round(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """Predict a mode that exchanges the vector every H steps, or one fragment of it every H / fragments steps."""
    exchange = mode_exchange(sites, values, sync)
    fragments = sync.fragments
    gathered_s, counted_steps = _gathered_work(sites, sync)
    exposed_s = fragments * max(0.0, exchange.seconds - sync.delay_steps * gathered_s / sync.inner_steps)
    wall_s = max(gathered_s + exposed_s, fragments * exchange.seconds)  # one exchange at a time
    tokens = sum(steps * site.tokens_per_step for site, steps in zip(sites, counted_steps, strict=True))
    return ModePrediction(
        mode=sync.mode,
        inner_steps=sync.inner_steps,
        codec=sync.codec,
        step_s=wall_s / sync.inner_steps,
        exchange_s=exchange.seconds,
        exposed_s=wall_s - gathered_s,
        limited_by=exchange.limited_by if wall_s > gathered_s else "compute",
        utilisation=tokens / wall_s / sum(site.tokens_per_s for site in sites),
        tokens_per_s=tokens / wall_s,
        bytes_per_step=fragments * max(exchange.bytes_sent) / sync.inner_steps,
        sites=tuple(
            SiteUse(
                name=site.name,
                share=share,
                bytes_per_step=fragments * sent_bytes / sync.inner_steps,
                utilisation=steps * site.step_s / wall_s,
                counted=steps > 0,
            )
            for site, share, sent_bytes, steps in zip(
                sites, exchange.shares, exchange.bytes_sent, counted_steps, strict=True
            )
        ),
    )


def _gathered_work(sites: Sequence[SitePace], sync: SyncSettings) -> tuple[float, list[float]]:
    """Return the seconds until an exchange begins, and the steps of each site that count in it.

    Without a quorum every site takes H steps. With one, sites that are behind when it is complete contribute the steps
    they have done at the end of their current one; sites that take longer than the grace period for it are late, and
    their H steps are dropped or counted in a later round.
    """
    steps, needed_s = sync.inner_steps, [sync.inner_steps * site.step_s for site in sites]
    if sync.mode != "quorum" or not sync.quorum:
        return max(needed_s), [float(steps)] * len(sites)
    enough_s = sorted(needed_s)[min(sync.quorum, len(sites)) - 1]
    # The end of the step in which the quorum was complete; for sites that were done before, the end of their H steps.
    arrivals_s = [min(math.ceil(enough_s / site.step_s - 1e-9), steps) * site.step_s for site in sites]
    on_time = [arrival <= enough_s + sync.grace_s for arrival in arrivals_s]
    gathered_s = max(arrivals_s) if all(on_time) else enough_s + sync.grace_s
    counted_steps = []
    for site, arrival, in_time in zip(sites, arrivals_s, on_time, strict=True):
        late_steps = 0.0 if sync.late == "drop" else steps / math.ceil(steps * site.step_s / gathered_s)
        counted_steps.append(arrival / site.step_s if in_time else late_steps)
    return gathered_s, counted_steps


def hiding_delay(found: ModePrediction, sync: SyncSettings) -> int | None:
    """Return the smallest `delay_steps` with which compute hides an exchange that is still exposed; None if none does.

    A result must be applied before the next fragment is sent, so H bounds the delay.
    """
    if found.mode not in ("diloco", "quorum") or found.exposed_s <= 1e-9:
        return None
    # Of one step, including the wait for slower sites.
    compute_s = found.step_s - found.exposed_s / found.inner_steps
    delay = math.ceil(found.exchange_s / compute_s - 1e-9)
    return delay if delay < found.inner_steps // sync.fragments else None


def smallest_inner_steps(
    sites: Sequence[SitePace], values: float, sync: SyncSettings, *, target: float = TARGET_UTILISATION
) -> int | None:
    """Return the smallest H with which utilisation reaches the target; None if no H does, as between unequal sites.

    Fragments and delay stay as they are, as far as H allows.
    """

    def reaches(steps: int) -> bool:
        settings = replace(
            sync,
            mode=sync.mode if sync.mode in ("diloco", "quorum") else "diloco",
            inner_steps=steps,
            fragments=min(sync.fragments, steps),
            delay_steps=min(sync.delay_steps, steps // min(sync.fragments, steps) - 1),
        )
        return predict_mode(sites, values, settings).utilisation >= target

    if not reaches(MAX_INNER_STEPS):
        return None
    low, high = 0, 1
    while not reaches(high):
        low, high = high, min(2 * high, MAX_INNER_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
