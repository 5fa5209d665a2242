"""Seconds of one step on this machine's own cores, from the constants that were measured on them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from phalanx.hardware.cpu_steps import CpuRates, CpuStep, cpu_times
from phalanx.plan.cases import Cases
from phalanx.plan.step import StepTimes
from phalanx.plan.weights import rank_weights

PROFILE = "phalanx-cpu"  # names its 80 % interval in uncertainty.toml


def step_columns(c: Cases) -> CpuStep:
    """Return the cases as inputs of the CPU formula; experts count as an MLP of the width that a token uses."""
    weights = rank_weights(c, stage_layers=np.ceil(c.layers / c.pp))
    routed_width = c.topk * c.expert_ffn + c.shared_ffn
    moe_share = c.moe_layers / c.layers
    return CpuStep(
        layers=c.layers,
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=(c.qk_dim + c.v_dim) / 2.0,
        ffn=(1.0 - moe_share) * c.ffn + moe_share * routed_width,
        gated=c.gated,
        vocab=c.vocab,
        seq=c.seq,
        tokens=c.tokens,
        count=c.accumulation,
        tp=c.tp,
        pp=c.pp,
        vpp=c.vpp,
        cp=c.cp,
        dp=c.dp,
        shard=c.shard,
        zero=c.zero,
        sp=c.sp,
        recompute=c.recompute,
        parameters=weights.dense + weights.experts,
    )


def predict_cpu_step(c: Cases, rates: CpuRates) -> StepTimes:
    """Return the step of every case."""
    times = cpu_times(step_columns(c), rates)
    # Columns of NICs and links, which cores do not have, may vary too: the step has the shape of all columns.
    zero = np.zeros(np.broadcast_shapes(*(np.shape(getattr(c, item.name)) for item in fields(c))))
    step_s = times.step + zero
    return StepTimes(
        step_s=step_s,
        matmul_s=times.matmul,
        attention_s=times.attention,
        elementwise_s=times.element,
        head_s=times.head,
        recompute_s=times.recompute,
        launch_s=times.issue,
        tensor_s=times.tensor,
        context_s=times.context,
        expert_s=zero,
        pipeline_send_s=times.send,
        bubble_s=times.bubble,
        shard_s=times.shard,
        gradient_s=times.gradient,
        gradient_total_s=times.gradient + zero,
        optimizer_s=times.update,
        overhead_s=times.other,
        micro_s=step_s / c.accumulation,
        # On cores no two kinds of work overlap: a smooth maximum of sharpness 1 is a sum.
        device_s=times.matmul + times.attention + times.element + times.recompute + times.tensor + times.context + zero,
        host_s=times.issue + zero,
        launch_sharpness=zero + 1.0,
        busy_s=step_s,
        moving_s=times.shard + zero,
        shard_sharpness=zero + 1.0,
    )
