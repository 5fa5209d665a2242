import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.plan.space import (
    build_space,
    device_splits,
    expert_sizes,
    micro_batches,
    possible_schedules,
    tensor_sizes,
)
from phalanx.units import all_divisors


def layouts(space, every=1):
    """Legal layouts of a space, or one in `every` of them."""
    rows = np.concatenate([np.stack(grid.rows(legal_cells(grid)), axis=1) for grid in space.grids()])
    return [space.layout(int(base), int(choice)) for base, choice in rows[::every]]


def legal_cells(grid):
    return np.broadcast_to(grid.legal, grid.shape)


@given(st.integers(1, 3000))
def test_divisors_are_exactly_those(number):
    assert all_divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(domains=st.sampled_from([1, 2, 3, 5, 6, 8]), batch=st.sampled_from([12, 60, 96, 128]))
def test_every_layout_is_legal(make_ask, domains, batch):
    request = make_ask(cluster=f"8xH100:{domains}", batch=batch)
    space = build_space(request)
    for one in layouts(space, every=29):
        assert one.devices == 8 * domains
        assert one.data * one.micro_batch * one.accumulation == batch
        assert request.model.heads % one.tensor == 0
        assert one.pipeline * one.virtual_pipeline <= request.model.layers
        assert one.context == 1 or request.sequence % (2 * one.context) == 0
        assert one.tensor <= 8
        assert (one.data * one.context) % one.shard == 0
        assert one.zero != 2 or one.accumulation == 1, "between micro-batches it is ZeRO-1 or reduces every time"
        assert one.zero in (request.limits.zero_with_pipeline if one.pipeline > 1 else request.limits.zero)
        assert (one.virtual_pipeline > 1) == (one.schedule == "interleaved")
        assert not one.sequence_parallel or one.tensor > 1
    found = layouts(space)
    assert len(set(found)) == len(found) > 100, "no layout is listed twice"


@pytest.mark.parametrize(
    ("preset", "cluster", "batch"), [("mixtral-8x7b", "8xH100:6", 96), ("llama-3-8b", "8xH100:3", 60)]
)
def test_a_cell_of_a_grid_is_the_layout_of_its_rows(make_ask, preset, cluster, batch):
    space = build_space(make_ask(preset, cluster, batch=batch), offload=("none", "optimizer"))
    for grid in space.grids():
        where = legal_cells(grid)
        base, choice = grid.rows(where)
        for name, values in space.columns(base, choice).items():
            if name != "group":
                assert np.array_equal(np.broadcast_to(grid.columns[name], grid.shape)[where], values), name


def test_the_grid_around_some_layouts_holds_exactly_them(make_ask):
    space = build_space(make_ask("mixtral-8x7b", "8xH100:4"))
    for grid in space.grids():
        wanted = legal_cells(grid) & (grid.columns["zero"] == 1) & (grid.columns["ep"] > 2)
        small, inside = grid.around(wanted)
        assert inside.shape == small.shape
        assert set(zip(*(one.tolist() for one in small.rows(inside)), strict=True)) == set(
            zip(*(one.tolist() for one in grid.rows(wanted)), strict=True)
        )
        for name, values in grid.columns.items():
            kept = np.broadcast_to(small.columns[name], small.shape)[inside]
            assert np.array_equal(kept, np.broadcast_to(values, grid.shape)[wanted]), name


def test_what_is_legal_does_not_depend_on_how_grids_are_joined(make_ask, monkeypatch):
    space = build_space(make_ask("mixtral-8x7b", "8xH100:3", batch=48))
    joined = set(layouts(space))
    monkeypatch.setattr("phalanx.plan.space.WASTED_CELLS", 0)
    monkeypatch.setattr("phalanx.plan.space.GRID_CELLS", 500)
    assert set(layouts(space)) == joined


def test_device_counts_that_are_no_power_of_two_are_split(make_ask):
    found = device_splits(make_ask(cluster="8xH100:3", batch=96), 24)
    assert (1, 1, 3, 8) in found
    assert (8, 1, 3, 1) in found
    assert (1, 1, 1, 24) in found
    assert all(tp * cp * pp * dp == 24 for tp, cp, pp, dp in found)


def test_tensor_size_keeps_whole_key_value_heads(make_ask):
    request = make_ask("llama-3-8b", parallel__framework="megatron")  # 32 heads, 8 key-value heads
    assert tensor_sizes(request, 64) == [1, 2, 4, 8, 16, 32]
    assert 6 not in tensor_sizes(request, 48)
    assert tensor_sizes(make_ask("llama-3-8b"), 64) == [1, 2, 4, 8]  # our trainer copies no heads


def test_experts_divide_and_fit_inside_the_replicas(make_ask):
    request = make_ask("mixtral-8x7b")  # 8 experts
    assert expert_sizes(request, 4) == [1, 2, 4]
    assert expert_sizes(request, 6) == [1, 2]
    assert expert_sizes(make_ask("llama-3-8b"), 64) == [1]


def test_micro_batches_divide_the_share(make_ask):
    assert micro_batches(make_ask(batch=96), 8) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(make_ask(batch=96, batch__micro=4), 8) == [4]
    assert micro_batches(make_ask(batch=96, batch__micro=48), 8) == []


def test_interleaving_needs_chunks_and_full_rounds(make_ask):
    request = make_ask()  # 32 layers
    assert (2, 4) in possible_schedules(request, 4, 8)  # 8 micro-batches over 4 stages, 4 chunks of 2 layers
    assert not [one for one in possible_schedules(request, 4, 6) if one[0] == 2]
    assert possible_schedules(request, 1, 8) == [(1, 1)]


def test_frameworks_are_offered_only_what_they_run(make_ask):
    request = make_ask(parallel__framework="megatron-deepspeed")
    found = layouts(build_space(request))
    assert {one.schedule for one in found} == {"1f1b"}
    assert {one.context for one in found} == {1}
    assert not [one for one in found if one.pipeline > 1 and one.zero > 1]
    ours = layouts(build_space(make_ask(batch=16)))
    assert {one.zero for one in ours if one.pipeline > 1} == {0, 1, 2}  # ZeRO-3 would free nothing there
    assert {one.zero for one in ours if one.pipeline == 1} == {0, 1, 2, 3}
    assert not [one for one in ours if one.schedule == "zero-bubble" and one.recompute == "selective"]


def test_what_is_fixed_stays(make_ask):
    request = make_ask(parallel__tensor=2, parallel__zero=1, parallel__recompute="full", batch__micro=2)
    found = layouts(build_space(request))
    assert found
    assert {(one.tensor, one.zero, one.recompute, one.micro_batch) for one in found} == {(2, 1, "full", 2)}


def test_hsdp_shards_inside_the_domain(make_ask):
    found = layouts(
        build_space(make_ask(cluster="8xH100:4", parallel__zero=3, parallel__tensor=2, parallel__pipeline=1))
    )
    assert {one.shard for one in found if one.context == 1} == {16, 4}


def test_wider_tensor_groups_only_on_request(make_ask):
    request = make_ask(cluster="8xH100:4", parallel__framework="megatron")
    assert int(build_space(request).base["tp"].max()) == 8
    assert int(build_space(request, widest_tensor=32).base["tp"].max()) == 32
    assert set(np.unique(build_space(make_ask(cluster="8xH100:4", parallel__tensor=16)).base["tp"])) == {16}


@pytest.mark.parametrize("offload", [("none",), ("optimizer",), ("none", "optimizer")])
def test_offload_is_tried_as_asked(make_ask, offload):
    assert {one.offload for one in layouts(build_space(make_ask(cluster="8xH100:1"), offload=offload))} == set(offload)
