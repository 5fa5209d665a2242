"""Which group carries what: placement, bytes and what shows."""

import numpy as np
import pytest

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.model import known_presets
from phalanx.plan import traffic
from phalanx.plan.case_columns import machine_columns, model_columns
from phalanx.plan.cases import COMPRESSION
from phalanx.plan.compute import compute_seconds
from phalanx.plan.physics import Profile, shipped_physics
from phalanx.plan.weights import rank_weights
from phalanx.validate.throughput_rows import row_columns, to_cases

ROW = {"layers": "1", "hidden": "64", "seq": "4096", "gpu": "H100", "gpus": "1", "global_batch": "64"}


def case(preset="llama-3-8b", cluster="8xH100:8", **changes):
    known = model_columns(known_presets()[preset].model()) | machine_columns(resolve_cluster(cluster))
    return to_cases([row_columns(ROW, 1, "none") | known | changes])


def groups(**changes):
    return traffic.axis_groups(case(**changes), shipped_physics(), Profile())


def shape(group):
    return group.ranks.item(), group.per_domain.item()


def test_ranks_fill_domains_tensor_first():
    g = groups(tp=4.0, cp=2.0, dp=4.0, pp=2.0)
    assert shape(g.tensor) == (4, 4)
    assert shape(g.context) == (2, 2)
    assert shape(g.data) == (8, 2)  # data and context share gradients; two of them per node of 8
    assert shape(g.pipeline) == (2, 1)


def test_hybrid_sharding_stays_inside_the_node_and_replicates_between():
    g = groups(dp=64.0, zero=3.0, shard=8.0)
    assert shape(g.shard) == (8, 8)
    assert shape(g.replica) == (8, 1)


def test_full_sharding_has_one_copy():
    g = groups(dp=64.0, zero=3.0, shard=64.0)
    assert shape(g.shard) == (64, 8)
    assert g.replica.ranks == 1


def test_without_zero_there_is_no_shard_to_share():
    assert shape(groups(dp=64.0, zero=0.0, shard=1.0).shard) == (64, 8)


def test_experts_live_inside_data_and_tensor_ranks():
    g = groups(preset="mixtral-8x7b", tp=2.0, dp=32.0, ep=8.0)
    assert shape(g.expert) == (8, 8)
    assert shape(g.expert_data) == (8, 1)


def sync(preset="llama-3-8b", profile=None, **changes):
    cases, profile = case(preset, **changes), profile or Profile()
    weights = rank_weights(cases, stage_layers=cases.layers)
    return traffic.gradient_traffic(cases, traffic.axis_groups(cases, shipped_physics(), profile), weights, profile)


def test_one_data_rank_has_no_gradient_traffic():
    alone = sync(dp=1.0, zero=1.0, shard=1.0)
    assert (alone.reduce.item(), alone.gather.item()) == (0, 0)


def test_sharding_the_optimizer_halves_the_reduction_and_gathers_weights_instead():
    plain, sharded = sync(dp=64.0, zero=0.0), sync(dp=64.0, zero=1.0, shard=64.0)
    assert plain.gather == 0
    # Ring: a reduce-scatter is half an all-reduce; a tree may make the whole cheaper than two halves.
    assert 0.45 * plain.reduce < sharded.reduce < 0.6 * plain.reduce
    # 16-bit weights are half the bytes of the fp32 gradients.
    assert sharded.gather == pytest.approx(0.5 * sharded.reduce, rel=0.05)


def test_zero_3_reduces_only_between_copies():
    assert sync(dp=64.0, zero=3.0, shard=64.0).reduce == 0
    hybrid = sync(dp=64.0, zero=3.0, shard=8.0)
    assert 0 < hybrid.reduce < sync(dp=64.0, zero=0.0).reduce
    assert hybrid.gather == 0


@pytest.mark.parametrize("name", COMPRESSION[1:])
def test_compressed_gradients_are_fewer_bytes(name):
    small = sync(dp=64.0, zero=0.0, compression=float(COMPRESSION.index(name)))
    assert small.reduce < sync(dp=64.0, zero=0.0).reduce


def test_tensor_parallelism_leaves_less_to_reduce():
    alone = {"dp": 8.0, "zero": 0.0, "domain": 1.0}  # one device per node, so that only the bytes differ
    assert sync(**alone, tp=8.0).reduce == pytest.approx(sync(**alone).reduce / 8, rel=0.05)


def test_expert_parallelism_leaves_less_to_reduce():
    whole = sync("mixtral-8x7b", dp=64.0, zero=1.0, shard=64.0)
    split = sync("mixtral-8x7b", dp=64.0, zero=1.0, shard=64.0, ep=8.0)
    assert split.reduce < whole.reduce


def tensor(**changes):
    cases, profile = case(**changes), Profile()
    return traffic.tensor_seconds(cases, traffic.axis_groups(cases, shipped_physics(), profile), profile).item()


def test_tensor_traffic_explodes_past_the_node():
    """Published: TP 8 to 16 over EFA loses 43 % of throughput, 2 to 32 loses 85 % (Ultra-Scale Playbook)."""
    assert tensor(tp=1.0) == 0
    # Sums in the switch need heads: on 4 x H200 NCCL takes a ring (365 GB/s), on 8 the switch (480 GB/s).
    assert 0 < tensor(tp=4.0) < 1.2 * tensor(tp=8.0)
    assert tensor(tp=16.0) > 1.4 * tensor(tp=8.0)


def test_sequence_parallelism_moves_the_same_bytes():
    """An all-reduce is a reduce-scatter and an all-gather (Korthikanti et al. 2022, section 4.2.2)."""
    rings = {"tp": 8.0, "switch_reduces": 0.0}
    assert tensor(**rings, sp=1.0) == pytest.approx(tensor(**rings, sp=0.0), rel=1e-6)
    assert tensor(tp=8.0, sp=0.0, switch_reduces=1.0) < tensor(**rings, sp=0.0), "a switch can sum, not gather"


def shard(**changes):
    cases, profile = case(**changes), Profile()
    weights = rank_weights(cases, stage_layers=cases.layers)
    return traffic.shard_seconds(cases, traffic.axis_groups(cases, shipped_physics(), profile), weights, profile).item()


def test_zero_3_inside_the_node_is_cheaper_than_over_slow_nics():
    slow = {"dp": 64.0, "zero": 3.0, "nic_bytes_per_s": 1.5e9}
    assert shard(**slow, shard=64.0) > 5 * shard(**slow, shard=8.0)


def test_zero_3_is_three_collectives_of_the_weights():
    cases = case(dp=64.0, zero=3.0, shard=64.0)
    least = 63 / 64 * 8.0e9 * (2 + 2 + 4) / cases.link_bytes_per_s.item()
    assert shard(dp=64.0, zero=3.0, shard=64.0) > least
    assert shard(dp=64.0, zero=2.0, shard=64.0) == 0


def experts(**changes):
    cases, profile = case("deepseek-v3", **changes), Profile()
    return traffic.expert_seconds(cases, traffic.axis_groups(cases, shipped_physics(), profile), profile).item()


def test_experts_across_nodes_cost_more_than_inside():
    assert experts(dp=64.0, ep=1.0) == 0
    assert 0 < experts(dp=64.0, ep=8.0) < experts(dp=64.0, ep=64.0)


def test_dense_models_have_no_expert_traffic():
    cases = case(dp=64.0, ep=8.0)
    assert traffic.expert_seconds(cases, traffic.axis_groups(cases, shipped_physics(), Profile()), Profile()) == 0


def context(**changes):
    cases = case(**changes)
    behind = compute_seconds(cases, shipped_physics(), Profile()).attention.forward
    return traffic.context_seconds(
        cases, shipped_physics(), traffic.axis_groups(cases, shipped_physics(), Profile()), behind
    ).item()


def test_ring_attention_hides_behind_long_sequences():
    assert context(cp=1.0) == 0
    short, long = ({"cp": 8.0, "tp": 8.0, "seq": length} for length in (8192.0, 524288.0))
    shares = []
    for one in (short, long):
        attention = compute_seconds(case(**one), shipped_physics(), Profile()).attention.forward.item()
        shares.append(context(**one) / attention)
    assert shares[1] < 0.2 * shares[0]


def test_fewer_key_heads_travel_lighter():
    slow = {"cp": 8.0, "seq": 8192.0, "nic_bytes_per_s": 1e9, "domain": 1.0}
    assert context(**slow, kv_heads=8.0) < 0.5 * context(**slow, kv_heads=32.0)


def test_pipeline_neighbours_send_one_activation():
    cases = case(pp=4.0, dp=16.0)
    sent = traffic.send_seconds(cases, traffic.axis_groups(cases, shipped_physics(), Profile())).item()
    assert sent > 4096 * 4096 * 2 / cases.nic_bytes_per_s.item()
    split = case(pp=4.0, dp=2.0, tp=8.0, sp=1.0)
    assert traffic.send_seconds(split, traffic.axis_groups(split, shipped_physics(), Profile())).item() < 0.3 * sent


def test_stages_inside_one_domain_use_the_fast_link():
    near, far = case(pp=4.0), case(pp=4.0, dp=16.0)
    times = [traffic.send_seconds(c, traffic.axis_groups(c, shipped_physics(), Profile())).item() for c in (near, far)]
    assert times[0] < 0.5 * times[1]


def test_many_domains_lose_bandwidth_by_the_profile():
    clean, lossy = (sync(profile=Profile(fabric_loss=loss), dp=64.0, tp=8.0, zero=0.0) for loss in (0.0, 0.3))
    assert np.all(lossy.reduce > 1.5 * clean.reduce)
