"""The trainer's checks as callbacks: compiled code, equal replicas, unchanged memory, finite and moving losses."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx.elastic.heartbeat_board import Phase
from phalanx.plan.auto_settings import digest_every
from phalanx.train.callbacks import Callback
from phalanx.train.guard.compiled import (
    CompiledComparison,
    code_key,
    compare_compiled,
    compiled_refusal,
    event_fields,
    is_comparison_due,
)
from phalanx.train.guard.divergence import ReplicaGuard, digest_shards
from phalanx.train.guard.divergence_verdict import Divergence, settle_divergence
from phalanx.train.parallel.across_replicas import AcrossReplicas
from phalanx.train.rank_control import UntrustedState
from phalanx.train.step_result import StepRequest
from phalanx.train.telemetry.clock import compiled_s
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext


class CompiledCodeCheck(Callback):
    """Compares compiled code with eager code before the first step; raises UserError on every rank if it is wrong."""

    def on_start(self, training: TrainingContext) -> None:
        """Compare, if some rank runs compiled code that was never compared in its process."""
        control, engine, step = training.control, training.engine, training.step
        if step >= training.batch_plan.steps or not training.job.train.compile_check:
            return
        if not is_comparison_due(engine, control.compared):
            return
        began_s, compiled_before_s = time.perf_counter(), compiled_s()
        tokens, targets = (torch.from_numpy(rows) for rows in training.batches.get(step))
        with training.memory.left_out():
            comparison = compare_compiled(engine, tokens, targets)
        training.events.write(
            "compile_check",
            step=step,
            epoch=control.generation,
            seconds=time.perf_counter() - began_s,
            compile_s=compiled_s() - compiled_before_s,
            **event_fields(comparison),
        )
        if isinstance(comparison, CompiledComparison) and not comparison.passes:
            raise compiled_refusal(comparison, compute=engine.settings.compute, where="train.compile")
        control.compared.add(code_key(engine))
        control.progress(step, Phase.BUILDING)


class ReplicaComparison(Callback):
    """Compares copies of the state before anything keeps it; raises UntrustedState on every rank if they differ."""

    def __init__(self, training: TrainingContext, *, each_step: bool = True) -> None:
        plan, engine = training.plan, training.engine
        every = digest_every(plan.job.fault, plan.reliability, plan.prediction, wall_s=plan.duration.wall_s)
        self.guard = ReplicaGuard(
            engine.state, every=every, each_step=each_step, at_rest=engine.at_rest, device=engine.device
        )
        self._case, self._across = training.control.case, engine.across
        self._sound_step = 0  # newest step at which all comparisons passed
        # Newest step whose state was unchanged before the next update.
        self._unchanged_step = 0
        self._was_known = False  # True if memory was compared in the present step
        self._spent_s = 0.0
        if self.guard.is_on:
            engine.compare_memory = self.compare_memory

    def on_start(self, training: TrainingContext) -> None:
        """Take the restored state as sound."""
        self._sound_step = self._unchanged_step = training.step

    def compare_memory(self) -> torch.Tensor:
        """Return 1 if this rank's memory changed since the last update, else 0.

        Called by the engine before an update.
        """
        self._was_known = self.guard.remembers
        return self.guard.compare_memory()

    def memory_changed(self, training: TrainingContext) -> UntrustedState:
        """Return the error to raise on every rank when some rank's memory changed."""
        training.control.check()  # the flag may come from an aborted collective
        return self._untrusted_state(self.guard.name_changed(training.step))

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Compare copies, and decide an open case once its step is done again.

        In an open case copies differed without a majority; the rank whose earlier digest differs from the repetition
        was wrong.
        """
        step, began_s = training.step, time.perf_counter()
        if self._was_known:
            self._unchanged_step = report.step
        requests = report.result.requests  # the same on every rank
        is_saved = requests[StepRequest.SAVE] or requests[StepRequest.STOP] or step == training.batch_plan.steps
        divergence = self.guard.check(step, is_saved=is_saved)
        is_compared = self.guard.is_due(step) or (is_saved and self.guard.is_on)
        if divergence is None and is_compared and training.engine.across is not None:
            self._compare_replicas(training, training.engine.across)
        self._spent_s = time.perf_counter() - began_s
        if divergence is not None:
            raise self._untrusted_state(divergence)
        case = self._case
        if case is not None and step == case.step and case.boxes in self.guard.last:
            wrong = settle_divergence(case.digests, self.guard.last[case.boxes])
            if wrong is not None:
                what = f"rank {wrong} was wrong at step {step:,}: done again, the others' values came out"
                raise UntrustedState("settled", step=step, sound=step, what=what, suspects=(wrong,))
        if is_compared:
            self._sound_step = step

    def digest(self, training: TrainingContext) -> tuple[str | None, float | None]:
        """Return the digest of the weights, and the seconds of comparing and digesting.

        (None, None) after a step that is not compared.
        """
        if not self.guard.is_due(training.step):
            return None, None
        began_s = time.perf_counter()
        digest = digest_shards(training.engine.weights())
        return digest, self._spent_s + time.perf_counter() - began_s

    def _compare_replicas(self, training: TrainingContext, across: AcrossReplicas) -> None:
        """Compare the state of model replicas: each rank with the ranks at its place in the others."""
        digest = bytes.fromhex(digest_shards(training.engine.state()))
        gathered = across.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        # If a replica was lost just now, the next step detects it.
        digests = (
            {replica: bytes(value.tolist()) for replica, value in gathered.items()} if gathered is not None else {}
        )
        wrong = odd_replicas(digests)
        differs = torch.zeros(across.replicas.count + 1, device=training.engine.device)
        differs[0] = len(set(digests.values())) > 1
        differs[[replica + 1 for replica in wrong]] = 1.0
        if dist.get_world_size() > 1:  # all ranks of a replica leave, or none
            dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        if not differs[0]:
            return
        suspects = [replica for replica in range(across.replicas.count) if differs[replica + 1]]
        names = ", ".join(map(str, suspects)) or "which cannot be told"
        raise UntrustedState(
            "diverged",
            step=training.step,
            sound=self._sound_step,
            what=f"the states of model replicas differ after step {training.step:,} (wrong: {names})",
        )

    def _untrusted_state(self, found: Divergence) -> UntrustedState:
        """Return the error for a divergence, with the newest step that is still trusted."""
        suspects = found.suspects if found.certain else ()
        if self._across is not None:  # the guard numbers the ranks of its own replica
            suspects = tuple(self._across.replicas.rank(self._across.replica, rank) for rank in suspects)
        return UntrustedState(
            "diverged",
            step=found.step,
            # Memory may have changed at any time since the last update, also before its result was copied or saved.
            sound=self._unchanged_step if found.kind == "rest" else self._sound_step,
            what=found.problem().render().splitlines()[0],
            suspects=suspects,
            # Rank numbers of evidence are those of torch's world, which with model replicas is one replica.
            evidence=found.to_json() if self._across is None or found.kind == "rest" else None,
        )


def odd_replicas(digests: Mapping[int, bytes]) -> list[int]:
    """Return the replicas whose digest differs from that of the majority; empty if there is no majority.

    >>> odd_replicas({0: b"a", 1: b"b", 2: b"a"}), odd_replicas({0: b"a", 1: b"b"}), odd_replicas({})
    ([1], [], [])
    """
    majority = {digest for digest, count in Counter(digests.values()).items() if 2 * count > len(digests)}
    return [replica for replica, own in digests.items() if majority and own not in majority]


FIRST_RANK_BUFFER = "is changed by forward: data ranks change it each in its own way, and the first one's value counts"
UNSAVED_BUFFER = (
    "is changed by forward and registered with persistent=False: no checkpoint holds it, so after a restart it begins "
    "as it was built"
)


class ChangedBuffers(Callback):
    """Warns once of each buffer of the user's own network that forward changes."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Warn of buffers that data ranks change differently."""
        self._warn_of(training, training.engine.first_rank_buffers, FIRST_RANK_BUFFER)

    def on_checkpoint_taken(self, training: TrainingContext, step: int) -> None:
        """Warn of changed buffers that the checkpoint does not contain."""
        self._warn_of(training, training.engine.changed_unsaved(), UNSAVED_BUFFER)

    def _warn_of(self, training: TrainingContext, names: Iterable[str], what: str) -> None:
        for name, effect in sorted({(name, what) for name in names} - self._warned):
            self._warned.add((name, effect))
            step = max(training.step - 1, 0)
            training.events.write("remark", step=step, text=f"the buffer {name} {effect}", is_warning=True)


# Steps with the same loss. Batches differ, and so do their losses, from the second or third digit on.
STILL_STEPS = 32
STILL = 1e-6  # relative spread of the losses up to which the loss counts as not moving


class StalledTraining(Callback):
    """Warns of a model that learns nothing: a gradient norm of exactly 0, or a loss that does not move.

    Damage that turns an activation into zeros, or saturates it, causes this while all numbers stay finite. The run
    continues, since there may be a reason that the user knows.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=STILL_STEPS)
        self._is_zero = self._is_still = False

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Warn once when it begins."""
        result = report.result
        if result.skipped or not result.tokens:
            return
        is_zero = result.grad_norm == 0.0
        if is_zero and not self._is_zero:
            self._warn_of(training, report.step, "the gradient norm is exactly 0: no weight learns from this step")
        self._losses.append(result.loss)
        spread = max(self._losses) - min(self._losses)
        is_still = len(self._losses) == STILL_STEPS and spread <= STILL * abs(result.loss)
        if is_still and not self._is_still:
            what = f"the loss has been {result.loss:.6g} for {STILL_STEPS} steps, and batches differ"
            self._warn_of(training, report.step, what)
        self._is_zero, self._is_still = is_zero, is_still

    def _warn_of(self, training: TrainingContext, step: int, what: str) -> None:
        if training.rank == 0:  # every rank has the same numbers
            remedy = "the state may be damaged: compare the curve with an earlier checkpoint, and resume from that"
            training.events.write("remark", step=step, text=f"step {step:,}: {what}; {remedy}", is_warning=True)


class SkippedSteps(Callback):
    """Raises UntrustedState when `train.skipped_steps` steps in a row were skipped."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Skipped steps of the present streak; saved, so that a streak continues after a restart.
        self.in_a_row = 0
        # Steps done before that streak; all steps if the last was not skipped.
        self.trusted_step = 0

    def on_start(self, training: TrainingContext) -> None:
        """Trust the restored steps, except for a streak of skipped steps at their end."""
        self.trusted_step = training.step - self.in_a_row

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Count the streak; raise when it is too long."""
        self.in_a_row = self.in_a_row + 1 if report.result.skipped else 0
        self.trusted_step = training.step - self.in_a_row
        if self.in_a_row >= self._most:
            raise UntrustedState(
                "not-finite",
                step=training.step,
                sound=self.trusted_step,
                what=f"the gradient was not finite, or far too large, in {plural(self.in_a_row, 'step')} in a row",
            )
