"""Seconds of one optimizer step, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan import traffic
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import FULL, Compute, compute
from phalanx.plan.memory import OFFLOAD_PARAMETERS, MemoryProfile, layer_activations
from phalanx.plan.optimizer import owned_weights, update_seconds
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import rank_weights

LAUNCH_SHARPNESS = 4.0  # p of the p-norm that joins device time and host launch time
# Parameters in host memory are fetched in fp32 for forward and again for backward; gradients return in fp32.
FETCHED_BYTES = 12.0
OFFLOAD_ACTIVATIONS = 2  # index in cases.OFFLOAD
ZERO_BUBBLE = 3  # index in cases.SCHEDULES
# Splitting every backward in two loses fused weight gradients and reads activations twice: an assumption, to be
# replaced when the trainer measures it.
ZERO_BUBBLE_SLOWDOWN = 1.04


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


def smooth_max(a: Floats, b: Floats, sharpness: Floats | float) -> Floats:
    """A maximum with a rounded corner: two resources that overlap well but not perfectly."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1.0 / sharpness)


def stage_layers(c: Cases, *, head_layers: Floats, balanced: Floats) -> tuple[Floats, Floats]:
    """(layers of the fullest stage, layers of the last one), the head weighing `head_layers` layers.

    A balanced split may give the last stage fewer layers, or every other stage one more, whichever is faster.
    """
    even = np.ceil(c.layers / c.pp - 1e-9)
    left = np.clip(c.layers - even * (c.pp - 1.0), 0.0, even)
    more = even + 1.0
    left_more = np.clip(c.layers - more * (c.pp - 1.0), 0.0, more)
    wins = (balanced > 0) & (np.maximum(more, left_more + head_layers) < np.maximum(even, left + head_layers))
    wins = wins & (c.pp > 1)
    return np.where(wins, more, even), np.where(wins, left_more, left)


def predict_step(c: Cases, k: Physics, f: Profile) -> StepTimes:
    """The step of every case."""
    g = traffic.groups(c, k, f)
    work = compute(c, k, f)
    tensor = traffic.tensor_seconds(c, g, f)
    context = traffic.context_seconds(c, k, g, work.attention.forward)
    expert = traffic.expert_seconds(c, g, f)
    again = np.where(c.recompute == FULL, tensor + context + expert, 0.0)
    device = _device_seconds(work) + 2.0 * tensor + 3.0 * context + 2.0 * expert + again
    host = work.operations * f.launch_s * (2.5 + (c.recompute == FULL))
    host = host + np.where((c.pp > 1) & (c.tp > 1), c.layers * c.tp * f.tensor_pipeline_s, 0.0)
    plain = device
    device = device * np.where((c.schedule == ZERO_BUBBLE) & (c.pp > 1), ZERO_BUBBLE_SLOWDOWN, 1.0)
    layers_s = smooth_max(device, host, LAUNCH_SHARPNESS)

    head_s = work.head.forward + work.head.backward
    per_layer = layers_s / c.layers
    fullest, last = stage_layers(c, head_layers=head_s / per_layer, balanced=np.asarray(f.balanced_stages))
    mid_s, last_s = fullest * per_layer, last * per_layer + head_s
    stage_s = np.maximum(mid_s, last_s)
    holds_head = last_s >= mid_s
    send = np.where(c.pp > 1, 2.0 * c.vpp * traffic.send_seconds(c, g) * f.pipeline_exposed, 0.0)
    host_micro = f.micro_s + np.where(c.pp > 1, f.pipeline_s, 0.0)
    busy = stage_s + send + host_micro
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        # Activations leave during forward and return during backward, behind compute.
        kept, _ = layer_activations(c, MemoryProfile())
        moved = np.where(c.offload == OFFLOAD_ACTIVATIONS, 2.0 * fullest * kept / c.host_link_bytes_per_s, 0.0)
        busy = np.maximum(busy, moved)

    w = rank_weights(c, stage_layers=fullest)
    fetched = np.where(c.offload == OFFLOAD_PARAMETERS, owned_weights(c, w) * FETCHED_BYTES, 0.0)
    fetch_s = fetched / c.host_link_bytes_per_s
    moving_s = traffic.shard_seconds(c, g, w, f) + fetch_s
    micro = np.where((c.zero == 3) & (c.pp <= 1), smooth_max(busy, moving_s, f.shard_sharpness), busy)
    mean_stage = (c.layers * per_layer + head_s) / c.pp
    bubble = (c.pp - 1.0) / c.vpp * (mean_stage + send + host_micro)
    # ZB-H1 fills the bubble with weight gradients: (p-1)(F+B-W) remains of (p-1)(F+B+W) (Qi et al., arXiv 2401.10241).
    weight_s = work.matmul.backward / 2.0
    bubble = np.where(c.schedule == ZERO_BUBBLE, bubble * np.maximum(0.0, 1.0 - 2.0 * weight_s / device), bubble)

    sync = traffic.gradient_traffic(c, g, w, f)
    # Traffic hides behind elapsed time, whether the device or the host sets it.
    share = fullest / c.layers * layers_s / device
    backward_s = (work.matmul.backward + work.attention.backward + work.elementwise.backward) * share
    forward_s = (work.matmul.forward + work.attention.forward + work.elementwise.forward) * share
    count = c.accumulation
    # ZeRO-2 owns no full gradient: it scatters after every micro-batch, behind the next one.
    repeats = np.where((c.zero == 2) & (c.pp <= 1), count - 1.0, 0.0)
    overlap = np.where(c.zero == 0, f.data_overlap, f.scatter_overlap)
    shown = repeats * np.maximum(0.0, sync.again - overlap * (forward_s + backward_s))
    shown = shown + sync.reduce - np.minimum(sync.reduce, backward_s) * overlap
    shown = shown + sync.gather - np.minimum(sync.gather, forward_s) * f.gather_overlap
    factoring = traffic.factoring_seconds(c, k, w)
    shown = shown + factoring
    gradient = sync.reduce + repeats * sync.again + sync.gather + factoring
    # A pipeline keeps gathered weights for the whole step (memory.py), so there they are fetched once.
    optimizer = update_seconds(c, k, f, w, g) + np.where(c.pp > 1, fetch_s, 0.0)
    overhead = f.step_s + f.step_log_devices_s * np.log2(np.maximum(c.devices, 1.0))

    step = count * micro + bubble + shown + optimizer + overhead
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
        optimizer_s=optimizer,
        overhead_s=count * (busy - stage_s - send) + overhead,
        micro_s=micro,
    )


def _device_seconds(work: Compute) -> Floats:
    passes = (work.matmul, work.attention, work.elementwise)
    total = work.recompute
    for one in passes:
        total = total + one.forward + one.backward
    return total
