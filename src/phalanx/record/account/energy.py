"""Energy a run has used, summed over ranks and restarts from the counters in their `monitor` events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.io.values import integer, number, printable
from phalanx.record.account.formations import MarkReader, files_of

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory

# Up to this size the monitors are read one by one; beyond, restarts are read off a mesh of this many columns.
MOST_READ_BYTES = 64 * 2**20
COLUMNS = 240
SOME = 16  # ranks that are asked for the source, of so many
MOST_J = 1e18  # 32 years of a power station of 1 GW: a damaged counter, not a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What the counters say."""

    energy_j: float
    ranks: int  # that have a counter
    source: str  # nvml, rapl, estimate, or several of them


def used(history: RunHistory) -> Used | None:
    """None where no rank has a counter."""
    if _is_small(history):
        newest = {rank: event for rank in history.ranks if (event := history.latest("monitor", rank)) is not None}
        ranks = [rank for rank, event in newest.items() if _sane(number(event, "energy_j"))]
        totals = list(_exact(history, ranks))
    else:
        newest = {
            rank: event for rank in _some(history.ranks) if (event := history.latest("monitor", rank)) is not None
        }
        totals = list(_coarse(history))
    if not totals:
        return None
    names = Counter(printable(event.get("energy_source") or "unknown", most=40) for event in newest.values())
    return Used(energy_j=sum(totals), ranks=len(totals), source=", ".join(sorted(names)))


def _some(ranks: Sequence[int]) -> Sequence[int]:
    return ranks[:: max(1, len(ranks) // SOME)]


def _sane(energy: float | None) -> bool:
    return energy is not None and 0.0 <= energy <= MOST_J


def counted(readings: Iterable[tuple[int | None, float | None]]) -> float:
    """The sum over epochs of a counter that begins anew in each: the last value of every one.

    Its first value in an epoch holds what was used while nobody looked, and need not be lower than the last one before.
    Without epochs only a lower one tells.

    >>> counted([(None, 1.0), (None, 5.0), (None, None), (None, 2.0), (None, 3.0)])
    8.0
    >>> counted([(1, 90.0), (1, 100.0), (2, 150.0), (2, 209.0)])
    309.0
    """
    total = last = 0.0
    known: int | None = None
    for epoch, value in readings:
        if value is not None and _sane(value):
            begins = value < last or (epoch != known and epoch is not None and known is not None)
            total, last = (total + last, value) if begins else (total, value)
            known = known if epoch is None else epoch
    return total + last


def _is_small(history: RunHistory) -> bool:
    return history.run.event_bytes() <= MOST_READ_BYTES


def _exact(history: RunHistory, known: Iterable[int]) -> Iterable[float]:
    for rank in known:
        monitors = MarkReader(kinds=frozenset((b"monitor",))).read(files_of(history.run, rank))
        yield counted((integer(event, "epoch"), number(event, "energy_j")) for _, event in monitors)


def _coarse(history: RunHistory) -> Iterable[float]:
    """To within a column of the run: its last value is the mean of the last one.

    A mesh has no epochs: a counter that begins anew above its last value is not seen to, and what it had counted until
    then is missing.
    """
    for values in history.mesh("energy_j", columns=COLUMNS).values:
        if any(_sane(value) for value in values):
            yield counted((None, value) for value in values)
