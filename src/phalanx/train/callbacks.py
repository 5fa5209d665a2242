"""Callbacks: code that runs at named moments of a training run, in order, with state that checkpoints keep.

A callback subclasses `Callback` and overrides the moments it wants; a moment nobody overrides costs nothing. Every rank
has its own instance and calls the same moments in the same order, so a callback may use collectives where all ranks
reach them alike. The trainer's own features (comparison of replicas, telemetry, evaluation, checkpoints) are callbacks
too: `TrainingContext` lists them. This module imports no torch, so that a job can be prepared where there is none.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.elastic.failure import failure_of
from phalanx.elastic.rank_link import Interrupted
from phalanx.errors import PhalanxError, Problem, SystemFailure

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.train.engine import Engine
    from phalanx.train.evaluate import Score
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext

MOMENTS = (
    "on_start",
    "on_resume",
    "on_step_begin",
    "on_gradients_ready",
    "on_before_update",
    "on_after_update",
    "on_step_end",
    "on_evaluate",
    "on_checkpoint_taken",
    "on_checkpoint_saved",
    "on_failure",
    "on_end",
)


class Callback:
    """Override the moments you need. `training` is the `TrainingContext`: step, lr, engine, job, plan, events, rank.

    >>> class LossLog(Callback):
    ...     def __init__(self, every: int = 10) -> None:
    ...         self.every, self.seen = every, 0
    ...     def on_step_end(self, training, report):
    ...         self.seen += 1
    ...     def state_dict(self):
    ...         return {"seen": self.seen}
    ...     def load_state_dict(self, state):
    ...         self.seen = state["seen"]
    """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: JSON values. Each rank keeps its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; on a changed number of ranks, what rank 0 gave."""

    def on_start(self, training: TrainingContext) -> None:
        """Before the first step of this membership; again after every recovery."""

    def on_resume(self, training: TrainingContext) -> None:
        """After `on_start`, where the state came from a checkpoint on disk or in memory."""

    def on_step_begin(self, training: TrainingContext) -> None:
        """Before the batch of step `training.step` is fetched; counted in the step's time."""

    def on_gradients_ready(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """This rank's shards of the summed gradients, before their norm; they may be changed in place."""

    def on_before_update(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """The gradients as the optimizer gets them: averaged and clipped. Not called for a skipped step."""

    def on_after_update(self, training: TrainingContext) -> None:
        """The weights are updated. Not called for a skipped step."""

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """`report.step` is done and recorded; `training.step` steps are done in all."""

    def on_evaluate(self, training: TrainingContext, score: Score) -> None:
        """The model was evaluated on held-out text."""

    def on_checkpoint_taken(self, training: TrainingContext, step: int) -> None:
        """The state after `step` steps is copied, and is being written."""

    def on_checkpoint_saved(self, training: TrainingContext, step: int) -> None:
        """The checkpoint of `step` is committed."""

    def on_failure(self, training: TrainingContext, error: BaseException) -> None:
        """Training leaves the loop with an error, here or on another rank. No collectives: peers may be gone."""

    def on_end(self, training: TrainingContext, state: str) -> None:
        """After the last checkpoint: the run is "done" or "stopped"."""


class CallbackList:
    """Callbacks in the order they are called; an error of one of the user's own names it, the moment, rank and step."""

    def __init__(self, callbacks: Iterable[Callback], *, own: Sequence[Callback] = (), rank: int = 0) -> None:
        everyone = list(callbacks)
        self._own, self._rank = _callbacks_by_name(own), rank
        self._methods = {
            moment: [
                (one, getattr(one, moment))
                for one in everyone
                if getattr(type(one), moment) is not getattr(Callback, moment) or moment in vars(one)
            ]
            for moment in MOMENTS
        }

    def wants(self, moment: str) -> bool:
        """Whether anybody overrides a moment."""
        return bool(self._methods[moment])

    def attach_to(self, engine: Engine, training: TrainingContext) -> None:
        """Let the engine call the moments inside its step; one that nobody overrides it does not even prepare."""
        if self.wants("on_gradients_ready"):
            engine.on_gradients_ready = lambda grads: self.call("on_gradients_ready", training, grads)
        if self.wants("on_before_update"):
            engine.on_before_update = lambda grads: self.call("on_before_update", training, grads)
        if self.wants("on_after_update"):
            engine.on_after_update = lambda: self.call("on_after_update", training)

    def call(self, moment: str, training: TrainingContext, *arguments: Any) -> None:
        """Call a moment of every callback that overrides it, in order."""
        for callback, method in self._methods[moment]:
            try:
                method(training, *arguments)
            except Exception as error:
                name = next((name for name, one in self._own.items() if one is callback), "")
                if not name or _passes_through(error):
                    raise
                raise self._callback_failed(name, moment, f"step {training.step:,}", error) from error

    def call_after_failure(self, training: TrainingContext, error: BaseException) -> list[str]:
        """`on_failure` of every callback; what goes wrong in one is told, and hides neither the error nor the rest."""
        problems = []
        for callback, method in self._methods["on_failure"]:
            try:
                method(training, error)
            except Exception as second:
                problems.append(
                    f"callback {type(callback).__name__} failed in on_failure: {type(second).__name__}: {second}"
                )
        return problems

    def state_dict(self) -> dict[str, Any]:
        """The state of every callback of the user's own, by name."""
        states = {}
        for name, callback in self._own.items():
            try:
                states[name] = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            except Exception as error:
                raise self._callback_failed(name, "state_dict", "a checkpoint", error) from error
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Hand every callback of the user's own its state, where the checkpoint has one."""
        for name, callback in self._own.items():
            if states.get(name):
                try:
                    callback.load_state_dict(states[name])
                except Exception as error:
                    raise self._callback_failed(name, "load_state_dict", "a checkpoint", error) from error

    def _callback_failed(self, name: str, moment: str, when: str, error: Exception) -> SystemFailure:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        what = f"callback {name} failed in {moment}: {type(error).__name__}: {error}"
        return SystemFailure(Problem(where=f"rank {self._rank}, {when}", what=what[:500], fix=f"see {place}"))


def _callbacks_by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """By class name, the second of a class as "Name 2": what checkpoints and messages call them."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name, count = type(callback).__name__, 1
        while name in named:
            count += 1
            name = f"{type(callback).__name__} {count}"
        named[name] = callback
    return named


def _passes_through(error: Exception) -> bool:
    """Whether an error is not the callback's own: our own, the end of the membership, or a lost peer."""
    return isinstance(error, PhalanxError | Interrupted) or failure_of(0, error, step=-1).is_consequence
