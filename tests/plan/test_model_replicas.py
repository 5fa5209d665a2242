"""What a lost rank costs, worked out by hand for both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.run_sections import FaultSettings
from phalanx.plan.layout import Layout
from phalanx.plan.model_replicas import REGROUP_S, ModelReplicas, price_loss

HSDP = Layout(
    data=8, shard=2, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=2, sequence_parallel=False,
    micro_batch=1, accumulation=1, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
CLUSTER = resolve_cluster("8xH100:8")
SPEED = CLUSTER.nic_bytes_per_s
COSTS = {"step_s": 4.0, "tokens_per_s": 1000.0, "state_bytes": 6 * SPEED, "gradient_bytes": 2 * SPEED, "redone_s": 20.0}


def test_both_ways():
    found = price_loss(HSDP, CLUSTER, FaultSettings(detect_s=10.0, restart_s=100.0), **COSTS)
    assert (found.replicas, found.ranks) == (4, 2)
    assert (found.rebuild.stall_s, found.rebuild.slow_s, found.rebuild.lost_tokens) == (130.0, 0.0, 130_000.0)
    # Noticed, half a step done again, connected without the replica and with it, half of the state copied.
    assert found.leave_out.stall_s == pytest.approx(10.0 + 2.0 + 2 * REGROUP_S + 3.0)
    assert found.leave_out.slow_s == 100.0
    assert found.leave_out.lost_s == pytest.approx(found.leave_out.stall_s + 100.0 / 4)
    assert found.leave_out.lost_tokens == pytest.approx(1000.0 * found.leave_out.lost_s)
    assert found.exchange_s == pytest.approx(2 * 3 / 4)
    saved_s = found.rebuild.lost_s - found.leave_out.lost_s
    assert found.break_even_per_day == pytest.approx(86400 / 4 * 1.5 / saved_s)


def test_where_rebuilding_is_quick_leaving_out_never_pays():
    found = price_loss(HSDP, CLUSTER, FaultSettings(detect_s=0.0, restart_s=0.0), **{**COSTS, "redone_s": 0.0})
    assert found.break_even_per_day is None


def test_one_replica_has_no_two_ways():
    whole = replace(HSDP, shard=8)
    assert price_loss(whole, CLUSTER, FaultSettings(), **COSTS) is None
    assert ModelReplicas.of(whole).count == 1


def test_context_groups_belong_to_one_replica():
    found = ModelReplicas.of(replace(HSDP, data=4, context=2))
    assert (found.count, found.size) == (4, 2)
    assert [found.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
