"""The list of callbacks: which are called, in what order, and whose error it was."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from phalanx.elastic.rank_link import Interrupted
from phalanx.errors import SystemFailure
from phalanx.train.callbacks import Callback, CallbackList

TRAINING = SimpleNamespace(step=7)


class Counts(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, training):
        self.calls.append("start")

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.calls = ["loaded"] * state["calls"]


class Broken(Callback):
    def on_step_end(self, training, report):
        raise ValueError("no more film")

    def state_dict(self):
        return {"tensor": object()}


def test_moments_nobody_overrides_cost_nothing_and_order_is_kept():
    first, second, seen = Counts(), Counts(), []
    first.on_start = lambda training: seen.append("first")
    second.on_start = lambda training: seen.append("second")
    everyone = CallbackList([first, second, Callback()], own=[first, second])
    assert [everyone.wants(moment) for moment in ("on_start", "on_step_end", "on_gradients_ready")] == [
        True,
        False,
        False,
    ]
    everyone.call("on_start", TRAINING)
    assert seen == ["first", "second"]


def test_state_by_name_and_back():
    one, two = Counts(), Counts()
    both = CallbackList([one, two], own=[one, two])
    both.call("on_start", TRAINING)
    assert both.state_dict() == {"Counts": {"calls": 1}, "Counts 2": {"calls": 1}}
    both.load_state_dict({"Counts 2": {"calls": 3}, "Gone": {}})
    assert (one.calls, two.calls) == (["start"], ["loaded"] * 3)


def test_an_error_names_callback_moment_rank_and_step():
    broken = Broken()
    everyone = CallbackList([broken], own=[broken], rank=3)
    with pytest.raises(SystemFailure) as caught:
        everyone.call("on_step_end", TRAINING, None)
    assert (
        caught.value.problems[0]
        .render()
        .startswith("rank 3, step 7: callback Broken failed in on_step_end: ValueError: no more film\n")
    )
    with pytest.raises(SystemFailure, match="callback Broken failed in state_dict: TypeError"):
        everyone.state_dict()


def test_lost_peers_and_the_end_of_a_membership_are_not_the_callback_s_fault():
    for error in (RuntimeError("gloo: Connection closed by peer"), Interrupted()):
        broken = Broken()
        broken.on_step_end = lambda training, report, error=error: (_ for _ in ()).throw(error)
        with pytest.raises(type(error)):
            CallbackList([broken], own=[broken]).call("on_step_end", TRAINING, None)
    with pytest.raises(ValueError, match="film"):  # our own callbacks fail as what they are
        CallbackList([Broken()]).call("on_step_end", TRAINING, None)


def test_an_error_in_on_failure_hides_nothing():
    broken, counts = Broken(), Counts()
    broken.on_failure = lambda training, error: 1 / 0
    counts.on_failure = lambda training, error: counts.calls.append(str(error))
    told = CallbackList([broken, counts]).call_after_failure(TRAINING, ValueError("first"))
    assert told == ["callback Broken failed in on_failure: ZeroDivisionError: division by zero"]
    assert counts.calls == ["first"]


def test_callbacks_and_plug_ins_import_no_torch():
    code = "import sys, phalanx.train.callbacks, phalanx.train.plugins; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
