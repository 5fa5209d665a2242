"""Detection of held-out losses beyond chance, and of the updates that cause them: pure functions.

Losses are nats per token, one number for each held-out sequence, so that two states of the model are compared sequence
by sequence: what makes some sequences harder than others cancels out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.peers.facts import Vector

Losses = npt.NDArray[np.float64]

# A rise counts as harm if it exceeds both: so many standard errors of the paired differences, which chance alone
# exceeds once in a few hundred rounds, and so many nats; a smaller rise is not worth a repeated round.
STANDARD_ERRORS = 3.0
LEAST_RISE = 0.002
# Times the median distance of all peers from the typical peer; among 3 honest peers, 2 to 3 were measured.
OUTLIER = 5.0
LIAR_SHARE = 3  # at most one peer in LIAR_SHARE is assumed to lie
# Cosine of a copy; honest updates of two rounds or two peers stay below 0.9 after a few inner steps.
REPEATED = 0.999
SKETCH_VALUES = 512
KEPT_UPDATES = 16  # rounds for which updates are remembered


def rises(before: Losses, after: Losses) -> bool:
    """Return True if the mean loss rises by more than chance explains.

    >>> rises(np.array([3.0, 2.0, 4.0]), np.array([3.1, 2.1, 4.11])), rises(np.array([3.0, 2.0]), np.array([3.4, 1.8]))
    (True, False)
    """
    difference = after - before
    rise = float(difference.mean())
    if not math.isfinite(rise):
        return not bool(np.isfinite(after).all())
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    return rise > LEAST_RISE and rise > STANDARD_ERRORS * error


def most_liars(members: int) -> int:
    """Return how many of `members` members a vote may exclude at once.

    >>> [most_liars(members) for members in (3, 4, 6, 9)]
    [1, 1, 2, 3]
    """
    return max(1, members // LIAR_SHARE)


def outliers(alone: Mapping[str, Losses], floor: Losses | None = None) -> list[str]:
    """Return peers whose update, applied alone, leaves a loss far above the typical peer's, and above `floor`.

    Peers are compared with each other because local steps may raise the loss of all, which averaging removes again.
    """
    peers = sorted(alone)
    table = np.stack([np.nan_to_num(alone[peer], nan=np.inf) for peer in peers])
    typical = np.median(table, axis=0)
    reference = typical if floor is None else np.maximum(floor, typical)
    excess = table.mean(axis=1) - typical.mean()
    spread = float(np.median(np.abs(excess)))
    return [
        peer for place, peer in enumerate(peers) if rises(reference, alone[peer]) and excess[place] > OUTLIER * spread
    ]


def find_causes(
    before: Losses,
    after: Losses,
    alone: Mapping[str, Losses],
    without: Callable[[Collection[str]], Losses],
) -> dict[str, str]:
    """Return peers whose removal lowers the round's loss beyond chance, with the reason, by leave-one-out.

    `before` and `after` are the losses before and after the round, `alone` those with one peer's update, and `without`
    computes those without some peers. Only outliers are removed, the worst first, and each must lower the loss
    further. The result is empty unless the removals together take the harm away. Where the round does no harm (any
    more), only peers are removed whose own update raises the loss: a peer that has learnt little is slow, and does not
    lie.
    """
    unusual, harmful = outliers(alone), outliers(alone, floor=before)
    causes: dict[str, str] = {}
    current = after
    while len(causes) < most_liars(len(alone)):
        candidates = unusual if rises(before, current) else harmful
        suspects = [peer for peer in candidates if peer not in causes]
        if not suspects or (not causes and candidates is harmful and len(suspects) > most_liars(len(alone))):
            break
        losses = {peer: without([*causes, peer]) for peer in suspects}
        best = min(suspects, key=lambda peer: (float(losses[peer].mean()), peer))
        if not rises(losses[best], current):
            break
        causes[best] = (
            f"held-out loss {_text(before)} before the round, {_text(after)} with its update, "
            f"{_text(losses[best])} without it, {_text(alone[best])} with it alone"
        )
        current = losses[best]
    return {} if rises(before, current) else causes


def _text(losses: Losses) -> str:
    return f"{float(losses.mean()):.3f}"


# ---- repeated updates ------------------------------------------------------------------------------------------------


def sketch_of(values: Vector, start: int) -> Vector:
    """Return random signed sums of a vector's values, which keep the angle between two vectors.

    `start` is the place of `values` in the whole vector; it seeds the signs.

    >>> vector = np.random.default_rng(1).normal(size=5000)
    >>> bool(cosine(sketch_of(vector, 0), sketch_of(3.0 * vector, 0)) > 0.9999)
    True
    """
    signs = np.random.default_rng(start).integers(0, 2, values.size, dtype=np.int8) * 2.0 - 1.0
    signed = np.zeros(-(-values.size // SKETCH_VALUES) * SKETCH_VALUES)
    signed[: values.size] = signs * values
    sketch: Vector = signed.reshape(-1, SKETCH_VALUES).sum(axis=0)
    return sketch


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(np.dot(one, other)) / norms if norms > 0.0 and math.isfinite(norms) else 0.0


@dataclass(slots=True)
class UpdateHistory:
    """Sketches of this member's share of earlier updates and means, to recognise updates that are sent again."""

    shares: tuple[int, int] = (0, 0)
    updates: deque[tuple[int, dict[str, Vector]]] = field(default_factory=lambda: deque(maxlen=KEPT_UPDATES))
    means: deque[tuple[int, Vector]] = field(default_factory=lambda: deque(maxlen=KEPT_UPDATES))

    def remember(self, round_number: int, share: tuple[int, int], sketches: Mapping[str, Vector], mean: Vector) -> None:
        """Remember a committed round; a new share clears earlier rounds, whose sketches cannot be compared with it."""
        if share != self.shares:
            self.updates.clear()
            self.means.clear()
            self.shares = share
        self.updates.append((round_number, dict(sketches)))
        self.means.append((round_number, mean))

    def repeated(self, share: tuple[int, int], sketches: Mapping[str, Vector]) -> dict[str, str]:
        """Return peers that send an earlier update or result again, with the reason; {} if too many seem to."""
        reasons: dict[str, str] = {}
        for peer, sketch in sketches.items() if share == self.shares else ():
            for number, mean in self.means:
                if cosine(sketch, mean) >= REPEATED:
                    reasons[peer] = f"its update is a copy of the result of round {number}"
            for number, earlier_sketches in self.updates:
                for sender, earlier in earlier_sketches.items():
                    if cosine(sketch, earlier) >= REPEATED:
                        whose = "its own" if sender == peer else "another peer's"
                        reasons[peer] = f"its update is {whose} of round {number} again"
        return reasons if len(reasons) <= most_liars(len(sketches)) else {}


def same_updates(sketches: Mapping[str, Vector]) -> Sequence[tuple[str, str]]:
    """Return pairs of peers that send the same update in one round; it is unknown which of the two is the copy."""
    peers = sorted(sketches)
    return [
        (first, second)
        for place, first in enumerate(peers)
        for second in peers[place + 1 :]
        if cosine(sketches[first], sketches[second]) >= REPEATED
    ]
