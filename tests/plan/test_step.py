"""The whole step: its parts add up, and it moves the way pipelines, networks and sharding move."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.model import known_presets
from phalanx.plan.case_columns import machine_columns, model_columns
from phalanx.plan.cases import COMPRESSION, OFFLOAD, PRECISION, SCHEDULES
from phalanx.plan.physics import Profile, shipped_physics, shipped_profiles
from phalanx.plan.step import StepTimes, predict_step, smooth_max, stage_layers
from phalanx.validate.throughput_rows import row_columns, to_cases

ROW = {"layers": "1", "hidden": "64", "seq": "4096", "gpu": "H100", "gpus": "1", "global_batch": "256"}
COMBINED = {"device_s", "host_s", "launch_sharpness", "busy_s", "moving_s", "shard_sharpness"}
NOT_PARTS = {"step_s", "gradient_total_s", "micro_s", *COMBINED}
PARTS = [field.name for field in fields(StepTimes) if field.name not in NOT_PARTS]
FREE = {"link_bytes_per_s": 1e18, "nic_bytes_per_s": 1e18, "link_latency_s": 0.0, "nic_latency_s": 0.0}
GPIPE, PLAIN, INTERLEAVED, ZERO_BUBBLE = (float(index) for index in range(len(SCHEDULES)))


def case(preset="llama-3-8b", cluster="8xH100:8", **changes):
    known = model_columns(known_presets()[preset].model()) | machine_columns(resolve_cluster(cluster))
    return to_cases([row_columns(ROW, 1, "none") | known | {"schedule": PLAIN, "zero": 1.0} | changes])


def step(*args, profile=None, **changes):
    return predict_step(case(*args, **changes), shipped_physics(), profile or Profile())


def seconds(*args, **changes):
    return step(*args, **changes).step_s.item()


sizes = st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0])


@st.composite
def layouts(draw):
    """A preset and any legal mixture of axes, settings and machines."""
    dp, zero = draw(st.sampled_from([1.0, 2.0, 6.0, 16.0, 128.0])), draw(st.sampled_from([0.0, 1.0, 2.0, 3.0]))
    cp, pp = draw(sizes), draw(sizes)
    tp = draw(sizes)
    return {
        "preset": draw(st.sampled_from(["gpt2-xl", "llama-3-70b", "mixtral-8x7b", "deepseek-v3"])),
        "cluster": draw(st.sampled_from(["8xA100:16", "8xH100:16", "72xGB200:2", "1xL40S:8"])),
        "tp": tp,
        "pp": pp,
        "vpp": draw(st.sampled_from([1.0, 2.0])) if pp > 1 else 1.0,
        "cp": cp,
        "dp": dp,
        "ep": draw(st.sampled_from([1.0, 8.0])) if dp * cp * tp >= 8 else 1.0,
        "zero": zero,
        "shard": draw(st.sampled_from([dp * cp, max(1.0, dp * cp / 2)])) if zero else 1.0,
        "sp": draw(st.sampled_from([0.0, 1.0])),
        "micro_batch": draw(st.sampled_from([1.0, 2.0, 4.0])),
        "global_batch": draw(st.sampled_from([128.0, 1536.0])),
        "recompute": draw(st.sampled_from([0.0, 1.0, 2.0])),
        "precision": float(draw(st.integers(0, len(PRECISION) - 1))),
        "schedule": draw(st.sampled_from([GPIPE, PLAIN, ZERO_BUBBLE])),
        "offload": float(draw(st.integers(0, len(OFFLOAD) - 1))),
        "compression": float(draw(st.integers(0, len(COMPRESSION) - 1))),
        "profile": draw(st.sampled_from(list(shipped_profiles().values()))),
    }


@settings(max_examples=200, deadline=None)
@given(layout=layouts())
def test_parts_add_up(layout):
    times = step(**layout)
    parts = {name: getattr(times, name).item() for name in PARTS}
    assert sum(parts.values()) == pytest.approx(times.step_s.item(), rel=1e-9)
    assert all(np.isfinite(value) for value in parts.values())
    assert min(parts.values()) >= -1e-9 * times.step_s.item(), parts
    assert times.gradient_total_s >= times.gradient_s * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_a_free_network_is_never_slower(layout):
    layout |= {"offload": 0.0}  # a slow host link would rule the step
    assert seconds(**layout, **FREE) <= seconds(**layout) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_twice_the_batch_takes_longer_but_at_most_twice(layout):
    one, two = seconds(**layout), seconds(**layout | {"global_batch": 2 * layout["global_batch"]})
    assert one * (1 - 1e-9) <= two <= 2 * one * (1 + 1e-9)


# The next two hold exactly where nothing hides behind the work: on a free network, with a host that keeps up.
ALONE = FREE | {"offload": 0.0}


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_recompute_is_never_free(layout):
    none, full = (seconds(**layout | ALONE | {"recompute": kind}) for kind in (0.0, 2.0))
    assert full > none


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), slower=st.floats(1.01, 4.0))
def test_a_slower_device_is_slower(layout, slower):
    layout |= ALONE | {"profile": replace(layout["profile"], launch_s=0.0, tensor_pipeline_s=0.0)}
    cases = case(**{name: value for name, value in layout.items() if name != "profile"})
    rates = ("matmul_flops", "matmul_fp8_flops", "matmul_fp4_flops", "matmul_fp32_flops", "memory_bytes_per_s")
    changed = {name: getattr(cases, name).item() / slower for name in rates}
    assert seconds(**layout | changed) > seconds(**layout)


def test_rows_do_not_touch_each_other():
    """One table of many cases gives what each case gives alone."""
    changes = [
        {"tp": 8.0, "dp": 8.0},
        {"pp": 4.0, "dp": 16.0, "micro_batch": 2.0},
        {"dp": 64.0, "zero": 3.0, "shard": 64.0},
    ]
    base = row_columns(ROW, 1, "none") | model_columns(known_presets()["llama-3-8b"].model())
    base |= machine_columns(resolve_cluster("8xH100:8")) | {"schedule": PLAIN, "zero": 1.0}
    dense = [base | one for one in changes]
    moe = base | model_columns(known_presets()["mixtral-8x7b"].model()) | {"dp": 64.0, "ep": 8.0}
    together = predict_step(to_cases([*dense, moe]), shipped_physics(), Profile()).step_s
    alone = [seconds(**one) for one in changes] + [seconds("mixtral-8x7b", dp=64.0, ep=8.0)]
    assert together == pytest.approx(alone)


# --- pipeline ---


def bubble(**changes):
    times = step("llama-3-70b", **{"tp": 4.0, "pp": 8.0, "dp": 2.0, "shard": 2.0, **changes})
    return (times.bubble_s / times.step_s).item()


def test_no_pipeline_no_bubble():
    assert bubble(pp=1.0) == 0


def test_micro_batches_fill_the_pipeline():
    shares = [bubble(global_batch=size) for size in (16.0, 64.0, 256.0, 1024.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.05


def test_bubble_share_of_an_even_pipeline_is_the_textbook_one():
    """(p-1)/(m+p-1) of the step (Narayanan et al. 2021) when nothing else takes time."""
    quiet = Profile(step_s=0.0, step_log_devices_s=0.0, micro_s=0.0, pipeline_s=0.0, balanced_stages=0.0)
    times = step("llama-3-70b", profile=quiet, tp=4.0, pp=8.0, dp=1.0, shard=1.0, global_batch=32.0, vocab=64.0, **FREE)
    assert (times.bubble_s / times.step_s).item() == pytest.approx(7 / (32 + 7), rel=0.05)


def test_interleaving_shrinks_the_bubble():
    shares = [bubble(vpp=chunks, schedule=INTERLEAVED if chunks > 1 else PLAIN) for chunks in (1.0, 2.0, 5.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] < 0.7 * shares[0]


def test_interleaving_sends_more():
    sent = [step("llama-3-70b", tp=4.0, pp=8.0, dp=2.0, vpp=chunks).pipeline_send_s.item() for chunks in (1.0, 2.0)]
    assert sent[1] == pytest.approx(2 * sent[0])


def test_zero_bubble_is_smaller_but_not_free():
    # Of F + B + W per stage, F + B - W remains: a third where all three are alike, more where some work has no weights
    # (attention, norms), as Qi et al. (arXiv 2401.10241) give for ZB-H1.
    shape = {"tp": 4.0, "pp": 8.0, "dp": 2.0, "shard": 2.0, "global_batch": 64.0}
    kept = []
    for sequence in (2048.0, 32768.0):
        one, other = (step("llama-3-70b", **shape, seq=sequence, schedule=kind) for kind in (ZERO_BUBBLE, PLAIN))
        kept.append((one.bubble_s / other.bubble_s).item())
    assert 1 / 3 < kept[0] < kept[1] < 1, "attention has no weights: longer sequences leave more of the bubble"
    long = {"tp": 4.0, "pp": 8.0, "dp": 2.0, "shard": 2.0, "global_batch": 8192.0}
    # With many micro-batches there is no bubble left to save, and splitting the backward still costs.
    assert seconds("llama-3-70b", **long, schedule=ZERO_BUBBLE) > seconds("llama-3-70b", **long)


def test_gpipe_and_1f1b_take_the_same_time():
    assert bubble(schedule=GPIPE) == bubble(schedule=PLAIN)


def test_uneven_stages_cost():
    """81 layers on 8 stages: one stage has 11, all wait for it."""
    no_head = {"vocab": 64.0, "tp": 4.0, "pp": 8.0, "dp": 2.0, "shard": 2.0}
    even, odd = (seconds("llama-3-70b", **no_head, layers=layers) for layers in (80.0, 81.0))
    assert odd / even == pytest.approx(1.1, abs=0.03)


@pytest.mark.parametrize(
    ("layers", "pp", "head", "balanced", "expected"),
    [
        (32, 1, 2.0, 1.0, (32, 32)),
        (32, 4, 0.0, 0.0, (8, 8)),
        (30, 4, 0.0, 0.0, (8, 6)),
        (32, 4, 3.0, 0.0, (8, 8)),  # unbalanced: the head comes on top of the last stage
        (32, 4, 3.0, 1.0, (9, 5)),  # balanced: the others take one more, the last one 5 and the head
        (126, 16, 1.0, 1.0, (8, 6)),  # Llama 3 405B on 16 stages: two layers fewer where the embedding stands
    ],
)
def test_layers_of_a_stage(layers, pp, head, balanced, expected):
    cases = case(layers=float(layers), pp=float(pp))
    found = stage_layers(cases, head_layers=np.array([head]), balanced=np.array([balanced]))
    assert tuple(one.item() for one in found) == expected


@given(
    layers=st.integers(1, 200), pp=st.integers(1, 64), head=st.floats(0.0, 10.0), balanced=st.sampled_from([0.0, 1.0])
)
def test_no_layer_is_lost(layers, pp, head, balanced):
    cases = case(layers=float(layers), pp=float(pp))
    most, last = (
        one.item() for one in stage_layers(cases, head_layers=np.array([head]), balanced=np.array([balanced]))
    )
    assert 0 <= last <= most
    assert last + most * (pp - 1) >= layers


# --- network and sharding ---


def test_tensor_parallelism_past_the_node_loses_throughput():
    """Published: TP 8 to 16 on H100 with EFA loses 43 % of tokens/s per GPU (Ultra-Scale Playbook)."""
    efa = {"nic_bytes_per_s": 25e9, "sp": 1.0, "dp": 1.0, "shard": 1.0, "global_batch": 8.0, "micro_batch": 4.0}
    inside, across = seconds(tp=8.0, **efa), seconds(tp=16.0, **efa)
    per_device = inside / (2 * across)
    assert 0.3 < per_device < 0.75


def test_hybrid_sharding_beats_full_sharding_over_slow_nics():
    slow = {"dp": 64.0, "zero": 3.0, "nic_bytes_per_s": 1.5e9}
    assert seconds(**slow, shard=8.0) < 0.7 * seconds(**slow, shard=64.0)


def test_zero_1_is_cheaper_than_zero_3_per_micro_batch():
    many = {"dp": 8.0, "shard": 8.0, "global_batch": 256.0, "nic_bytes_per_s": 5e9, "domain": 1.0}
    assert seconds(**many, zero=1.0) < seconds(**many, zero=3.0)


def test_zero_2_scatters_after_every_micro_batch():
    slow = {"dp": 64.0, "shard": 64.0, "global_batch": 1024.0, "nic_bytes_per_s": 1.5e9}
    one, two = (step(**slow, zero=stage).gradient_total_s.item() for stage in (1.0, 2.0))
    assert two > 5 * one


def test_accumulation_spreads_gradient_traffic():
    shares = []
    for batch in (64.0, 1024.0):
        times = step(dp=64.0, zero=0.0, global_batch=batch, nic_bytes_per_s=5e9)
        shares.append((times.gradient_s / times.step_s).item())
    assert shares[1] < 0.3 * shares[0]


def test_overlap_hides_gradients():
    open_, hidden = (
        step(dp=64.0, zero=0.0, profile=Profile(data_overlap=share)).gradient_s.item() for share in (0.0, 1.0)
    )
    assert hidden < 0.5 * open_


def test_more_data_ranks_at_the_same_batch_are_faster_but_less_than_in_proportion():
    few, many = (seconds(dp=ranks, shard=ranks, global_batch=512.0) for ranks in (8.0, 64.0))
    assert few / 8 < many < few


def test_small_models_are_bound_by_the_host():
    tiny, large = step("gpt2"), step("llama-3-70b", tp=8.0)
    assert (tiny.launch_s / tiny.step_s).item() > (large.launch_s / large.step_s).item()
    fast_host = step("gpt2", profile=Profile(launch_s=1e-9))
    assert fast_host.launch_s.item() == pytest.approx(0.0, abs=1e-6)
    assert fast_host.step_s < tiny.step_s


def test_offloading_costs_time():
    plain = seconds("llama-3-70b", tp=8.0, dp=8.0, shard=8.0)
    assert seconds("llama-3-70b", tp=8.0, dp=8.0, shard=8.0, offload=1.0) > plain
    slow_host = {"offload": 2.0, "host_link_bytes_per_s": 1e9}
    assert seconds("llama-3-70b", tp=8.0, dp=8.0, shard=8.0, **slow_host) > 1.5 * plain


def test_sharding_the_optimizer_shares_its_work():
    whole, shared = (step(dp=64.0, zero=stage, shard=64.0).optimizer_s.item() for stage in (0.0, 1.0))
    assert shared == pytest.approx(whole / 64)


@given(a=st.floats(1e-9, 1e3), b=st.floats(1e-9, 1e3), p=st.floats(1.0, 20.0))
def test_smooth_max_lies_between_the_maximum_and_the_sum(a, b, p):
    found = smooth_max(np.array([a]), np.array([b]), p).item()
    assert max(a, b) * (1 - 1e-9) <= found <= (a + b) * (1 + 1e-9)
