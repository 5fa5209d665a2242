"""What a user would write: a callback, a loss, a metric, an optimizer and data, for the tests of plug-ins."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.nn.functional as F

from phalanx.train.callbacks import MOMENTS, Callback


class Diary(Callback):
    """Writes every moment down, counts steps, and kills its process once where it is told to."""

    def __init__(self, path: str, kill_rank: int = -1, kill_step: int = -1) -> None:
        self.path, self.kill_rank, self.kill_step, self.steps, self.losses = path, kill_rank, kill_step, 0, []

    def state_dict(self):
        return {"steps": self.steps, "losses": self.losses}

    def load_state_dict(self, state):
        self.steps, self.losses = state["steps"], state["losses"]

    def _write(self, moment, training, **more):
        line = {"moment": moment, "rank": training.rank, "step": training.step, "steps": self.steps, **more}
        with Path(f"{self.path}-{training.rank}").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def on_gradients_ready(self, training, gradients):
        assert all(isinstance(one, torch.Tensor) for one in gradients)
        self._write("on_gradients_ready", training)
        mark = Path(f"{self.path}-killed")
        if (training.rank, training.step) == (self.kill_rank, self.kill_step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, training, report):
        self.steps += 1
        self.losses.append(report.result.loss)
        self._write("on_step_end", training, loss=report.result.loss)

    def on_evaluate(self, training, score):
        self._write("on_evaluate", training, metrics=dict(score.metrics))


def _moment(name):
    def call(self, training, *rest):
        self._write(name, training)

    return call


for _name in MOMENTS:
    if _name not in vars(Diary):
        setattr(Diary, _name, _moment(_name))


class Breaks(Callback):
    """Fails in its third step."""

    def on_step_end(self, training, report):
        if report.step == 2:
            raise ValueError("this lamp is broken")


class BlocksFolder(Callback):
    """After a step, a file stands where checkpoints should go; all ranks meet afterwards, to evaluate."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, training, report):
        if training.step == self.step and torch.distributed.get_rank() == 0:
            shutil.rmtree(training.folder.checkpoints)
            Path(training.folder.checkpoints).write_text("no folder")


def smooth_loss(logits, targets, smoothing=0.1):
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1),
        targets.flatten(),
        reduction="sum",
        ignore_index=-100,
        label_smoothing=smoothing,
    )


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def accuracy(logits, targets):
    return ((logits.argmax(-1) == targets) & (targets != -100)).sum()


class SignDescent(torch.optim.Optimizer):
    """Lion without decay: a state as large as the parameter, updated element by element."""

    elementwise = True

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["mean"] = one.clone()  # not zero: what a fresh run starts from
                state["mean"].lerp_(one.grad, 1 - group["momentum"])
                one.add_(state["mean"].sign(), alpha=-group["lr"])


class NormDescent(SignDescent):
    """Looks at a whole tensor at once."""

    elementwise = False


def counting(sequence, vocab):
    """A dataset with indices, as Hugging Face has them: no position of its own."""
    return [{"input_ids": [(start + place) % vocab for place in range(sequence + 1)]} for start in range(64)]


class Stream:
    """An iterable that knows its place."""

    def __init__(self, sequence, vocab, log=""):
        self.sequence, self.vocab, self.log, self.place = sequence, vocab, log, 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]
        if self.log:
            with Path(self.log).open("a") as out:
                out.write(f"resumed {self.place}\n")

    def __iter__(self):
        while True:
            self.place += 1
            yield [(self.place * 7 + column) % self.vocab for column in range(self.sequence + 1)]
