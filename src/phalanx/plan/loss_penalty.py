"""The loss that a mode and codec cost against synchronous training, as far as it has been measured.

Our own measurements are in loss_penalty.toml, by table and seed. Where there is none, a published result is cited, and
where there is none of those either, the penalty is reported as unknown.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from phalanx.io.files import shipped_text
from phalanx.job.sync_section import SyncSettings
from phalanx.units import plural

COLD_STEPS = (10, 20, 50)  # H of the runs without a warm-up; they lost 2.6 to 4.7 %, without an order in H
Case = tuple[str, int, str, bool]  # what is exchanged, H, codec, with a warm-up


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPenalty:
    """The penalty of one row of a table: in percent, for each seed."""

    percents: tuple[float, ...]
    page: str
    what: str
    chance: tuple[float, ...] = ()  # percent by which synchronous runs differ from each other

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.percents)

    def __str__(self) -> str:
        seeds = plural(len(self.percents), "seed")
        spread = f"{min(self.percents):+.2f} to {max(self.percents):+.2f} % over {seeds}"
        percents = spread if len(self.percents) > 1 else f"{self.mean:+.2f} % with one seed"
        by_chance = f"; {min(self.chance):+.2f} to {max(self.chance):+.2f} % by chance alone" if self.chance else ""
        return f"our runs: {percents}{by_chance}; {self.what} ({self.page})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPenalty:
    """Expected rise of the validation loss over synchronous training with the same tokens."""

    percent: float | None  # None: not measured
    source: str
    note: str = ""
    low: float | None = None  # over the seeds
    high: float | None = None
    seeds: int = 0


def measured_penalties(exchanges: float = math.inf) -> dict[Case, MeasuredPenalty]:
    """Return every case of our tables, for a run of `exchanges` exchanges.

    Short runs lose more, so a case comes from the longest table that the run is as long as, else from the shortest; of
    equally long tables the newest counts.
    """
    penalties: dict[Case, tuple[float, MeasuredPenalty]] = {}
    for case, length, penalty in _rows():
        rank = length if length <= exchanges else -length
        if case not in penalties or rank > penalties[case][0]:
            penalties[case] = rank, penalty
    return {case: penalty for case, (_, penalty) in penalties.items()}


def expected_penalty(sync: SyncSettings, *, warm: bool, steps: float = math.inf) -> LossPenalty:
    """Return the penalty of a mode, H and codec.

    `warm` is true where synchronous steps come first; `steps` is the number of steps after them.

    >>> from phalanx.job.sync_section import SyncSettings
    >>> expected_penalty(SyncSettings(mode="target-batch"), warm=True).percent
    0.0
    >>> expected_penalty(SyncSettings(mode="diloco", inner_steps=500), warm=True).percent is None
    True
    """
    family = "int8" if sync.codec == "bf16" else sync.codec  # both round without a bias
    tables = measured_penalties(steps / sync.inner_steps)
    if sync.mode not in ("diloco", "quorum"):
        if family == "fp32":
            return LossPenalty(percent=0.0, source="synchronous training itself: the mean of all gradients")
        penalty = tables.get(("gradients", 1, family, False))
        if penalty is None:
            note = f"{family} gradients of every step: nobody measured them here"
            return LossPenalty(percent=None, source="", note=note)
        return _penalty_of(
            penalty, note="top-k of raw gradients breaks Adam's moments" if family == "topk-2bit" else ""
        )
    if (penalty := tables.get(("updates", sync.inner_steps, family, warm))) is not None:
        return _penalty_of(penalty)
    if not warm and family in ("fp32", "int8"):
        nearest = min(COLD_STEPS, key=lambda steps: abs(steps - sync.inner_steps))
        return _penalty_of(
            tables["updates", nearest, "fp32", False], note=f"measured at H = {nearest}, without a warm-up"
        )
    return LossPenalty(percent=None, source=_shipped()["published"][sync.codec], note="not measured by us at this H")


def _penalty_of(known: MeasuredPenalty, note: str = "") -> LossPenalty:
    return LossPenalty(
        percent=known.mean,
        source=str(known),
        note=note,
        low=min(known.percents),
        high=max(known.percents),
        seeds=len(known.percents),
    )


def _rows() -> Iterator[tuple[Case, float, MeasuredPenalty]]:
    """Yield each case of the tables with its penalty and the number of exchanges of its runs."""
    for table in _shipped()["table"]:
        base = table["synchronous"]
        chance = _percents(table.get("moved", ()), base)
        for row in table["rows"]:
            percents = _percents(row["nats"], base)
            penalty = MeasuredPenalty(percents=percents, page=table["page"], what=table["what"], chance=chance)
            case = (row["exchanged"], row["inner_steps"], row["codec"], row["warm"])
            # Gradients are exchanged in every step: the newest table counts, whatever its length.
            yield case, table["exchanges"] if row["exchanged"] == "updates" else 1.0, penalty


def _percents(nats: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Return the penalty of each seed; a row may have fewer seeds than the table."""
    return tuple(100 * (nats_of_seed / synchronous - 1) for nats_of_seed, synchronous in zip(nats, base, strict=False))


@cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(shipped_text(__file__, "loss_penalty.toml"))
