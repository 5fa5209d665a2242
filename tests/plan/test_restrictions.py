"""A plan is never slower than the plan of the same job with one setting fixed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.plan.host_memory import offload_problem
from phalanx.plan.request import MEGATRON
from phalanx.plan.score import LayoutScores, least_seconds, price_layouts, score_layouts
from phalanx.plan.search import FULL_MEMORY, ROOMIER, search_layouts
from phalanx.plan.space import build_space

PAIRS = [
    ("llama-3-70b", "8xH100:2", 8192, 64),
    ("llama-3-70b", "8xA100:4", 4096, 128),
    ("llama-3-8b", "4xL40S:2", 4096, 64),
    ("mixtral-8x7b", "8xA100:1", 4096, 64),
    ("qwen3-30b-a3b", "8xH100:4", 8192, 256),
]
RESTRICTIONS = {
    "tensor": (1, 2, 8, 16),
    "pipeline": (1, 2, 8),
    "context": (1, 2),
    "data": (1, 4, 16),
    "shard": (1, 4, 16),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "activations", "parameters"),
    "micro": (1, 2, 4),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
}


def restrict(request, name, value):
    return replace(request, fixed={**request.fixed, name: value})


def crowded(request, candidate):
    return candidate.memory_bytes > FULL_MEMORY * request.cluster.accelerator.memory_bytes * request.memory.usable


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} on {pair[1]}")
def test_no_restriction_makes_a_plan_faster(make_ask, pair):
    preset, cluster, sequence, batch = pair
    request = make_ask(preset, cluster, sequence=sequence, batch=batch)
    free = search_layouts(request).best
    checked = 0
    for name, values in RESTRICTIONS.items():
        for value in values:
            restricted = restrict(request, name, value)
            if not score_layouts(build_space(restricted)).fits.any():
                continue
            best = search_layouts(restricted).best
            layout = best.layout
            # What a user fixes is taken at its word beyond what the hosts hold and what the trainer can run, and a
            # layout at the edge of memory is the plan only where no other is left.
            beyond = layout.zero not in request.limits.zero_with_pipeline and layout.pipeline > 1
            if beyond or offload_problem(restricted, layout) or (crowded(request, best) and not crowded(request, free)):
                continue
            checked += 1
            assert free.step_s <= ROOMIER * best.step_s, f"{name} = {value}: {layout.name}, free: {free.layout.name}"
    assert checked


def test_offload_is_planned_where_it_is_faster_and_reported(make_ask):
    request = make_ask("llama-3-70b", "8xH100:2", sequence=8192, batch=64)
    found, without = search_layouts(request), search_layouts(restrict(request, "offload", "none"))
    assert found.best.layout.offload == "optimizer"
    assert found.best.step_s < 0.5 * without.best.step_s
    assert "the plan keeps the optimizer in host memory: " in found.warnings[0].what
    assert without.best.layout.name in found.warnings[0].what
    assert 'set parallel.offload = "none"' in found.warnings[0].fix


def test_hosts_without_room_take_no_offload(make_ask):
    request = make_ask("llama-3-70b", "8xH100:2", sequence=8192, batch=64)
    small = replace(request, cluster=replace(request.cluster, host_memory_bytes=1e9))
    best = search_layouts(small).best
    assert best.layout.offload == "none"
    forced = search_layouts(restrict(small, "offload", "optimizer")).best.layout
    problem = offload_problem(small, forced)
    assert problem is not None
    assert "the hosts have" in problem.what
    assert offload_problem(request, forced) is None


def test_state_that_is_not_shared_out_is_held_by_the_hosts_once_per_copy(make_ask):
    request = make_ask("llama-3-8b", "8xH100:1", parallel__offload='"optimizer"', parallel__zero=0)
    whole = replace(search_layouts(request).best.layout, data=8, shard=1, tensor=1, pipeline=1, context=1)
    # 8 billion parameters with 16 bytes each are 128 GB once, and 1 TB for eight ranks.
    hosts = replace(request, cluster=replace(request.cluster, host_memory_bytes=500e9))
    assert offload_problem(hosts, whole) is not None
    assert offload_problem(hosts, replace(whole, zero=1, shard=8)) is None


def test_a_framework_and_a_processor_are_offered_only_what_they_have(make_ask):
    request = make_ask("llama-3-70b", "8xH100:2", sequence=8192, batch=64)
    assert replace(request, limits=MEGATRON).offload_kinds == ("none", "optimizer")
    device = replace(request.cluster.accelerator, family="cpu")
    assert replace(request, cluster=replace(request.cluster, accelerator=device)).offload_kinds == ("none",)


def test_no_layout_is_faster_than_the_bound_of_its_row(make_ask):
    request = make_ask("mixtral-8x7b", "8xH100:2", batch=64)
    space = replace(build_space(request, offload=request.offload_kinds), zero2="any")
    bound = least_seconds(space.part("none"))
    for kind in request.offload_kinds:
        scores: LayoutScores = score_layouts(space.part(kind), memory_cutoff=np.inf)
        assert (bound[scores.base] <= scores.step_s * (1 + 1e-12)).all()
        assert scores.base.size


def test_selective_recompute_keeps_its_products_on_the_device(make_ask):
    request = make_ask("llama-3-8b", "8xH100:1", batch=64)
    layout = replace(search_layouts(request).best.layout, recompute="selective")
    moved = replace(layout, offload="activations")
    _, times, memory = price_layouts(request, [layout, moved, replace(moved, recompute="full")])
    assert memory.total[1] == memory.total[0]
    assert times.step_s[1] == times.step_s[0]
    assert memory.activations[2] < memory.activations[0]


def test_offloaded_activations_wait_for_the_host_link(make_ask):
    """They cross it on the stream of the compute: nothing hides them."""
    request = make_ask("llama-3-8b", "8xH100:1", batch=64)
    layout = replace(search_layouts(request).best.layout, recompute="none")
    _, times, _ = price_layouts(request, [layout, replace(layout, offload="activations")])
    assert times.overhead_s[1] > times.overhead_s[0] + 0.01 * times.step_s[0]
    assert times.matmul_s[1] == times.matmul_s[0]


def test_in_a_pipeline_zero_2_adds_up_as_many_gradients_as_zero_1(make_ask):
    request = make_ask("llama-3-8b", "4xL40S:2", batch=64)
    layout = search_layouts(restrict(request, "pipeline", 4)).best.layout
    _, times, _ = price_layouts(request, [replace(layout, zero=stage) for stage in (1, 2)])
    assert times.optimizer_s[1] == pytest.approx(times.optimizer_s[0], rel=1e-12)
