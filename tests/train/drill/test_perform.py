"""The parts of a drill that need no run: what the plan would say, how a run should end, what a replay must repeat."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.elastic.local_launch import LaunchOutcome
from phalanx.record.run import Run
from phalanx.train.drill import perform
from phalanx.train.drill.faults import parse_faults
from phalanx.train.drill.perform import judge_injected
from phalanx.train.drill.step_history import build_history

Story = Any


def plan(*, memory_every: int) -> Any:
    return SimpleNamespace(
        job=SimpleNamespace(fault=SimpleNamespace(detect_s=1.0, restart_s=2.0)),
        prediction=SimpleNamespace(step_s=0.4),
        reliability=SimpleNamespace(interval_s=50.0, blocking_s=0.5, memory_every=memory_every),
    )


def test_what_the_plan_says_at_the_drills_rate_of_failures() -> None:
    # Each failure costs 1 s + 2 s + half of what is redone: a step with copies in memory, an interval without.
    assert perform._planned_effective(plan(memory_every=1), trained_s=28.8, failures=1) == pytest.approx(
        (1 - 3.2 / 32) / 1.01
    )
    assert perform._planned_effective(plan(memory_every=0), trained_s=504.0, failures=2) == pytest.approx(0.9 / 1.01)
    assert perform._planned_effective(plan(memory_every=1), trained_s=5.0, failures=0) == pytest.approx(1 / 1.01)
    assert perform._planned_effective(plan(memory_every=1), trained_s=3.2, failures=9) == pytest.approx(0.1 / 1.01)


@pytest.mark.parametrize(
    ("texts", "minutes", "state", "ok"),
    [
        (["kill"], 0.0, "done", True),
        (["kill"], 0.0, "stopped", False),
        (["kill"], 2.0, "stopped", True),
        (["kill", "sigterm"], 0.0, "stopped", True),
        (["sigterm"], 0.0, "done", False),
        (["crash-loop"], 0.0, "failed", True),
        (["crash-loop"], 0.0, "done", False),
        (["kill"], 2.0, "stuck", False),
    ],
)
def test_how_a_run_should_end(story: Story, texts: list[str], minutes: float, state: str, ok: bool) -> None:
    story.epoch(2, step=0, source="start")
    story.end(state)
    history = build_history(story.supervisor, story.ranks)
    assert perform._ending_verdict((state, ""), history, parse_faults(texts), minutes=minutes).ok is ok


def test_a_replay_repeats_poisoned_steps_and_leaves_spikes_to_the_ranks() -> None:
    """A step skipped for NaN has no norm; one that all ranks found too large has, and they will find it again."""
    assert perform._not_finite([{"grad_norm": 1.0}, {"grad_norm": None}])
    assert not perform._not_finite([{"grad_norm": 900.0}])


def test_what_was_asked_for_must_have_happened_as_often_as_it_was_asked_for() -> None:
    faults = parse_faults(["kill:rank=1,step=3", "nan:rank=0,step=5,times=3", "crash-loop"])
    assert judge_injected(faults, {0: 1, 1: 3, 2: 4}).ok
    assert judge_injected(faults, {0: 1, 1: 1, 2: 4}).evidence == "nan:rank=0,step=5,times=3 fired 1 of 3 times"
    assert judge_injected(faults, {1: 3, 2: 4}).evidence == "kill:step=3"


def test_a_run_without_a_membership_took_no_time() -> None:
    """One that fails its preflight has an end and no beginning."""
    end = {"event": "end", "t": 1_795_000_000.0, "state": "failed"}
    assert perform._wall_s(build_history([end], [])) == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_drill_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """SIGTERM during a replay is not Ctrl-C."""
    heard: list[int] = []
    before = signal.signal(number, lambda got, frame: heard.append(got))
    ended = LaunchOutcome(state="stopped", exit_code=130, message="", signals=(number,))
    monkeypatch.setattr(perform, "launch", lambda run, **rest: ended)
    monkeypatch.setattr(perform, "_drill_hosts", lambda scene, net: ())
    job = SimpleNamespace(comm=SimpleNamespace(init_timeout_s=1.0), fault=SimpleNamespace(dead_after_s=1.0))
    scene = SimpleNamespace(
        plan=SimpleNamespace(job=job), hosts=1, minutes=0.0, tell=print, environ={}, allow_code=False
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            perform._run_drill(scene, Run(path=tmp_path), ())
        assert heard == [number]
        assert perform._run_drill(scene, Run(path=tmp_path), parse_faults(["sigterm:step=1"])) == ("stopped", "")
    finally:
        signal.signal(number, before)
