"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.plan import traffic
from phalanx.plan.cases import ZERO_BUBBLE, Cases, Floats
from phalanx.plan.compute import FULL, Compute, compute_seconds
from phalanx.plan.memory import layer_activations
from phalanx.plan.memory_profile import OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS, MemoryProfile, offloads_activations
from phalanx.plan.optimizer import owned_weights, update_seconds
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import rank_weights

# Parameters in host memory are fetched in fp32 for forward and again for backward; gradients return in fp32.
FETCHED_BYTES = 12.0
# Splitting every backward in two loses fused weight gradients and reads activations twice: an assumption, to be
# replaced when the trainer measures it.
ZERO_BUBBLE_SLOWDOWN = 1.04
ZERO = np.zeros(())  # a part that no case of a table has, of no length


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds per step on the busiest stage; the parts add up to `step_s`."""

    step_s: Floats
    matmul_s: Floats
    attention_s: Floats
    elementwise_s: Floats
    head_s: Floats
    recompute_s: Floats
    launch_s: Floats  # device idle because the host cannot issue work fast enough
    tensor_s: Floats
    context_s: Floats
    expert_s: Floats
    pipeline_send_s: Floats
    bubble_s: Floats
    shard_s: Floats  # ZeRO-3 traffic that shows
    gradient_s: Floats  # gradient traffic that shows
    gradient_total_s: Floats  # shown or hidden; not part of the sum
    optimizer_s: Floats
    overhead_s: Floats
    micro_s: Floats  # one micro-batch on the busiest stage; not part of the sum
    # What the parts were combined from, not part of the sum: `launch_s` is what the host shows beside the device,
    # `shard_s` what ZeRO-3 traffic shows beside the work; each by a smooth maximum of this sharpness.
    device_s: Floats
    host_s: Floats
    launch_sharpness: Floats
    busy_s: Floats
    moving_s: Floats
    shard_sharpness: Floats

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> StepTimes:
        """The same table restricted to some rows."""
        whole = {item.name: np.broadcast_to(getattr(self, item.name), self.step_s.shape) for item in fields(StepTimes)}
        return StepTimes(**{name: value[rows] for name, value in whole.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSum:
    """The sum of a StepTimes without its parts."""

    step_s: Floats


def smooth_max(a: Floats, b: Floats, sharpness: Floats | float) -> Floats:
    """A maximum with a rounded corner: two resources that overlap well but not perfectly."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Layers of the fullest stage and of the last one: `even`, or where `uneven` one more in all but the last."""

    even: Floats
    left: Floats
    left_more: Floats
    uneven: NDArray[np.bool_]

    @property
    def fullest(self) -> Floats:
        """Layers of the fullest stage."""
        return np.where(self.uneven, self.even + 1.0, self.even)

    @property
    def last(self) -> Floats:
        """Layers of the last stage."""
        return np.where(self.uneven, self.left_more, self.left)


def split_stage_layers(c: Cases, *, head_layers: Floats, balanced: Floats) -> Split:
    """The split into stages, the head weighing `head_layers` layers.

    A balanced split may give the last stage fewer layers, or every other stage one more, whichever is faster.
    """
    even = np.ceil(c.layers / c.pp - 1e-9)
    left = np.clip(c.layers - even * (c.pp - 1.0), 0.0, even)
    more = even + 1.0
    left_more = np.clip(c.layers - more * (c.pp - 1.0), 0.0, more)
    wins = (balanced > 0) & (np.maximum(more, left_more + head_layers) < np.maximum(even, left + head_layers))
    return Split(even=even, left=left, left_more=left_more, uneven=wins & (c.pp > 1))


def stage_layers(c: Cases, *, head_layers: Floats, balanced: Floats) -> tuple[Floats, Floats]:
    """(layers of the fullest stage, layers of the last one)."""
    split = split_stage_layers(c, head_layers=head_layers, balanced=balanced)
    return split.fullest, split.last


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Seconds that follow from the parameters of a stage: a search works them out once for every way to recompute."""

    fetch: Floats
    moving: Floats
    reduce: Floats
    gather: Floats
    again: Floats
    factoring: Floats
    update: Floats
    adding: Floats  # gradients to those of the micro-batches before


def _step_state(c: Cases, k: Physics, f: Profile, g: traffic.Groups, layers: Floats) -> _State:
    w = rank_weights(c, stage_layers=layers)
    hosted = c.offload == OFFLOAD_PARAMETERS
    fetch = (
        np.where(hosted, owned_weights(c, w) * FETCHED_BYTES, 0.0) / c.host_link_bytes_per_s if hosted.any() else ZERO
    )
    sync = traffic.gradient_traffic(c, g, w, f)
    alone = c.pp <= 1
    return _State(
        fetch=fetch,
        moving=traffic.shard_seconds(c, g, w, f) + fetch if np.any((c.zero == 3) & alone) else ZERO,
        reduce=sync.reduce,
        gather=sync.gather,
        again=sync.again if np.any((c.zero == 2) & alone) else ZERO,
        factoring=traffic.factoring_seconds(c, k, w) if np.any(c.compression == traffic.POWERSGD) else ZERO,
        update=update_seconds(c, k, f, w, g),
        # In a pipeline whole gradients are added up: they are reduced once, after the last micro-batch.
        adding=(w.dense + w.experts)
        / np.where((c.zero >= 2) & alone, c.shard, 1.0)
        * f.accumulate_bytes
        / (c.memory_bytes_per_s * k.memory)
        if np.any(np.asarray(f.accumulate_bytes) > 0)
        else ZERO,
    )


def _state_of(c: Cases, k: Physics, f: Profile, g: traffic.Groups, split: Split) -> _State:
    """The state of the fullest stage, which has one of two sizes."""
    even = _step_state(c, k, f, g, split.even)
    if not split.uneven.any():
        return even
    more = _step_state(c, k, f, g, split.even + 1.0)
    pairs = {field.name: (getattr(more, field.name), getattr(even, field.name)) for field in fields(_State)}
    return _State(**{name: np.where(split.uneven, *pair) if pair[0].ndim else ZERO for name, pair in pairs.items()})


def predict_step(c: Cases, k: Physics, f: Profile) -> StepTimes:
    """The step of every case."""
    found = _predict_step(c, k, f, parts=True)
    assert isinstance(found, StepTimes)
    return found


def predict_step_sum(c: Cases, k: Physics, f: Profile) -> StepSum:
    """The same without its parts, which a search of a million layouts does not look at."""
    return StepSum(step_s=_predict_step(c, k, f, parts=False).step_s)


def predict_least_step(c: Cases, k: Physics, f: Profile) -> StepSum:
    """The step without ZeRO-3's traffic, gradients and the update, which is never longer than the whole."""
    return StepSum(step_s=_predict_step(c, k, f, parts=False, with_state=False).step_s)


def _predict_step(c: Cases, k: Physics, f: Profile, *, parts: bool, with_state: bool = True) -> StepTimes | StepSum:
    g = traffic.axis_groups(c, k, f)
    work = compute_seconds(c, k, f)
    tensor = traffic.tensor_seconds(c, g, f)
    context = traffic.context_seconds(c, k, g, work.attention.forward)
    expert = traffic.expert_seconds(c, g, f)
    again = np.where(c.recompute == FULL, tensor + context + expert, 0.0)
    device = _device_seconds(work) + 2.0 * tensor + 3.0 * context + 2.0 * expert + again
    host = work.operations * f.launch_s * (2.5 + (c.recompute == FULL))
    host = host + np.where((c.pp > 1) & (c.tp > 1), c.layers * c.tp * f.tensor_pipeline_s, 0.0)
    plain = device
    device = device * np.where((c.schedule == ZERO_BUBBLE) & (c.pp > 1), ZERO_BUBBLE_SLOWDOWN, 1.0)
    layers_s = smooth_max(device, host, f.launch_sharpness)

    head_s = work.head.forward + work.head.backward
    per_layer = layers_s / c.layers
    split = split_stage_layers(c, head_layers=head_s / per_layer, balanced=np.asarray(f.balanced_stages))
    fullest, last = split.fullest, split.last
    mid_s, last_s = fullest * per_layer, last * per_layer + head_s
    stage_s = np.maximum(mid_s, last_s)
    holds_head = last_s >= mid_s
    send = np.where(c.pp > 1, 2.0 * c.vpp * traffic.send_seconds(c, g) * f.pipeline_exposed, 0.0)
    host_micro = f.micro_s + np.where(c.pp > 1, f.pipeline_s, 0.0)
    busy = stage_s + send + host_micro
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        # Activations leave in forward and return in backward on the compute's stream (train/parallel/recompute.py).
        kept, checkpoint = layer_activations(c, MemoryProfile())
        moved = 2.0 * fullest * np.where(c.recompute == FULL, checkpoint, kept) / c.host_link_bytes_per_s
        busy = busy + np.where(offloads_activations(c), moved, 0.0)

    mean_stage = (c.layers * per_layer + head_s) / c.pp
    bubble = (c.pp - 1.0) / c.vpp * (mean_stage + send + host_micro)
    # ZB-H1 fills the bubble with weight gradients: (p-1)(F+B-W) remains of (p-1)(F+B+W) (Qi et al., arXiv 2401.10241).
    weight_s = work.matmul.backward / 2.0
    bubble = np.where(c.schedule == ZERO_BUBBLE, bubble * np.maximum(0.0, 1.0 - 2.0 * weight_s / device), bubble)
    count = c.accumulation
    overhead = f.step_s + f.step_log_devices_s * np.log2(np.maximum(c.devices, 1.0))
    if not with_state:
        return StepSum(step_s=count * busy + bubble + overhead)

    state = _state_of(c, k, f, g, split)
    busy = busy + state.adding
    gathers = (c.zero == 3) & (c.pp <= 1)
    micro = np.where(gathers, smooth_max(busy, state.moving, f.shard_sharpness), busy) if gathers.any() else busy

    # Traffic hides behind elapsed time, whether the device or the host sets it.
    share = fullest / c.layers * layers_s / device
    backward_s = (work.matmul.backward + work.attention.backward + work.elementwise.backward) * share
    forward_s = (work.matmul.forward + work.attention.forward + work.elementwise.forward) * share
    # ZeRO-2 owns no full gradient: it scatters after every micro-batch, behind the next one.
    repeats = np.where((c.zero == 2) & (c.pp <= 1), count - 1.0, 0.0)
    overlap = np.where(c.zero == 0, f.data_overlap, f.scatter_overlap)
    if repeats.any():
        shown = repeats * np.maximum(0.0, state.again - overlap * (forward_s + backward_s)) + state.reduce
        shown = shown - np.minimum(state.reduce, backward_s) * overlap
    else:
        shown = state.reduce - np.minimum(state.reduce, backward_s) * overlap
    # Parts that no case has are left out: each sum here is over all axes of a search.
    shown = shown + state.gather - np.minimum(state.gather, forward_s) * f.gather_overlap
    shown = shown + state.factoring if state.factoring.ndim else shown
    # A pipeline keeps gathered weights for the whole step (memory_profile.py), so there they are fetched once.
    optimizer = state.update + np.where(c.pp > 1, state.fetch, 0.0) if state.fetch.ndim else state.update

    step = count * micro + bubble + shown + optimizer + overhead
    if not parts:
        return StepSum(step_s=step)
    gradient = state.reduce + repeats * state.again + state.gather + state.factoring
    layers_here = np.where(holds_head, last, fullest)
    part = count * layers_here / c.layers
    zero = np.zeros_like(step)
    return StepTimes(
        step_s=step,
        matmul_s=part * (work.matmul.forward + work.matmul.backward),
        attention_s=part * (work.attention.forward + work.attention.backward),
        elementwise_s=part * (work.elementwise.forward + work.elementwise.backward),
        head_s=np.where(holds_head, count * head_s, 0.0),
        recompute_s=part * work.recompute,
        launch_s=part * (layers_s - plain),
        tensor_s=part * (2.0 + (c.recompute == FULL)) * tensor,
        context_s=part * (3.0 + (c.recompute == FULL)) * context,
        expert_s=part * (2.0 + (c.recompute == FULL)) * expert,
        pipeline_send_s=count * send,
        bubble_s=bubble,
        shard_s=count * (micro - busy),
        gradient_s=shown,
        gradient_total_s=gradient + zero,
        optimizer_s=optimizer + count * state.adding,
        overhead_s=count * (busy - state.adding - stage_s - send) + overhead,
        micro_s=micro,
        device_s=part * device,
        host_s=part * host,
        launch_sharpness=np.broadcast_to(f.launch_sharpness, step.shape),
        busy_s=count * busy + zero,
        moving_s=np.where(gathers, count * state.moving, 0.0) + zero,
        shard_sharpness=np.broadcast_to(f.shard_sharpness, step.shape),
    )


def _device_seconds(work: Compute) -> Floats:
    passes = (work.matmul, work.attention, work.elementwise)
    total = work.recompute
    for one in passes:
        total = total + one.forward + one.backward
    return total
