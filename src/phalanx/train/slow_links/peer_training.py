"""A peer's training: the ordinary loop and engine, with the exchange with other peers added as a callback.

target-batch   every step exchanges gradients: their mean over the tokens of the global batch, whichever peer had them
diloco         the same for the first steps; then peers step alone, and exchange the movement of their weights
quorum         as diloco, but a round waits for a quorum of the peers only

All decisions about what comes next (round, step, members) follow from committed rounds, which all peers know alike;
none depends on the time at which a message arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.job.schema import Job
from phalanx.job.sync_section import SyncSettings
from phalanx.network.slow_codecs import FEEDBACK_CODECS
from phalanx.peers.facts import Address, PeerProgress, Vector
from phalanx.peers.harm_votes import ABSTAINED, Judgement, RoundTrial
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.callbacks import Callback
from phalanx.train.data.batches import BatchPlan
from phalanx.train.data.token_samples import TokenDataset
from phalanx.train.engine import Engine
from phalanx.train.slow_links.carried_state import CarriedState
from phalanx.train.slow_links.fragments import assign_fragments, due_fragment
from phalanx.train.slow_links.heldout_gate import HeldoutGate
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer
from phalanx.train.slow_links.peer_batches import PeerBatches
from phalanx.train.slow_links.peer_exchange import (
    AgreedRound,
    BehindGroup,
    GroupLink,
    LeavingGroup,
    PeerExchange,
    PendingRound,
)
from phalanx.train.slow_links.peer_state import StateServer, copy_state, most_state_bytes, take_state
from phalanx.train.slow_links.peer_vector import VectorMap, spread_object
from phalanx.train.slow_links.round_ledger import PaceMeter, RoundLedger
from phalanx.train.slow_links.sample_deal import Ranges, count_samples, deal_samples, uncounted_samples
from phalanx.train.slow_links.training_entry import TrainingEntry
from phalanx.train.slow_links.update_screening import LossScreen

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext


class PeerTraining(Callback):
    """The callback of one rank of a peer. `link` is the group, on rank 0 only; `addresses` are those of other members.

    A peer that `founds` the group does so if there are no addresses, or no peer answers there.
    """

    def __init__(
        self,
        link: GroupLink | None,
        sync: SyncSettings,
        *,
        addresses: Sequence[Address] = (),
        founds: bool = False,
        is_allowed: Callable[[str], bool] = lambda peer: True,
        stop: Callable[[], bool] = lambda: False,
        patience_s: float = 60.0,
        is_drilled: bool = False,
    ) -> None:
        self._link, self._sync, self.is_drilled = link, sync, is_drilled
        self._entry: TrainingEntry | None = None
        if link is not None:
            self._entry = TrainingEntry(
                link,
                sync,
                addresses=addresses,
                founds=founds,
                is_allowed=is_allowed,
                stop=stop,
                patience_s=patience_s,
            )
        self._server = StateServer()
        # The ranks of a mesh copy the state together, so only the state of a lone rank is copied while it waits.
        frozen = {"frozen": self._server.frozen} if dist.get_world_size() == 1 else {}
        self.exchange = PeerExchange(link, sync, stop=stop, **frozen)
        self.id = str(spread_object(link.id if link is not None else ""))
        self.ledger = RoundLedger(waits_for_all=sync.mode != "quorum")
        self._pace = PaceMeter()
        # A newcomer's position, as of the last step that all peers have done.
        self._boundary: dict[str, Any] = {}
        # Tokens learnt from since each fragment was exchanged, by fragment.
        self._tokens: dict[int, int] = {}
        self._samples = 0  # samples learnt from since the last round
        self._exchanged_step = -1
        self._sent_fragment: int | None = None
        self._screen: LossScreen | None = None
        self._gate: HeldoutGate | None = None
        # Step to apply it after, fragment, round.
        self._pending: tuple[int, int, PendingRound] | None = None
        # The same for checkpoints: step, fragment, tokens.
        self._under_way: tuple[int, int, float] | None = None
        self._training: TrainingContext | None = None
        # Asked to stop between two steps: the loop ends before the next one.
        self._is_leaving = False

    # ---- set-up, in this order -------------------------------------------------------------------------------------

    def attach(self, engine: Engine, *, steps: int) -> None:
        """Prepare the engine before the state is restored; every rank calls this. `steps` is the length of the run."""
        self._engine = engine
        self._gradients = VectorMap(engine.shards)
        self.outer: OuterOptimizer | None = None
        self._fragments: list[list[int]] = []
        if self._sync.mode in ("diloco", "quorum"):
            sync = self._sync
            rate, momentum = sync.outer_step(steps)
            self.outer = OuterOptimizer(engine.shards, learning_rate=rate, momentum=momentum)
            chosen = assign_fragments(self._gradients.sizes, sync.fragments)
            for number in range(sync.fragments):
                self._fragments.append([at for at, shard in enumerate(engine.shards) if chosen[shard.name] == number])
            self._fragment_maps = [VectorMap([engine.shards[at] for at in places]) for places in self._fragments]
            has_feedback = sync.codec in FEEDBACK_CODECS and sync.feedback > 0.0
            self._carried = CarriedState(
                engine.shards, self._fragments, has_feedback=has_feedback, has_delay=bool(sync.delay_steps)
            )
            engine.peer_state = [*self.outer.state(), *self._carried.state()]
        engine.average_over_peers = self._average_gradients
        # It would measure the gradient noise of one peer as that of the global batch.
        engine.listener = None

    def open_batches(
        self, folder: Path, job: Job, plan: BatchPlan, engine: Engine
    ) -> tuple[PeerBatches, TokenDataset | None]:
        """Return the batches of this rank, whose samples follow from the members of each step, and the dataset."""
        self._batch_plan = plan
        self.warm_up = plan.steps if self._sync.mode == "target-batch" else self._sync.warm_up_steps(plan.steps)
        dataset = TokenDataset.open([folder / path for path in job.data.paths], "train", vocab=job.model.vocab)
        self.batches = PeerBatches(
            dataset,
            dataset.sampler(job.data.sequence, job.data.seed),
            sequence=job.data.sequence,
            deal=BatchDeal.of(engine.settings.layout, reproducible=engine.settings.reproducible),
            data_rank=engine.data_rank,
            digest=dataset.digest,
            share_of=self._share_of,
            position=self.position,
            restore=self._restore_position,
        )
        return self.batches, dataset

    def enter(self, training: TrainingContext, step: int) -> int:
        """Join the group with the state after `step` steps, or take the group's newer state; return the steps done."""
        self._training, training.step = training, step  # copies of the state depend on the step
        if self.outer is not None and not step:
            self.outer.reset()
        if self.outer is not None and self._sync.screening == "loss" and training.dataset is not None:
            self._screen = LossScreen(self._engine, self.outer, training.dataset.folders)
        if self.outer is not None and self._sync.gate_sequences and training.dataset is not None:
            self._gate = HeldoutGate(
                self._engine,
                self.outer,
                training.dataset.folders,
                sync=self._sync,
                seed=training.job.data.seed,
            )
        self._mark_boundary(step)
        self._server.serve(self._copy_state)
        is_elsewhere = False
        if self._link is not None and self._entry is not None:
            self._link.serve_state(self._server.provide)
            # A round of `meet` has a vector of one value.
            self._link.expect_values(max(1, self._gradients.length))
            number = self.exchange.round
            is_elsewhere = self._entry.join_group(number).next_round != number
            if not is_elsewhere:
                self._entry.wait_for_peers(number)
                self._entry.check_majority(number, self.members)
                is_elsewhere = self._link.view().next_round > number
        if spread_object(is_elsewhere):
            return self.catch_up(training)
        try:
            self._meet(step)
        except BehindGroup as error:  # the group is in a round with another vector
            return self.catch_up(training, str(error))
        except LeavingGroup:
            self._is_leaving = True
        return step

    def _meet(self, step: int) -> None:
        """Do the round that establishes the members, and continue with the state after `step` steps.

        A newcomer that takes the state before that round is committed takes part in it too. With an update of another
        length it would be dropped from the round, or the others would be.
        """
        self._boundary = {**self.position(step), "meets": True}
        self._agree(self.exchange.meet(), kind="meet", step=step)
        self._mark_boundary(step)
        self._resume_rounds()

    def _resume_rounds(self) -> None:
        """Restore the codecs' losses from a checkpoint, and send an update that was under way again."""
        for fragment in range(len(self._fragments)):
            self.exchange.load_sender(fragment, self._carried.lost(fragment))
        if self._under_way is not None:
            until, fragment, tokens = self._under_way
            pending = self.exchange.average(
                self._fragment_maps[fragment],
                self._carried.sent(fragment),
                tokens,
                sender=fragment,
                waits=False,
            )
            self._pending = (until, fragment, pending)

    def catch_up(self, training: TrainingContext, why: str = "") -> int:
        """Take the newest state of the group; return the steps that it has done. Every rank of the peer calls this."""
        while True:
            step, meets = self._take_group_state(training, why)
            if not meets:
                return step
            try:
                self._meet(step)
                if self._owes_exchange(step):
                    self._exchange_weights(training)
            except BehindGroup as error:
                why = str(error)
                continue
            except LeavingGroup:
                self._is_leaving = True
            return training.step

    def _take_group_state(self, training: TrainingContext, why: str) -> tuple[int, bool]:
        """Take the group's state; return its steps, and True if the group's next round is that of `_meet`."""
        text = why or "this peer is new"
        training.events.write("peer", step=training.step, kind="behind", text=text)
        most_bytes = most_state_bytes(self._engine, self.outer)
        # This peer's own state can still be given to a newcomer in the meantime.
        with self._server.frozen() if dist.get_world_size() == 1 else nullcontext():
            tensors = self._entry.fetch_state(most_bytes) if self._entry is not None else {}
        self._engine.clear_gradients()
        position = take_state(self._engine, self.outer, tensors)
        if self._gate is not None:
            self._gate.forget()
        self._restore_position(position)
        meets = bool(position.get("meets"))
        self._pending, self._tokens, self._samples = None, {}, 0
        if self.outer is not None:
            self._carried.forget()
        for fragment in range(len(self._fragments)):
            self.exchange.load_sender(fragment, None)
        training.comparison.guard.forget()
        training.checkpoints.forget_unwritten()
        training.step = step = int(position["step"])
        if not meets:
            self._under_way, self._exchanged_step = None, step
        elif self._under_way is not None:  # sent again after the meeting, here as zeros that count for no tokens
            until, fragment, _ = self._under_way
            self._under_way = (until, fragment, 0.0)
        self._mark_boundary(step)
        training.events.write("peer", step=step, kind="caught-up", text=f"took the state after step {step:,}")
        return step, meets

    @property
    def step(self) -> int:
        """Steps that this peer has done."""
        return self._training.step if self._training is not None else 0

    def status(self) -> dict[str, Any]:
        """Return facts for the status file."""
        return {"step": self.step, "mode": self._sync.mode, "credit": dict(self.credit)}

    # ---- position and members --------------------------------------------------------------------------------------

    def position(self, step: int) -> dict[str, Any]:
        """Return the state of rounds and members after `step` steps, for a checkpoint."""
        return {
            "step": step,
            "round": self.exchange.round,
            **self.ledger.state(),
            "exchanged": self._exchanged_step,
            "tokens": {str(fragment): count for fragment, count in self._tokens.items()},
            "under_way": list(self._under_way) if self._under_way is not None else None,
        }

    def _restore_position(self, position: Any) -> None:
        """Restore rounds and members from a checkpoint's or another peer's position."""
        if not position:
            return
        self.exchange.round = int(position["round"])
        self.ledger.load_state(position)
        self._exchanged_step = int(position.get("exchanged", -1))
        self._tokens = {int(fragment): int(count) for fragment, count in position.get("tokens", {}).items()}
        self._under_way = None
        if (under_way := position.get("under_way")) is not None:
            # A fourth value, of older checkpoints, is not needed.
            until, fragment, tokens = under_way[:3]
            self._under_way = (int(until), int(fragment), float(tokens))

    def _mark_boundary(self, step: int) -> None:
        self._boundary = self.position(step)

    def _copy_state(self) -> Any:
        # Decided by the steps done, not by the boundary: between the last synchronous step and the first exchange this
        # peer's own weights have moved.
        is_shared = self.step <= self.warm_up
        return copy_state(self._engine, self.outer, self._boundary, is_shared=is_shared)

    def _deal(self, step: int) -> dict[str, Ranges]:
        """Return each member's samples of a step; synchronous steps are dealt by pace (decision 0051)."""
        return self.ledger.deal(self._batch_plan, step, by_pace=step < self.warm_up)

    def _share_of(self, step: int) -> Ranges:
        return self._deal(step).get(self.id, ())

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the members."""
        return self.ledger.members

    @property
    def credit(self) -> dict[str, int]:
        """Samples that each peer's updates counted for, by id."""
        return self.ledger.credit

    def _agree(self, agreed: AgreedRound, *, kind: str, step: int, fragment: int | None = None) -> None:
        """Enter a committed round into the ledger, and record it as an event."""
        self.ledger.agree(agreed, sequence=self._engine.settings.sequence, is_update=kind != "meet")
        self._samples = 0
        if kind != "meet":  # the time after `meet` would include the start-up of the first step
            self._pace.begin(time.monotonic())
        if self._training is not None and self._link is not None:
            self._training.events.write(
                "exchange",
                step=step,
                round=agreed.number,
                kind=kind,
                members=list(agreed.members),
                weights=agreed.weights,
                dropped=agreed.dropped,
                capped=agreed.capped,
                aggregation=agreed.aggregation,
                fragment=fragment,
                paces=agreed.paces,
                shares=agreed.shares,
                seconds=agreed.seconds,
                bytes_sent=agreed.bytes_sent,
                bytes_received=agreed.bytes_received,
                digest=agreed.digest,
                credit=self.credit,
            )

    # ---- gradients: target-batch, and the first steps of the other modes -------------------------------------------

    def _average_gradients(self, grads: Sequence[torch.Tensor]) -> bool:
        """Replace the gradients by their mean over the global batch; return False if this step exchanges none.

        Samples that no update counted are dealt again, and their gradients exchanged in a further round.
        """
        training = self._training
        assert training is not None
        step = training.step
        if step >= self.warm_up:
            return False
        training.pause()
        own, sequence = self._share_of(step), self._engine.settings.sequence
        dealt, further = self._deal(step), list(grads)
        total: list[torch.Tensor] | None = None
        weight, is_stuck = 0.0, False
        while True:
            tokens = count_samples(own) * sequence
            scale = 1.0 / (self._engine.unit * tokens) if tokens else 0.0
            self._samples = count_samples(own)
            self._pace.end(self._samples, time.monotonic())
            self._report(step)
            with self._engine.clock.stall():
                means = [grad * scale if tokens else torch.zeros_like(grad) for grad in further]
                limits = {peer: float(count_samples(samples) * sequence) for peer, samples in dealt.items()}
                agreed, mean = self.exchange.average(self._gradients, means, tokens, limits=limits).finish()
            self._agree(agreed, kind="gradient", step=step)
            if mean is not None:
                added = agreed.tokens
                total = mean if total is None else _weighted_mean(total, weight, mean, added)
                weight += added
            counted = {peer: round(tokens / sequence) for peer, tokens in agreed.weights.items()}
            uncounted = uncounted_samples(dealt, counted)
            # Two rounds in a row without any gradient end the step, which would otherwise be repeated without end.
            if not uncounted or not self.members or (is_stuck and mean is None):
                break
            is_stuck = mean is None
            dealt = deal_samples(uncounted, self.members, self.ledger.paces)
            own = dealt.get(self.id, ())
            rows = (torch.from_numpy(array) for array in self.batches.read(own))
            further = self._engine.more_gradients(*rows)
        for place, grad in enumerate(grads):
            if total is None:
                # No peer's gradient was finite: with NaN the engine skips the step.
                grad.fill_(float("nan"))
            else:
                grad.copy_(total[place])
        return True

    def _report(self, step: int) -> None:
        if self._link is not None:
            pace = self._pace.samples_per_s
            self._link.report(PeerProgress(step=step, samples=self._samples, samples_per_s=pace))

    # ---- weights: the outer steps of diloco and quorum --------------------------------------------------------------

    def on_start(self, training: TrainingContext) -> None:
        """Do an exchange first that was due when this peer was stopped."""
        if self._is_leaving or not self._owes_exchange(training.step):
            return
        try:
            self._exchange_weights(training)
        except BehindGroup as error:
            training.step = self.catch_up(training, str(error))
        except LeavingGroup:
            self._is_leaving = True

    def on_step_begin(self, training: TrainingContext) -> None:
        """Raises LeavingGroup if a stop was requested since the last step."""
        if self._is_leaving:
            raise LeavingGroup

    def _owes_exchange(self, step: int) -> bool:
        return step > self.warm_up and self._exchanged_step < step

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Exchange weights if that is due, and copy the state if a newcomer waits for it."""
        if training.step <= self.warm_up:
            if self.outer is not None and training.step == self.warm_up:
                self.outer.reset()
            self._exchanged_step = training.step
            self._mark_boundary(training.step)
        else:
            learnt = 0 if report.result.skipped else report.result.tokens
            for fragment in range(len(self._fragments)):
                self._tokens[fragment] = self._tokens.get(fragment, 0) + learnt
            self._samples += learnt // self._engine.settings.sequence
            self._note_dealt(training.step - 1)
            self._exchange_weights(training)
        if spread_object(self._server.is_wanted):
            self._server.make_copy()

    def _exchange_weights(self, training: TrainingContext) -> None:
        """Apply the update under way if it is due, and exchange the fragments that are due after this step."""
        sync, total = self._sync, self._batch_plan.steps
        if sync.mode == "quorum" and self._is_waited_for(training.step):
            # The samples of the skipped steps are not learnt from.
            reached, training.step = training.step, self._next_exchange(training.step)
            for skipped in range(reached, training.step):
                self._note_dealt(skipped)
        inner = training.step - self.warm_up
        fragment = due_fragment(inner, inner_steps=sync.inner_steps, fragments=sync.fragments)
        is_last = training.step >= total
        if self._pending is not None and (is_last or training.step >= self._pending[0]):
            _, sent, sent_round = self._pending
            # If it raises (a stop), the update remains under way.
            self._apply(training, sent, sent_round)
            self._pending = self._under_way = None
        due = list(range(sync.fragments)) if is_last else [] if fragment is None else [fragment]
        for number in due:
            self._sent_fragment = number
            self._report(training.step)
            movements = self.outer.pseudo_gradients() if self.outer is not None else []
            chosen = [movements[at] for at in self._fragments[number]]
            is_delayed = bool(sync.delay_steps) and not is_last
            if not is_delayed:
                training.pause()
            tokens = float(self._tokens.get(number, 0))
            limits = self.ledger.weight_limits(number, sequence=self._engine.settings.sequence)
            pending = self.exchange.average(
                self._fragment_maps[number], chosen, tokens, limits=limits, sender=number, waits=not is_delayed
            )
            if is_delayed:
                self._pending = (training.step + sync.delay_steps, number, pending)
                self._carried.keep_sent(number, chosen)
                self._under_way = (training.step + sync.delay_steps, number, tokens)
            else:
                self._apply(training, number, pending)
        self._exchanged_step = training.step

    def score_update(self, peer: str, vector: Vector) -> str | None:
        """Return the reason to leave out a peer's update of weights, or None.

        Runs on the group's worker thread, while training waits.
        """
        fragment = self._sent_fragment
        if self._screen is None or fragment is None or dist.get_world_size() > 1 or self._sync.delay_steps:
            return None
        with self._server.while_frozen() as is_frozen:
            if not is_frozen or len(vector) != self._fragment_maps[fragment].length:
                return None
            return self._screen.complaint(self._fragment_maps[fragment], self._fragments[fragment], vector)

    def judge_round(self, trial: RoundTrial) -> Judgement:
        """Return this peer's vote on a round of weights before it is committed.

        Runs on a worker thread of the group, while training waits. A peer that is a mesh, or that trains on while an
        update is under way, abstains.
        """
        fragment = self._sent_fragment
        if self._gate is None or fragment is None or dist.get_world_size() > 1 or self._sync.delay_steps:
            return ABSTAINED
        with self._server.while_frozen() as is_frozen:
            if not is_frozen or len(trial.mean) != self._fragment_maps[fragment].length:
                return ABSTAINED
            return self._gate.judge(self._fragment_maps[fragment], self._fragments[fragment], trial)

    def _apply(self, training: TrainingContext, fragment: int, pending: PendingRound) -> None:
        """Do the outer step of a fragment. A peer that was not counted follows, and drops or keeps its own progress."""
        assert self.outer is not None
        agreed, means = pending.finish()
        self._agree(agreed, kind="weights", step=training.step, fragment=fragment)
        self._carried.keep_lost(fragment, self.exchange.sender_state(fragment))
        places = self._fragments[fragment]
        self.ledger.settle_dealt(fragment, agreed, keeps_late=self._sync.late == "count")
        is_counted = self.id in agreed.weights or not self._tokens.get(fragment)
        if means is not None:
            before = [self.outer.weights[at].clone() for at in places] if not is_counted else []
            # Sparse updates are added up rather than averaged (decision 0058), so the scale depends on their number.
            scale = self._sync.update_scale(sum(tokens > 0.0 for tokens in agreed.weights.values()))
            self.outer.step(dict(zip(places, means, strict=True)), scale=scale)
            if self._gate is not None:
                self._gate.settle()
            if is_counted or self._sync.late == "drop":
                # The run's result is the shared weights, without a share of this peer's own.
                is_last = training.step >= self._batch_plan.steps
                self.outer.mix_in(places, local_share=0.0 if is_last else self._sync.local_share)
            else:
                self.outer.carry(dict(zip(places, before, strict=True)))
            self._engine.publish()
            training.comparison.guard.forget()
        if is_counted or self._sync.late == "drop":
            self._tokens[fragment] = 0
        self._mark_boundary(training.step)

    def _note_dealt(self, step: int) -> None:
        """Note the samples that every member was dealt in a step that each takes alone."""
        self.ledger.note_dealt(self._deal(step), fragments=len(self._fragments))

    def _next_exchange(self, step: int) -> int:
        """Return the next step at which a fragment is due, or the last step."""
        sync, total = self._sync, self._batch_plan.steps
        while (
            step < total
            and due_fragment(step - self.warm_up, inner_steps=sync.inner_steps, fragments=sync.fragments) is None
        ):
            step += 1
        return step

    def _is_waited_for(self, step: int) -> bool:
        """Return True if a quorum of the others has reached the next exchange, so that this peer sends what it has."""
        exchange_step = self._next_exchange(step)
        count = 0
        if self._link is not None and self._sync.quorum and step < exchange_step:
            count = sum(
                progress.step >= exchange_step for peer, progress in self._link.progress().items() if peer != self.id
            )
        is_waited_for = bool(self._sync.quorum) and count >= min(self._sync.quorum, max(1, len(self.members) - 1))
        return bool(spread_object(is_waited_for))

    def on_end(self, training: TrainingContext, state: str) -> None:
        """Record the cost of the held-out gate, and leave the group, so that no peer waits for this one."""
        if self._gate is not None and self._gate.rounds and self._link is not None:
            training.events.write("peer", step=training.step, kind="gate", text=self._gate.cost)
        if self._link is not None:
            self._link.leave()

    def close(self) -> None:
        """Close the group in any case."""
        self.exchange.close()
        if self._link is not None:
            self._link.close()


def _weighted_mean(
    before: Sequence[torch.Tensor], weight: float, mean: Sequence[torch.Tensor], added: float
) -> list[torch.Tensor]:
    """Return the weighted mean of two means, in host memory; the same bits on every peer."""
    share = added / (weight + added)
    return [old * (1.0 - share) + new * share for old, new in zip(before, mean, strict=True)]
