"""What a mode and codec cost in loss against synchronous training, as far as anybody measured it.

Our own numbers stand in loss_penalty.toml, by table and seed. Where we measured nothing, a published statement is
named, and where there is none, the penalty is said to be unknown.
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
    """Of one row of a table: in percent, for each seed."""

    percents: tuple[float, ...]
    page: str
    what: str
    chance: tuple[float, ...] = ()  # what synchronous training differs by from itself

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.percents)

    def __str__(self) -> str:
        seeds = plural(len(self.percents), "seed")
        spread = f"{min(self.percents):+.2f} to {max(self.percents):+.2f} % over {seeds}"
        told = spread if len(self.percents) > 1 else f"{self.mean:+.2f} % with one seed"
        by_chance = f"; {min(self.chance):+.2f} to {max(self.chance):+.2f} % by chance alone" if self.chance else ""
        return f"our runs: {told}{by_chance}; {self.what} ({self.page})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPenalty:
    """Expected rise of the validation loss over synchronous training with the same tokens."""

    percent: float | None  # None: nobody measured it here
    source: str
    note: str = ""
    low: float | None = None  # over the seeds
    high: float | None = None
    seeds: int = 0


def measured_penalties(exchanges: float = math.inf) -> dict[Case, MeasuredPenalty]:
    """Every case of our tables, for a run of so many exchanges.

    Short runs lose more: from the longest table that the run is as long as, else from the shortest; of two alike, the
    newest.
    """
    found: dict[Case, tuple[float, MeasuredPenalty]] = {}
    for case, length, penalty in _rows():
        rank = length if length <= exchanges else -length
        if case not in found or rank > found[case][0]:
            found[case] = rank, penalty
    return {case: penalty for case, (_, penalty) in found.items()}


def expected_penalty(sync: SyncSettings, *, warm: bool, steps: float = math.inf) -> LossPenalty:
    """The penalty of a mode, H and codec; `warm` where synchronous steps come first, `steps` are those after them.

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
        known = tables.get(("gradients", 1, family, False))
        if known is None:
            note = f"{family} gradients of every step: nobody measured them here"
            return LossPenalty(percent=None, source="", note=note)
        return _penalty_of(known, note="top-k of raw gradients breaks Adam's moments" if family == "topk-2bit" else "")
    if (known := tables.get(("updates", sync.inner_steps, family, warm))) is not None:
        return _penalty_of(known)
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
    """Each with the exchanges of its runs."""
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
    """By seed; a row may have fewer than the table."""
    return tuple(100 * (one / synchronous - 1) for one, synchronous in zip(nats, base, strict=False))


@cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(shipped_text(__file__, "loss_penalty.toml"))
