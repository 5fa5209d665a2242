"""The trainer's own checks as callbacks: replicas that must be equal, gradients that must be finite, compiled code."""

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
    """Compares compiled code with eager code before anything is learnt from it; raises on every rank alike."""

    def on_start(self, training: TrainingContext) -> None:
        """Where this process runs compiled code that was never compared."""
        control, engine, step = training.control, training.engine, training.step
        if step >= training.batch_plan.steps or not training.job.train.compile_check:
            return
        if not is_comparison_due(engine, control.compared):
            return
        began_s, compiled = time.perf_counter(), compiled_s()
        tokens, targets = (torch.from_numpy(rows) for rows in training.batches.get(step))
        with training.memory.left_out():
            found = compare_compiled(engine, tokens, targets)
        training.events.write(
            "compile_check",
            step=step,
            epoch=control.generation,
            seconds=time.perf_counter() - began_s,
            compile_s=compiled_s() - compiled,
            **event_fields(found),
        )
        if isinstance(found, CompiledComparison) and not found.passes:
            raise compiled_refusal(found, compute=engine.settings.compute, where="train.compile")
        control.compared.add(code_key(engine))
        control.progress(step, Phase.BUILDING)


class ReplicaComparison(Callback):
    """Compares copies of the state before anything keeps it; raises UntrustedState on every rank alike."""

    def __init__(self, training: TrainingContext, *, each_step: bool = True) -> None:
        plan, engine = training.plan, training.engine
        every = digest_every(plan.job.fault, plan.reliability, plan.prediction, wall_s=plan.duration.wall_s)
        self.guard = ReplicaGuard(
            engine.state, every=every, each_step=each_step, at_rest=engine.at_rest, device=engine.device
        )
        self._case, self._across = training.control.case, engine.across
        self._sound_step = 0  # newest step whose state nothing speaks against
        self._unchanged_step = 0  # newest step whose state was still the same before the next update
        self._was_known = False  # whether the present step compares memory with what the last one left
        self._spent_s = 0.0
        if self.guard.is_on:
            engine.compare_memory = self.compare_memory

    def on_start(self, training: TrainingContext) -> None:
        """What was restored is sound."""
        self._sound_step = self._unchanged_step = training.step

    def compare_memory(self) -> torch.Tensor:
        """Before an update, by the engine: 1 where this rank's memory is not what the last update left, else 0."""
        self._was_known = self.guard.remembers
        return self.guard.compare_memory()

    def memory_changed(self, training: TrainingContext) -> UntrustedState:
        """What is raised on every rank, since memory of some rank changed."""
        training.control.check()  # numbers of an aborted collective say nothing
        return self._untrusted_state(self.guard.name_changed(training.step))

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Compare, and settle which rank was wrong where the same step is done again."""
        step, began_s = training.step, time.perf_counter()
        if self._was_known:
            self._unchanged_step = report.step
        asked = report.result.requests  # the same on every rank
        is_saved = asked[StepRequest.SAVE] or asked[StepRequest.STOP] or step == training.batch_plan.steps
        found = self.guard.check(step, is_saved=is_saved)
        is_compared = self.guard.is_due(step) or (is_saved and self.guard.is_on)
        if found is None and is_compared and training.engine.across is not None:
            self._compare_replicas(training, training.engine.across)
        self._spent_s = time.perf_counter() - began_s
        if found is not None:
            raise self._untrusted_state(found)
        case = self._case
        if case is not None and step == case.step and case.boxes in self.guard.last:
            wrong = settle_divergence(case.digests, self.guard.last[case.boxes])
            if wrong is not None:
                what = f"rank {wrong} was wrong at step {step:,}: done again, the others' values came out"
                raise UntrustedState("settled", step=step, sound=step, what=what, suspects=(wrong,))
        if self.guard.is_due(step) or is_saved:
            self._sound_step = step

    def digest(self, training: TrainingContext) -> tuple[str | None, float | None]:
        """The digest of the weights after a compared step, and the seconds that comparing and digesting took."""
        if not self.guard.is_due(training.step):
            return None, None
        began_s = time.perf_counter()
        digest = digest_shards(training.engine.weights())
        return digest, self._spent_s + time.perf_counter() - began_s

    def _compare_replicas(self, training: TrainingContext, across: AcrossReplicas) -> None:
        """The state of every replica: each rank compares its own with that of the same place in the others."""
        digest = bytes.fromhex(digest_shards(training.engine.state()))
        told = across.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        # Where a replica was lost just now, the next step says so.
        said = {replica: bytes(one.tolist()) for replica, one in told.items()} if told is not None else {}
        wrong = odd_replicas(said)
        differs = torch.zeros(across.replicas.count + 1, device=training.engine.device)
        differs[0] = len(set(said.values())) > 1
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
        suspects = found.suspects if found.certain else ()
        if self._across is not None:  # the guard numbers the ranks of its own replica
            suspects = tuple(self._across.replicas.rank(self._across.replica, one) for one in suspects)
        return UntrustedState(
            "diverged",
            step=found.step,
            # Memory may have changed at any time since the last update, so before its result was copied or saved too.
            sound=self._unchanged_step if found.kind == "rest" else self._sound_step,
            what=found.problem().render().splitlines()[0],
            suspects=suspects,
            # Which rank was wrong is settled by numbers of one world only.
            evidence=found.to_json() if self._across is None or found.kind == "rest" else None,
        )


def odd_replicas(digests: Mapping[int, bytes]) -> list[int]:
    """Replicas whose digest is not that of most; none where no digest is that of most.

    >>> odd_replicas({0: b"a", 1: b"b", 2: b"a"}), odd_replicas({0: b"a", 1: b"b"}), odd_replicas({})
    ([1], [], [])
    """
    counts = Counter(digests.values())
    digest, count = counts.most_common(1)[0] if counts else (b"", 0)
    return [one for one, own in digests.items() if own != digest] if 2 * count > len(digests) else []


FIRST_RANK_BUFFER = "is changed by forward: data ranks change it each in its own way, and the first one's value counts"
UNSAVED_BUFFER = (
    "is changed by forward and registered with persistent=False: no checkpoint holds it, so after a restart it begins "
    "as it was built"
)


class ChangedBuffers(Callback):
    """Warns of buffers of the user's own network that forward changes, of each once."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Of those that data ranks change each in its own way."""
        self._warn_of(training, training.engine.first_rank_buffers, FIRST_RANK_BUFFER)

    def on_checkpoint_taken(self, training: TrainingContext, step: int) -> None:
        """Of those that the checkpoint does not hold."""
        self._warn_of(training, training.engine.changed_unsaved(), UNSAVED_BUFFER)

    def _warn_of(self, training: TrainingContext, names: Iterable[str], what: str) -> None:
        for name, said in sorted({(name, what) for name in names} - self._warned):
            self._warned.add((name, said))
            step = max(training.step - 1, 0)
            training.events.write("remark", step=step, text=f"the buffer {name} {said}", is_warning=True)


STILL_STEPS = 32  # with the same loss: batches differ, and so do their losses, from the second or third digit on
STILL = 1e-6  # of the loss: less than this is no movement


class StalledTraining(Callback):
    """Warns of a model that learns nothing: a gradient norm of exactly 0, or a loss that does not move.

    Damage that turns an activation into zeros or saturates it does that without a number that is not finite. The run
    goes on, since a person may know why.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=STILL_STEPS)
        self._is_zero = self._is_still = False

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Say it once when it begins."""
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
            cure = "the state may be damaged: compare the curve with an earlier checkpoint, and resume from that"
            training.events.write("remark", step=step, text=f"step {step:,}: {what}; {cure}", is_warning=True)


class SkippedSteps(Callback):
    """Gives up when `train.skipped_steps` steps in a row were skipped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_a_row = 0  # steps skipped in the present streak; saved, so that a streak outlives a restart
        self.trusted_step = 0  # steps done before that streak; all of them where the last was not skipped

    def on_start(self, training: TrainingContext) -> None:
        """Of what was restored, the steps before a streak that it ended with are trusted."""
        self.trusted_step = training.step - self.in_a_row

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Count."""
        self.in_a_row = self.in_a_row + 1 if report.result.skipped else 0
        self.trusted_step = training.step - self.in_a_row
        if self.in_a_row >= self._most:
            raise UntrustedState(
                "not-finite",
                step=training.step,
                sound=self.trusted_step,
                what=f"the gradient was not finite, or far too large, in {plural(self.in_a_row, 'step')} in a row",
            )
