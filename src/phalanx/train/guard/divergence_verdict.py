"""Decides which rank is wrong when copies differ: pure arithmetic on digests of ranks that hold the same state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import Problem
from phalanx.io.codec import from_message, json_values
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestClaim:
    """The digest that one rank computed of one set of boxes."""

    rank: int
    boxes: str  # digest of the boxes' names and places; ranks with the same value hold copies
    digest: str  # digest of the boxes' bytes
    tensors: int  # number of boxes in the set


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """State that should be equal and is not.

    `certain`: all suspects are wrong; otherwise at least one of them is. `digests` are those of the ranks that hold
    the state.
    """

    step: int  # steps done when it was detected
    kind: str  # "copies": copies on ranks differ; "rest": memory changed between two updates
    suspects: tuple[int, ...]
    certain: bool
    boxes: str
    digests: dict[int, str]
    tensors: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """Return the error message, with the ranks, the tensors and what to do."""
        of = f" ({', '.join(self.tensors)})" if self.tensors else ""
        ranks = ", ".join(map(str, self.suspects))
        if self.kind == "rest" and not self.certain:
            return Problem(
                where=f"step {self.step:,}",
                what=f"weights or optimizer state of every rank changed between two updates{of}",
                why="memory does not fail on all ranks at once: code other than the optimizer wrote to them",
                fix="change weights in a callback (phalanx.Callback), which the comparison knows of",
            )
        names = f"rank {ranks}" if len(self.suspects) == 1 else f"ranks {ranks}"
        if self.kind == "rest":
            what = f"weights or optimizer state of {names} changed between two updates{of}"
        elif self.certain:
            copies = plural(len(self.digests) - len(self.suspects), "copy")
            holds = f"holds other values than its {copies}"
            if len(self.suspects) > 1:
                holds = f"hold other values than the {copies} that agree"
            what = f"{names} {holds}{of}"
        else:
            what = f"copies on ranks {ranks} differ, and no majority tells which is right{of}"
        return Problem(
            where=f"step {self.step:,}",
            what=what,
            why="memory or arithmetic failed without a word; every step from here on would learn from it",
            fix="go back to the last state that was compared, without that rank's device",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, for messages between processes."""
        return dict(json_values(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Divergence:
        """Return the divergence of the JSON form that `to_json` returned."""
        return from_message(cls, data)


def judge_claims(step: int, claims: Sequence[DigestClaim]) -> Divergence | None:
    """Return the gravest difference among all ranks' claims; None if all copies agree.

    A set in which a majority decides comes before one that leaves several suspects: a rank that is wrong in one set
    mostly is wrong in other sets. The result depends on the claims alone, so every rank gets the same.
    """
    sets: dict[str, list[DigestClaim]] = {}
    for claim in claims:
        sets.setdefault(claim.boxes, []).append(claim)
    divergences = [
        verdict for boxes, members in sets.items() if (verdict := _judge_set(step, boxes, members)) is not None
    ]
    return min(
        divergences,
        key=lambda divergence: (not divergence.certain, divergence.suspects, divergence.boxes),
        default=None,
    )


def _judge_set(step: int, boxes: str, claims: Sequence[DigestClaim]) -> Divergence | None:
    """Return the divergence of one set of boxes, or None if its copies agree."""
    digests = {claim.rank: claim.digest for claim in claims}
    right = majority_digest(digests)
    suspects = tuple(sorted(rank for rank, digest in digests.items() if digest != right))
    if not suspects:
        return None
    return Divergence(
        step=step, kind="copies", suspects=suspects, certain=right is not None, boxes=boxes, digests=digests
    )


def majority_digest(digests: Mapping[int, str]) -> str | None:
    """Return the digest that more holders have than any other digest, or None if there is no such digest.

    It is right if at least two holders share it, since two errors are never alike.

    >>> majority_digest({0: "a", 1: "a", 2: "b"}), majority_digest({0: "a", 1: "b"}), majority_digest({0: "a"})
    ('a', None, 'a')
    """
    ranked = Counter(digests.values()).most_common(2)
    if len(ranked) == 1:
        return ranked[0][0]
    (first, count), (_, next_count) = ranked
    return first if count > next_count else None


def settle_divergence(earlier: Mapping[int, str], recomputed: str) -> int | None:
    """Return the one holder whose earlier digest differs from that of the same steps computed again.

    None if no holder or several differ: then the repetition was not exact, as with kernels that have no fixed order.

    >>> settle_divergence({3: "a", 7: "b"}, "b"), settle_divergence({3: "a", 7: "b"}, "c")
    (3, None)
    """
    wrong = [rank for rank, digest in earlier.items() if digest != recomputed]
    return wrong[0] if len(wrong) == 1 and len(earlier) > 1 else None
