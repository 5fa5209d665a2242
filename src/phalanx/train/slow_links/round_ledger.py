"""What committed rounds say, which all peers know alike: who takes part, what each has learnt, and how fast each is.

From it follows which samples a peer is dealt. Nothing here follows from the time at which a peer hears of something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.train.data.batches import BatchPlan
from phalanx.train.slow_links.peer_exchange import AgreedRound
from phalanx.train.slow_links.sample_deal import Ranges, count_samples, deal_samples

MOST_MISSED = 3  # rounds in a row without a peer, after which it is dealt no more samples
SMOOTHING = 0.3  # of a peer's pace: what one step adds to what was known
LEAST_TIMED_S = 1e-3


class RoundLedger:
    """Of one rank of a peer; the same on all of them."""

    def __init__(self, *, waits_for_all: bool) -> None:
        self._waits_for_all = waits_for_all  # without: a quorum is enough for a round
        self.members: tuple[str, ...] = ()
        self.credit: dict[str, int] = {}  # samples that each peer's updates counted for, by id
        self.paces: dict[str, float] = {}  # samples a second that each said it learns from, in the last round
        self._missed: dict[str, int] = {}  # rounds in a row that a member was late for, with a quorum
        # Samples dealt and not counted yet, by fragment and peer; None after a checkpoint that does not have them.
        self._owed: dict[int, dict[str, int]] | None = {}
        self._dealt: dict[str, Ranges] = {}
        self._dealt_step = -1

    def deal(self, plan: BatchPlan, step: int, *, by_pace: bool) -> dict[str, Ranges]:
        """Each member's samples of a step: in proportion to its pace, or alike."""
        if step != self._dealt_step:
            first, count = plan.at(step)
            paces = self.paces if by_pace else {}
            self._dealt, self._dealt_step = deal_samples((range(first, first + count),), self.members, paces), step
        return self._dealt

    def agree(self, agreed: AgreedRound, *, sequence: int, is_update: bool) -> None:
        """A round is committed: who takes part from now on, and whose samples count."""
        if not self._waits_for_all:  # also those that were late a few times
            gone = {*agreed.members, *agreed.dropped}
            missed = {one: self._missed.get(one, 0) + 1 for one in self.members if one not in gone}
            self._missed = {one: count for one, count in missed.items() if count < MOST_MISSED}
        self.members = tuple(sorted({*agreed.members, *self._missed}))
        self.paces = dict(agreed.paces)
        for peer, tokens in agreed.weights.items() if is_update else ():
            self.credit[peer] = self.credit.get(peer, 0) + round(tokens / sequence)

    def note_dealt(self, dealt: Mapping[str, Ranges], *, fragments: int) -> None:
        """Add what each member was dealt in a step whose update is exchanged later, by fragment."""
        for fragment in range(fragments if self._owed is not None else 0):
            assert self._owed is not None
            owed = self._owed.setdefault(fragment, {})
            for peer, samples in dealt.items():
                owed[peer] = owed.get(peer, 0) + count_samples(samples)

    def weight_limits(self, fragment: int, *, sequence: int) -> dict[str, float] | None:
        """Return the most tokens that each member's next update of a fragment can count for, by id, where known."""
        if self._owed is None:
            return None
        return {peer: float(samples * sequence) for peer, samples in self._owed.get(fragment, {}).items()}

    def settle_dealt(self, fragment: int, agreed: AgreedRound, *, keeps_late: bool) -> None:
        """A fragment was exchanged: those who were counted begin anew, and the others too unless late ones are kept."""
        self._owed = {} if self._owed is None else self._owed
        owed = self._owed.pop(fragment, {})
        if keeps_late:
            self._owed[fragment] = {peer: samples for peer, samples in owed.items() if peer not in agreed.weights}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, and for a newcomer."""
        return {
            "members": list(self.members),
            "credit": dict(self.credit),
            "missed": dict(self._missed),
            "paces": dict(self.paces),
            "owed": None
            if self._owed is None
            else {str(fragment): dict(owed) for fragment, owed in self._owed.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As `state` said."""
        self._dealt_step = -1
        self.members = tuple(state["members"])
        self.credit = {str(peer): int(count) for peer, count in state["credit"].items()}
        self._missed = {str(peer): int(count) for peer, count in state.get("missed", {}).items()}
        self.paces = {str(peer): float(pace) for peer, pace in state.get("paces", {}).items()}
        self._owed = None
        if state.get("owed") is not None:
            self._owed = {
                int(fragment): {str(peer): int(samples) for peer, samples in owed.items()}
                for fragment, owed in state["owed"].items()
            }


class PaceMeter:
    """How many samples a second this peer learns from while it waits for nobody."""

    def __init__(self) -> None:
        self.samples_per_s = 0.0  # 0: not known yet
        self._since: float | None = None

    def begin(self, now_s: float) -> None:
        """Nothing is waited for from now on."""
        self._since = now_s

    def end(self, samples: int, now_s: float) -> None:
        """So many samples were learnt from since `begin`; the next wait begins."""
        since, self._since = self._since, None
        if since is None or not samples:
            return
        found = samples / max(LEAST_TIMED_S, now_s - since)
        known = self.samples_per_s
        self.samples_per_s = found if not known else known + SMOOTHING * (found - known)
