"""Simulate peers that come and go over months: the goodput of a plan on a cluster of sites.

Sites stay and are away for exponential times. Between two changes, rounds follow each other at the pace that the
planner predicts for the members (plan/slow_modes.py), so that the cost of a run depends on its changes and not on its
rounds.

A peer that leaves loses its unfinished round. The others notice `dead_after_s` later, unless they had to compute for
longer anyway, and repeat an exchange it was part of. A round commits with a majority of the last membership (exactly
half is enough with its first member), or with the job's quorum; until then all peers wait. A peer that returns
fetches the state, then starts with the next round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.hardware.types import Site
from phalanx.job.sync_section import SyncSettings
from phalanx.plan.plan import Plan
from phalanx.plan.slow_exchange import PAYLOAD_SHARE, peer_link
from phalanx.plan.slow_modes import SitePace, predict_mode
from phalanx.units import DAY_S

VIEW_S = 1.0  # from a death noticed to the next membership: the bound of issue 17
MOST_CHANGES = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnPolicy:
    """The inputs of a simulation: sites, their paces, and the exchange."""

    sites: tuple[Site, ...]
    paces: tuple[SitePace, ...]
    values: int
    sync: SyncSettings
    state_bytes: float  # weights and optimizer state, which a returning peer fetches


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnOutcome:
    """The result of one simulated run. Seconds are of the whole group, shares of a site's own time."""

    wall_s: float
    tokens: float
    goodput: float  # tokens over those of all sites computing all the time
    present: tuple[float, ...]  # share of the time that each site was a member
    credit: tuple[float, ...]  # share of the tokens that each site trained on
    departures: int
    lost_tokens: float  # of unfinished rounds of peers that left
    # Remaining peers waited for a death to be noticed, or repeated an exchange.
    stalled_s: float
    waiting_s: float  # no round could commit: no majority, or fewer than the quorum
    fetching_s: float  # returning peers fetched the state


@dataclass(slots=True)
class _Pace:
    """The pace of one membership."""

    round_s: float
    compute_s: float  # of the round, before its exchange
    tokens: Mapping[int, float]  # of each member, per round


@dataclass(slots=True)
class _ChurnRun:
    """The state of a run."""

    members: list[int]  # sorted by index: the first may decide with exactly half
    view: list[int]  # of the last committed round
    now_s: float = 0.0
    rounds: float = 0.0  # with the finished part of the current round
    blocked: bool = False
    tokens: dict[int, float] = field(default_factory=dict)
    present_s: dict[int, float] = field(default_factory=dict)
    departures: int = 0
    lost_tokens: float = 0.0
    stalled_s: float = 0.0
    waiting_s: float = 0.0
    fetching_s: float = 0.0
    stall_left_s: float = 0.0


def churn_policy(plan: Plan) -> ChurnPolicy:
    """Return the policy of a plan on a cluster of sites."""
    assert plan.sites is not None
    paces = tuple(
        SitePace(
            name=row.name,
            devices=row.devices,
            step_s=row.step_s,
            tokens_per_step=row.tokens_per_s * row.step_s,
            link=peer_link(site),
            usd_per_hour=row.usd_per_hour,
        )
        for row, site in zip(plan.sites.sites, plan.cluster.sites, strict=True)
    )
    return ChurnPolicy(
        sites=plan.cluster.sites,
        paces=paces,
        values=plan.sites.values,
        sync=plan.job.sync,
        state_bytes=plan.reliability.checkpoint_bytes,
    )


def expected_changes(policy: ChurnPolicy, days: float) -> float:
    """Return the expected number of departures and returns of one run."""
    return sum(2 * days * DAY_S / (site.session_s + site.absence_s) for site in policy.sites if site.session_s > 0)


def simulate_churn(policy: ChurnPolicy, *, days: float, count: int, seed: int) -> Iterator[ChurnOutcome]:
    """Yield `count` runs, each with its own random numbers."""
    paces: dict[tuple[int, ...], _Pace] = {}
    for number in range(count):
        yield _simulate_run(policy, days * DAY_S, random.Random(f"{seed}/{number}"), paces)


def _simulate_run(
    policy: ChurnPolicy, until_s: float, source: random.Random, paces: dict[tuple[int, ...], _Pace]
) -> ChurnOutcome:
    """Simulate one run as a sequence of departures, returns and finished fetches, with rounds in between."""
    sites = policy.sites
    run = _ChurnRun(members=list(range(len(sites))), view=list(range(len(sites))))
    # Times at which a present site leaves, an absent one returns, and a returned one has fetched the state.
    leaves = {index: _draw(source, site.session_s) for index, site in enumerate(sites)}
    returns: dict[int, float] = {}
    ready: dict[int, float] = {}
    while run.now_s < until_s:
        next_s = min(until_s, *leaves.values(), *returns.values(), *ready.values())
        _go_on(policy, run, next_s - run.now_s, paces)
        run.now_s = next_s
        for index in [index for index, time_s in leaves.items() if time_s <= next_s]:
            _depart(policy, run, index, paces)
            del leaves[index]
            ready.pop(index, None)
            away_s = sites[index].absence_s
            returns[index] = next_s + (_draw(source, away_s) if away_s else 0.0)
        for index in [index for index, time_s in returns.items() if time_s <= next_s]:
            fetch_s = _fetch_seconds(policy, run, index)
            del returns[index]
            run.fetching_s += fetch_s
            ready[index] = next_s + fetch_s
            leaves[index] = next_s + _draw(source, sites[index].session_s)
        for index in [index for index, time_s in ready.items() if time_s <= next_s]:
            del ready[index]
            run.members = sorted({*run.members, index})
            # It takes no part in the rest of the current round.
            if not run.blocked:
                missed = 1.0 - run.rounds % 1.0
                run.tokens[index] = (
                    run.tokens.get(index, 0.0) - missed * _pace_of(policy, run.members, paces).tokens[index]
                )
        run.blocked = not _may_commit(run, policy.sync)
        if not run.blocked:
            run.view = list(run.members)
    ideal = sum(pace.tokens_per_s for pace in policy.paces) * until_s
    tokens = max(0.0, sum(run.tokens.values()))
    return ChurnOutcome(
        wall_s=until_s,
        tokens=tokens,
        goodput=tokens / ideal,
        present=tuple(run.present_s.get(index, 0.0) / until_s for index in range(len(sites))),
        credit=tuple(max(0.0, run.tokens.get(index, 0.0)) / tokens if tokens else 0.0 for index in range(len(sites))),
        departures=run.departures,
        lost_tokens=run.lost_tokens,
        stalled_s=run.stalled_s,
        waiting_s=run.waiting_s,
        fetching_s=run.fetching_s,
    )


def _go_on(policy: ChurnPolicy, run: _ChurnRun, seconds: float, paces: dict[tuple[int, ...], _Pace]) -> None:
    """Advance the rounds of the present members by `seconds`."""
    for index in run.members:
        run.present_s[index] = run.present_s.get(index, 0.0) + seconds
    if run.blocked or not run.members:
        run.waiting_s += seconds
        return
    stalled = min(seconds, run.stall_left_s)
    run.stall_left_s -= stalled
    run.stalled_s += stalled
    pace = _pace_of(policy, run.members, paces)
    rounds_done = (seconds - stalled) / pace.round_s
    run.rounds += rounds_done
    for index, tokens in pace.tokens.items():
        run.tokens[index] = run.tokens.get(index, 0.0) + rounds_done * tokens


def _depart(policy: ChurnPolicy, run: _ChurnRun, index: int, paces: dict[tuple[int, ...], _Pace]) -> None:
    """Remove a peer that leaves without notice, somewhere in a round."""
    run.departures += 1
    if index not in run.members:
        return  # it was still fetching the state
    if not run.blocked:
        pace = _pace_of(policy, run.members, paces)
        into_s = (run.rounds % 1.0) * pace.round_s
        lost = (run.rounds % 1.0) * pace.tokens[index]
        run.tokens[index] = run.tokens.get(index, 0.0) - lost
        run.lost_tokens += lost
        noticed_s = policy.sync.dead_after_s + VIEW_S
        computing_s = pace.compute_s - into_s
        run.stall_left_s = max(0.0, noticed_s - computing_s) if computing_s > 0 else noticed_s - computing_s
    run.members = [member for member in run.members if member != index]


def _may_commit(run: _ChurnRun, sync: SyncSettings) -> bool:
    """Return True if the present members can commit a round; two parts of a divided group never both can."""
    if sync.mode == "quorum" and sync.quorum and len(run.members) < sync.quorum:
        return False
    known_members = [index for index in run.members if index in run.view]
    if 2 * len(known_members) == len(run.view):
        return run.view[0] in known_members
    return 2 * len(known_members) > len(run.view)


def _fetch_seconds(policy: ChurnPolicy, run: _ChurnRun, index: int) -> float:
    """Return the seconds to fetch the state from the fastest sender; 0 if no other member is present.

    Without other members, the peer has the state it left with.
    """
    sender_rates = [policy.sites[member].up_bytes_per_s for member in run.members if member != index]
    if not sender_rates:
        return 0.0
    return policy.state_bytes / (min(policy.sites[index].down_bytes_per_s, max(sender_rates)) * PAYLOAD_SHARE)


def _pace_of(policy: ChurnPolicy, members: Sequence[int], paces: dict[tuple[int, ...], _Pace]) -> _Pace:
    """Return the pace of a membership, as the planner predicts it; results are cached by members."""
    key = tuple(members)
    if key not in paces:
        chosen = [policy.paces[index] for index in members]
        sync = policy.sync
        # No peer to exchange with.
        if len(chosen) == 1:
            only_peer = chosen[0]
            paces[key] = _Pace(only_peer.step_s, only_peer.step_s, {members[0]: only_peer.tokens_per_step})
        else:
            prediction = predict_mode(chosen, policy.values, sync)
            round_s = prediction.step_s * prediction.inner_steps
            rates = [use.utilisation * pace.tokens_per_s for use, pace in zip(prediction.sites, chosen, strict=True)]
            tokens = {index: rate * round_s for index, rate in zip(members, rates, strict=True)}
            paces[key] = _Pace(round_s, round_s - prediction.exposed_s, tokens)
    return paces[key]


def _draw(source: random.Random, mean_s: float) -> float:
    """Draw an exponential time; a site without a mean stays forever."""
    return source.expovariate(1 / mean_s) if mean_s > 0 else math.inf
