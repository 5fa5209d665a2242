"""A failure in time, by the fluid engine: rates before it, until it is noticed, once it is bypassed, and after it.

Rates are fair in each of these stages, and change at once between them. Until a dead part is noticed, data sent over
it is lost: sprayed flows continue to send, a queue pair sends what it has and then waits. A part that only loses
packets keeps its speed; routing never notices it, senders do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_failures import fault_links
from phalanx.sim.fabric_links import Floats, Ints, Links, links_of
from phalanx.sim.fair_rates import fair_rates_of, paused_rates
from phalanx.sim.fluid import MRC, FlowParts, FluidCase, Wire, batch_of, case_of, parts_of
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.routes import Routing, route_flows
from phalanx.sim.traffic_matrix import Flows

TINY = 1e-9  # tolerance of rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """The way in which connections send and recover."""

    name: str
    routing: Routing
    react_s: float  # from a failure until its paths are left; infinite: never
    least_paths: int = 1  # paths that a sender keeps in any case, good or bad
    probe_s: float = math.inf  # until a path that was left is tried again
    pauses: bool = False  # PFC
    go_back: bool = False  # a lost packet is sent again with all that followed it (RoCE)
    # The wait of such a sender when no gap is reported: a receiver reports a gap once, and only when a later
    # packet arrives.
    timeout_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """The result of an episode. Times are infinite for flows that do not finish."""

    times_s: Floats
    end_s: Floats = field(repr=False)  # ends of the intervals with constant rates
    bits: Floats = field(repr=False)  # of payload delivered in each
    lost_packets: float
    touched: int  # flows that had a path over a broken part while they were sending
    stopped: str = ""  # "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class _EpisodeStage:
    """A time interval in which no part fails, returns or is noticed."""

    begin_s: float
    end_s: float
    share: Floats  # of each link's capacity
    avoided: Floats | None  # 0 where no new data is sent
    doomed: NDArray[np.bool_] | None  # dead links that are not noticed yet
    loss: Floats | None
    # Paths that senders keep although they lose packets; 0 before the good ones are used up: all.
    keeps: int


@dataclass(kw_only=True, slots=True)
class _Account:
    """The progress of an episode: remaining bits, finish times, and what was delivered and lost."""

    left: Floats
    times: Floats
    # Of each row: when it lost its data on a dead path; NaN where it did not.
    lost_at: Floats
    now: float = 0.0
    lost_bits: float = 0.0
    ends: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)


def run_episode(
    fabric: Fabric,
    flows: Flows,
    *,
    manner: Manner,
    faults: Sequence[FabricFault] = (),
    denied: Sequence[FabricFault] = (),
    wire: Wire = MRC,
) -> Episode:
    """Simulate flows that start together, and failures in the meantime; parts in `denied` are never used."""
    links = links_of(fabric)
    denied_links = np.concatenate([np.empty(0, dtype=np.int64), *(fault_links(links, fault) for fault in denied)])
    wire_bits = 8.0 * wire.wire_bytes(flows.nbytes)
    account, parts, hops = None, None, np.zeros(len(flows), dtype=np.int64)
    touched, stopped = np.zeros(len(flows), dtype=bool), ""
    try:
        for stage in _episode_stages(links, faults, denied_links, manner, wire):
            routes = route_flows(links, flows, manner.routing, stage.avoided)
            case = case_of(links, routes, links.capacity() * stage.share, manner.routing)
            pulls = wire.pulls(len(case.owner), manner.routing.seed)
            case = replace(case, table=replace(case.table, pull=pulls))
            if account is None or parts is None:
                parts = parts_of(case, wire_bits, manner.routing)
                never_lost = np.full(len(case.owner), np.nan)
                account = _Account(left=parts.bits.copy(), times=np.full(len(parts.bits), np.inf), lost_at=never_lost)
                np.maximum.at(hops, case.owner, case.routes.hops)
            useful, lost, survives = _row_fates(links, case, stage, manner, wire)
            waits = _row_waits(parts, survives, manner, wire)
            moving = np.isinf(account.times[parts.of_row])
            touched[case.owner[moving & (lost > 0)]] = True
            idle = _idle_paths(case, manner, stage.keeps) if stage.keeps else np.zeros(len(moving), dtype=bool)
            _advance_stage(account, case, parts, stage, manner, useful, lost, waits, idle)
            if not np.isinf(account.times).any():
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    if account is None or parts is None:
        # Interrupted before the first rates: no result exists.
        raise KeyboardInterrupt
    return _make_episode(fabric, flows, wire, account, parts, hops, touched, stopped)


def _make_episode(
    fabric: Fabric,
    flows: Flows,
    wire: Wire,
    account: _Account,
    parts: FlowParts,
    hops: Ints,
    touched: NDArray[np.bool_],
    stopped: str,
) -> Episode:
    """Return the result of an episode from its account: finish times with latency, delivered bits, and losses."""
    done_s = np.zeros(len(flows))
    np.maximum.at(done_s, parts.flow, account.times)
    payload = float(flows.nbytes.sum() / wire.wire_bytes(flows.nbytes).sum())
    not_queued = np.zeros(len(flows), dtype=bool)
    return Episode(
        times_s=done_s + wire.latency_s(flows.nbytes, hops, fabric.port_gbps, not_queued),
        end_s=np.array(account.ends),
        bits=payload * np.array(account.bits),
        lost_packets=account.lost_bits / (8.0 * (wire.payload_bytes + wire.header_bytes)),
        touched=int(touched.sum()),
        stopped=stopped,
    )


def _episode_stages(
    links: Links, faults: Sequence[FabricFault], without: Ints, manner: Manner, wire: Wire
) -> Iterator[_EpisodeStage]:
    """Yield the stages between the times at which a fault begins, ends, is noticed, or leaves no spare paths."""
    hits = [_Hit(fault, fault_links(links, fault), *_loss_detected(links, fault, manner, wire)) for fault in faults]
    edges = {0.0, math.inf}
    for fault, _, dry_s, _ in hits:
        edges |= {fault.at_s, fault.until_s}
        edges |= {time for time in (fault.at_s + manner.react_s, dry_s) if time < fault.until_s}
    for begin, end in itertools.pairwise(sorted(edges)):
        yield _episode_stage(links, hits, without, manner, begin, end)


def timer_s(lost_s: Floats | float, works_s: Floats | float, timeout_s: float) -> Any:
    """Return when a sender retries that lost everything at `lost_s` and could succeed from `works_s` on.

    Its timer expires every `timeout_s` seconds; without a timer it retries at once.
    """
    if not timeout_s:
        return works_s
    return lost_s + timeout_s * np.ceil((works_s - lost_s) / timeout_s - TINY)


class _Hit(NamedTuple):
    """A fault, its links, when it leaves senders without spare paths, and how many paths they then keep."""

    fault: FabricFault
    links: Ints
    dry_s: float
    keeps: int


def _loss_detected(links: Links, fault: FabricFault, manner: Manner, wire: Wire) -> tuple[float, int]:
    """Return when losses have retired all spare paths, and how many paths then remain in use.

    Infinite where probes restore paths sooner. Then as many paths are lost as return: rate·loss·probe_s = spare
    paths, where the rate is that of the planes in use, or of the least paths.
    """
    packets_per_s = links.fabric.nic_gbps * 1e9 / (8.0 * (wire.payload_bytes + wire.header_bytes))
    retired_per_s, spare_paths = packets_per_s * fault.loss, max(0, manner.routing.paths - manner.least_paths)
    if manner.routing.recovery != "edge" or retired_per_s * manner.probe_s <= spare_paths or fault.loss == 0:
        return math.inf, 0
    balance = spare_paths / (retired_per_s * manner.probe_s)
    return fault.at_s + spare_paths / retired_per_s, max(manner.least_paths, round(balance * links.fabric.planes))


def _episode_stage(
    links: Links, faults: list[_Hit], without: Ints, manner: Manner, begin: float, end: float
) -> _EpisodeStage:
    """Return one stage from `begin` to `end`.

    For each link it has the remaining capacity and loss, whether senders avoid it, and whether it is dead without
    being noticed.
    """
    share, avoided, loss = np.ones(links.count), np.ones(links.count), np.zeros(links.count)
    doomed, keeps = np.zeros(links.count, dtype=bool), 0
    for fault, hit_links, dry_s, kept_paths in faults:
        if not fault.at_s <= begin < fault.until_s:
            continue
        is_known = begin >= fault.at_s + manner.react_s
        if fault.loss > 0:
            if begin >= dry_s:
                keeps = min(keeps or kept_paths, kept_paths)
            loss[hit_links] = 1 - (1 - loss[hit_links]) * (1 - fault.loss)
            if is_known and manner.routing.recovery == "edge":
                avoided[hit_links] = 0.0
        elif fault.left > 0:
            share[hit_links] = fault.left
        elif is_known:
            share[hit_links] = avoided[hit_links] = 0.0
        else:
            doomed[hit_links] = True
    share[without] = avoided[without] = 0.0
    return _EpisodeStage(
        begin_s=begin,
        end_s=end,
        share=share,
        avoided=avoided if (avoided < 1).any() else None,
        doomed=doomed if doomed.any() else None,
        loss=loss if loss.any() else None,
        keeps=keeps,
    )


def _idle_paths(case: FluidCase, manner: Manner, keeps: int) -> NDArray[np.bool_]:
    """Return the paths that lose packets and are left, where a flow has enough others."""
    cut = case.routes.cut.reshape(-1, manner.routing.paths)
    good = (~cut).sum(axis=1, keepdims=True)
    return np.asarray(cut & (np.cumsum(cut, axis=1) > np.maximum(0, keeps - good))).reshape(-1)


def _row_fates(
    links: Links, case: FluidCase, stage: _EpisodeStage, manner: Manner, wire: Wire
) -> tuple[Floats, Floats, Floats]:
    """Return for each row the useful share of its data, the lost share, and the share that lossy parts let through."""
    rows, hops = len(case.owner), case.routes.links
    survives = np.ones(rows)
    if stage.loss is not None:
        # -1, a missing hop, reads the last entry.
        survives = np.append(1 - stage.loss, 1.0)[hops].prod(axis=1)
    alive = survives.copy()
    useful = _went_back(survives, links.fabric, wire) if manner.go_back else survives.copy()
    if stage.doomed is not None:
        dead = np.append(stage.doomed, False)[hops].any(axis=1)
        useful[dead] = survives[dead] = 0.0
    return useful, 1 - survives, alive


def _row_waits(parts: FlowParts, survives: Floats, manner: Manner, wire: Wire) -> Floats:
    """Return the seconds that each row waits for timers per bit it delivers.

    A timer runs for every packet that is lost twice in a row, and for a lost last packet, after which no packet
    reveals the gap. The random numbers are drawn once for a whole part.
    """
    if not (manner.go_back and manner.timeout_s) or survives.min(initial=1.0) >= 1:
        return np.zeros(len(survives))
    bits, lost = parts.bits[parts.of_row], 1 - survives
    packets = bits / (8.0 * (wire.payload_bytes + wire.header_bytes))
    luck = np.random.default_rng(manner.routing.seed)
    timers = luck.poisson(packets * lost**2) + (luck.random(len(lost)) < lost)
    return np.asarray(timers * manner.timeout_s / bits)


def _went_back(survives: Floats, fabric: Fabric, wire: Wire) -> Floats:
    """Return the useful share under go-back-N: every loss costs the data in flight, one bandwidth-delay product."""
    trip_s = 2 * (wire.base_s + (fabric.hops + 1) * wire.link_s)
    under_way = max(1.0, trip_s * fabric.port_gbps * 1e9 / (8.0 * (wire.payload_bytes + wire.header_bytes)))
    return np.asarray(survives / (survives + (1 - survives) * under_way))


def _advance_stage(
    account: _Account,
    case: FluidCase,
    parts: FlowParts,
    stage: _EpisodeStage,
    manner: Manner,
    useful: Floats,
    lost: Floats,
    waits: Floats,
    idle: NDArray[np.bool_],
) -> None:
    """Drain the flows until the stage ends or nothing moves, in intervals between the timers of waiting senders."""
    begin_s = stage.begin_s
    while begin_s < stage.end_s:
        rows, end_s = np.flatnonzero(np.isinf(account.times[parts.of_row]) & ~idle), stage.end_s
        if manner.routing.recovery != "edge":
            rows, end_s = _patient_rows(account, case, parts, replace(stage, begin_s=begin_s), manner, useful, rows)
        while len(rows) and account.now < end_s:
            table = case.table.some(rows)
            rates = fair_rates_of(table, case.capacity)
            rates = paused_rates(table, rates, case.capacity) if manner.pauses else rates
            # A waiting row is silent for the rest of the time.
            rates = rates / (1 + rates * useful[rows] * waits[rows])
            leaves = _one_step(account, parts, end_s, rows, rates, useful[rows], lost[rows])
            if leaves is None:
                break
            rows = rows[~leaves[parts.of_row[rows]]]
        # The remaining flows wait.
        if account.now < end_s < math.inf and np.isinf(account.times).any():
            account.now = end_s
            account.ends.append(end_s)
            account.bits.append(0.0)
        begin_s = end_s


def _patient_rows(
    account: _Account,
    case: FluidCase,
    parts: FlowParts,
    stage: _EpisodeStage,
    manner: Manner,
    useful: Floats,
    rows: Ints,
) -> tuple[Ints, float]:
    """Return the rows that send, and the time of the next timer.

    Queue pairs on dead paths send what they have, lose it, and wait until a path works and their timer expires. The
    others continue.
    """
    lost_at, dead = account.lost_at[rows], useful[rows] <= 0
    fresh = dead & np.isnan(lost_at)
    if fresh.any():
        sends = ~dead | fresh
        rates = fair_rates_of(case.table.some(rows[sends]), case.capacity)[fresh[sends]]
        sent = np.minimum(rates * (stage.end_s - stage.begin_s), account.left[parts.of_row[rows[fresh]]])
        account.lost_bits += float(sent.sum())
        account.lost_at[rows[fresh]] = stage.begin_s
    due_s = np.broadcast_to(timer_s(lost_at, stage.begin_s, manner.timeout_s), dead.shape)
    is_waiting: NDArray[np.bool_] = ~dead & (due_s > stage.begin_s * (1 + TINY))  # NaN: no timer is running
    account.lost_at[rows[~(dead | is_waiting)]] = np.nan
    return np.asarray(rows[~(dead | is_waiting)]), float(due_s[is_waiting].min(initial=stage.end_s))


def _one_step(
    account: _Account, parts: FlowParts, end_s: float, rows: Ints, rates: Floats, useful: Floats, lost: Floats
) -> NDArray[np.bool_] | None:
    """Advance until the next parts are done; None when the stage ends first or nothing moves."""
    speed: Floats = np.bincount(parts.of_row[rows], weights=rates * useful, minlength=len(account.left)).astype(float)
    needs = np.divide(account.left, speed, out=np.full(len(speed), np.inf), where=speed > 0)
    first, now = float(needs.min()), account.now
    if now + first > end_s or not np.isfinite(first):
        if np.isfinite(end_s):
            _keep_step(account, end_s - now, speed, needs, rates * lost)
        return None
    leaves = needs <= min(first + batch_of(len(parts.of_row)) * (now + first), end_s - now)
    step = float(needs[leaves].max())
    account.times[leaves] = now + needs[leaves]
    _keep_step(account, step, speed, needs, rates * lost)
    return np.asarray(leaves)


def _keep_step(account: _Account, step: float, speed: Floats, needs: Floats, losing: Floats) -> None:
    moved = speed * np.minimum(needs, step, where=speed > 0, out=np.zeros(len(speed)))
    account.left = np.where(np.isinf(account.times), account.left - moved, np.inf)
    account.lost_bits += float(losing.sum()) * step
    account.now += step
    account.ends.append(account.now)
    account.bits.append(float(moved.sum()))
