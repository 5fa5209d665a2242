"""Failure rates of published sites, and the range for a site that is not among them."""

import math

import pytest

from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.failures import (
    COVERAGE,
    failures_per_host_day,
    host_failure_spread,
    known_rate,
    middle_range,
    rate_source,
    recovery_spread,
    sample_sites,
    site_figures,
)
from phalanx.sim.months.causes import usual_mix

H100 = find_accelerator("H100")


@pytest.mark.parametrize(
    ("name", "devices", "rate", "source"),
    [
        ("H100", 8, 419 / 54 / 2048, "Llama 3 405B"),
        ("B200", 8, 419 / 54 / 2048, "Llama 3 405B"),
        ("A100", 8, 6.5e-3, "Meta RSC-1"),
        ("v5p", 4, 8e-4, "TPU v4 fleet"),
        ("cpu", 4, 151 / 54 / 2048, "Llama 3 405B without its GPUs"),
    ],
)
def test_the_usual_rate_is_one_site_and_lies_in_the_range(name, devices, rate, source):
    device = find_accelerator(name)
    assert failures_per_host_day(device, devices) == pytest.approx(rate)
    assert rate_source(device).startswith(f"{source} (")
    low, high = host_failure_spread(device, devices).interval
    assert low < rate < high


def test_a_site_left_out_is_covered_about_as_often_as_the_range_says():
    covered = []
    for one in site_figures():
        if one.quantity == "recovery_s":
            low, high = recovery_spread(without=[one.site]).interval
        elif one.kind == "gpu":
            low, high = host_failure_spread(H100, 1, without=[one.site]).interval
        else:
            continue
        covered.append(low <= one.figure <= high)
    assert COVERAGE - 0.1 <= sum(covered) / len(covered) <= COVERAGE + 0.1


def test_kinds_with_one_figure_have_a_wider_range():
    def factor(name):
        low, high = host_failure_spread(find_accelerator(name), 4).interval
        return high / low

    assert factor("v5p") == pytest.approx(factor("cpu"))
    assert factor("v5p") > 1.5 * factor("H100")


def test_an_own_figure_does_not_spread():
    assert known_rate(0.01).interval == (0.01, 0.01)
    assert {rate for rate, _ in sample_sites(known_rate(0.01), recovery_spread(), count=7)} == {0.01}


def test_sampled_sites_fill_both_spreads():
    rates, recoveries = host_failure_spread(H100, 8), recovery_spread()
    sampled = sample_sites(rates, recoveries, count=200)
    for place, spread in enumerate((rates, recoveries)):
        found = middle_range([one[place] for one in sampled])
        assert found == pytest.approx(spread.interval, rel=0.1)
    logs = [[math.log(one[place]) for one in sampled] for place in (0, 1)]
    mean = [sum(one) / len(one) for one in logs]
    product = sum((a - mean[0]) * (b - mean[1]) for a, b in zip(*logs, strict=True)) / len(sampled)
    assert abs(product) < 0.05 * rates.log_spread * recoveries.log_spread


def test_the_mix_of_causes_adds_up_to_the_same_run():
    total = next(one for one in site_figures() if one.site == "Llama 3 405B").value
    assert usual_mix()[0].source.split()[2] == f"{total:g}"
