"""The training loop: a page. Data in, a step, the record of it, and now and then a look up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx.errors import Problem, WorldError
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run
from phalanx.train.checkpoint.background import AsyncSaver
from phalanx.train.data.batches import Batches, BatchPlan
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.engine import Engine, StepResult
from phalanx.train.evaluate import Heldout
from phalanx.train.memory import MemoryMeter
from phalanx.train.optim.schedule import learning_rate
from phalanx.train.parallel.expert import imbalance
from phalanx.train.sample import sample_texts
from phalanx.train.state import meta_of


class Loop:
    """Everything a run needs between its first and its last step."""

    def __init__(
        self,
        folder: Run,
        plan: Plan,
        engine: Engine,
        events: EventWriter,
        memory: MemoryMeter,
        *,
        stop: Callable[[], bool],
        heartbeat: Callable[[int], None],
    ) -> None:
        self.folder, self.plan, self.job, self.engine, self.events = folder, plan, plan.job, engine, events
        self._stop, self._heartbeat = stop, heartbeat
        self.dataset = TokenDataset.open([folder.path / path for path in self.job.data.paths], "train")
        self.batch_plan = BatchPlan.of(self.job.batch, sequence=self.job.data.sequence, tokens=plan.duration.tokens)
        self.batches = Batches(
            self.dataset,
            self.dataset.sampler(self.job.data.sequence, self.job.data.seed),
            self.batch_plan,
            sequence=self.job.data.sequence,
            data_rank=engine.meshes.index("data"),
            data_ranks=engine.dims.data,
        )
        self.heldout = Heldout(self.dataset.folders, engine, sequences=self.job.train.evaluate_sequences)
        self.saver = AsyncSaver(
            folder.checkpoints,
            attempt=_attempt(engine.device),
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            keep=self.job.checkpoint.keep,
        )
        self.memory = memory
        self._saved_step = self._taken_step = -1
        self._saved_s = time.monotonic()
        self._skipped = 0

    def run(self, first: int) -> None:
        """Take every step from `first` on; ends early when asked to."""
        total = self.batch_plan.steps
        self.events.write("run_start", step=first, steps=total, world=dist.get_world_size())
        step = first
        stopped = False
        while step < total and not stopped:
            result, taken_s, lr = self._step(step)
            step += 1
            self._record(step - 1, result, taken_s, lr)
            self._count_skipped(result, step)
            self._tell_saved()
            if self._is_due(step):
                self._evaluate(step)
            if result.save:
                self._save(step)
            stopped = result.stop
            self._heartbeat(step)
        self._finish(step, stopped=stopped and step < total)

    def _step(self, step: int) -> tuple[StepResult, float, float]:
        began_s = time.perf_counter()
        tokens, targets = (torch.from_numpy(rows) for rows in self.batches.get(step))
        seen, total = self.batch_plan.tokens_before(step + 1), self.plan.duration.tokens
        lr = learning_rate(self.job.optim, tokens_seen=seen, total_tokens=total)
        result = self.engine.step(tokens, targets, lr=lr, stop=self._stop(), save=self._wants_save())
        return result, time.perf_counter() - began_s, lr

    def _record(self, step: int, result: StepResult, taken_s: float, lr: float) -> None:
        self.events.write(
            "step",
            step=step,
            loss=result.loss,
            tokens=result.tokens,
            duration_s=taken_s,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens_per_s=result.tokens / taken_s,
            memory_bytes=self.memory.peak_bytes(),
            compute_s=result.compute_s,
            wait_s=result.wait_s,
            skipped=result.skipped,
            bytes_sent=result.bytes_sent,
            expert_imbalance=self._expert_imbalance(),
        )

    def _expert_imbalance(self) -> float | None:
        """Tokens of the busiest expert over the mean, in the worst layer of this stage; None without experts."""
        loads = self.engine.expert_loads
        if loads is None:
            return None
        return max(imbalance(load_E, self.engine.dims.expert).expert for load_E in loads)

    def _count_skipped(self, result: StepResult, step: int) -> None:
        self._skipped = self._skipped + 1 if result.skipped else 0
        if self._skipped >= self.job.train.skipped_steps:
            raise WorldError(
                Problem(
                    where=f"step {step:,}",
                    what=f"the gradient was not finite in {self._skipped} steps in a row",
                    why="no rank has updated anything since; more steps would not heal it",
                    fix="lower optim.lr, lengthen optim.warmup_tokens, or resume before the first of them",
                )
            )

    def _is_due(self, step: int) -> bool:
        every = self.job.train.evaluate_every
        return bool(every) and step % every == 0 and step < self.batch_plan.steps

    def _evaluate(self, step: int) -> None:
        self._heartbeat(step)
        score = self.heldout.score()
        if score is not None:
            self.events.write(
                "evaluate",
                step=step,
                loss=score.loss,
                bits_per_byte=score.bits_per_byte,
                tokens=score.tokens,
                seconds=score.seconds,
            )

    def _wants_save(self) -> bool:
        """Rank 0's clock decides, every rank hears of it with the step's numbers."""
        interval_s = self.plan.reliability.interval_s
        return dist.get_rank() == 0 and time.monotonic() - self._saved_s >= interval_s

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        self._saved_s, self._saved_step = time.monotonic(), step
        tokens = self.batch_plan.tokens_before(step)
        meta = meta_of(self.engine, step=step, tokens=tokens, data=self.dataset.digest)
        blocked_s = self.saver.save(step=step, pieces=self.engine.state(), meta=meta)
        if not self.job.checkpoint.asynchronous:
            self.saver.wait()
        self._taken_step = step
        self.events.write("checkpoint", step=step, blocked_s=blocked_s, seconds=None, bytes=None)

    def _tell_saved(self) -> None:
        """Record a checkpoint once it is on the disk."""
        if self._taken_step >= 0 and not self.saver.busy:
            saved, self._taken_step = self.saver.wait(), -1
            if saved is not None:
                self.events.write(
                    "checkpoint", step=saved.step, path=saved.path.name, seconds=saved.seconds, bytes=saved.bytes
                )

    def _finish(self, step: int, *, stopped: bool) -> None:
        self.batches.close()
        if not stopped:
            self._evaluate(step)
        self._heartbeat(step)
        self._save(step)
        self.saver.wait()
        self._tell_saved()
        self._heartbeat(step)
        dist.barrier()
        if stopped:
            self.events.write("stop", step=step, reason="asked to stop")
        elif dist.get_rank() == 0 and self.job.train.samples:
            for text in sample_texts(self.folder.checkpoints, self.job, self.dataset):
                self.events.write("sample", step=step, text=text)
        self.events.write("run_end", step=step, state="stopped" if stopped else "done")


def _attempt(device: torch.device) -> str:
    """A name for this start of the job that all ranks share and no earlier start had."""
    number = torch.tensor([time.time_ns() // 1000], device=device)
    dist.broadcast(number, src=0)
    return f"{int(number.item()):x}"
