import pytest

from phalanx.plan.mapping import mapping
from phalanx.plan.score import price
from phalanx.plan.search import search


def axes(ask):
    layout = search(ask).best.layout
    return layout, {use.axis: use for use in mapping(ask, layout)}


def test_tensor_groups_stay_on_the_fast_links(make_ask):
    layout, found = axes(make_ask(cluster="8xH100:4", parallel__tensor=8, parallel__pipeline=2, parallel__context=1))
    assert found["tensor"].tier == "NVLink4"
    assert found["tensor"].stride == 1
    assert found["data"].tier == "NIC"
    assert found["data"].stride == 8
    assert found["pipeline"].stride == 8 * layout.data


def test_groups_that_span_domains_say_how_many_ranks_each_holds(make_ask):
    _, found = axes(make_ask(cluster="8xH100:4", parallel__tensor=2, parallel__pipeline=1, parallel__context=1))
    assert found["data"].tier == "NVLink4×4+NIC"


def test_axes_of_one_rank_are_left_out(make_ask):
    _, found = axes(make_ask(parallel__tensor=1, parallel__pipeline=1, parallel__context=1))
    assert set(found) == {"data"}


def test_gradient_bytes_of_plain_data_parallelism(make_ask):
    ask = make_ask("gpt2", cluster="8xH100:1", sequence=1024, batch=64, parallel__mode="fixed")
    layout, found = axes(ask)
    gradients = 124e6 * float(ask.profile.gradient_bytes)
    assert layout.zero == 0
    assert found["data"].operation == "all-reduce"
    assert found["data"].bytes_per_step == pytest.approx(2 * 7 / 8 * gradients, rel=0.02)


def test_the_all_reduce_algorithm_is_chosen_by_time_and_the_next_best_is_told(make_ask):
    for spec in ("8xH100:1", "8xH100:16"):
        _, found = axes(make_ask("gpt2", cluster=spec, sequence=1024, batch=1024, parallel__mode="fixed"))
        assert found["data"].algorithm in ("ring", "tree", "hierarchical")
        name, slower = found["data"].next_best.split()
        assert name != found["data"].algorithm
        assert float(slower.rstrip("x")) >= 1.0


def test_gathers_run_on_rings(make_ask):
    _, found = axes(make_ask(parallel__zero=3))
    assert found["data"].operation == "reduce-scatter + all-gather"
    assert found["data"].algorithm == "ring"


def test_what_shows_is_what_the_step_counts(make_ask):
    ask = make_ask("mixtral-8x7b", cluster="8xH100:4", parallel__expert=8, parallel__pipeline=2)
    layout, found = axes(ask)
    _, times, _ = price(ask, [layout])
    assert found["expert"].shown_s == pytest.approx(float(times.expert_s[0]))
    assert found["pipeline"].shown_s == pytest.approx(float(times.pipeline_send_s[0]))
    for use in found.values():
        assert 0.0 <= use.exposed <= 1.0
        assert use.bytes_per_step > 0
