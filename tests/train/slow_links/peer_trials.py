"""Peers as threads of one process: each trains a small job with a group that is no network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from local_group import LocalGroup, LocalHub

import phalanx
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter, read_events
from phalanx.record.run import Run, create_run
from phalanx.train.callbacks import Callback
from phalanx.train.rank_control import RankControl
from phalanx.train.rank_training import train_rank
from phalanx.train.slow_links.peer_training import PeerTraining

JOB = """
name = "peers"
[model]
layers = 2
hidden = 16
heads = 2
head_dim = 8
ffn = 32
vocab = 300
[data]
path = "data"
sequence = 16
tokens = {tokens}
[batch]
global_sequences = 6
micro = 1
[optim]
name = "{optimizer}"
lr = 3e-3
[precision]
compute = "fp32"
[parallel]
mode = "fixed"
[train]
samples = 0
evaluate_sequences = 16
[telemetry]
timeline_every = 0
[checkpoint]
async = false
[cluster]
spec = "local-cpu:1"
[sync]
{sync}
"""


@dataclass
class Outcome:
    """How a peer ended."""

    run: Run
    state: str = ""
    step: int = 0
    first: dict[str, np.ndarray] = field(default_factory=dict)  # weights before the first step
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # and at the end
    error: BaseException | None = None
    peers: PeerTraining | None = None

    def events(self, kind: str) -> list[dict]:
        return [one for one in read_events(self.run.events(0))[0] if one["event"] == kind]

    @property
    def loss(self) -> float:
        return self.events("evaluate")[-1]["loss"]


class KeepWeights(Callback):
    """Keeps the weights at the end; stops after `stop_after` steps."""

    def __init__(self, outcome: Outcome, *, stop_after: int = 0, at_step: Callable[[int], None] | None = None) -> None:
        self.outcome, self.stop_after, self.at_step = outcome, stop_after, at_step

    def on_start(self, training) -> None:
        self.outcome.first = _weights(training)

    def on_step_begin(self, training) -> None:
        if self.at_step is not None:
            self.at_step(training.step)
        if self.stop_after and training.step == self.stop_after - 1:
            training.stop()

    def on_end(self, training, state: str) -> None:
        self.outcome.weights = _weights(training)


def _weights(training) -> dict[str, np.ndarray]:
    return {one.name: one.tensor.detach().double().numpy().copy() for one in training.engine.shards}


class PeerTrials:
    """Makes run folders of one job, and trains peers in them."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder = folder
        (folder / "data").symlink_to(dataset)

    def plan(self, sync: str = "", *, steps: int = 6, optimizer: str = "adamw") -> Plan:
        text = JOB.format(tokens=steps * 96, sync=sync, optimizer=optimizer)
        (self.folder / "job.toml").write_text(text)
        made = phalanx.plan(self.folder / "job.toml", calibration=None)
        data = replace(made.job.data, paths=(str((self.folder / "data").resolve()),))
        return replace(made, job=replace(made.job, data=data))

    def start(
        self,
        plan: Plan,
        group: LocalGroup | None,
        *,
        run: Run | None = None,
        addresses=(),
        stop_after: int = 0,
        at_step: Callable[[int], None] | None = None,
        patience_s: float = 30.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Train one peer here; alone, and as ever, without a group."""
        if run is None:
            job = job_to_dict(plan.job)
            run = create_run(self.folder / "runs", "peer", job_toml=to_toml(job), job=job, plan_json=plan.to_json())
        outcome = Outcome(run=run)
        events = EventWriter(run.events(0), rank=0)
        peers = None
        if group is not None:
            peers = PeerTraining(group, plan.job.sync, addresses=addresses, patience_s=patience_s, stop=stop)
            outcome.peers = group.training = peers
        control = RankControl(stop=stop, progress=lambda step, phase: None, peers=peers)
        callbacks = [KeepWeights(outcome, stop_after=stop_after, at_step=at_step)]
        try:
            device = torch.device("cpu")
            outcome.state, outcome.step = train_rank(run, plan, device, events, control, callbacks=callbacks)
        except BaseException as error:
            outcome.error = error
            raise
        finally:
            events.close()
        return outcome

    def train(self, plan: Plan, peers: int, *, runs=None, stop_after: int = 0, hub: LocalHub | None = None, **options):
        """Train so many peers at once; how each ended, in order of their ids."""
        hub = hub or LocalHub()
        return join_all(
            [
                lambda place=place: self.start(
                    plan,
                    LocalGroup(hub, f"peer-{place}"),
                    run=runs[place] if runs else None,
                    stop_after=stop_after,
                    **options,
                )
                for place in range(peers)
            ]
        )


def join_all(calls: list[Callable[[], Outcome]]) -> list[Outcome]:
    """Call each in a thread of its own; raises what was raised first."""
    found: list[Outcome | None] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
