"""Who is wrong when copies differ: pure arithmetic on the digests of those who hold the same."""

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
    """What one rank says of one set of boxes that it holds."""

    rank: int
    boxes: str  # digest of which boxes these are: ranks with the same hold copies
    digest: str  # of their bytes
    tensors: int  # boxes in the set


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """State that should be the same and is not.

    `certain`: the suspects are wrong; otherwise at least one of them is. `digests` are of the holders.
    """

    step: int  # steps done when it was noticed
    kind: str  # "copies": those of other ranks differ; "rest": memory changed between two updates
    suspects: tuple[int, ...]
    certain: bool
    boxes: str
    digests: dict[int, str]
    tensors: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """The four parts of a message."""
        of = f" ({', '.join(self.tensors)})" if self.tensors else ""
        ranks = ", ".join(map(str, self.suspects))
        if self.kind == "rest" and not self.certain:
            return Problem(
                where=f"step {self.step:,}",
                what=f"weights or optimizer state of every rank changed between two updates{of}",
                why="memory does not fail on all ranks at once: code other than the optimizer wrote to them",
                fix="change weights in a callback (phalanx.Callback), which the comparison knows of",
            )
        if self.kind == "rest":
            names = f"rank {ranks}" if len(self.suspects) == 1 else f"ranks {ranks}"
            what = f"weights or optimizer state of {names} changed between two updates{of}"
        elif self.certain:
            what = (
                f"rank {ranks} holds other values than its {plural(len(self.digests) - len(self.suspects), 'copy')}{of}"
            )
        else:
            what = f"copies on ranks {ranks} differ, and no majority tells which is right{of}"
        return Problem(
            where=f"step {self.step:,}",
            what=what,
            why="memory or arithmetic failed without a word; every step from here on would learn from it",
            fix="go back to the last state that was compared, without that rank's device",
        )

    def to_json(self) -> dict[str, Any]:
        """For messages between processes."""
        return dict(json_values(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Divergence:
        """What `to_json` gave."""
        return from_message(cls, data)


def judge_claims(step: int, claims: Sequence[DigestClaim]) -> Divergence | None:
    """The gravest difference among all ranks' claims; None when every copy agrees.

    A set that a majority can speak for comes before one that leaves several suspects: a rank that is wrong in one set
    mostly is in others. The result depends on the claims alone, so every rank comes to the same.
    """
    sets: dict[str, list[DigestClaim]] = {}
    for claim in claims:
        sets.setdefault(claim.boxes, []).append(claim)
    found = [verdict for boxes in sorted(sets) if (verdict := _judge_set(step, boxes, sets[boxes])) is not None]
    return min(found, key=lambda one: (not one.certain, one.suspects, one.boxes), default=None)


def _judge_set(step: int, boxes: str, claims: Sequence[DigestClaim]) -> Divergence | None:
    digests = {claim.rank: claim.digest for claim in claims}
    right = majority_digest(digests)
    suspects = tuple(sorted(rank for rank, digest in digests.items() if digest != right))
    if not suspects:
        return None
    return Divergence(
        step=step, kind="copies", suspects=suspects, certain=right is not None, boxes=boxes, digests=digests
    )


def majority_digest(digests: Mapping[int, str]) -> str | None:
    """What more holders say than anything else, if at least two do: no two errors are alike.

    >>> majority_digest({0: "a", 1: "a", 2: "b"}), majority_digest({0: "a", 1: "b"}), majority_digest({0: "a"})
    ('a', None, 'a')
    """
    ranked = Counter(digests.values()).most_common(2)
    if len(ranked) == 1:
        return ranked[0][0]
    (first, most), (_, next_most) = ranked
    return first if most > next_most else None


def settle_divergence(earlier: Mapping[int, str], recomputed: str) -> int | None:
    """Which of two holders was wrong, once the same steps were done again: the one that now reads otherwise.

    None when neither or both were: then doing it again did not give the same, as kernels without a fixed order may not.

    >>> settle_divergence({3: "a", 7: "b"}, "b"), settle_divergence({3: "a", 7: "b"}, "c")
    (3, None)
    """
    wrong = [rank for rank, digest in earlier.items() if digest != recomputed]
    return wrong[0] if len(wrong) == 1 and len(earlier) > 1 else None
