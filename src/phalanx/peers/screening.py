"""Which updates a round leaves out before a byte of them is sent, and which claims of progress cannot be."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.peers.facts import PeerProgress
from phalanx.peers.messages import Ready

# Times the median weight that one peer may count: peers differ in speed by an order of magnitude, not by two.
WEIGHT_LIMIT = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UsualUpdate:
    """What the updates of the last committed round were like."""

    norm: float
    weight: float


def screen_ready(
    ready: Mapping[str, Ready],
    norm_limit: float,
    most_weight: float | None = None,
    usual_update: UsualUpdate | None = None,
) -> dict[str, str]:
    """Peers whose updates are left out, with the reason; owners find out whether the stated norms are true.

    `most_weight` is what no honest peer can have learnt from, where that is known. Of two updates the median does not
    say which is wrong: one that is far from the other and from `usual_update` is.
    """
    dropped: dict[str, str] = {}
    if not ready:
        return dropped
    forms = [(one.values, one.codec, one.top_share) for one in ready.values()]
    common = max(set(forms), key=lambda form: (forms.count(form), form))
    for peer, one in ready.items():
        if (one.values, one.codec, one.top_share) != common:
            mine, theirs = f"{one.values:,} values in {one.codec}", f"{common[0]:,} in {common[1]}"
            dropped[peer] = f"its update has {mine}, the round's has {theirs}"
        elif one.norm is None:
            dropped[peer] = "its update is not finite (NaN or infinity)"
    rest = {peer: one for peer, one in ready.items() if peer not in dropped}
    norms = {peer: one.norm or 0.0 for peer, one in rest.items() if one.weight > 0.0}
    weights = {peer: one.weight for peer, one in rest.items() if one.weight > 0.0}
    middle = statistics.median(norms.values()) if norms else 0.0
    usual = statistics.median(weights.values()) if weights else 0.0
    if len(norms) == 2 and usual_update is not None:
        for peer, other in (list(norms), list(norms)[::-1]):
            if usual_update.norm > 0.0 and norms[peer] > norm_limit * max(norms[other], usual_update.norm):
                times = norms[peer] / usual_update.norm
                dropped[peer] = f"the norm of its update, {norms[peer]:.3g}, is {times:.3g} times the last round's"
            elif weights[peer] > WEIGHT_LIMIT * max(weights[other], usual_update.weight):
                times = weights[peer] / usual_update.weight
                dropped[peer] = f"it claims a weight of {weights[peer]:.3g}, {times:.3g} times the last round's"
    for peer, norm in norms.items():
        if peer in dropped:
            continue
        if middle > 0.0 and norm > norm_limit * middle:
            dropped[peer] = f"the norm of its update, {norm:.3g}, is {norm / middle:.3g} times the round's median"
        elif most_weight is not None and weights[peer] > most_weight:
            dropped[peer] = (
                f"it claims a weight of {weights[peer]:.6g}, and nobody was given more than {most_weight:.6g}"
            )
        elif weights[peer] > WEIGHT_LIMIT * usual:
            dropped[peer] = f"it claims a weight of {weights[peer]:.3g}, {weights[peer] / usual:.3g} times the median"
    return dropped


@dataclass(slots=True)
class ProgressCheck:
    """What one peer has claimed so far; a claim that cannot be is named, once until it changes its kind."""

    samples_per_s: float | None  # more than this no peer of the run can do
    last: PeerProgress = field(default_factory=PeerProgress)
    at_s: float | None = None
    named: str = ""

    def doubt(self, claim: PeerProgress, now_s: float) -> str:
        """Why a new claim cannot be true, or nothing."""
        before, at_s = self.last, self.at_s
        self.last, self.at_s = claim, now_s
        reason = ""
        if claim.step < 0 or claim.samples < 0:
            reason = f"it claims step {claim.step} and {claim.samples} samples"
        elif at_s is not None and claim.step < before.step:
            reason = f"it went back from step {before.step} to {claim.step}"
        elif at_s is not None and self.samples_per_s is not None and claim.samples > before.samples:
            # Heartbeats come in bursts after a stall: one second of slack.
            most = self.samples_per_s * (now_s - at_s + 1.0)
            if claim.samples - before.samples > most:
                reason = f"it claims {claim.samples - before.samples:,} samples in a time that allows {most:,.0f}"
        new, self.named = reason if reason[:12] != self.named[:12] else "", reason
        return new
