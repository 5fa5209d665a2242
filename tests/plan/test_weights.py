"""Parameters per rank, held against phalanx.job.parameter_counts, which counts the same models another way."""

import numpy as np
import pytest

from phalanx.job.model import known_presets
from phalanx.job.parameter_counts import count_parameters
from phalanx.plan.case_columns import model_columns
from phalanx.plan.weights import active_weights, rank_weights, total_weights
from phalanx.validate.throughput_rows import row_columns, to_cases

ROW = {"layers": "1", "hidden": "64", "seq": "4096", "gpu": "H100", "gpus": "1", "global_batch": "64"}
# Learned positions are the one thing left out that a small model feels.
ROTARY = [name for name, preset in known_presets().items() if preset.model().positions != "learned"]


def case(preset, **changes):
    return to_cases([row_columns(ROW, 1, "none") | model_columns(known_presets()[preset].model()) | changes])


def held(preset, **changes):
    """(parameters of one rank, RankWeights) with all layers on one stage."""
    cases = case(preset, **changes)
    weights = rank_weights(cases, stage_layers=cases.layers)
    return (weights.dense + weights.experts).item(), weights


@pytest.mark.parametrize("preset", ROTARY)
def test_totals_agree_with_the_exact_count(preset):
    exact = count_parameters(known_presets()[preset].model())
    assert total_weights(case(preset)).item() == pytest.approx(exact.total, rel=0.01)
    assert active_weights(case(preset)).item() == pytest.approx(exact.active, rel=0.01)


@pytest.mark.parametrize("preset", ["llama-3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3"])
def test_one_rank_holds_everything_when_nothing_is_split(preset):
    assert held(preset)[0] == pytest.approx(total_weights(case(preset)).item())


@pytest.mark.parametrize("tp", [2.0, 8.0])
def test_tensor_ranks_together_hold_the_dense_model(tp):
    assert tp * held("llama-3-70b", tp=tp)[0] == pytest.approx(total_weights(case("llama-3-70b")).item())


def test_expert_ranks_split_experts_and_nothing_else():
    _, whole = held("deepseek-v3", dp=64.0)
    _, split = held("deepseek-v3", dp=64.0, ep=64.0)
    assert split.experts == pytest.approx(whole.experts / 64)
    assert split.dense == pytest.approx(whole.dense)
    assert (whole.expert_replicas.item(), split.expert_replicas.item()) == (64, 1)


@pytest.mark.parametrize(("tp", "ep", "dp"), [(1.0, 1.0, 8.0), (1.0, 8.0, 16.0), (2.0, 4.0, 8.0)])
def test_copies_of_experts_times_ranks_is_a_whole_number_of_models(tp, ep, dp):
    _, weights = held("mixtral-8x7b", tp=tp, ep=ep, dp=dp)
    everywhere = weights.experts.item() * tp * dp
    model = known_presets()["mixtral-8x7b"].model()
    experts = model.layers * model.experts * count_parameters(model).expert
    assert everywhere == pytest.approx(experts * weights.expert_replicas.item())


def test_stages_split_layers_and_stand_apart_from_the_tables():
    cases = case("llama-3-8b", pp=4.0)
    weights = rank_weights(cases, stage_layers=cases.layers / 4)
    table = 128256 * 4096
    assert weights.embedding == table  # the first stage holds the input table, the last the head, never both
    assert weights.dense == pytest.approx((total_weights(cases) - 2 * table) / 4 + table)


def test_a_tied_table_is_held_once_without_a_pipeline_and_twice_with():
    one, both = case("gpt2"), case("gpt2", pp=2.0)
    table = 50257 * 768
    assert rank_weights(one, stage_layers=one.layers).embedding == table
    assert rank_weights(both, stage_layers=both.layers / 2).embedding == table


def test_the_widest_layer_is_what_zero_3_gathers():
    _, dense = held("llama-3-8b")
    exact = count_parameters(known_presets()["llama-3-8b"].model())
    assert dense.layer == pytest.approx(exact.attention_per_layer + exact.dense_mlp_per_layer, rel=1e-3)
    assert np.all(held("mixtral-8x7b")[1].layer > 5 * held("mixtral-8x7b", ep=8.0, dp=8.0)[1].layer)
