"""Ledger of committed rounds, the same on all peers: members, samples learnt from, and paces.

The samples that a peer is dealt follow from it. Nothing here depends on the time at which a message arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.train.data.batches import BatchPlan
from phalanx.train.slow_links.peer_exchange import AgreedRound
from phalanx.train.slow_links.sample_deal import Ranges, count_samples, deal_samples

MOST_MISSED = 3  # consecutive rounds without a peer, after which it is dealt no more samples
SMOOTHING = 0.3  # weight of the newest step in a peer's pace
LEAST_TIMED_S = 1e-3  # shorter times are taken as this, so that a pace stays finite


class RoundLedger:
    """The ledger of one rank of a peer; the same on all ranks of all peers."""

    def __init__(self, *, waits_for_all: bool) -> None:
        self._waits_for_all = waits_for_all  # False: a quorum is enough for a round
        self.members: tuple[str, ...] = ()
        self.credit: dict[str, int] = {}  # samples that each peer's updates counted for, by id
        # Samples per second that each peer reported in the last round.
        self.paces: dict[str, float] = {}
        # Consecutive rounds that a member was late for, with a quorum.
        self._missed: dict[str, int] = {}
        # Samples dealt and not counted yet, by fragment and peer; None after restoring a checkpoint without them.
        self._owed: dict[int, dict[str, int]] | None = {}
        self._dealt: dict[str, Ranges] = {}
        self._dealt_step = -1

    def deal(self, plan: BatchPlan, step: int, *, by_pace: bool) -> dict[str, Ranges]:
        """Return each member's samples of a step: in proportion to its pace, or in equal parts."""
        if step != self._dealt_step:
            first, count = plan.at(step)
            paces = self.paces if by_pace else {}
            self._dealt, self._dealt_step = deal_samples((range(first, first + count),), self.members, paces), step
        return self._dealt

    def agree(self, agreed: AgreedRound, *, sequence: int, is_update: bool) -> None:
        """Enter a committed round: update members, paces, and the samples counted for each peer."""
        # With a quorum, members stay that were late for fewer than MOST_MISSED rounds.
        if not self._waits_for_all:
            present = {*agreed.members, *agreed.dropped}
            missed = {peer: self._missed.get(peer, 0) + 1 for peer in self.members if peer not in present}
            self._missed = {peer: count for peer, count in missed.items() if count < MOST_MISSED}
        self.members = tuple(sorted({*agreed.members, *self._missed}))
        self.paces = dict(agreed.paces)
        for peer, tokens in agreed.weights.items() if is_update else ():
            self.credit[peer] = self.credit.get(peer, 0) + round(tokens / sequence)

    def note_dealt(self, dealt: Mapping[str, Ranges], *, fragments: int) -> None:
        """Add the samples that each member was dealt in a step whose update is exchanged later, to every fragment."""
        for fragment in range(fragments if self._owed is not None else 0):
            assert self._owed is not None
            owed = self._owed.setdefault(fragment, {})
            for peer, samples in dealt.items():
                owed[peer] = owed.get(peer, 0) + count_samples(samples)

    def weight_limits(self, fragment: int, *, sequence: int) -> dict[str, float] | None:
        """Return the most tokens that each member's next update of a fragment can count for, by id; None if unknown."""
        if self._owed is None:
            return None
        return {peer: float(samples * sequence) for peer, samples in self._owed.get(fragment, {}).items()}

    def settle_dealt(self, fragment: int, agreed: AgreedRound, *, keeps_late: bool) -> None:
        """Clear the samples owed of an exchanged fragment; with `keeps_late`, not for members that were not counted."""
        self._owed = {} if self._owed is None else self._owed
        owed = self._owed.pop(fragment, {})
        if keeps_late:
            self._owed[fragment] = {peer: samples for peer, samples in owed.items() if peer not in agreed.weights}

    def state(self) -> dict[str, Any]:
        """Return the ledger for a checkpoint or a newcomer."""
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
        """Restore the ledger from `state`."""
        self._dealt_step = -1
        self.members = tuple(state["members"])
        self.credit = {str(peer): int(count) for peer, count in state["credit"].items()}
        self._missed = {str(peer): int(count) for peer, count in state.get("missed", {}).items()}
        self.paces = {str(peer): float(pace) for peer, pace in state.get("paces", {}).items()}
        # None: weights are then limited together with the norms (`screening.screen_ready`), and not by the deal.
        self._owed = None
        if state.get("owed") is not None:
            self._owed = {
                int(fragment): {str(peer): int(samples) for peer, samples in owed.items()}
                for fragment, owed in state["owed"].items()
            }


class PaceMeter:
    """Measures how many samples per second this peer learns from, without the time that it waits for others."""

    def __init__(self) -> None:
        self.samples_per_s = 0.0  # 0: not known yet
        self._since: float | None = None

    def begin(self, now_s: float) -> None:
        """Start timing, as a wait has ended."""
        self._since = now_s

    def end(self, samples: int, now_s: float) -> None:
        """Stop timing, as the next wait begins; `samples` were learnt from since `begin`."""
        since, self._since = self._since, None
        if since is None or not samples:
            return
        measured = samples / max(LEAST_TIMED_S, now_s - since)
        previous = self.samples_per_s
        self.samples_per_s = measured if not previous else previous + SMOOTHING * (measured - previous)
