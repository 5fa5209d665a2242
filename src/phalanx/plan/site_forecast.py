"""The forecast of a plan for a cluster of sites, as values: sites, modes, and utilisation by codec and H."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.job.sync_section import SyncSettings
from phalanx.plan.loss_penalty import LossPenalty
from phalanx.plan.slow_modes import ModePrediction


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRow:
    """One site: its own layout and pace, and its link."""

    name: str
    cluster: str
    devices: int
    layout: str
    step_s: float  # for its share of the batch, without any exchange
    tokens_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    loss: float
    client_only: bool
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRow:
    """One mode, H and codec: its steady state, and the whole run including its synchronous steps at the start."""

    sync: SyncSettings
    prediction: ModePrediction
    steps: int
    warm_up_steps: int
    warm_up_s: float
    training_s: float  # to the token budget, without failures
    run_utilisation: float  # over the whole run
    usd: float | None  # of all sites at the middle price, without failures
    penalty: LossPenalty


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecRow:
    """The utilisation with one codec for each H of the forecast, and the smallest H that reaches the target."""

    codec: str
    utilisation: tuple[float, ...]
    smallest_inner_steps: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteForecast:
    """The forecast of all sites of a plan. `rows[chosen]` is the job's own [sync]."""

    sites: tuple[SiteRow, ...]
    values: int  # numbers that are exchanged: the model's parameters
    target_utilisation: float
    rows: tuple[ModeRow, ...]
    chosen: int
    inner_steps: tuple[int, ...]
    grid: tuple[CodecRow, ...]

    @property
    def row(self) -> ModeRow:
        """The job's own mode."""
        return self.rows[self.chosen]
