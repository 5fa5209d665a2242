"""Five scalars from a few measured steps: recovered where the measurements speak, left alone where they do not."""

from dataclasses import fields

import numpy as np
import pytest

from phalanx.plan.calibrate import GROUPS, Calibration, apply_calibration, fit_calibration
from phalanx.plan.step import StepTimes
from phalanx.validate.throughput_rows import predict_rows
from phalanx.validate.throughput_score import take_rows

ROW = {
    "model_name": "llama-3-8b", "layers": "32", "hidden": "4096", "seq": "4096", "gpu": "H100-80GB-SXM",
    "gpus": "64", "global_batch": "256", "micro_batch": "1", "recompute": "none",
}  # fmt: skip
LAYOUTS = (
    {"tp": 1, "dp": 64}, {"tp": 8, "dp": 8}, {"tp": 2, "pp": 4, "dp": 8}, {"tp": 4, "dp": 16, "recompute": "full"},
    {"tp": 2, "dp": 32, "zero_stage": 3}, {"pp": 8, "dp": 8},
)  # fmt: skip
FEW = np.arange(len(LAYOUTS)) < 3


@pytest.fixture
def times():
    rows = tuple(
        ROW | {"id": str(at)} | {name: str(value) for name, value in one.items()} for at, one in enumerate(LAYOUTS)
    )
    return predict_rows(rows).times


def errors(times, found, truth):
    return np.abs(apply_calibration(times, found).step_s / truth - 1.0)


def test_at_most_five_scalars():
    assert {field.name for field in fields(Calibration)} == set(GROUPS)
    assert len(GROUPS) <= 5


def test_every_part_but_the_bubble_has_one_scalar():
    grouped = [part for parts in GROUPS.values() for part in parts]
    none = {"step_s", "bubble_s", "gradient_total_s", "micro_s"}
    none |= {"device_s", "host_s", "launch_sharpness", "busy_s", "moving_s", "shard_sharpness"}
    every = {field.name for field in fields(StepTimes)} - none
    assert sorted(grouped) == sorted(every)


def test_ones_change_nothing(times):
    same = apply_calibration(times, Calibration())
    for field in fields(StepTimes):
        assert getattr(same, field.name) == pytest.approx(getattr(times, field.name)), field.name


def test_calibrated_parts_still_add_up(times):
    changed = apply_calibration(times, Calibration(compute=1.4, host=0.5, outer_traffic=3.0))
    parts = [part for group in GROUPS.values() for part in group]
    assert sum(getattr(changed, part) for part in parts) + changed.bubble_s == pytest.approx(changed.step_s)


def test_recompute_costs_nothing_beside_a_slow_host_and_gains_nothing_either():
    """A tiny model on few devices, whose step the host sets: before, a faster device made recompute a gain."""
    small = ROW | {"layers": "24", "hidden": "512", "heads": "8", "seq": "256", "gpus": "1", "global_batch": "8"}
    small |= {"tp": "1", "dp": "1", "model_name": "", "ffn": "2048", "vocab": "8192"}
    none, full = ({**small, "id": kind, "recompute": kind} for kind in ("none", "selective"))
    times = predict_rows((none, full)).times
    assert (times.launch_s > times.matmul_s).all(), "the host sets the step"
    for scalars in (Calibration(compute=0.5), Calibration(memory=0.5), Calibration(compute=0.2, memory=0.2, host=3.0)):
        plain, again = apply_calibration(times, scalars).step_s
        assert again >= plain, scalars


def test_a_faster_device_does_not_shorten_a_step_that_the_host_or_the_network_sets():
    small = ROW | {"layers": "24", "hidden": "512", "heads": "8", "seq": "256", "gpus": "1", "global_batch": "8"}
    small |= {"tp": "1", "dp": "1", "model_name": "", "ffn": "2048", "vocab": "512"}
    host = predict_rows((small | {"id": "host"},)).times
    quick = apply_calibration(host, Calibration(compute=0.1))
    assert float(quick.step_s[0] / host.step_s[0]) > 0.97
    spread = ROW | {"id": "network", "seq": "256", "global_batch": "64", "zero_stage": "3", "dp": "64", "tp": "1"}
    network = predict_rows((spread,)).times
    assert float(network.shard_s[0]) > float(network.matmul_s[0]), "ZeRO-3 traffic sets the step"
    quick = apply_calibration(network, Calibration(compute=0.1))
    gained = float((network.step_s - quick.step_s)[0])
    assert gained < 0.5 * float(0.9 * (network.matmul_s + network.attention_s + network.head_s)[0])


def test_no_measurements_leave_ones(times):
    nothing = take_rows(times, np.zeros(len(LAYOUTS), dtype=bool))
    assert fit_calibration(nothing, np.array([])) == Calibration()
    assert fit_calibration(times, np.full(len(LAYOUTS), np.nan)) == Calibration()


@pytest.mark.parametrize("bad", [0.0, -3.0, np.inf, np.nan])
def test_measurements_that_are_none_are_left_out(times, bad):
    truth = times.step_s * 1.2
    spoilt = truth.copy()
    spoilt[0] = bad
    without = np.arange(len(LAYOUTS)) > 0
    expected = fit_calibration(take_rows(times, without), truth[without])
    assert fit_calibration(times, spoilt).compute == pytest.approx(expected.compute, rel=1e-3)


@pytest.mark.parametrize("slower", [0.8, 1.3])
def test_a_slower_device_is_recovered_from_three_steps(times, slower):
    truth = apply_calibration(times, Calibration(compute=slower)).step_s
    found = fit_calibration(take_rows(times, FEW), truth[FEW])
    # The priors hold compute closer than the host, so the host takes a part of the blame; unseen steps come out well.
    assert found.compute == pytest.approx(slower, rel=0.1)
    assert np.mean(errors(times, found, truth)[~FEW]) < np.mean(errors(times, Calibration(), truth)[~FEW]) / 2


def test_a_slower_network_is_recovered_on_the_layouts_that_use_it(times):
    truth = apply_calibration(times, Calibration(inner_traffic=2.0)).step_s
    found = fit_calibration(take_rows(times, FEW), truth[FEW])
    assert found.inner_traffic > 1.5
    assert np.max(errors(times, found, truth)) < np.max(errors(times, Calibration(), truth)) / 2


def test_exact_predictions_are_left_as_they_are(times):
    found = fit_calibration(times, times.step_s)
    for name in GROUPS:
        assert getattr(found, name) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_one_absurd_measurement_does_not_ruin_the_rest(times, factor):
    spoilt = times.step_s.copy()
    spoilt[-1] *= factor
    found = fit_calibration(times, spoilt)
    assert np.max(errors(times, found, times.step_s)[:-1]) < 0.15


def test_scalars_stay_positive_and_bounded(times):
    found = fit_calibration(take_rows(times, FEW), np.array([1e-6, 1e6, 1.0]))
    for name in GROUPS:
        assert 0.01 < getattr(found, name) < 100.0


def test_noisy_measurements_move_less(times):
    truth = times.step_s * 1.3
    sure, unsure = (fit_calibration(take_rows(times, FEW), truth[FEW], noise) for noise in (0.03, 0.5))
    assert 1.0 < unsure.compute < sure.compute
