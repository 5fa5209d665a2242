"""Trains a run of one rank in this process, without agent and coordinator; for sweeps of many tiny runs.

An ordinary run needs an agent, a coordinator and a rank, each a process that imports torch. Here one process that has
imported it trains one run after the other. The run folder, its events and checkpoints are the same; only a failed
rank is not started again.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import HashStore  # type: ignore[attr-defined]

from phalanx.elastic.failure import write_error
from phalanx.elastic.heartbeat_board import Phase
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.train.callbacks import Callback
from phalanx.train.join_group import join_group, take_device
from phalanx.train.leave import forget_groups
from phalanx.train.rank_control import RankControl
from phalanx.train.rank_training import train_rank
from phalanx.train.state.paths import commit_name
from phalanx.train.state.reader import list_commits

if TYPE_CHECKING:
    from phalanx.train.evaluate import Score
    from phalanx.train.slow_links.peer_training import PeerTraining
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext

SMOOTH = 0.9  # weight of the past in the running mean of the loss
PATIENCE = 20  # steps before a loss is judged
WORSE_THAN_GUESSING = 0.5  # nats above ln(vocabulary)
RISEN = 1.0  # nats above the lowest running mean


def train_lone_rank(
    run: Run,
    *,
    stop: Callable[[], bool],
    progress: Callable[[int], None] = lambda step: None,
    callbacks: Sequence[Callback] = (),
    sharers: int = 1,
    peers: Callable[[EventWriter], PeerTraining] | None = None,
    allow_code: bool = False,
) -> str:
    """Train a run of one rank in this process, from its newest checkpoint; return "done" or "stopped".

    `stop` returns True to end the run early. `sharers` processes share the cores of this machine. `peers` makes this
    rank one of several peers on slow links. Errors are recorded in the run folder and raised.
    """
    plan = Plan.from_json(run.plan_text(), where=str(run.plan_json))
    assert plan.layout.devices == 1, "a lone rank trains the whole model"
    with run.held():
        run.set_status("running", world=1, started=round(time.time(), 3))
        events = EventWriter(run.events(0), rank=0)
        try:
            device = take_device(plan, sharers)
            joined_s = join_group(plan, device, rank=0, world=1, store=HashStore())
            control = RankControl(
                stop=stop,
                progress=lambda step, phase: _tell(progress, step, phase),
                peers=peers(events) if peers is not None else None,
            )
            state, step = train_rank(
                run, plan, device, events, control, joined_s=joined_s, callbacks=callbacks, allow_code=allow_code
            )
            run.set_status(state, exit_code=0, message="", step=step)
            return state
        except BaseException as error:
            write_error(run, 0, error, step=-1)
            run.set_status("failed", exit_code=3, message=redact(str(error), os.environ)[:2000])
            raise
        finally:
            events.close()
            forget_groups()
            gc.collect()  # engines hold each other in circles


def _tell(progress: Callable[[int], None], step: int, phase: Phase) -> None:
    """Call `progress` with the steps done, in the training phase only."""
    if phase == Phase.TRAINING:
        progress(step)


def start_from_trunk(run: Run, trunk: Run, step: int) -> bool:
    """Copy the checkpoint of `step` of run `trunk` into a new run, whose first steps are the same.

    Returns False if the trunk has no such checkpoint, or the run already has one.
    """
    source, target = Path(trunk.checkpoints) / commit_name(step), Path(run.checkpoints) / commit_name(step)
    if list_commits(run.checkpoints) or not source.is_dir():
        return False
    draft = target.with_name(f".{target.name}.copy")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    draft.rename(target)
    return True


class SweepWatch(Callback):
    """The callback of a sweep's run: keeps its last score, saves at its decay, and stops it if it diverges."""

    def __init__(self, *, save_at: int = 0) -> None:
        self.save_at = save_at
        self.score: Score | None = None
        self.diverged = ""  # reason, or ""
        self.loss = math.nan
        self._mean, self._lowest, self._seen = 0.0, math.inf, 0

    def on_step_begin(self, training: TrainingContext) -> None:
        """Request a checkpoint before the step after which it is to be saved."""
        if self.save_at and training.step == self.save_at - 1:
            training.save()

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Stop a run whose loss is not finite, worse than guessing, or has risen far."""
        self.loss = report.result.loss
        self._seen += 1
        if not math.isfinite(self.loss):
            self._give_up(training, f"loss {self.loss} in step {report.step:,}")
            return
        self._mean = self.loss if self._seen == 1 else SMOOTH * self._mean + (1.0 - SMOOTH) * self.loss
        if self._seen < PATIENCE:
            return
        self._lowest = min(self._lowest, self._mean)
        guess = math.log(training.job.model.vocab)
        if self._mean > guess + WORSE_THAN_GUESSING:
            self._give_up(
                training, f"loss {self._mean:.2f} is above ln(vocabulary) = {guess:.2f} in step {report.step:,}"
            )
        elif self._mean > self._lowest + RISEN:
            self._give_up(training, f"loss rose from {self._lowest:.2f} to {self._mean:.2f} by step {report.step:,}")

    def on_evaluate(self, training: TrainingContext, score: Score) -> None:
        """Keep the score; the last one counts."""
        self.score = score

    def _give_up(self, training: TrainingContext, why: str) -> None:
        """Record why the run diverged, and stop it."""
        self.diverged = self.diverged or why
        training.stop()
