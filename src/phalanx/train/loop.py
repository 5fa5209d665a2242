"""The training loop: a batch, a step, and the callbacks that look at it. Everything else a run does is a callback."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.elastic.heartbeat_board import Phase
from phalanx.train.optim.learning_rate import learning_rate
from phalanx.train.parallel.across_replicas import ReplicaLost
from phalanx.train.slow_links.peer_exchange import BehindGroup, LeavingGroup
from phalanx.train.step_result import MemoryChanged, StepReport, StepRequest, StepResult
from phalanx.train.training_context import TrainingContext


def run_training(training: TrainingContext, first: int) -> str:
    """Take every step from `first` on; "done", or "stopped" or "reform" when all ranks were asked to leave."""
    try:
        return _run_steps(training, first)
    except BaseException as error:
        for text in training.callbacks.call_after_failure(training, error):
            training.events.write("remark", step=training.step, text=text, is_warning=True)
        raise


def _run_steps(training: TrainingContext, first: int) -> str:
    total, leaving = training.batch_plan.steps, ""
    training.step = first
    training.events.write(
        "run_start", step=first, steps=total, world=training.world_size, epoch=training.control.generation
    )
    training.callbacks.call("on_start", training)
    if first:
        training.callbacks.call("on_resume", training)
    while training.step < total and not leaving:
        try:
            report = take_step(training)
            training.step += 1
            training.callbacks.call("on_step_end", training, report)
        except ReplicaLost:
            _regroup_replicas(training)
            continue
        except BehindGroup as error:
            assert training.control.peers is not None
            training.step = training.control.peers.catch_up(training, str(error))
            continue
        except LeavingGroup:
            leaving = "stopped"
            continue
        except MemoryChanged:
            raise training.comparison.memory_changed(training) from None
        leaving = _leaving_state(training, report.result)
        training.control.progress(training.step, Phase.TRAINING)
        if report.result.is_round_due and not leaving:
            _regroup_replicas(training)
        elif leaving == "reform" and not _are_replicas_here(training):
            _regroup_replicas(training)
            leaving = ""  # the request stands, and is met with the next step
    if leaving == "reform" and training.step < total:
        training.checkpoints.leave_membership()
        return leaving
    return _finish_run(training, "stopped" if leaving and training.step < total else "done")


def take_step(training: TrainingContext) -> StepReport:
    """One step: its batch, its learning rate, the engine; every rank hears what any rank asks for."""
    step, checkpoints = training.step, training.checkpoints
    timer = training.telemetry.begin_step(step)
    training.callbacks.call("on_step_begin", training)  # within the step: what a drill slows down is slow
    with timer.data():
        tokens, targets = (torch.from_numpy(rows) for rows in training.batches.get(step))
        targets = training.control.hooks.targets(step, targets)
    seen = training.batch_plan.tokens_before(step + 1)
    training.lr = learning_rate(training.job.optim, tokens_seen=seen, total_tokens=training.plan.duration.tokens)
    copied_step = checkpoints.copied_step  # of which this rank's request speaks
    with timer.engine():
        result = training.engine.step(tokens, targets, lr=training.lr, requests=training.rank_requests)
    training.control.check()
    checkpoints.confirm_copies(copied_step, result.requests)
    return timer.report(result, lr=training.lr)


def _leaving_state(training: TrainingContext, result: StepResult) -> str:
    if result.requests[StepRequest.STOP]:
        return "stopped"
    is_left = result.requests[StepRequest.REFORM] or training.step in training.control.leaves_at
    return "reform" if is_left else ""


def _are_replicas_here(training: TrainingContext) -> bool:
    rounds = training.control.rounds
    return rounds is None or rounds.are_all_here(training.engine, training.step)


def _regroup_replicas(training: TrainingContext) -> None:
    """A replica was lost, or is back: go on with those that are present, from what the furthest of them has."""
    control = training.control
    assert control.rounds is not None
    training.pause()
    training.step = control.rounds.regroup(training.engine, training.step)
    training.comparison.guard.forget()  # the state may be another's
    training.checkpoints.forget_unwritten()
    control.check()
    control.progress(training.step, Phase.BUILDING)


def _finish_run(training: TrainingContext, state: str) -> str:
    training.batches.close()
    if state == "done":
        training.evaluation.evaluate(training)
    training.pause()
    reason = "stop" if state == "stopped" else "end"
    training.checkpoints.save_last(reason)
    while not _are_replicas_here(training):  # one was lost: perhaps the one that was saving, or before its last step
        _regroup_replicas(training)
        training.checkpoints.save_last(reason)
    training.pause()
    dist.barrier()
    training.control.check()
    if state == "stopped":
        training.events.write("stop", step=training.step, reason="asked to stop")
    training.callbacks.call("on_end", training, state)
    training.events.write("run_end", step=training.step, state=state)
    return state
