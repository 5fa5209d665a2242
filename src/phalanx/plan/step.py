"""Seconds of one optimizer step, and the parts that they consist of."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.plan import traffic
from phalanx.plan.cases import ZERO_BUBBLE, Cases, Floats
from phalanx.plan.compute import FULL, SELECTIVE, Compute, compute_seconds
from phalanx.plan.memory import layer_activations
from phalanx.plan.memory_profile import OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS, MemoryProfile, offloads_activations
from phalanx.plan.optimizer import owned_weights, update_seconds
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import rank_weights

# Bytes per parameter in host memory: fetched in fp32 for forward and again for backward; gradients return in fp32.
FETCHED_BYTES = 12.0
# Splitting every backward in two loses fused weight gradients and reads activations twice: an assumption, to be
# replaced when the trainer measures it.
ZERO_BUBBLE_SLOWDOWN = 1.04
ZERO = np.zeros(())  # a part that no case of the table has; as a scalar it costs nothing in sums


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds per step on the busiest stage; the parts add up to `step_s`, except for fields marked otherwise."""

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
    shard_s: Floats  # exposed ZeRO-3 traffic
    gradient_s: Floats  # exposed gradient traffic
    gradient_total_s: Floats  # exposed or hidden; not part of the sum
    optimizer_s: Floats
    overhead_s: Floats
    micro_s: Floats  # one micro-batch on the busiest stage; not part of the sum
    # The inputs of two smooth maxima, not part of the sum: `launch_s` is the exposed host time next to the device's
    # work, `shard_s` the exposed ZeRO-3 traffic next to the work; each maximum has its own sharpness.
    device_s: Floats
    host_s: Floats
    launch_sharpness: Floats
    busy_s: Floats
    moving_s: Floats
    shard_sharpness: Floats

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> StepTimes:
        """Return the table restricted to some rows."""
        columns = {
            item.name: np.broadcast_to(getattr(self, item.name), self.step_s.shape) for item in fields(StepTimes)
        }
        return StepTimes(**{name: value[rows] for name, value in columns.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSum:
    """The step time of a StepTimes without its parts."""

    step_s: Floats


def smooth_max(a: Floats, b: Floats, sharpness: Floats | float) -> Floats:
    """Return a maximum with a rounded corner: two resources that overlap well but not perfectly."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Layers of the fullest and the last stage.

    The fullest has `even` layers, or one more where `uneven`; the last then has `left_more` instead of `left`.
    """

    even: Floats
    left: Floats
    left_more: Floats
    uneven: NDArray[np.bool_]

    @property
    def fullest(self) -> Floats:
        """The number of layers of the fullest stage."""
        return np.where(self.uneven, self.even + 1.0, self.even)

    @property
    def last(self) -> Floats:
        """The number of layers of the last stage."""
        return np.where(self.uneven, self.left_more, self.left)


def split_stage_layers(c: Cases, *, head_layers: Floats, balanced: Floats) -> Split:
    """Return the split of the layers into stages, where the head takes as long as `head_layers` layers.

    A balanced split may give the last stage fewer layers, by giving every other stage one more, where that is faster.
    """
    even = np.ceil(c.layers / c.pp - 1e-9)
    even_rest = np.clip(c.layers - even * (c.pp - 1.0), 0.0, even)
    even_more = even + 1.0
    more_rest = np.clip(c.layers - even_more * (c.pp - 1.0), 0.0, even_more)
    is_uneven = (balanced > 0) & (
        np.maximum(even_more, more_rest + head_layers) < np.maximum(even, even_rest + head_layers)
    )
    return Split(even=even, left=even_rest, left_more=more_rest, uneven=is_uneven & (c.pp > 1))


def stage_layers(c: Cases, *, head_layers: Floats, balanced: Floats) -> tuple[Floats, Floats]:
    """Return (layers of the fullest stage, layers of the last one)."""
    split = split_stage_layers(c, head_layers=head_layers, balanced=balanced)
    return split.fullest, split.last


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Seconds that depend only on the parameters of a stage; a search computes them once for all recompute kinds."""

    fetch: Floats
    moving: Floats
    reduce: Floats
    gather: Floats
    again: Floats
    factoring: Floats
    update: Floats
    # Adding gradients to those of the earlier micro-batches.
    adding: Floats


def _step_state(c: Cases, k: Physics, f: Profile, g: traffic.Groups, layers: Floats) -> _State:
    w = rank_weights(c, stage_layers=layers)
    is_hosted = c.offload == OFFLOAD_PARAMETERS
    fetch = (
        np.where(is_hosted, owned_weights(c, w) * FETCHED_BYTES, 0.0) / c.host_link_bytes_per_s
        if is_hosted.any()
        else ZERO
    )
    traffic_s = traffic.gradient_traffic(c, g, w, f)
    has_no_pipeline = c.pp <= 1
    return _State(
        fetch=fetch,
        moving=traffic.shard_seconds(c, g, w, f) + fetch if np.any((c.zero == 3) & has_no_pipeline) else ZERO,
        reduce=traffic_s.reduce,
        gather=traffic_s.gather,
        again=traffic_s.again if np.any((c.zero == 2) & has_no_pipeline) else ZERO,
        factoring=traffic.factoring_seconds(c, k, w) if np.any(c.compression == traffic.POWERSGD) else ZERO,
        update=update_seconds(c, k, f, w, g),
        # In a pipeline whole gradients are accumulated: they are reduced once, after the last micro-batch.
        adding=(w.dense + w.experts)
        / np.where((c.zero >= 2) & has_no_pipeline, c.shard, 1.0)
        * f.accumulate_bytes
        / (c.memory_bytes_per_s * k.memory)
        if np.any(np.asarray(f.accumulate_bytes) > 0)
        else ZERO,
    )


def _state_of(c: Cases, k: Physics, f: Profile, g: traffic.Groups, split: Split) -> _State:
    """Return the state seconds of the fullest stage, which has `even` or one more layers."""
    even = _step_state(c, k, f, g, split.even)
    if not split.uneven.any():
        return even
    more = _step_state(c, k, f, g, split.even + 1.0)
    pairs = {field.name: (getattr(more, field.name), getattr(even, field.name)) for field in fields(_State)}
    return _State(**{name: np.where(split.uneven, *pair) if pair[0].ndim else ZERO for name, pair in pairs.items()})


def predict_step(c: Cases, k: Physics, f: Profile) -> StepTimes:
    """Return the step of every case."""
    times = _predict_step(c, k, f, parts=True)
    assert isinstance(times, StepTimes)
    return times


def predict_step_sum(c: Cases, k: Physics, f: Profile) -> StepSum:
    """Return the step of every case without its parts, which a search of a million layouts does not use."""
    return StepSum(step_s=_predict_step(c, k, f, parts=False).step_s)


def predict_least_step(c: Cases, k: Physics, f: Profile) -> StepSum:
    """Return the step without ZeRO-3's traffic, gradients and the update, a lower bound on the whole step."""
    return StepSum(step_s=_predict_step(c, k, f, parts=False, with_state=False).step_s)


def _predict_step(c: Cases, k: Physics, f: Profile, *, parts: bool, with_state: bool = True) -> StepTimes | StepSum:
    g = traffic.axis_groups(c, k, f)
    work = compute_seconds(c, k, f)
    tensor = traffic.tensor_seconds(c, g, f)
    context = traffic.context_seconds(c, k, g, work.attention.forward)
    expert = traffic.expert_seconds(c, g, f)
    exchanged_again = np.where(c.recompute == SELECTIVE, f.exchange_again, c.recompute == FULL)
    recompute_traffic = np.where(c.recompute == FULL, tensor, 0.0) + exchanged_again * (context + expert)
    device_s = _device_seconds(work) + 2.0 * tensor + 3.0 * context + 2.0 * expert + recompute_traffic
    host_s = work.operations * f.launch_s * (2.5 + (c.recompute == FULL))
    host_s = host_s + np.where((c.pp > 1) & (c.tp > 1), c.layers * c.tp * f.tensor_pipeline_s, 0.0)
    device_plain = device_s
    device_s = device_s * np.where((c.schedule == ZERO_BUBBLE) & (c.pp > 1), ZERO_BUBBLE_SLOWDOWN, 1.0)
    layers_s = smooth_max(device_s, host_s, f.launch_sharpness)

    head_s = work.head.forward + work.head.backward
    per_layer = layers_s / c.layers
    split = split_stage_layers(c, head_layers=head_s / per_layer, balanced=np.asarray(f.balanced_stages))
    fullest, last = split.fullest, split.last
    mid_s, last_s = fullest * per_layer, last * per_layer + head_s
    stage_s = np.maximum(mid_s, last_s)
    holds_head = last_s >= mid_s
    send_s = np.where(c.pp > 1, 2.0 * c.vpp * traffic.send_seconds(c, g) * f.pipeline_exposed, 0.0)
    host_micro = f.micro_s + np.where(c.pp > 1, f.pipeline_s, 0.0)
    busy_s = stage_s + send_s + host_micro
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        # Activations leave in forward and return in backward on the stream that computes
        # (train/parallel/recompute.py).
        stored, checkpoint = layer_activations(c, MemoryProfile())
        moved_s = 2.0 * fullest * np.where(c.recompute == FULL, checkpoint, stored) / c.host_link_bytes_per_s
        busy_s = busy_s + np.where(offloads_activations(c), moved_s, 0.0)

    mean_stage = (c.layers * per_layer + head_s) / c.pp
    bubble_s = (c.pp - 1.0) / c.vpp * (mean_stage + send_s + host_micro)
    # ZB-H1 fills the bubble with weight gradients: (p-1)(F+B-W) remains of (p-1)(F+B+W) (Qi et al., arXiv 2401.10241).
    weight_s = work.matmul.backward / 2.0
    bubble_s = np.where(
        c.schedule == ZERO_BUBBLE, bubble_s * np.maximum(0.0, 1.0 - 2.0 * weight_s / device_s), bubble_s
    )
    count = c.accumulation
    overhead = f.step_s + f.step_log_devices_s * np.log2(np.maximum(c.devices, 1.0))
    if not with_state:
        return StepSum(step_s=count * busy_s + bubble_s + overhead)

    state = _state_of(c, k, f, g, split)
    busy_s = busy_s + state.adding
    gathers = (c.zero == 3) & (c.pp <= 1)
    micro = np.where(gathers, smooth_max(busy_s, state.moving, f.shard_sharpness), busy_s) if gathers.any() else busy_s

    # Traffic is hidden by elapsed time, whether the device or the host determines it.
    share = fullest / c.layers * layers_s / device_s
    backward_s = (work.matmul.backward + work.attention.backward + work.elementwise.backward) * share
    forward_s = (work.matmul.forward + work.attention.forward + work.elementwise.forward) * share
    # ZeRO-2 keeps no full gradient: it scatters after every micro-batch, overlapped with the next one.
    repeats = np.where((c.zero == 2) & (c.pp <= 1), count - 1.0, 0.0)
    overlap = np.where(c.zero == 0, f.data_overlap, f.scatter_overlap)
    if repeats.any():
        exposed_s = repeats * np.maximum(0.0, state.again - overlap * (forward_s + backward_s)) + state.reduce
        exposed_s = exposed_s - np.minimum(state.reduce, backward_s) * overlap
    else:
        exposed_s = state.reduce - np.minimum(state.reduce, backward_s) * overlap
    # Parts that no case has are left out, because each sum here is over all axes of a search.
    exposed_s = exposed_s + state.gather - np.minimum(state.gather, forward_s) * f.gather_overlap
    exposed_s = exposed_s + state.factoring if state.factoring.ndim else exposed_s
    # A pipeline keeps gathered weights for the whole step (memory_profile.py), so there they are fetched once.
    optimizer = state.update + np.where(c.pp > 1, state.fetch, 0.0) if state.fetch.ndim else state.update

    step_total = count * micro + bubble_s + exposed_s + optimizer + overhead
    if not parts:
        return StepSum(step_s=step_total)
    gradient_s = state.reduce + repeats * state.again + state.gather + state.factoring
    layers_here = np.where(holds_head, last, fullest)
    layer_share = count * layers_here / c.layers
    zero = np.zeros_like(step_total)
    return StepTimes(
        step_s=step_total,
        matmul_s=layer_share * (work.matmul.forward + work.matmul.backward),
        attention_s=layer_share * (work.attention.forward + work.attention.backward),
        elementwise_s=layer_share * (work.elementwise.forward + work.elementwise.backward),
        head_s=np.where(holds_head, count * head_s, 0.0),
        recompute_s=layer_share * work.recompute,
        launch_s=layer_share * (layers_s - device_plain),
        tensor_s=layer_share * (2.0 + (c.recompute == FULL)) * tensor,
        context_s=layer_share * (3.0 + exchanged_again) * context,
        expert_s=layer_share * (2.0 + exchanged_again) * expert,
        pipeline_send_s=count * send_s,
        bubble_s=bubble_s,
        shard_s=count * (micro - busy_s),
        gradient_s=exposed_s,
        gradient_total_s=gradient_s + zero,
        optimizer_s=optimizer + count * state.adding,
        overhead_s=count * (busy_s - state.adding - stage_s - send_s) + overhead,
        micro_s=micro,
        device_s=layer_share * device_s,
        host_s=layer_share * host_s,
        launch_sharpness=np.broadcast_to(f.launch_sharpness, step_total.shape),
        busy_s=count * busy_s + zero,
        moving_s=np.where(gathers, count * state.moving, 0.0) + zero,
        shard_sharpness=np.broadcast_to(f.shard_sharpness, step_total.shape),
    )


def _device_seconds(work: Compute) -> Floats:
    work_passes = (work.matmul, work.attention, work.elementwise)
    total = work.recompute
    for work_pass in work_passes:
        total = total + work_pass.forward + work_pass.backward
    return total
