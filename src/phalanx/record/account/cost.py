"""Money, energy and carbon of a run: so far, projected to its end, as planned, and the source of each number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable, text
from phalanx.record.account.ledger import Ledger, read_ledger
from phalanx.record.account.memberships import MarkReader, files_of, layout_spans, read_launches
from phalanx.record.run import Run
from phalanx.record.run_lock import is_run_over
from phalanx.units import HOUR_S, plural

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory


J_PER_KWH = 3.6e6
EARLY = "not known yet: the ranks have not read their counters"
# Seconds between two readings of the counters, if the plan has no other interval.
INTERVAL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """US dollars, joules at the devices, and kilograms of CO2 equivalent; None where unknown."""

    usd: float | None = None
    energy_j: float | None = None
    kgco2e: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of a run. `energy_source` is nvml, rapl, estimate (of a monitor), or plan."""

    so_far: Amount
    projected: Amount  # at the end of the run, at its mean pace so far
    predicted: Amount  # as in the plan
    device_hours: float
    wall_s: float
    projected_wall_s: float | None
    energy_source: str
    sources: Mapping[str, str]

    @property
    def usd(self) -> float | None:
        """US dollars so far."""
        return self.so_far.usd

    @property
    def energy_j(self) -> float | None:
        """Joules so far."""
        return self.so_far.energy_j

    @property
    def kgco2e(self) -> float | None:
        """Kilograms of CO2 equivalent so far."""
        return self.so_far.kgco2e


def run_cost(run: Run, history: RunHistory | None = None, book: Ledger | None = None) -> Cost:
    """Compute the cost of a run from its folder; `history` and `book` (the ledger) save reading it again."""
    if history is None:
        from phalanx.record.archive.history import RunHistory

        history = RunHistory.open(run)
    book = book if book is not None else read_ledger(run, history)
    try:
        plan = run.plan()
    except PhalanxError:
        plan = {}
    world = run.world()
    rates = _Rates(plan, world=1 if world is None else world)
    measured = used_energy(history)
    wall_s = projected_wall_s(run, plan, history, book)
    early = _is_early(run, plan, book) and (measured is None or measured.ranks < rates.world)
    spent = _spent_shares(run, history, rates, book.wall_s)
    device_s = sum(launch_rates.world * seconds for launch_rates, seconds in spent)
    energy_j = None if early else _run_energy(measured, rates, spent)
    so_far = rates.amount(spent, energy_j)
    left_s = wall_s - book.wall_s if wall_s is not None else 0.0
    ahead = 1.0 + rates.world * left_s / device_s if device_s else None
    projected = (
        Amount()
        if wall_s is None or ahead is None
        else rates.amount([*spent, (rates, left_s)], energy_j * ahead if energy_j is not None else None)
    )
    return Cost(
        so_far=so_far,
        projected=projected,
        predicted=_predicted_amount(plan, rates),
        device_hours=device_s / HOUR_S,
        wall_s=book.wall_s,
        projected_wall_s=wall_s,
        energy_source="" if energy_j is None else measured.source if measured else "plan",
        sources=_amount_sources(plan, rates, measured) | ({"energy_j": EARLY} if early else {}),
    )


class _Rates:
    """The price of a device hour and the carbon of a joule, from the plan's bill."""

    def __init__(self, plan: Mapping[str, Any], *, world: int) -> None:
        bill = at(plan, "bill")
        price = bill.get("usd_per_device_hour")
        middle = price[1] if isinstance(price, list) and len(price) == 3 else price
        self.usd_per_hour = number({"price": middle}, "price")
        self.watts = number(bill, "watts_per_device")
        self.pue = number(bill, "pue") or 1.0
        self.gco2_per_kwh = number(bill, "grid_gco2_per_kwh")
        self.world = world
        spares = max(0, integer(at(plan, "reliability"), "spares") or 0)
        self.rented = world + spares * max(0, integer(at(plan, "cluster"), "host_devices") or 0)

    def amount(self, spent: Sequence[Spent], energy_j: float | None) -> Amount:
        """Return the cost of device seconds at their rates, and of `energy_j` joules at this carbon intensity."""
        usd = [
            launch_rates.usd_per_hour * launch_rates.rented * seconds / HOUR_S
            for launch_rates, seconds in spent
            if launch_rates.usd_per_hour is not None
        ]
        return Amount(
            usd=sum(usd) if len(usd) == len(spent) and self.usd_per_hour is not None else None,
            energy_j=energy_j,
            kgco2e=None
            if energy_j is None or self.gco2_per_kwh is None
            else energy_j / J_PER_KWH * self.pue * self.gco2_per_kwh / 1000,
        )


# The rates of the devices, and the seconds for which they were held.
Spent = tuple[_Rates, float]


def _spent_shares(run: Run, history: RunHistory, rates: _Rates, wall_s: float) -> list[Spent]:
    """Split the run's seconds by launch: each has its own number of devices, and perhaps another price."""
    launches = read_launches(run, history)
    total_s = sum(launch.seconds for launch in launches)
    if len(launches) < 2 or total_s <= 0:
        return [(rates, wall_s)]
    return [(_Rates(launch.plan, world=launch.world), wall_s * launch.seconds / total_s) for launch in launches]


def _is_early(run: Run, plan: Mapping[str, Any], book: Ledger) -> bool:
    """Return True while first counter readings may be missing; no energy is shown before, so that it never drops."""
    interval_s = number(at(plan, "job", "telemetry"), "interval_s") or INTERVAL_S
    return book.wall_s - book.accounts.init < 2 * interval_s and not is_run_over(run)


def _run_energy(measured: Used | None, rates: _Rates, spent: Sequence[Spent]) -> float | None:
    """Return the measured energy, extrapolated to ranks without a counter, or else the plan's power × time."""
    if measured is not None:
        return measured.energy_j * max(rates.world, measured.ranks) / measured.ranks
    if not all(launch_rates.watts for launch_rates, _ in spent):
        return None
    return sum((launch_rates.watts or 0.0) * launch_rates.world * seconds for launch_rates, seconds in spent)


def projected_wall_s(run: Run, plan: Mapping[str, Any], history: RunHistory, book: Ledger) -> float | None:
    """Project the seconds of the whole run at its mean pace so far, with start-up counted once; None if unknown.

    For a run that is done, return its wall time.
    """
    steps = integer(at(plan, "duration"), "steps")
    if run.status().get("state") == "done":
        return book.wall_s
    if not steps or history.last_step is None or not book.steps:
        return None
    remaining_steps = max(0, steps - history.last_step - 1)
    once_s = book.accounts.init + book.accounts.compile + book.accounts.stopping
    pace_s = max(0.0, book.wall_s - once_s) / book.steps
    return book.wall_s + remaining_steps * pace_s * _newest_over_all(run, history)


def _newest_over_all(run: Run, history: RunHistory) -> float:
    """Return the newest layout's mean step time over that of the run: the remaining steps use the newest layout."""
    spans = layout_spans(run, history)
    if len(spans) < 2:
        return 1.0
    means = [history.curve("duration_s", first=first, points=1).mean for first in (spans[-1].first, spans[0].first)]
    newest_s, all_s = (next(iter(curve_means), None) for curve_means in means)
    return newest_s / all_s if newest_s and all_s else 1.0


def _predicted_amount(plan: Mapping[str, Any], rates: _Rates) -> Amount:
    bill = at(plan, "bill")
    usd = bill.get("usd")
    kwh = number(bill, "kwh")
    return Amount(
        usd=number({"usd": usd[1] if isinstance(usd, list) and len(usd) == 3 else usd}, "usd"),
        energy_j=kwh * J_PER_KWH / rates.pue if kwh is not None else None,
        kgco2e=number(bill, "kgco2e"),
    )


def _amount_sources(plan: Mapping[str, Any], rates: _Rates, measured: Used | None) -> dict[str, str]:
    bill = at(plan, "bill")
    price = (
        f"{plural(rates.rented, 'device')} × hours × ${rates.usd_per_hour:g}" if rates.usd_per_hour is not None else ""
    )
    if measured is not None:
        missing = rates.world - measured.ranks
        rest = f"; {missing} of {rates.world} ranks have no counter and count like the others" if missing > 0 else ""
        energy = f"{measured.source}, summed over ranks and restarts{rest}"
    elif rates.watts:
        energy = f"no counter: the plan's {rates.watts:g} W per device; {text(bill, 'power_source')}"
    else:
        energy = "not known: no counter, and no power in the plan"
    carbon = f"energy × PUE {rates.pue:g} ({text(bill, 'pue_source')})"
    if rates.gco2_per_kwh is not None:
        carbon += f" × {rates.gco2_per_kwh:g} g/kWh ({text(bill, 'grid_source')})"
    return {
        "usd": "; ".join(source for source in (price, text(bill, "price_source")) if source) or "no price in the plan",
        "energy_j": energy,
        "kgco2e": carbon,
        "projected": "projected from the mean time per step so far, interruptions included, start-up once",
    }


# ---- energy, summed over ranks and restarts from the counters in `monitor` events ------------------------------------


# Up to this size all `monitor` events are read; beyond, restarts are detected on a mesh of COLUMNS columns.
MOST_READ_BYTES = 64 * 2**20
COLUMNS = 240
# Number of ranks whose newest `monitor` event is read for the source, in a large run.
SOME = 16
# Counted event by event: each rank takes a millisecond.
MOST_READ_RANKS = 1024
# 32 years of a 1 GW power station: beyond this a counter is damaged.
MOST_J = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Energy according to the counters."""

    energy_j: float
    ranks: int  # that have a counter
    source: str  # nvml, rapl, estimate, or several of them


def used_energy(history: RunHistory) -> Used | None:
    """Return the energy used by all ranks with a counter; None if no rank has one."""
    is_small = len(history.ranks) <= MOST_READ_RANKS
    if is_small and history.run.event_bytes(beyond=MOST_READ_BYTES) <= MOST_READ_BYTES:
        newest = {rank: event for rank in history.ranks if (event := history.latest("monitor", rank)) is not None}
        ranks = [rank for rank, event in newest.items() if _is_sane(number(event, "energy_j"))]
        totals = list(_exact_energy(history, ranks))
    else:
        newest = {
            rank: event
            for rank in history.ranks[:: max(1, len(history.ranks) // SOME)]
            if (event := history.latest("monitor", rank)) is not None
        }
        totals = list(_coarse_energy(history))
    if not totals:
        return None
    names = Counter(printable(event.get("energy_source") or "unknown", most=40) for event in newest.values())
    return Used(energy_j=sum(totals), ranks=len(totals), source=", ".join(sorted(names)))


def _is_sane(energy: float | None) -> bool:
    return energy is not None and 0.0 <= energy <= MOST_J


def counted_energy(readings: Iterable[tuple[int | None, float | None]]) -> float:
    """Return the sum over generations of a counter that restarts in each: the last value of every generation.

    The first value of a generation includes what was used before the first reading, so it may be higher than the last
    value before. Without generations only a lower value marks a restart.

    >>> counted_energy([(None, 1.0), (None, 5.0), (None, None), (None, 2.0), (None, 3.0)])
    8.0
    >>> counted_energy([(1, 90.0), (1, 100.0), (2, 150.0), (2, 209.0)])
    309.0
    """
    total = last = 0.0
    last_generation: int | None = None
    for generation, value in readings:
        if value is not None and _is_sane(value):
            begins = value < last or (
                generation != last_generation and generation is not None and last_generation is not None
            )
            total, last = (total + last, value) if begins else (total, value)
            last_generation = last_generation if generation is None else generation
    return total + last


def _exact_energy(history: RunHistory, known: Iterable[int]) -> Iterable[float]:
    for rank in known:
        monitors = MarkReader(kinds=frozenset((b"monitor",))).read(files_of(history.run, rank))
        yield counted_energy((integer(event, "epoch"), number(event, "energy_j")) for _, event in monitors)


def _coarse_energy(history: RunHistory) -> Iterable[float]:
    """Return the energy of each rank to within one column: the last value is the mean of the last column.

    A mesh has no generations: if a counter restarts and exceeds its last value within one column, the restart is not
    seen and the energy counted before it is missing.
    """
    for values in history.mesh("energy_j", columns=COLUMNS).values:
        if any(_is_sane(value) for value in values):
            yield counted_energy((None, value) for value in values)
