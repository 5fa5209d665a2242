import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.request import request_from_job
from phalanx.plan.score import price_layouts, score_layouts
from phalanx.plan.search import DECIDES, FULL_MEMORY, SAFE_MEMORY, SAME, layout_complexity, search_layouts
from phalanx.plan.space import build_space


def test_the_best_is_the_fastest_that_fits_up_to_a_tie(make_ask):
    request = make_ask()
    found, scores = search_layouts(request), score_layouts(build_space(request))
    fastest = scores.step_s[scores.fits].min()
    assert found.best.fits
    assert fastest <= found.best.step_s <= SAME * fastest
    assert found.fitting == int(scores.fits.sum())
    assert found.legal >= scores.legal >= scores.base.size


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("llama-3-8b", {}),
        ("mixtral-8x7b", {}),
        ("mixtral-8x7b", {"optim__name": '"muon"'}),
        ("qwen3-30b-a3b", {"parallel__recompute_layers": 4, "parallel__recompute": '"full"'}),
        ("llama-3-8b", {"parallel__compression": '"powersgd"'}),
        ("llama-3-8b", {"parallel__offload": '"parameters"'}),
        ("llama-3-8b", {"parallel__offload": '"activations"'}),
        ("llama-3-8b", {"parallel__zero": 2}),
    ],
)
def test_scores_of_a_grid_equal_prices_one_by_one(make_ask, preset, settings):
    request = make_ask(preset, cluster="8xH100:2", batch=16, **settings)
    scores = score_layouts(build_space(request), memory_cutoff=np.inf)
    rows = np.linspace(0, scores.base.size - 1, 200, dtype=int)
    _, times, memory = price_layouts(request, [scores.layout(int(row)) for row in rows])
    assert np.allclose(times.step_s, scores.step_s[rows], rtol=1e-12, atol=0)
    assert np.allclose(memory.total, scores.memory_bytes[rows], rtol=1e-12, atol=0)
    assert memory.runs.all()


def test_scores_are_in_the_order_of_the_tables(make_ask):
    scores = score_layouts(build_space(make_ask("mixtral-8x7b")))
    order = scores.base * scores.space.choice["zero"].size + scores.choice
    assert (np.diff(order) > 0).all(), "of equals the first is taken: it must not depend on how they were priced"


def test_where_nothing_comes_near_only_the_smallest_is_kept(make_ask, monkeypatch):
    monkeypatch.setattr("phalanx.plan.space.GRID_CELLS", 500)
    space = build_space(make_ask())
    everything, least = score_layouts(space, memory_cutoff=np.inf), score_layouts(space, memory_cutoff=1e-3)
    smallest = everything.memory_bytes == everything.memory_bytes.min()
    assert least.legal == everything.legal
    assert least.base.tolist() == everything.base[smallest].tolist()
    assert least.choice.tolist() == everything.choice[smallest].tolist()


def axes_of(scores):
    return sum((scores.column(name) > 1).astype(int) for name in ("tp", "cp", "pp", "ep"))


def all_equal(space, **options):
    """As `score_layouts`, but every layout takes 1.00 to 1.01 s, less with more machinery, and half the memory."""
    scores = score_layouts(space, **options)
    step_s = 1.01 - 0.001 * axes_of(scores) - 1e-5 * scores.column("pp") - 1e-6 * scores.column("vpp")
    return replace(scores, step_s=step_s, memory_bytes=np.full(step_s.size, 0.5 * scores.usable_bytes))


def test_among_equals_the_simplest_wins(make_ask, monkeypatch):
    monkeypatch.setattr("phalanx.plan.search.score_layouts", all_equal)
    request = make_ask()
    found, scores = search_layouts(request), all_equal(build_space(request))
    assert found.fastest.step_s == scores.step_s.min() < found.best.step_s <= SAME * found.fastest.step_s
    rows = np.arange(scores.base.size)
    keys = dict(zip(map(scores.layout, rows), zip(*layout_complexity(scores, rows), strict=True), strict=True))
    assert keys[found.best.layout] == min(keys.values()) < keys[found.fastest.layout]
    assert [one.idea for one in found.others if one.layout == found.fastest.layout] == ["fastest on paper"]


def test_a_simpler_layout_that_fills_the_memory_does_not_win(make_ask, monkeypatch):
    def crowded(space, **options):
        scores = all_equal(space, **options)
        share = np.where(axes_of(scores) == 0, (1 + SAFE_MEMORY) / 2, SAFE_MEMORY)
        return replace(scores, memory_bytes=share * scores.usable_bytes)

    monkeypatch.setattr("phalanx.plan.search.score_layouts", crowded)
    assert search_layouts(make_ask()).best.layout.axes == 1


def test_beyond_a_tie_the_fastest_wins_whatever_it_takes(make_ask, monkeypatch):
    def far_apart(space, **options):
        scores = all_equal(space, **options)
        return replace(scores, step_s=np.where(scores.step_s == scores.step_s.min(), 1.0 / SAME - 0.02, 1.0))

    monkeypatch.setattr("phalanx.plan.search.score_layouts", far_apart)
    found = search_layouts(make_ask())
    assert found.best.layout.axes == 3
    assert found.best.layout == found.fastest.layout


def test_stages_come_before_axes_before_schedules(make_ask):
    scores = score_layouts(build_space(make_ask()))
    rows = np.arange(scores.base.size)
    keys = list(zip(*layout_complexity(scores, rows), strict=True))
    plain = [row for row in rows[::97] if scores.layout(int(row)).axes == 0]
    piped = [row for row in rows[::97] if scores.layout(int(row)).axes == 1]
    assert max(keys[row] for row in plain) < min(keys[row] for row in piped)
    shallow, flat = (
        [row for row in rows if (scores.column("pp")[row], scores.layout(int(row)).axes) == wanted]
        for wanted in ((2, 2), (4, 1))
    )
    assert max(keys[row] for row in shallow) < min(keys[row] for row in flat)
    deep, odd = (
        [row for row in rows if scores.column("pp")[row] == stages and (scores.column("vpp")[row] > 1) == interleaved]
        for stages, interleaved in ((4, False), (2, True))
    )
    assert min(keys[row][:3] for row in odd) < min(keys[row][:3] for row in deep)


def test_a_simpler_layout_may_not_risk_the_memory():
    """BLOOM on 48 nodes: TP8 PP6 is simpler and 1.4 % slower, but would fill 94 % of the usable memory."""
    job = load(Path(__file__).parents[2] / "examples" / "bloom-176b-48x8xA100.toml").job
    request, _ = request_from_job(job, resolve_cluster(job.cluster.target))
    best = search_layouts(request).best
    assert best.memory_bytes <= 0.9 * score_layouts(build_space(request)).usable_bytes


def filled(share_of_fastest, lead, share_of_rest, monkeypatch):
    """A search where one row is `lead` times as fast as all others; memory shares as given."""

    def made(space, **options):
        scores = all_equal(space, **options)
        first = np.arange(scores.base.size) == scores.base.size // 2
        share = np.where(first, share_of_fastest, share_of_rest)
        return replace(scores, step_s=np.where(first, 1.0 / lead, 1.0), memory_bytes=share * scores.usable_bytes)

    monkeypatch.setattr("phalanx.plan.search.score_layouts", made)


def test_a_layout_with_room_beats_one_at_the_edge_of_memory_that_is_little_faster(make_ask, monkeypatch):
    filled(0.99, 1.025, 0.94, monkeypatch)
    found = search_layouts(make_ask())
    assert found.best.step_s > found.fastest.step_s
    assert found.best.memory_bytes < found.fastest.memory_bytes
    assert found.warnings == ()


def test_a_full_layout_loses_to_one_within_the_specification_however_fast_it_is(make_ask, monkeypatch):
    """MEM001 calls more than 90 % of the device an error: the plan keeps it, and tells what is faster on paper."""
    filled(0.99, 1.10, 0.80, monkeypatch)
    found = search_layouts(make_ask())
    assert found.fastest.memory_bytes > found.best.memory_bytes
    assert found.best.step_s == pytest.approx(1.10 * found.fastest.step_s)
    assert found.warnings == ()


def test_a_full_layout_fills_no_more_of_the_device_than_it_must(make_ask, monkeypatch):
    """0.99 of the usable 92 % is beyond 90 % of the device, 0.97 is not."""
    filled(0.99, 1.10, 0.97, monkeypatch)
    assert search_layouts(make_ask()).best.step_s == 1.0
    filled(0.999, 1.10, 0.985, monkeypatch)
    assert search_layouts(make_ask()).best.step_s < 1.0


def test_a_layout_that_would_fit_if_its_trace_took_more_beats_any_that_would_not(make_ask, monkeypatch):
    """0.97 of the usable memory is within 90 % of the device, and still not what a trace 6 % above its plan leaves."""
    filled(0.97, 1.50, 0.94, monkeypatch)
    found = search_layouts(make_ask())
    assert found.best.step_s == pytest.approx(1.50 * found.fastest.step_s)
    assert found.warnings == ()


@pytest.mark.parametrize(("framework", "decided"), [("phalanx", True), ("megatron-lm", False)])
def test_a_full_layout_without_a_roomy_one_says_so(make_ask, monkeypatch, framework, decided):
    """And for our own trainer, what tells whether it fits."""
    filled(0.99, 1.10, 0.96, monkeypatch)
    (warning,) = search_layouts(make_ask(parallel__framework=f'"{framework}"')).warnings
    assert "no layout here leaves 10% free: use more devices" in warning.fix
    assert (DECIDES in warning.why) is decided


def test_a_full_layout_fixed_by_hand_names_what_the_free_search_finds(make_ask, monkeypatch):
    def made(space, **options):
        scores = all_equal(space, **options)
        return replace(
            scores,
            memory_bytes=(0.99 if "tensor" in space.request.fixed else 0.8) * scores.usable_bytes + 0 * scores.step_s,
        )

    monkeypatch.setattr("phalanx.plan.search.score_layouts", made)
    assert "leaves 20.0% free and takes 1.0" in search_layouts(make_ask(parallel__tensor=2)).warnings[0].fix


def test_llama_70b_on_64_h100_leaves_room(make_ask):
    request = make_ask("llama-3-70b", cluster="8xH100:8", sequence=8192, batch=512)
    found = search_layouts(request)
    assert found.best.memory_bytes <= FULL_MEMORY * score_layouts(build_space(request)).usable_bytes or found.warnings


def test_the_choice_does_not_depend_on_chance(make_ask):
    request = make_ask(cluster="8xH100:8", sequence=8192, batch=512)
    assert search_layouts(request) == search_layouts(request)


def test_runners_up_are_distinct_and_each_is_another_idea(make_ask):
    found = search_layouts(make_ask(cluster="8xH100:4"))
    layouts = [one.layout for one in found.others]
    assert found.best.layout not in layouts
    assert len(set(layouts)) == len(layouts) >= 4
    for one in found.others:
        if "another tensor size" in one.idea:
            assert one.layout.tensor != found.best.layout.tensor
        if "another ZeRO stage" in one.idea:
            assert one.layout.zero != found.best.layout.zero
        if not one.fits:
            assert one.step_s < found.best.step_s, "what does not fit is shown only when it would have been faster"


def test_nothing_in_the_pareto_set_is_beaten_in_all_three(make_ask):
    points = [
        (one.step_s, one.step_s * one.layout.devices, one.memory_bytes)
        for one in search_layouts(make_ask(cluster="8xH100:4")).pareto
    ]
    assert len(points) >= 2
    for a in points:
        assert not [b for b in points if b != a and all(x <= y for x, y in zip(b, a, strict=True))]


def test_smaller_parts_of_the_cluster_take_part(make_ask):
    devices = {one.layout.devices for one in search_layouts(make_ask(cluster="8xH100:4")).pareto}
    assert 32 in devices
    assert devices <= {32, 16, 8}
    assert len(devices) > 1


def test_a_fixed_layout_is_kept_and_a_better_one_is_named(make_ask):
    sizes = {"parallel__tensor": 8, "parallel__pipeline": 2, "parallel__context": 1, "parallel__recompute": "full"}
    found = search_layouts(make_ask(**sizes))
    best = found.best.layout
    assert (best.tensor, best.pipeline, best.context, best.recompute) == (8, 2, 1, "full")
    (warning,) = found.warnings
    assert "tensor = 8, context = 1, pipeline = 2, recompute = full) cost" in warning.what
    assert "the free search finds TP1" in warning.fix


def test_offload_without_which_nothing_fits_is_reported(make_ask):
    found = search_layouts(make_ask("llama-3-8b", cluster="1xH100:1", batch=8))
    assert found.best.layout.offload == "optimizer"
    assert "nothing fits in device memory without keeping the optimizer in host memory" in found.warnings[0].what


def test_more_memory_never_makes_the_best_slower(make_ask):
    request = make_ask("llama-3-70b", cluster="8xH100:4")
    device = request.cluster.accelerator
    roomy = replace(
        request, cluster=replace(request.cluster, accelerator=replace(device, memory_bytes=2 * device.memory_bytes))
    )
    assert search_layouts(roomy).best.step_s <= search_layouts(request).best.step_s * SAME


def test_a_model_that_cannot_fit_says_how_many_devices_would_do(make_ask):
    with pytest.raises(UserError) as caught:
        search_layouts(make_ask("llama-3.1-405b", cluster="8xH100:1", batch=64))
    text = str(caught.value)
    assert text.startswith("8xH100-80GB-SXM:1: llama-3.1-405b does not fit: every valid layout needs at least ")
    assert "or devices with more memory" in text
    named = re.search(r"use (\d+) such devices with the optimizer in host memory \((\d+) without\)", text)
    assert named is not None
    for devices, offload in zip(named.groups(), ("optimizer", "none"), strict=True):
        sets = {"cluster": f"H100:{devices}", "batch": 64, "parallel__offload": f'"{offload}"'}
        assert search_layouts(make_ask("llama-3.1-405b", **sets)).best.fits


def test_a_network_of_ones_own_is_split_only_as_it_can_be(make_ask):
    """The trainer splits its own layers alone over tensor, context and expert ranks; stages need their author."""
    own = {"model__module": '"net.py:build"'}
    assert search_layouts(make_ask(cluster="8xH100:2", batch=4)).best.layout.data < 16, (
        "our own layers would be split here"
    )
    found = search_layouts(make_ask(cluster="8xH100:2", batch=16, **own))
    splits = {(one.layout.tensor, one.layout.context, one.layout.pipeline) for one in (found.best, *found.pareto)}
    assert splits == {(1, 1, 1)}
    by_hand = search_layouts(make_ask(cluster="8xH100:2", batch=16, parallel__pipeline=2, **own))
    assert (by_hand.best.layout.pipeline, by_hand.best.layout.tensor) == (2, 1)
