import re
from dataclasses import replace

import pytest

from phalanx.plan.reasons import PARTS, _why_not_taken, crossing_point, explain_alternative, slowest_part
from phalanx.plan.score import price_layouts
from phalanx.plan.search import search_layouts


def test_the_parts_are_the_step(make_ask):
    request = make_ask("mixtral-8x7b", cluster="8xH100:4")
    found = search_layouts(request)
    for layout in (found.best.layout, *(one.layout for one in found.others)):
        _, times, _ = price_layouts(request, [layout])
        assert sum(float(getattr(times, name)[0]) for name in PARTS) == pytest.approx(float(times.step_s[0]), rel=0.02)


def test_every_runner_up_says_why_and_what_would_help(make_ask):
    request = make_ask(cluster="8xH100:4")
    found = search_layouts(request)
    for other in found.others:
        told = explain_alternative(request, found.best.layout, other)
        assert told.reason
        assert told.wins_if
        assert told.fits == other.fits
        if not told.fits:
            assert re.fullmatch(r"does not fit: .+ GB of .+ GB", told.reason)
            assert re.fullmatch(r"wins with .+ [GM]B more memory per device", told.wins_if)


def test_the_crossing_is_where_the_two_are_equal(make_ask):
    """Turning the NIC to the printed value makes the runner-up as fast as the best, and not before."""
    request = make_ask(cluster="8xH100:8", batch=64)
    found = search_layouts(request)
    best = found.best.layout
    checked = 0
    for other in found.others:
        if other.step_s <= found.best.step_s:
            continue  # ahead already: passed over for being less simple, and no crossing is printed
        match = re.fullmatch(
            r"wins with a NIC ([≤≥]) ([\d,.]+) Gb/s per device", crossing_point(request, best, other.layout)
        )
        if match is None or not other.fits:
            continue
        value = float(match[2].replace(",", "")) * 1e9 / 8
        further = 1.02 if match[1] == "≥" else 1 / 1.02
        for factor, wins in ((further, True), (1 / further, False)):
            turned = replace(request, cluster=replace(request.cluster, nic_bytes_per_s=value * factor))
            _, times, _ = price_layouts(turned, [best, other.layout])
            assert (times.step_s[1] <= times.step_s[0]) == wins
        checked += 1
    assert checked


def test_a_faster_layout_the_job_rules_out_says_which_setting_does(make_ask):
    request = make_ask(cluster="8xH100:4", parallel__tensor=8, batch__micro=2)
    found = search_layouts(request)
    told = [explain_alternative(request, found.best.layout, other) for other in found.others]
    faster = [one for one in told if one.fits and one.slower < 0]
    assert faster
    assert any("the job fixes tensor = 8" in one.reason for one in faster)
    assert all(one.wins_if == "wins if the planner may choose it" for one in faster if "fixes" in one.reason)


def test_the_head_is_compared_together_with_the_other_matrix_products(make_ask):
    """Which stage is the busiest moves time between the two names, not between the layouts."""
    request = make_ask(cluster="8xH100:4")
    layout = search_layouts(request).best.layout
    _, times, _ = price_layouts(request, [layout, layout])
    matmul, head = times.matmul_s.copy(), times.head_s.copy()
    matmul[0], head[0] = matmul[0] + head[0], 0.0
    moved = replace(times, matmul_s=matmul, head_s=head)
    assert slowest_part(moved, (layout, layout)) == "as fast, but more complex"
    matmul[1] += 1.0
    assert slowest_part(replace(moved, matmul_s=matmul), (layout, layout)).startswith("matrix products and head ")


def test_a_faster_layout_at_the_edge_of_memory_says_that_this_is_why(make_ask):
    request = make_ask(cluster="8xH100:4")
    reason, _ = _why_not_taken(request, search_layouts(request).best.layout, (0.8, 0.99))
    assert reason == "fills 99.0% of the usable memory, too close to the limit"
