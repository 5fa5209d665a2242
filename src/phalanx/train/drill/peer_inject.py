"""Faults from inside a peer: a group that is late, spoils its updates or lies about them; and wrong clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from phalanx.peers.attempt import Attempt
from phalanx.peers.facts import Address, MemberView, PeerProgress, PeerState, RoundResult, Vector
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.train.data.batches import IGNORED
from phalanx.train.drill import firings
from phalanx.train.drill.faults import Fault
from phalanx.train.slow_links.peer_batches import PeerBatches

if TYPE_CHECKING:
    from phalanx.peers.codecs import Sender
    from phalanx.train.data.token_samples import Tokens
    from phalanx.train.slow_links.peer_exchange import GroupLink
    from phalanx.train.slow_links.sample_deal import Ranges

FACTOR = 1000.0  # of values that are too large
SCALED = 8.0  # times an honest update: below the limit on norms
TURNED = -4.0  # times an update that raises the loss: small enough for the limit on norms


class FaultyGroup:
    """A `GroupLink` that applies the faults of a drill to this peer, and otherwise behaves as the wrapped group."""

    def __init__(
        self,
        run: Run,
        group: GroupLink,
        faults: Sequence[Fault],
        *,
        number: int,
        weights_from: int = 0,
        hides_pace: bool = False,
    ) -> None:
        self._run, self._group, self._number = run, group, number
        self._hides_pace = hides_pace
        self._faults = [fault for fault in faults if fault.of.inside and fault.kind != "clock-skew"]
        self._step = -1
        self._late: list[tuple[float, float]] = []  # (until, seconds in every round)
        # Steps before this one exchange gradients.
        self._weights_from = weights_from
        self._lies: list[str] = []
        self._kept: dict[int, Vector] = {}  # this peer's first honest update of each length
        self._results: dict[int, Vector] = {}  # the newest result of each length
        # A round number, and the faults that spoil each call for that round.
        self._spoilt: tuple[int, list[Fault]] = (-1, [])

    @property
    def id(self) -> str:
        """The id of this peer."""
        return self._group.id

    def join(self, addresses: Sequence[Address] = (), *, timeout_s: float = 30.0, first_round: int = 0) -> MemberView:
        """Call the wrapped group's method."""
        return self._group.join(addresses, timeout_s=timeout_s, first_round=first_round)

    def view(self) -> MemberView:
        """Call the wrapped group's method."""
        return self._group.view()

    def report(self, progress: PeerProgress) -> None:
        """Report this peer's step, which decides which faults are due, and its pace unless the drill hides it."""
        self._step = progress.step
        self._group.report(replace(progress, samples_per_s=0.0) if self._hides_pace else progress)

    def progress(self) -> dict[str, PeerProgress]:
        """Call the wrapped group's method."""
        return self._group.progress()

    def average(
        self,
        round_number: int,
        vector: Vector,
        weight: float,
        codec: str | Sender = "fp32",
        *,
        timeout_s: float = 60.0,
        quorum: int | None = None,
        grace_s: float | None = None,
        weight_limits: Mapping[str, float] | None = None,
    ) -> RoundResult:
        """Average with the peers, after the faults have changed this peer's update, its weight or its timing."""
        if vector.size > 1 and self._spoilt[0] != round_number:
            self._spoilt = (round_number, list(self._due_faults(round_number)))
        understates = False
        # A repeated call for the same round is spoilt in the same way.
        for fault in self._spoilt[1] if vector.size > 1 else ():
            match fault.kind:
                case "slow":
                    self._late.append((time.monotonic() + fault.for_s, fault.sleep_s))
                case "nan":
                    vector = np.array(vector, copy=True)
                    vector[0] = np.nan
                case "poison":
                    vector = vector * (FACTOR if fault.how == "norm" else TURNED)
                case "liar" if fault.how == "norm":
                    understates = True
                case "lie":
                    self._begin_lie(fault.how)
                case _:
                    weight *= FACTOR
        is_weights = vector.size > 1 and self._step >= self._weights_from
        honest = vector
        if is_weights:
            for how in self._lies:
                vector = self._false_update(how, vector, round_number)
            self._kept.setdefault(honest.size, honest)
        for until_s, sleep_s in self._late:
            if time.monotonic() < until_s:
                time.sleep(sleep_s)
        with _larger_than_stated(self._group.id) if understates else nullcontext():
            result = self._group.average(
                round_number,
                vector,
                weight,
                codec,
                timeout_s=timeout_s,
                quorum=quorum,
                grace_s=grace_s,
                weight_limits=weight_limits,
            )
        if is_weights and result.vector is not None:
            self._results[honest.size] = result.vector
        return result

    def _begin_lie(self, how: str) -> None:
        if how not in self._lies:
            self._lies.append(how)
            if how == "flipped":
                _flip_labels()

    def _false_update(self, how: str, vector: Vector, round_number: int) -> Vector:
        """Return a false update in place of the honest one; the honest one where there is nothing to copy yet."""
        update = vector
        match how:
            case "reversed":
                update = -vector
            case "scaled":
                update = SCALED * vector
            case "random":
                noise = np.random.default_rng((self._number, round_number)).standard_normal(vector.size)
                update = noise * (np.linalg.norm(vector) / np.linalg.norm(noise))
            case "copied":
                update = self._results.get(vector.size, vector)
            case "stale":
                update = self._kept.get(vector.size, vector)
        return update.astype(vector.dtype, copy=False)

    def serve_state(self, provider: Callable[[], PeerState | None]) -> None:
        """Call the wrapped group's method."""
        self._group.serve_state(provider)

    def expect_values(self, most_values: int) -> None:
        """Call the wrapped group's method."""
        self._group.expect_values(most_values)

    def fetch_state(
        self,
        into: Callable[[str, bytes], None],
        *,
        timeout_s: float = 600.0,
        most_bytes: Mapping[str, int] | None = None,
    ) -> int:
        """Call the wrapped group's method."""
        return self._group.fetch_state(into, timeout_s=timeout_s, most_bytes=most_bytes)

    def leave(self) -> None:
        """Call the wrapped group's method."""
        self._group.leave()

    def close(self) -> None:
        """Call the wrapped group's method."""
        self._group.close()

    def _due_faults(self, round_number: int) -> Iterator[Fault]:
        for fault in list(self._faults):
            if fault.at_s is not None:
                began_s = firings.drill_clock(self._run)
                is_due = began_s is not None and time.time() >= began_s + fault.at_s
            else:
                is_due = self._step >= (fault.step or 0)
            if is_due:
                self._faults.remove(fault)
                place = {"rank": self._number, "step": self._step, "note": f"round {round_number}"}
                if firings.claim_firing(self._run, fault, whom=self._number, **place):
                    yield fault


@contextmanager
def _larger_than_stated(me: str) -> Iterator[None]:
    """Make this process send updates that are larger than the norm it has stated for them, for the context."""
    honest = Attempt.encode_piece

    def lying(attempt: Attempt, start: int) -> bytes:
        if attempt.me != me or attempt.outgoing is None:
            return honest(attempt, start)
        true, attempt.outgoing = attempt.outgoing, attempt.outgoing * FACTOR
        try:
            return honest(attempt, start)
        finally:
            attempt.outgoing = true

    setattr(Attempt, "encode_piece", lying)  # noqa: B010 — a method of a class that others use too
    try:
        yield
    finally:
        setattr(Attempt, "encode_piece", honest)  # noqa: B010


def _flip_labels() -> None:
    """Make this process learn from wrong targets: each token is mirrored in the range of the batch's tokens."""
    honest = PeerBatches.read

    def flipped(batches: PeerBatches, samples: Ranges) -> tuple[Tokens, Tokens]:
        tokens, targets = honest(batches, samples)
        mirrored = np.where(targets == IGNORED, IGNORED, tokens.max(initial=0) - targets)
        return tokens, np.clip(mirrored, np.minimum(targets, 0), None).astype(targets.dtype)

    setattr(PeerBatches, "read", flipped)  # noqa: B010 — a method of a class that others use too


def own_faults(run: Run) -> list[Fault]:
    """Return the faults that hit the peer of this run from inside; none outside of drills.

    Two conditions, so that a stray file in a run folder never hurts a real run.
    """
    launch = run.launch()
    if launch.get("drill") is not True or not firings.schedule_path(run).is_file():
        return []
    number = int(launch.get("peer_number", 0))
    faults = [fault for fault in firings.read_schedule(run) if number in fault.peer and fault.of.inside]
    return [replace(fault, peer=(number,)) for fault in faults]


def faulty_group(run: Run, group: GroupLink) -> GroupLink:
    """Return the group of this peer, wrapped where its drill has faults for it; the group itself outside of drills.

    In a drill that compares losses (`equal_shares`) no peer reports its pace, so all are dealt equal shares. Shares
    that follow measured paces differ from run to run, and `clipped-mean` cuts the larger ones: 0.009 nats between two
    runs.
    """
    faults, launch = own_faults(run), run.launch()
    hides_pace = launch.get("drill") is True and launch.get("equal_shares") is True
    if not faults and not hides_pace:
        return group
    plan = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    warm_up = plan.job.sync.warm_up_steps(plan.duration.steps)
    number = int(launch.get("peer_number", 0))
    return FaultyGroup(run, group, faults, number=number, weights_from=warm_up, hides_pace=hides_pace)


def shift_clocks(run: Run) -> None:
    """Shift the clocks of this process where its drill asks for that; called before anything reads a clock."""
    for fault in own_faults(run):
        number = fault.peer[0]
        if fault.kind == "clock-skew":
            firings.claim_firing(run, replace(fault, times=1), whom=number, rank=number, note=f"{fault.skew_s:+g} s")
            for name in ("time", "monotonic"):
                clock = getattr(time, name)
                setattr(time, name, lambda clock=clock: clock() + fault.skew_s)  # noqa: B023 — each kind once
