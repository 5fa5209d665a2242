"""How often machines fail and how long a job takes to go on: published figures, and how far sites lie apart.

The one source of rates for the plan, the rules and the months (decision 0026). `data/failure_sites.csv` has a row per
published figure. The usual rate of a device is that of one site; what another site will see is a lognormal spread over
all sites, wide enough for a site that is not in the table: the 80 % interval of a new observation with Student's
quantile, because the spread itself is estimated from few sites. benchmarks/site_spread.py leaves every site out in
turn and counts how often its figures are covered.
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

COVERAGE = 0.80  # of sites that a range holds
EDGE_Z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
# Which site's rate a device is given by itself. RSC-1's hosts give the projected 1.8 h between failures at 16,384 GPUs.
HOPPER_SITE, AMPERE_SITE = "Llama 3 405B", "Meta RSC-1"
# Mean repair times of 22 Los Alamos systems lie between "less than an hour" and "more than a day" (Schroeder and
# Gibson, DSN 2006). So many normal values span about 3.8 standard deviations.
REPAIR_LOG_SPREAD = math.log(24.0) / 3.8


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteFigure:
    """One published figure. `value` failures of `devices` devices in `days`, or seconds of recovery.

    `share` is what part of all failures the count has, as of GPU failures alone.
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
        """Failures of all kinds per device and day (of a CPU: per host)."""
        return self.value / self.share / (self.devices * self.days)

    @property
    def figure(self) -> float:
        """What is compared between sites: failures per device and day, or seconds."""
        return self.per_device_day if self.quantity == "failures" else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSpread:
    """Lognormal over sites. `log_spread` 0: the user's own figure, which has no spread."""

    median: float
    log_spread: float
    sites: int

    def quantile(self, share: float) -> float:
        """The value that this share of sites stays below."""
        if not self.log_spread:
            return self.median
        return self.median * math.exp(self.log_spread * statistics.NormalDist().inv_cdf(share))

    @property
    def interval(self) -> tuple[float, float]:
        """The range of 80 % of sites."""
        return self.quantile((1 - COVERAGE) / 2), self.quantile((1 + COVERAGE) / 2)


@functools.cache
def site_figures() -> tuple[SiteFigure, ...]:
    """The whole table."""
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
    """Whose failures a device shares: a GPU's stand for every accelerator but Google's."""
    if accelerator.family == "cpu":
        return "cpu"
    return "tpu" if accelerator.vendor == "google" else "gpu"


def failures_per_host_day(accelerator: Accelerator, host_devices: int) -> float:
    """Expected failures of one host per day where nobody gave a rate, growing with the devices in it.

    >>> from phalanx.hardware.catalog import find_accelerator
    >>> f"{failures_per_host_day(find_accelerator('H100'), 8):.2g}"
    '0.0038'
    """
    return _usual_figure(accelerator).per_device_day * _units_per_host(accelerator, host_devices)


def rate_source(accelerator: Accelerator) -> str:
    """Where that rate comes from."""
    one = _usual_figure(accelerator)
    return f"{one.site} ({one.source})"


def _usual_figure(accelerator: Accelerator) -> SiteFigure:
    kind = device_kind(accelerator)
    site = AMPERE_SITE if accelerator.family == "ampere" else HOPPER_SITE
    return next(
        one
        for one in site_figures()
        if one.quantity == "failures" and one.kind == kind and (kind != "gpu" or one.site == site)
    )


def _units_per_host(accelerator: Accelerator, host_devices: int) -> int:
    return 1 if device_kind(accelerator) == "cpu" else host_devices


def host_failure_spread(accelerator: Accelerator, host_devices: int, *, without: Collection[str] = ()) -> SiteSpread:
    """Failures per host and day over sites; `without` names sites to leave out.

    TPUs and hosts without accelerators have one published figure each: the middle is theirs, and the spread is that of
    GPU sites, wider by the doubt about a middle that one figure gives.
    """
    kind, units = device_kind(accelerator), _units_per_host(accelerator, host_devices)
    gpus = _site_figures("failures", "gpu", without)
    return _predictive_spread(gpus, own=gpus if kind == "gpu" else _site_figures("failures", kind), scale=units)


def recovery_spread(*, without: Collection[str] = ()) -> SiteSpread:
    """Seconds from a failure to the next step over sites whose jobs start again by themselves."""
    found = _site_figures("recovery_s", "any", without)
    return _predictive_spread(found, own=found, scale=1.0)


def repair_spread(repair_s: float) -> SiteSpread:
    """Seconds until a host is back: around the usual value, which has no published anchor."""
    return SiteSpread(median=repair_s, log_spread=REPAIR_LOG_SPREAD, sites=22)


def known_rate(value: float) -> SiteSpread:
    """The user's own figure: this site's, so nothing is left to spread."""
    return SiteSpread(median=value, log_spread=0.0, sites=1)


def _site_figures(quantity: str, kind: str, without: Collection[str] = ()) -> list[SiteFigure]:
    return [one for one in site_figures() if one.quantity == quantity and one.kind == kind and one.site not in without]


def _predictive_spread(figures: Sequence[SiteFigure], *, own: Sequence[SiteFigure], scale: float) -> SiteSpread:
    """What one more figure will be: Student's prediction interval, as the lognormal with the same 80 % range.

    Every figure counts, not a mean for each site: two of one site lie as far apart as two sites (the hosts of RSC-1 and
    its jobs of 1,024 GPUs by 3.6, ByteRobust's two ways to restart by 8), and a user's job is one figure.
    """
    spread = statistics.stdev(math.log(one.figure) for one in figures)
    width = student_quantile(len(figures) - 1) * spread * math.sqrt(1 + 1 / len(own))
    return SiteSpread(
        median=scale * math.exp(statistics.fmean(math.log(one.figure) for one in own)),
        log_spread=width / EDGE_Z,
        sites=len({one.site for one in own}),
    )


def student_quantile(degrees: int) -> float:
    """Student's 90th percentile, by Fisher's expansion: right to a hundredth from 3 degrees of freedom on.

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
    """GPU-days behind Llama 3's counts of interruptions."""
    one = next(one for one in site_figures() if one.site == HOPPER_SITE)
    return one.devices * one.days


def sample_sites(*spreads: SiteSpread, count: int) -> list[tuple[float, ...]]:
    """Sites spread evenly over the quantiles of up to three independent spreads, without random numbers.

    >>> [round(rate, 2) for rate, _ in sample_sites(known_rate(1.0), recovery_spread(), count=2)]
    [1.0, 1.0]
    """
    # The first in strata; the others by Roberts' R2 sequence (powers of the plastic number), which fills the square.
    steps = (1.0 / count, 0.7548776662466927, 0.5698402909980532)
    return [
        tuple(
            spread.quantile(min(1 - 1e-9, max(1e-9, math.fmod((place + 0.5) * step, 1.0))))
            for spread, step in zip(spreads, steps, strict=False)
        )
        for place in range(count)
    ]


def middle_range(values: Sequence[float], share: float = COVERAGE) -> tuple[float, float]:
    """The range that the middle share of values falls in.

    >>> [round(bound, 9) for bound in middle_range([float(one) for one in range(11)])]
    [1.0, 9.0]
    """
    ordered = sorted(values)

    def at(quantile: float) -> float:
        place = quantile * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return at((1 - share) / 2), at((1 + share) / 2)
