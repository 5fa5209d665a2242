"""The step as events: every stage runs its schedule, each task as soon as its inputs have arrived."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.errors import mistake
from phalanx.plan.layout import Layout
from phalanx.sim.step.step_work import Inner, StepWork

GRADIENT, SHARD, SEND = "gradient_s", "shard_s", "pipeline_send_s"
# Passes of a step, each about five spans: 500,000 took 9 s of CPU and 0.7 GB (2026-11-15), and --break runs ten
# steps.
MOST_PASSES = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The timeline of a step: spans of activity, and every stage's time by part (`device_s` adds up to the step)."""

    step_s: float
    spans: tuple[Span, ...]
    device_s: tuple[dict[str, float], ...]
    wire_s: tuple[dict[str, float], ...]
    handovers: tuple[Handover, ...] = ()  # between stages

    @property
    def busiest(self) -> int:
        """The stage with the least idle time: the one that the plan's breakdown describes."""
        idle = [parts.get(BUBBLE, 0.0) for parts in self.device_s]
        return idle.index(min(idle))


def check_spans(layout: Layout, layers: int) -> None:
    """Raise UserError for a step whose simulation would take minutes."""
    tasks = 2 * (layers if layout.zero == 3 and layout.pipeline == 1 else layout.pipeline * layout.virtual_pipeline)
    if tasks * layout.accumulation <= MOST_PASSES:
        return
    micros = MOST_PASSES // tasks
    sequences = micros * layout.micro_batch * layout.data
    raise mistake(
        "phalanx sim",
        f"{layout.accumulation:,} micro-batches make {tasks * layout.accumulation:,} passes, more than {MOST_PASSES:,}",
        why="they take minutes and gigabytes, and one micro-batch is like another",
        fix=f"simulate a smaller batch: --set batch.global_sequences={sequences}",
    )


def simulate_timeline(work: StepWork) -> Timeline:
    """Simulate one step."""
    stages = [Lanes(number) for number in range(work.stages)]
    for lanes in stages:
        _gather_parameters(work, lanes)
    if work.sharing[0].layer_gather_s > 0:
        _Sharded(work, stages[0]).run()
        return _finish_step(work, stages, ())
    pipeline = _Pipeline(work, stages)
    pipeline.run()
    return _finish_step(work, stages, tuple(pipeline.handovers))


def _gather_parameters(work: StepWork, lanes: Lanes) -> None:
    """Receive updated parameters (ZeRO-1 and 2) during the first forward, as far as they may overlap."""
    shared = work.sharing[lanes.stage]
    forward_s = work.layers[lanes.stage] * work.forward.compute_s
    lanes.queue(BACKGROUND, 0.0, shared.gather_s, "gather parameters", GRADIENT)
    hidden = min(shared.gather_s, forward_s) * shared.gather_overlap
    lanes.busy(shared.gather_s - hidden, "wait for parameters", GRADIENT)


def _finish_step(work: StepWork, stages: list[Lanes], handovers: tuple[Handover, ...]) -> Timeline:
    """Finish the step: gradients that could not be hidden, the norm that all stages wait for, and the update."""
    for lanes in stages:
        shared = work.sharing[lanes.stage]
        lanes.wait(lanes.free_s[BACKGROUND], SHARD if shared.layer_gather_s > 0 else GRADIENT)
        late = shared.reduce_s * (1.0 - shared.overlap)
        lanes.wait(lanes.queue(BACKGROUND, lanes.now_s, late, "reduce the rest", GRADIENT), GRADIENT)
        lanes.busy(shared.after_s, "factor gradients", GRADIENT)
    together = max(lanes.now_s for lanes in stages)
    for lanes in stages:
        lanes.wait(together, BUBBLE)
        lanes.busy(work.optimizer_s, "optimizer", "optimizer_s")
        lanes.busy(work.host_step_s, "host", "overhead_s")
    return Timeline(
        step_s=max(lanes.now_s for lanes in stages),
        spans=tuple(sorted((span for lanes in stages for span in lanes.spans), key=lambda span: span.start_s)),
        device_s=tuple(dict(lanes.device_s) for lanes in stages),
        wire_s=tuple(dict(lanes.wire_s) for lanes in stages),
        handovers=handovers,
    )


class _Pipeline:
    """Stages that send activations forward and gradients back; a pipeline of one stage is the plain case."""

    def __init__(self, work: StepWork, stages: list[Lanes]) -> None:
        self.work, self.stages = work, stages
        shape = {"stages": work.stages, "chunks": work.chunks, "micros": work.micros}
        self.left = [deque(task_order(work.schedule, lanes.stage, **shape)) for lanes in stages]
        # (kind, micro-batch, position in the model) -> arrival in seconds.
        self.arrived: dict[tuple[str, int, int], float] = {}
        # By the same key: the stage that sent it, and a time in the middle of the send.
        self.sent: dict[tuple[str, int, int], tuple[int, float]] = {}
        self.handovers: list[Handover] = []
        self.weights: list[deque[Task]] = [deque() for _ in stages]  # postponed weight gradients (zero-bubble)

    def run(self) -> None:
        """Run rounds in which each stage advances as far as the arrival of its next input is known."""
        waiting = True
        while waiting:
            moved = [self._advance_stage(lanes) for lanes in self.stages]
            waiting = any(self.left)
            assert any(moved) or not waiting, "the schedule waits for itself"
        for lanes in self.stages:
            while self.weights[lanes.stage]:
                self._weight_gradient(lanes)

    def _advance_stage(self, lanes: Lanes) -> bool:
        """Run the tasks of a stage whose inputs have a known arrival; True if any ran.

        While the next input is not there, postponed weight gradients run instead.
        """
        tasks, moved = self.left[lanes.stage], False
        while tasks:
            ready = self._input_ready(lanes.stage, tasks[0])
            if ready is None:
                break
            pending = self.weights[lanes.stage]
            # ZB-H1 holds no more than the first stage of 1F1B: stage s has s fewer micro-batches in progress, and as
            # many weight gradients may wait there (Qi et al., arXiv:2401.10241, section 2.1).
            if pending and (ready > lanes.now_s or len(pending) > lanes.stage):
                self._weight_gradient(lanes)
            else:
                lanes.wait(ready, BUBBLE)
                self._do_task(lanes, tasks.popleft())
            moved = True
        return moved

    def _chunk_place(self, stage: int, chunk: int) -> int:
        return chunk * self.work.stages + stage

    def _last_place(self) -> int:
        return self.work.chunks * self.work.stages - 1

    def _input_ready(self, stage: int, task: Task) -> float | None:
        """Return when the input of a task arrives; None while it is unknown."""
        position = self._chunk_place(stage, task.chunk)
        if (task.kind == "F" and position == 0) or (task.kind == "B" and position == self._last_place()):
            return 0.0
        return self.arrived.get((task.kind, task.micro, position))

    def _do_task(self, lanes: Lanes, task: Task) -> None:
        """Run one pass on the device: its compute, the traffic inside it, its gradients and its output."""
        work, forward = self.work, task.kind == "F"
        layers = work.chunk_layers(lanes.stage, task.chunk)
        layer_pass = work.forward if forward else work.backward
        holds_head = self._chunk_place(lanes.stage, task.chunk) == self._last_place()
        head = (work.head_forward_s if forward else work.head_backward_s) * holds_head
        if forward:
            lanes.busy(work.host_micro_s / work.chunks, "host", "overhead_s")
        name = f"{task.kind}{task.micro}" + (f".{task.chunk}" if work.chunks > 1 else "")
        start = lanes.now_s
        later = 0.0 if forward else work.weight_s
        seconds = layers * (layer_pass.compute_s - later) + head
        if seconds > 0:
            # The pass that begins now uses data that another stage sent.
            sent = self.sent.get((task.kind, task.micro, self._chunk_place(lanes.stage, task.chunk)))
            if sent is not None:
                self.handovers.append(Handover(*sent, lanes.stage, lanes.now_s))
        lanes.run(seconds, layer_pass.inner, layers, name)
        if later > 0:
            self.weights[lanes.stage].append(task)
        elif not forward:
            self._reduce_gradients(lanes, task, start)
        self._send_output(lanes, task, name)

    def _send_output(self, lanes: Lanes, task: Task, name: str) -> None:
        step = 1 if task.kind == "F" else -1
        position = self._chunk_place(lanes.stage, task.chunk) + step
        if not 0 <= position <= self._last_place():
            return
        arrives = lanes.queue(SENDS, lanes.now_s, self.work.send_s, f"send {name}", SEND)
        self.arrived[task.kind, task.micro, position] = arrives
        if self.work.send_s > 0:
            self.sent[task.kind, task.micro, position] = lanes.stage, arrives - self.work.send_s / 2
        lanes.busy(self.work.send_s * self.work.send_exposed, f"send {name}", SEND)

    def _weight_gradient(self, lanes: Lanes) -> None:
        task = self.weights[lanes.stage].popleft()
        start = lanes.now_s
        layers = self.work.chunk_layers(lanes.stage, task.chunk)
        lanes.busy(layers * self.work.weight_s, f"W{task.micro}", "compute_s")
        self._reduce_gradients(lanes, task, start)

    def _reduce_gradients(self, lanes: Lanes, task: Task, start_s: float) -> None:
        """Send buckets of gradients while backward makes the next: for the last micro-batch, with ZeRO-2 for each."""
        shared = self.work.sharing[lanes.stage]
        last = task.micro == self.work.micros - 1
        seconds = shared.reduce_s * shared.overlap if last else shared.again_s
        buckets = max(1, round(self.work.layers[lanes.stage] / self.work.chunks))
        bucket_s = seconds / self.work.chunks / buckets
        for number in range(buckets if bucket_s > 0 else 0):
            ready = start_s + (lanes.now_s - start_s) * (number + 1) / buckets
            lanes.queue(BACKGROUND, ready, bucket_s, f"reduce {task.micro}", GRADIENT)


class _Sharded:
    """ZeRO-3 without a pipeline: layer by layer, the next layer's parameters are gathered while this one computes."""

    def __init__(self, work: StepWork, lanes: Lanes) -> None:
        self.work, self.lanes = work, lanes
        self.gather_s = work.sharing[0].layer_gather_s
        self.scatter_s = work.sharing[0].layer_scatter_s
        # Copies of a shard are reduced once (HSDP); the part that may be hidden is reduced during the last backward.
        self.reduce_s = work.sharing[0].reduce_s * work.sharing[0].overlap / work.layers[0]

    def run(self) -> None:
        work, lanes = self.work, self.lanes
        for micro in range(work.micros):
            lanes.busy(work.host_micro_s, "host", "overhead_s")
            self._run_direction(f"F{micro}", forward=True)
            lanes.busy(work.head_forward_s + work.head_backward_s, f"head {micro}", "compute_s")
            self._run_direction(f"B{micro}", forward=False, last=micro == work.micros - 1)

    def _run_direction(self, name: str, *, forward: bool, last: bool = False) -> None:
        """Run all layers forward or backward; the parameters of the next layer are gathered meanwhile."""
        lanes, layer_pass = self.lanes, self.work.forward if forward else self.work.backward
        layers = self.work.layers[0]
        arrives_s = self._fetch_layer(name)
        for number in range(layers):
            lanes.wait(arrives_s, SHARD)
            if number + 1 < layers:
                arrives_s = self._fetch_layer(name)
            lanes.run(layer_pass.compute_s, layer_pass.inner, 1.0, name)
            if not forward:
                lanes.queue(BACKGROUND, lanes.now_s, self.scatter_s, f"scatter {name}", SHARD)
            if last:
                lanes.queue(BACKGROUND, lanes.now_s, self.reduce_s, f"reduce {name}", GRADIENT)

    def _fetch_layer(self, name: str) -> float:
        return self.lanes.queue(BACKGROUND, self.lanes.now_s, self.gather_s, f"gather {name}", SHARD)


# The order of work of a pipeline stage: forward and backward passes of micro-batches and model chunks.


@dataclass(frozen=True, slots=True)
class Task:
    """A pass of one micro-batch through one chunk of a stage."""

    kind: Literal["F", "B"]
    micro: int
    chunk: int = 0


def task_order(schedule: str, stage: int, *, stages: int, chunks: int, micros: int) -> list[Task]:
    """Return the tasks of a stage in order. Zero-bubble has the order of 1F1B; weight gradients fill its gaps.

    >>> [f"{task.kind}{task.micro}" for task in task_order("1f1b", 1, stages=3, chunks=1, micros=4)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    """
    forward = _schedule_units("F", stages=stages, chunks=chunks, micros=micros)
    backward = _schedule_units("B", stages=stages, chunks=chunks, micros=micros)
    if schedule == "gpipe":
        return forward + backward
    # Forward passes before the first backward (Narayanan et al., arXiv:2104.04473, section 2.2).
    later_stages = stages - stage - 1
    warm_up = min(len(forward), later_stages if chunks == 1 else 2 * later_stages + (chunks - 1) * stages)
    tasks = forward[:warm_up]
    for forward_task, backward_task in zip(forward[warm_up:], backward, strict=False):
        tasks += [forward_task, backward_task]
    return tasks + backward[len(forward) - warm_up :]


def _schedule_units(kind: Literal["F", "B"], *, stages: int, chunks: int, micros: int) -> list[Task]:
    """Return all forward or all backward passes of a stage in order.

    Micro-batches form groups of the pipeline's depth, and each group runs through one chunk after the other.
    """
    tasks = []
    for first in range(0, micros, stages):
        group = range(first, min(first + stages, micros))
        for chunk in range(chunks) if kind == "F" else reversed(range(chunks)):
            tasks += [Task(kind, micro, chunk) for micro in group]
    return tasks


# One stage of the pipeline during a step: its device, its wires, and the device's time by part.


DEVICE = "device"
SENDS = "sends"
BACKGROUND = "background"  # traffic of weights and gradients that overlaps compute
BUBBLE = "bubble_s"
# Names of waits; a wait for traffic is called "wait for" its part.
WAITS = {BUBBLE: "bubble"}


class Span(NamedTuple):
    """An interval on the device of a stage, or on one of its wires. A step has up to a few 100,000."""

    stage: int
    track: str  # DEVICE, "link", "nic", SENDS or BACKGROUND
    name: str
    part: str  # a part of the plan's step, or "compute_s"
    start_s: float
    end_s: float


class Handover(NamedTuple):
    """An activation or its gradient in transit: the send that carries it, and the pass that uses it."""

    source: int  # stage
    sent_s: float  # a time within the send
    target: int
    used_s: float  # when the pass begins


class Lanes:
    """A stage's clock. The device does one thing at a time; sends and background traffic have a queue each."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.now_s = 0.0  # when the device is free
        self.free_s = {SENDS: 0.0, BACKGROUND: 0.0}
        self.spans: list[Span] = []
        # Seconds of the step by part, of work and of waiting.
        self.device_s: dict[str, float] = defaultdict(float)
        self.wire_s: dict[str, float] = defaultdict(float)

    def wait(self, until_s: float, part: str) -> None:
        """Idle the device until a time, on account of `part`."""
        if until_s > self.now_s:
            self._add_span(DEVICE, WAITS.get(part) or f"wait for {part.removesuffix('_s')}", part, self.now_s, until_s)
            self.device_s[part] += until_s - self.now_s
            self.now_s = until_s

    def busy(self, seconds: float, name: str, part: str) -> None:
        """Occupy the device with work, or with a visible wait for its own traffic."""
        if seconds > 0:
            self._add_span(DEVICE, name, part, self.now_s, self.now_s + seconds)
            self.device_s[part] += seconds
            self.now_s += seconds

    def run(self, compute_s: float, inner: tuple[Inner, ...], layers: float, name: str) -> None:
        """Compute with the traffic inside it: hidden traffic overlaps the end of the compute, the remainder follows."""
        start = self.now_s
        self.busy(compute_s, name, "compute_s")
        most_hidden = sum((traffic.wire_s - traffic.exposed_s) * layers for traffic in inner)
        # No more can be hidden than the compute is long.
        fits = min(1.0, compute_s / most_hidden) if most_hidden > 0 else 0.0
        at = max(start, self.now_s - fits * most_hidden)
        for traffic in inner:
            wire = traffic.wire_s * layers
            shown = wire - fits * (traffic.wire_s - traffic.exposed_s) * layers
            self._add_wire(traffic.tier, name, traffic.part, at, wire)
            at += wire
            self.busy(shown, f"{name} {traffic.part.removesuffix('_s')}", traffic.part)

    def queue(self, lane: str, ready_s: float, seconds: float, name: str, part: str) -> float:
        """Queue traffic until its lane is free; returns when it has arrived."""
        start = max(ready_s, self.free_s[lane])
        if seconds > 0:
            self._add_wire(lane, name, part, start, seconds)
        self.free_s[lane] = start + seconds
        return start + seconds

    def _add_wire(self, track: str, name: str, part: str, start_s: float, seconds: float) -> None:
        if seconds > 0:
            self.wire_s[part] += seconds
            self._add_span(track, name, part, start_s, start_s + seconds)

    def _add_span(self, track: str, name: str, part: str, start_s: float, end_s: float) -> None:
        self.spans.append(Span(self.stage, track, name, part, start_s, end_s))
