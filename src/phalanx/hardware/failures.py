"""Failure rates and recovery times: published figures, and how much they vary between sites.

The plan, the rules and the simulation of months take their rates from this file only (decision 0026).
`data/failure_sites.csv` has a row per published figure. The usual rate of a device is that of one site; the rate at
another site is a lognormal spread over all sites, wide enough for a site that is not in the table: the 80 % interval
of a new observation with Student's quantile, because the spread itself is estimated from few sites.
benchmarks/site_spread.py leaves every site out in turn and counts how often its figures are covered.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.io.files import shipped_text

if TYPE_CHECKING:
    from phalanx.hardware.types import Accelerator

Kind = Literal["gpu", "tpu", "cpu"]

COVERAGE = 0.80  # share of sites that an interval contains
EDGE_Z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
# The sites whose rates are the default of a device. RSC-1's hosts give the projected 1.8 h between failures at 16,384
# GPUs.
HOPPER_SITE, AMPERE_SITE = "Llama 3 405B", "Meta RSC-1"
# Mean repair times of 22 Los Alamos systems lie between "less than an hour" and "more than a day" (Schroeder and
# Gibson, DSN 2006). The range of 22 normal values is about 3.8 standard deviations.
REPAIR_LOG_SPREAD = math.log(24.0) / 3.8


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteFigure:
    """One published figure: `value` failures of `devices` devices in `days`, or seconds of recovery.

    `share` is the part of all failures that was counted, such as GPU failures alone.
    """

    site: str
    kind: str
    quantity: str
    value: float
    devices: float
    days: float
    share: float
    note: str
    source: str

    @property
    def per_device_day(self) -> float:
        """Failures of all kinds per device and day (for a CPU: per host)."""
        return self.value / self.share / (self.devices * self.days)

    @property
    def figure(self) -> float:
        """The value that is compared between sites: failures per device and day, or seconds."""
        return self.per_device_day if self.quantity == "failures" else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSpread:
    """A lognormal distribution over sites. `log_spread` is 0 for the user's own value, which has no spread."""

    median: float
    log_spread: float
    sites: int

    def quantile(self, share: float) -> float:
        """Return the value below which this share of sites lies."""
        if not self.log_spread:
            return self.median
        return self.median * math.exp(self.log_spread * statistics.NormalDist().inv_cdf(share))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that contains 80 % of sites."""
        return self.quantile((1 - COVERAGE) / 2), self.quantile((1 + COVERAGE) / 2)


@functools.cache
def site_figures() -> tuple[SiteFigure, ...]:
    """Return all rows of the table."""
    return tuple(
        SiteFigure(
            site=row["site"],
            kind=row["kind"],
            quantity=row["quantity"],
            value=float(row["value"]),
            devices=float(row["devices"] or 0.0),
            days=float(row["days"] or 0.0),
            share=float(row["share"] or 1.0),
            note=row["note"],
            source=row["source"],
        )
        for row in csv.DictReader(io.StringIO(shipped_text(__file__, "data/failure_sites.csv")))
    )


def device_kind(accelerator: Accelerator) -> Kind:
    """Return the kind of device whose failure rates apply; every accelerator but Google's counts as a GPU."""
    if accelerator.family == "cpu":
        return "cpu"
    return "tpu" if accelerator.vendor == "google" else "gpu"


def failures_per_host_day(accelerator: Accelerator, host_devices: int) -> float:
    """Return the expected failures of one host per day, by default proportional to the devices in it.

    >>> from phalanx.hardware.catalog import find_accelerator
    >>> f"{failures_per_host_day(find_accelerator('H100'), 8):.2g}"
    '0.0038'
    """
    return _usual_figure(accelerator).per_device_day * _units_per_host(accelerator, host_devices)


def rate_source(accelerator: Accelerator) -> str:
    """Return the source of the default failure rate."""
    figure = _usual_figure(accelerator)
    return f"{figure.site} ({figure.source})"


def _usual_figure(accelerator: Accelerator) -> SiteFigure:
    kind = device_kind(accelerator)
    site = AMPERE_SITE if accelerator.family == "ampere" else HOPPER_SITE
    return next(
        figure
        for figure in site_figures()
        if figure.quantity == "failures" and figure.kind == kind and (kind != "gpu" or figure.site == site)
    )


def _units_per_host(accelerator: Accelerator, host_devices: int) -> int:
    return 1 if device_kind(accelerator) == "cpu" else host_devices


def host_failure_spread(accelerator: Accelerator, host_devices: int, *, without: Collection[str] = ()) -> SiteSpread:
    """Return failures per host and day over sites; `without` names sites to leave out.

    TPUs and hosts without accelerators have one published figure each: the median is that figure, and the spread is
    that of GPU sites, widened by the uncertainty of a median from one figure.
    """
    kind, units = device_kind(accelerator), _units_per_host(accelerator, host_devices)
    gpus = _site_figures("failures", "gpu", without)
    return _predictive_spread(gpus, own=gpus if kind == "gpu" else _site_figures("failures", kind), scale=units)


def recovery_spread(*, without: Collection[str] = ()) -> SiteSpread:
    """Return seconds from a failure to the next step over sites whose jobs restart automatically."""
    figures = _site_figures("recovery_s", "any", without)
    return _predictive_spread(figures, own=figures, scale=1.0)


def repair_spread(repair_s: float) -> SiteSpread:
    """Return seconds until a host is back, around the usual value, which has no published source."""
    return SiteSpread(median=repair_s, log_spread=REPAIR_LOG_SPREAD, sites=22)


def known_rate(value: float) -> SiteSpread:
    """Return the user's own value as a distribution without spread."""
    return SiteSpread(median=value, log_spread=0.0, sites=1)


def _site_figures(quantity: str, kind: str, without: Collection[str] = ()) -> list[SiteFigure]:
    return [
        figure
        for figure in site_figures()
        if figure.quantity == quantity and figure.kind == kind and figure.site not in without
    ]


def _predictive_spread(figures: Sequence[SiteFigure], *, own: Sequence[SiteFigure], scale: float) -> SiteSpread:
    """Return the distribution of one more figure: a lognormal with Student's 80 % prediction interval.

    Every figure counts, not a mean per site: two figures of one site differ as much as two sites (the hosts of RSC-1
    and its jobs of 1,024 GPUs by a factor of 3.6, ByteRobust's two ways to restart by 8), and a user's job is one
    figure.
    """
    spread = statistics.stdev(math.log(figure.figure) for figure in figures)
    width = student_quantile(len(figures) - 1) * spread * math.sqrt(1 + 1 / len(own))
    return SiteSpread(
        median=scale * math.exp(statistics.fmean(math.log(figure.figure) for figure in own)),
        log_spread=width / EDGE_Z,
        sites=len({figure.site for figure in own}),
    )


def student_quantile(degrees: int) -> float:
    """Return Student's 90th percentile by Fisher's expansion, correct to 0.01 from 3 degrees of freedom on.

    >>> [round(student_quantile(degrees), 2) for degrees in (4, 8, 30)]
    [1.53, 1.4, 1.31]
    """
    z = EDGE_Z
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def llama_device_days() -> float:
    """Return the GPU-days behind Llama 3's counts of interruptions."""
    figure = next(figure for figure in site_figures() if figure.site == HOPPER_SITE)
    return figure.devices * figure.days


def sample_sites(*spreads: SiteSpread, count: int) -> list[tuple[float, ...]]:
    """Return sites spread evenly over the quantiles of up to three independent spreads, without random numbers.

    >>> [round(rate, 2) for rate, _ in sample_sites(known_rate(1.0), recovery_spread(), count=2)]
    [1.0, 1.0]
    """
    # The first in strata; the rest by Roberts' R2 sequence (powers of the plastic number), which fills the square
    # evenly.
    steps = (1.0 / count, 0.7548776662466927, 0.5698402909980532)
    return [
        tuple(
            spread.quantile(min(1 - 1e-9, max(1e-9, math.fmod((place + 0.5) * step, 1.0))))
            for spread, step in zip(spreads, steps, strict=False)
        )
        for place in range(count)
    ]


def middle_range(values: Sequence[float], share: float = COVERAGE) -> tuple[float, float]:
    """Return the range that contains the middle share of the values.

    >>> [round(bound, 9) for bound in middle_range([float(one) for one in range(11)])]
    [1.0, 9.0]
    """
    ordered = sorted(values)

    def at(quantile: float) -> float:
        position = quantile * (len(ordered) - 1)
        lower = math.floor(position)
        upper = min(lower + 1, len(ordered) - 1)
        return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])

    return at((1 - share) / 2), at((1 + share) / 2)
