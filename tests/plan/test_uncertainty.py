"""The 80 % interval: around the prediction, and wider where less is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.physics import shipped_profiles
from phalanx.plan.prediction import FEATURES, feature_widths, framework_scatter, interval_features, step_interval
from phalanx.validate.throughput_rows import predict_rows

ROW = {
    "id": "a", "model_name": "llama-3-8b", "layers": "32", "hidden": "4096", "seq": "4096", "gpu": "H100-80GB-SXM",
    "gpus": "64", "global_batch": "256", "micro_batch": "1", "recompute": "none",
}  # fmt: skip


def predicted(**changes):
    return predict_rows((ROW | {name: str(value) for name, value in changes.items()},))


def width(found, framework="default"):
    low, high = step_interval(found.cases, found.times, framework)
    return float(np.log(high / low)[0])


@settings(max_examples=50, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 8]),
    framework=st.sampled_from(["", *shipped_profiles()]),
    model=st.sampled_from(["llama-3-8b", "mixtral-8x7b"]),
    gpus=st.sampled_from([64, 4096]),
)
def test_low_step_high(tp, pp, framework, model, gpus):
    found = predicted(tp=tp, pp=pp, framework=framework, model_name=model, gpus=gpus, global_batch=4096)
    low, high = step_interval(found.cases, found.times, found.frameworks)
    assert 0 < low < found.times.step_s < high


def test_an_unknown_framework_is_wider():
    found = predicted()
    known = [width(found, name) for name in shipped_profiles() if name != "default"]
    assert width(found, "default") > 1.2 * np.median(known)
    assert width(found, "never heard of") == width(found, "default")


def test_mixtures_of_experts_are_less_certain():
    assert width(predicted(model_name="mixtral-8x7b", ep=8)) > width(predicted())


def test_exposed_traffic_is_less_certain():
    assert width(predicted(inter_link_gbps_per_gpu=10)) > width(predicted())


def test_features_are_shares():
    found = predicted(tp=8, pp=4)
    table = interval_features(found.cases, found.times)
    assert table.shape == (1, len(FEATURES))
    assert np.all(table >= 0)
    assert table[0, FEATURES.index("base")] == 1.0
    assert np.all(table <= 1.5)


def test_shipped_widths_never_turn_inside_out():
    for side in (*feature_widths(), *framework_scatter(list(shipped_profiles()))):
        assert np.all(side >= 0)
    assert all(side[FEATURES.index("base")] > 0 for side in feature_widths())


def test_one_framework_per_case():
    rows = tuple(ROW | {"id": name} for name in "ab")
    found = predict_rows(rows)
    low, high = step_interval(found.cases, found.times, ["megatron-lm", "default"])
    assert np.log(high / low)[1] > np.log(high / low)[0]


def test_the_interval_is_a_factor_not_an_offset():
    """Ten times the batch, hardly another relative width: the width is in logarithms."""
    small, large = (width(predicted(global_batch=size)) for size in (2560, 25600))
    assert small == pytest.approx(large, rel=0.3)
