"""Parts of the loop that no whole run would show: by themselves, with stand-ins around them."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from phalanx.elastic.rank_link import Interrupted
from phalanx.errors import Problem, SystemFailure
from phalanx.job.schema import Optim
from phalanx.train import loop
from phalanx.train.callbacks import CallbackList
from phalanx.train.checkpointing import Checkpointing
from phalanx.train.drill_hooks import DrillFaults
from phalanx.train.loop import run_training, take_step
from phalanx.train.rank_control import RankControl
from phalanx.train.step_result import NO_REQUESTS
from phalanx.train.telemetry import step_events
from phalanx.train.telemetry.noise import LocalNorms
from phalanx.train.telemetry.step_events import StepTelemetry
from phalanx.train.training_context import TrainingContext


@pytest.fixture
def bare():
    """A loop that was never built; it keeps what it writes."""
    training = TrainingContext.__new__(TrainingContext)
    training.written, training.rank, training.world_size, training.step = [], 0, 1, 0
    training.events = SimpleNamespace(write=lambda kind, **fields: training.written.append((kind, fields)))
    training.control = RankControl(stop=lambda: False, progress=lambda step, phase: None)
    training.engine = SimpleNamespace(listener=None)
    training.callbacks = CallbackList([])
    return training


def test_what_looking_into_a_step_costs_is_no_part_of_the_step(bare, monkeypatch):
    now_s = [0.0]

    def passes(seconds, value=None):
        now_s[0] += seconds
        return value

    class Timeline:
        opening_s = 0.0

        @contextmanager
        def step(self, number):
            passes(32.0)  # the device ends the last update: this step waits for it in any case
            passes(16.0)  # the profiler starts
            self.opening_s = 16.0
            yield []
            passes(8.0)

    monkeypatch.setattr(step_events, "time", SimpleNamespace(perf_counter=lambda: now_s[0], thread_time=lambda: 0.25))
    result = SimpleNamespace(requests=NO_REQUESTS, compute_s=0.5, cpu_s=0.5)
    hooks = SimpleNamespace(step_begins=lambda step: passes(1.0))  # a drill's delay is in the step
    bare.callbacks = CallbackList([DrillFaults(hooks)])
    bare.batches = SimpleNamespace(get=lambda step: passes(2.0, (np.zeros((1, 2), dtype=np.int64),) * 2))
    bare.batch_plan = SimpleNamespace(tokens_before=lambda step: 0)
    bare.plan = SimpleNamespace(duration=SimpleNamespace(tokens=100))
    bare.job = SimpleNamespace(optim=Optim())
    bare.engine.step = lambda *args, **kwargs: passes(4.0, result)
    bare.telemetry = StepTelemetry.__new__(StepTelemetry)
    bare.telemetry.timeline = Timeline()
    bare.checkpoints = SimpleNamespace(copied_step=-1, confirm_copies=lambda step, requests: None)
    bare.control = RankControl(stop=lambda: False, progress=lambda step, phase: None, over=lambda: now_s[0] > 1000.0)
    report = take_step(bare)
    assert (report.duration_s, report.before_s, report.data_s, report.own_s) == (39.0, 35.0, 2.0, 1.5)
    now_s[0] = 1000.0
    with pytest.raises(Interrupted):  # the membership ended in the middle of it: its numbers are worth nothing
        take_step(bare)


def test_a_run_that_is_taken_up_again_measures_the_noise_of_the_same_steps(bare, monkeypatch):
    norms = LocalNorms(frozenset())
    bare.engine.listener = SimpleNamespace(norms=norms)
    bare.batch_plan = SimpleNamespace(steps=6)
    bare.callbacks = CallbackList([StepTelemetry.__new__(StepTelemetry)])
    monkeypatch.setattr(loop, "_finish_run", lambda training, state: state)
    assert run_training(bare, 6) == "done"
    assert norms.next == 6


def test_a_save_that_failed_is_told_without_keys(bare, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    checkpoints = Checkpointing.__new__(Checkpointing)
    checkpoints._training = bare
    problem = Problem(where="s3://bucket", what="403 for wJalrXUtnFEMI at https://me:pw@host/x", fix="look")
    checkpoints.tell_unsaved(3, SystemFailure(problem))
    ((kind, fields),) = bare.written
    assert kind == "checkpoint"
    assert "[AWS_SECRET_ACCESS_KEY]" in fields["error"]
    assert "wJalr" not in fields["error"]
    assert "me:pw" not in fields["error"]
