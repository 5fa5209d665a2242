"""How busy sites are when they train over slow links: one mode, H and codec at a time.

Utilisation is the tokens of a second over those of a second in which every site computes all the time. It falls by what
is waited for: bytes that compute does not hide, and sites that are faster than the one the round waits for.
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
# 64 and 59 million a second, numpy on a busy Xeon core): a peer encodes what it sends and the sums that it owns. Sparse
# values are encoded once, and nobody owns sums: 24 on a busy Neoverse core; 45 and more in exchanges of an idle Xeon.
CODEC_VALUES_PER_S = {"fp64": 110e6, "fp32": 110e6, "bf16": 60e6, "int8": 32e6, "int4": 25e6, "topk-2bit": 24e6}


@dataclass(frozen=True, kw_only=True, slots=True)
class SitePace:
    """A site as the modes see it: its own step, on its own share of the batch, without any exchange."""

    name: str
    devices: int
    step_s: float
    tokens_per_step: float
    link: PeerLink
    usd_per_hour: float | None = None  # of all its devices

    @property
    def tokens_per_s(self) -> float:
        """While it computes."""
        return self.tokens_per_step / self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteUse:
    """One site in one mode."""

    name: str
    share: float  # of the vector, averaged for the others
    bytes_per_step: float  # sent, and as many received, per optimizer step
    utilisation: float  # of its own compute
    counted: bool  # false: its results come too late and are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class ModePrediction:
    """One mode with its H and codec."""

    mode: str
    inner_steps: int  # optimizer steps per exchange: 1 for every-step and target-batch
    codec: str
    step_s: float  # wall time per optimizer step, its part of the exchange included
    exchange_s: float  # of one exchange (of one fragment)
    exposed_s: float  # of it, not hidden by compute
    limited_by: str
    utilisation: float
    tokens_per_s: float
    bytes_per_step: float  # sent by the busiest site, per optimizer step
    sites: tuple[SiteUse, ...]


def predict_mode(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """What `sync` does to these sites, for a model of so many values; warm-up left out."""
    if sync.mode in ("every-step", "target-batch"):
        return _each_step(sites, values, sync)
    return _each_round(sites, values, sync)


def mode_exchange(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> SlowExchange:
    """One exchange of the mode: of the whole vector, or of one fragment of it."""
    fragments = sync.fragments if sync.mode in ("diloco", "quorum") else 1
    part = math.ceil(values / fragments)
    return exchange_time(
        [site.link for site in sites],
        encoded_bytes(sync.codec, part, sync.sent_share()),
        round_trips=ROUND_TRIPS if len(sites) > 2 else ROUND_TRIPS_OF_TWO,
        values=part,
        values_per_s=CODEC_VALUES_PER_S[sync.codec],
        codec=sync.codec,
    )


def _each_step(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """Gradients of every step: nothing hides them, for the step needs their sum.

    Peers are dealt the batch of such a step by their pace; ranks of one job alike.
    """
    exchange = mode_exchange(sites, values, sync)
    tokens = sum(site.tokens_per_step for site in sites)
    compute_s = [site.step_s for site in sites]
    weights = pace_weights([site.tokens_per_s for site in sites])
    if sync.mode == "target-batch" and len(set(weights)) > 1:
        dealt = (tokens * weight / sum(weights) for weight in weights)
        compute_s = [part / site.tokens_per_s for part, site in zip(dealt, sites, strict=True)]
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
            SiteUse(name=site.name, share=share, bytes_per_step=sent, utilisation=spent_s / wall_s, counted=True)
            for site, share, sent, spent_s in zip(sites, exchange.shares, exchange.bytes_sent, compute_s, strict=True)
        ),
    )


def _each_round(sites: Sequence[SitePace], values: float, sync: SyncSettings) -> ModePrediction:
    """H steps of everybody, then one exchange, or one fragment every H / fragments steps."""
    exchange = mode_exchange(sites, values, sync)
    fragments = sync.fragments
    gathered_s, learnt = _gathered_work(sites, sync)
    exposed_s = fragments * max(0.0, exchange.seconds - sync.delay_steps * gathered_s / sync.inner_steps)
    wall_s = max(gathered_s + exposed_s, fragments * exchange.seconds)  # one exchange at a time
    tokens = sum(steps * site.tokens_per_step for site, steps in zip(sites, learnt, strict=True))
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
                bytes_per_step=fragments * sent / sync.inner_steps,
                utilisation=steps * site.step_s / wall_s,
                counted=steps > 0,
            )
            for site, share, sent, steps in zip(sites, exchange.shares, exchange.bytes_sent, learnt, strict=True)
        ),
    )


def _gathered_work(sites: Sequence[SitePace], sync: SyncSettings) -> tuple[float, list[float]]:
    """Seconds until an exchange begins, and the steps of each site that count in it.

    Without a quorum everybody takes H steps. With one, sites that are behind when it is complete bring what they have
    at the end of their step; whoever takes longer than the grace for it is late, and its H steps are dropped, or
    counted in a later round.
    """
    steps, needed_s = sync.inner_steps, [sync.inner_steps * site.step_s for site in sites]
    if sync.mode != "quorum" or not sync.quorum:
        return max(needed_s), [float(steps)] * len(sites)
    enough_s = sorted(needed_s)[min(sync.quorum, len(sites)) - 1]
    # The end of the step in which the quorum was complete; for those that were done before, of their H steps.
    arrivals_s = [min(math.ceil(enough_s / site.step_s - 1e-9), steps) * site.step_s for site in sites]
    on_time = [arrival <= enough_s + sync.grace_s for arrival in arrivals_s]
    gathered_s = max(arrivals_s) if all(on_time) else enough_s + sync.grace_s
    learnt = []
    for site, arrival, in_time in zip(sites, arrivals_s, on_time, strict=True):
        late = 0.0 if sync.late == "drop" else steps / math.ceil(steps * site.step_s / gathered_s)
        learnt.append(arrival / site.step_s if in_time else late)
    return gathered_s, learnt


def hiding_delay(found: ModePrediction, sync: SyncSettings) -> int | None:
    """The smallest `delay_steps` with which compute hides an exchange that it does not hide yet; None where none does.

    A result must be applied before the next fragment is sent, so H bounds the delay.
    """
    if found.mode not in ("diloco", "quorum") or found.exposed_s <= 1e-9:
        return None
    compute_s = found.step_s - found.exposed_s / found.inner_steps  # of one step, the wait for slower sites included
    delay = math.ceil(found.exchange_s / compute_s - 1e-9)
    return delay if delay < found.inner_steps // sync.fragments else None


def smallest_inner_steps(
    sites: Sequence[SitePace], values: float, sync: SyncSettings, *, target: float = TARGET_UTILISATION
) -> int | None:
    """The smallest H with which utilisation reaches the target; None where no H does, as between unequal sites.

    Fragments and delay stay as they are, as far as H allows them.
    """

    def reaches(steps: int) -> bool:
        tried = replace(
            sync,
            mode=sync.mode if sync.mode in ("diloco", "quorum") else "diloco",
            inner_steps=steps,
            fragments=min(sync.fragments, steps),
            delay_steps=min(sync.delay_steps, steps // min(sync.fragments, steps) - 1),
        )
        return predict_mode(sites, values, tried).utilisation >= target

    if not reaches(MAX_INNER_STEPS):
        return None
    low, high = 0, 1
    while not reaches(high):
        low, high = high, min(2 * high, MAX_INNER_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high
