"""Callbacks: code that runs at named moments of a training run, in order, with state that checkpoints keep.

A callback subclasses `Callback` and overrides the moments it wants; a moment without overrides costs nothing. Every
rank has its own instance and calls the same moments in the same order, so a callback may use collectives if all ranks
reach them. The trainer's own features (comparison of replicas, telemetry, evaluation, checkpoints) are callbacks too:
`TrainingContext` lists them. This module does not import torch, so that a job can be prepared where torch is not
installed.
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
    """Base class of callbacks: override the moments you need.

    `training` is the `TrainingContext`: step, lr, engine, job, plan, events, rank.

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
        """Return the state that a checkpoint keeps of this callback, as JSON values. Each rank keeps its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; if the number of ranks has changed, what rank 0 returned."""

    def on_start(self, training: TrainingContext) -> None:
        """Called before the first step of a membership; again after every recovery."""

    def on_resume(self, training: TrainingContext) -> None:
        """Called after `on_start`, if the state came from a checkpoint on disk or in memory."""

    def on_step_begin(self, training: TrainingContext) -> None:
        """Called before the batch of step `training.step` is fetched; counted in the step's time."""

    def on_gradients_ready(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """Called with this rank's shards of the summed gradients, before their norm; may change them in place."""

    def on_before_update(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """Called with the averaged and clipped gradients, as the optimizer gets them. Not for a skipped step."""

    def on_after_update(self, training: TrainingContext) -> None:
        """Called after the weights are updated. Not for a skipped step."""

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Called when `report.step` is done and recorded; `training.step` is the number of steps done."""

    def on_evaluate(self, training: TrainingContext, score: Score) -> None:
        """Called after the model was evaluated on held-out text."""

    def on_checkpoint_taken(self, training: TrainingContext, step: int) -> None:
        """Called when the state after `step` steps is copied; it is written from now on."""

    def on_checkpoint_saved(self, training: TrainingContext, step: int) -> None:
        """Called when the checkpoint of `step` is committed."""

    def on_failure(self, training: TrainingContext, error: BaseException) -> None:
        """Called when training ends with an error, here or on another rank. No collectives: peers may be gone."""

    def on_end(self, training: TrainingContext, state: str) -> None:
        """Called after the last checkpoint; `state` is "done" or "stopped"."""


class CallbackList:
    """The callbacks of a run, in the order in which they are called.

    An error of one of the user's own callbacks is raised as SystemFailure with its name, the moment, rank and step.
    """

    def __init__(self, callbacks: Iterable[Callback], *, own: Sequence[Callback] = (), rank: int = 0) -> None:
        ordered = list(callbacks)
        self._own, self._rank = _callbacks_by_name(own), rank
        self._methods = {
            moment: [
                (callback, getattr(callback, moment))
                for callback in ordered
                if getattr(type(callback), moment) is not getattr(Callback, moment) or moment in vars(callback)
            ]
            for moment in MOMENTS
        }

    def wants(self, moment: str) -> bool:
        """Return True if some callback overrides the moment."""
        return bool(self._methods[moment])

    def attach_to(self, engine: Engine, training: TrainingContext) -> None:
        """Set the engine's hooks for moments inside its step; a moment without overrides keeps the empty hook."""
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
                name = next((name for name, own_callback in self._own.items() if own_callback is callback), "")
                if not name or _passes_through(error):
                    raise
                raise self._callback_failed(name, moment, f"step {training.step:,}", error) from error

    def call_after_failure(self, training: TrainingContext, error: BaseException) -> list[str]:
        """Call `on_failure` of every callback; return a message for each that raises itself."""
        problems = []
        for callback, method in self._methods["on_failure"]:
            try:
                method(training, error)
            except Exception as failure:
                problems.append(
                    f"callback {type(callback).__name__} failed in on_failure: {type(failure).__name__}: {failure}"
                )
        return problems

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each of the user's own callbacks, by name."""
        states = {}
        for name, callback in self._own.items():
            try:
                states[name] = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            except Exception as error:
                raise self._callback_failed(name, "state_dict", "a checkpoint", error) from error
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the user's own callbacks for which the checkpoint has a state."""
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
    """Return callbacks by class name, the second of a class as "Name 2"; checkpoints and messages use these names."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name, count = type(callback).__name__, 1
        while name in named:
            count += 1
            name = f"{type(callback).__name__} {count}"
        named[name] = callback
    return named


def _passes_through(error: Exception) -> bool:
    """Return True for errors that are not the callback's: PhalanxError, the end of the membership, a lost peer."""
    return isinstance(error, PhalanxError | Interrupted) or failure_of(0, error, step=-1).is_consequence
