"""The training loop: a batch, a step, and the callbacks after it. All other features of a run are callbacks."""

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
    """Take every step from `first` on and return how it ended.

    "done": all steps are taken. "stopped": a rank asked to stop. "reform": the ranks leave this membership, and
    training continues in the next. Errors are passed to the callbacks' on_failure and raised.
    """
    try:
        return _run_steps(training, first)
    except BaseException as error:
        for text in training.callbacks.call_after_failure(training, error):
            training.events.write("remark", step=training.step, text=text, is_warning=True)
        raise


def _run_steps(training: TrainingContext, first: int) -> str:
    """Take the steps; reconnect model replicas where one was lost or came back."""
    num_steps, end_state = training.batch_plan.steps, ""
    training.step = first
    training.events.write(
        "run_start", step=first, steps=num_steps, world=training.world_size, epoch=training.control.generation
    )
    training.callbacks.call("on_start", training)
    if first:
        training.callbacks.call("on_resume", training)
    while training.step < num_steps and not end_state:
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
            end_state = "stopped"
            continue
        except MemoryChanged:
            raise training.comparison.memory_changed(training) from None
        end_state = _leaving_state(training, report.result)
        training.control.progress(training.step, Phase.TRAINING)
        if report.result.is_round_due and not end_state:
            _regroup_replicas(training)
        elif end_state == "reform" and not _are_replicas_here(training):
            _regroup_replicas(training)
            end_state = ""  # the request is repeated with the next step
    if end_state == "reform" and training.step < num_steps:
        training.checkpoints.leave_membership()
        return end_state
    return _finish_run(training, "stopped" if end_state and training.step < num_steps else "done")


def take_step(training: TrainingContext) -> StepReport:
    """Take one step: fetch its batch, compute its learning rate, run the engine, and confirm copies in memory."""
    step, checkpoints = training.step, training.checkpoints
    timer = training.telemetry.begin_step(step)
    training.callbacks.call(
        "on_step_begin", training
    )  # inside the timer: a rank that a drill slows down must measure as slow
    with timer.data():
        tokens, targets = (torch.from_numpy(rows) for rows in training.batches.get(step))
        targets = training.control.hooks.targets(step, targets)
    tokens_seen = training.batch_plan.tokens_before(step + 1)
    training.lr = learning_rate(training.job.optim, tokens_seen=tokens_seen, total_tokens=training.plan.duration.tokens)
    # The step that this rank's request COPY_UNSAFE refers to.
    copied_step = checkpoints.copied_step
    with timer.engine():
        result = training.engine.step(tokens, targets, lr=training.lr, requests=training.rank_requests)
    training.control.check()  # the result may come from an aborted collective
    checkpoints.confirm_copies(copied_step, result.requests)
    return timer.report(result, lr=training.lr)


def _leaving_state(training: TrainingContext, result: StepResult) -> str:
    """Return "stopped" or "reform" if this step was the last of the membership, else ""."""
    if result.requests[StepRequest.STOP]:
        return "stopped"
    is_left = result.requests[StepRequest.REFORM] or training.step in training.control.leaves_at
    return "reform" if is_left else ""


def _are_replicas_here(training: TrainingContext) -> bool:
    """Return True if every model replica of this round has done as many steps as this one."""
    rounds = training.control.rounds
    return rounds is None or rounds.are_all_here(training.engine, training.step)


def _regroup_replicas(training: TrainingContext) -> None:
    """Reconnect after a model replica was lost or came back.

    Training continues with the replicas present, from the state of the one that has done the most steps.
    """
    control = training.control
    assert control.rounds is not None
    training.pause()
    training.step = control.rounds.regroup(training.engine, training.step)
    # The state may have been taken from another replica.
    training.comparison.guard.forget()
    training.checkpoints.forget_unwritten()
    control.check()
    control.progress(training.step, Phase.BUILDING)


def _finish_run(training: TrainingContext, state: str) -> str:
    """Evaluate if all steps are done, save the last checkpoint, call on_end, and return `state`."""
    training.batches.close()
    if state == "done":
        training.evaluation.evaluate(training)
    training.pause()
    reason = "stop" if state == "stopped" else "end"
    training.checkpoints.save_last(reason)
    while not _are_replicas_here(
        training
    ):  # a replica was lost: perhaps the one that was saving, or before its last step
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
