"""Screening of updates by the members' statements: which are left out, their weights, and impossible claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.peers.facts import PeerProgress
from phalanx.peers.messages import Ready

# Largest weight of a peer, in usual weights: the speeds of peers differ by an order of magnitude.
WEIGHT_LIMIT = 10.0
# Largest overhead of a peer in a round, in median overheads. Overhead is total time, with the link and waiting, over
# computing time.
OVERHEAD_LIMIT = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UsualUpdate:
    """Median norm and weight of the updates of the last committed round."""

    norm: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Screening:
    """Result of a screening: reasons for dropped updates, weights of the others, and reasons for reduced weights."""

    dropped: dict[str, str]
    weights: dict[str, float]
    capped: dict[str, str]


def screen_ready(
    ready: Mapping[str, Ready],
    norm_limit: float,
    weight_limits: Mapping[str, float] | None = None,
    usual_update: UsualUpdate | None = None,
) -> Screening:
    """Return the members' weights after screening; owners verify later that the stated norms are true.

    `weight_limits` are the most tokens that each peer can have learnt from, if that is known. Weight and norm of an
    update multiply, so their product is limited as each of them is. With two updates the median does not show which
    one is wrong: it is the one that is far from both the other and `usual_update`.
    """
    dropped: dict[str, str] = {}
    if not ready:
        return Screening(dropped={}, weights={}, capped={})
    forms = [(message.values, message.codec, message.top_share) for message in ready.values()]
    common = max(set(forms), key=lambda form: (forms.count(form), form))
    for peer, message in ready.items():
        if (message.values, message.codec, message.top_share) != common:
            own_form, common_form = f"{message.values:,} values in {message.codec}", f"{common[0]:,} in {common[1]}"
            dropped[peer] = f"its update has {own_form}, the round's has {common_form}"
        elif message.norm is None and message.weight > 0.0:
            dropped[peer] = "its update is not finite (NaN or infinity)"
    weights = {peer: message.weight for peer, message in ready.items() if peer not in dropped}
    capped: dict[str, str] = {}
    for peer, weight in weights.items() if weight_limits is not None else ():
        assert weight_limits is not None
        if weight > (dealt := weight_limits.get(peer, 0.0)):
            weights[peer] = dealt
            capped[peer] = f"it claims a weight of {weight:.6g}, and was dealt {dealt:.6g}"
    counted = {peer: weight for peer, weight in weights.items() if weight > 0.0}
    norms = {peer: ready[peer].norm or 0.0 for peer in counted}
    last_norm = usual_update.norm if usual_update else 0.0
    usual_norms = _references(norms, last_norm)
    usual_weights = _references(counted, usual_update.weight if usual_update else 0.0)
    for peer, norm in norms.items():
        weight, usual_norm, usual_weight = counted[peer], usual_norms[peer], usual_weights[peer]
        if usual_norm > 0.0 and norm > norm_limit * usual_norm:
            reference, than = (
                (last_norm, "the last round's") if len(counted) == 2 else (usual_norm, "the round's median")
            )
            dropped[peer] = f"the norm of its update, {norm:.3g}, is {norm / reference:.3g} times {than}"
            del weights[peer]
            capped.pop(peer, None)
            continue
        most = WEIGHT_LIMIT * usual_weight
        if norm > 0.0 and usual_norm > 0.0:
            most = min(most, norm_limit * usual_weight * usual_norm / norm)
        if weight > most:
            weights[peer] = most
            reason = (
                f"a weight of {weight:.3g} with a norm of {norm:.3g} is too much for one update: it counts {most:.3g}"
            )
            capped.setdefault(peer, reason)
    return Screening(dropped=dropped, weights=weights, capped=capped)


def _references(values: Mapping[str, float], last: float) -> dict[str, float]:
    """Return the reference of each value: the median, or of two values the larger of the other and the last round's."""
    if len(values) != 2:
        return dict.fromkeys(values, statistics.median(values.values())) if values else {}
    first, second = values
    if last <= 0.0:
        return {first: math.inf, second: math.inf}
    return {first: max(values[second], last), second: max(values[first], last)}


def limit_paces(
    stated: Mapping[str, float], weights: Mapping[str, float], elapsed_s: Mapping[str, float]
) -> dict[str, float]:
    """Return the paces by which the next samples are dealt, limited by what the leader has measured in the round.

    The leader knows a peer's weight and the seconds that it took, which include time on the link. The ratio of stated
    to measured pace is similar among peers, so a far larger ratio is reduced.

    >>> paces, tokens, times = {"a": 10.0, "b": 10.0, "c": 400.0}, dict.fromkeys("abc", 8.0), dict.fromkeys("abc", 1.0)
    >>> limit_paces(paces, tokens, times)
    {'a': 10.0, 'b': 10.0, 'c': 40.0}
    """
    overheads = {
        peer: pace * elapsed_s[peer] / weights[peer]
        for peer, pace in stated.items()
        if elapsed_s.get(peer, 0.0) > 0.0 and weights.get(peer, 0.0) > 0.0
    }
    if len(overheads) < 3:
        return dict(stated)
    most = OVERHEAD_LIMIT * statistics.median(overheads.values())
    return {peer: pace * min(1.0, most / overheads.get(peer, most)) for peer, pace in stated.items()}


@dataclass(slots=True)
class ProgressCheck:
    """Check of one peer's claims of progress; an impossible claim is reported once, until its kind changes."""

    samples_per_s: float | None  # a rate that no peer of the run can exceed; None: not checked
    last: PeerProgress = field(default_factory=PeerProgress)
    at_s: float | None = None
    named: str = ""  # kind of the last impossible claim; "" if the last claim was possible

    def doubt(self, claim: PeerProgress, now_s: float) -> str:
        """Return the reason why a new claim cannot be true, or ""."""
        before, at_s = self.last, self.at_s
        self.last, self.at_s = claim, now_s
        kind, reason = "", ""
        if claim.step < 0 or claim.samples < 0:
            kind, reason = "negative", f"it claims step {claim.step} and {claim.samples} samples"
        elif claim.step < before.step:
            kind, reason = "backwards", f"it went back from step {before.step} to {claim.step}"
        elif at_s is not None and self.samples_per_s is not None:
            # Heartbeats arrive in bursts after a stall: one second of slack.
            most = self.samples_per_s * (now_s - at_s + 1.0)
            if claim.samples - before.samples > most:
                kind = "too fast"
                reason = f"it claims {claim.samples - before.samples:,} samples in a time that allows {most:,.0f}"
        is_new, self.named = kind != self.named, kind
        return reason if is_new else ""
