import math

import pytest

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.run_sections import Checkpoint, FaultSettings
from phalanx.plan.reliability import (
    checkpoint_overhead,
    daly_interval,
    effective_time,
    exact_effective_time,
    predict_reliability,
    spare_hosts,
)


def predict(spec="8xH100:2048", state_bytes=5.7e12, checkpoint=None, step_s=5.0, **fault):
    cluster = resolve_cluster(spec)
    return predict_reliability(
        cluster,
        checkpoint=checkpoint or Checkpoint(),
        fault=FaultSettings(**fault),
        state_bytes=state_bytes,
        devices=cluster.devices,
        step_s=step_s,
    )


def test_llama_3_interruptions():
    """419 unexpected interruptions in 54 days on 16,384 H100 (arXiv 2407.21783, table 5)."""
    assert 54 * predict().failures_per_day == pytest.approx(419, rel=0.10)


def test_llama_3_effective_time():
    """The same paper reports more than 90 % effective training time."""
    assert 0.90 < predict().effective_time < 0.99


@pytest.mark.parametrize(("hosts", "expected"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_byterobust_spares(hosts, expected):
    assert spare_hosts(hosts, 1.25e-3) == expected


def test_spares_at_the_ends():
    assert spare_hosts(100, 0.0) == 0
    assert spare_hosts(100, 1.0) == 100
    assert spare_hosts(100_000, 0.01) > 1000


@pytest.mark.parametrize(
    ("gpus", "lost_s", "ettr"),
    [(512, 600, 0.991), (4096, 600, 0.966), (16384, 600, 0.906), (16384, 90, 0.951), (100_000, 90, 0.854)],
)
def test_effective_time_table(gpus, lost_s, ettr):
    mtbf_s = 86400 / (gpus / 8 * 3.8e-3)
    assert effective_time(10.0, daly_interval(10.0, mtbf_s), mtbf_s, lost_s=lost_s) == pytest.approx(ettr, abs=0.002)


def test_daly_minimises_the_overhead():
    best = daly_interval(10.0, 11_000.0)
    assert checkpoint_overhead(10.0, best, 11_000.0) < min(
        checkpoint_overhead(10.0, best * f, 11_000.0) for f in (0.8, 1.25)
    )


def test_being_off_costs_as_the_theory_says():
    costs = dict(predict(state_bytes=1e9).interval_costs)
    assert costs[2.0] / costs[1.0] == pytest.approx(1.25, rel=0.02)
    assert costs[4.0] / costs[1.0] == pytest.approx(2.125, rel=0.03)


def test_synchronous_checkpoints_block_until_they_are_on_disk():
    sync, background = predict(checkpoint=Checkpoint(asynchronous=False)), predict()
    assert sync.blocking_s == sync.persist_s > background.blocking_s
    assert sync.effective_time < background.effective_time


def test_ranks_on_the_cores_of_one_machine_wait_less_for_a_save_than_a_cluster_does():
    # 1 GB on two CPU ranks blocked training for 0.11 s (benchmarks/2026-11-15-checkpoint-speed.md).
    assert predict("local-cpu:2", state_bytes=1e9).blocking_s == pytest.approx(0.11, rel=0.2)
    assert predict("8xH100:64", state_bytes=1e9).blocking_s == pytest.approx(0.5, rel=0.01)


def test_an_interval_by_hand_is_kept_beside_the_optimum():
    by_hand = predict(checkpoint=Checkpoint(interval_s=3600.0))
    assert by_hand.interval_s == 3600.0 > by_hand.optimal_interval_s
    assert by_hand.effective_time < predict().effective_time


def test_the_next_checkpoint_waits_for_the_last_one():
    slow = predict("8xH100:16", state_bytes=1e15)
    assert slow.optimal_interval_s >= slow.persist_s


def test_a_job_may_bring_its_own_rate():
    assert predict(failures_per_host_day=0.01).failures_per_day == pytest.approx(20.48)
    never = predict(failures_per_host_day=0.0)
    assert never.effective_time == 1.0
    assert math.isinf(never.mtbf_s)
    assert never.spares == 0


def test_a_run_that_never_gets_on_is_zero_not_negative():
    assert predict(failures_per_host_day=10.0).effective_time == 0.0


def test_checkpoints_cost_time_also_without_failures():
    assert effective_time(1.0, 1.0, math.inf, lost_s=100.0) == 0.5
    assert effective_time(1.0, math.inf, math.inf, lost_s=100.0) == 1.0


def test_copies_in_memory_cost_at_most_a_hundredth():
    """25 GB/s over the bus: a rank with 6 GB is held up for 0.24 s, which is 1 % of 60 steps of 0.4 s."""
    big = {"spec": "8xH100:1", "state_bytes": 48e9, "step_s": 0.4}
    assert predict(**big).memory_every == 60
    assert predict(spec="8xH100:1", state_bytes=48e9, step_s=30.0).memory_every == 1
    assert predict(**big, checkpoint=Checkpoint(memory_every=7)).memory_every == 7
    assert predict(**big, checkpoint=Checkpoint(memory_every=0)).memory_every == 0


def test_the_range_of_sites_holds_the_expected_time_and_own_figures_have_none():
    usual = predict()
    low, high = usual.effective_time_interval
    assert low < 0.9 < usual.effective_time < high
    assert usual.rate_source == "Llama 3 405B (arXiv 2407.21783 Table 5)"
    assert (
        usual.failures_per_host_day_interval[0] < usual.failures_per_host_day < usual.failures_per_host_day_interval[1]
    )
    own_rate = predict(failures_per_host_day=usual.failures_per_host_day)
    assert own_rate.failures_per_host_day_interval is None
    own_low, own_high = own_rate.effective_time_interval  # recovery times are still anybody's
    assert low < own_low < own_rate.effective_time < own_high
    own = predict(failures_per_host_day=0.004, detect_s=20.0)
    assert (own.recovery_s_interval, own.effective_time_interval) == (None, None)
    assert own.rate_source == "fault.failures_per_host_day of the job"


def test_sites_beyond_hope_still_have_a_range():
    low, high = predict("8xH100:16384").effective_time_interval
    assert 0 <= low < 0.1 < 0.8 < high < 1


def test_the_exact_expectation_agrees_with_the_formula_where_failures_are_rare():
    mtbf_s = 1e6
    interval_s = daly_interval(10.0, mtbf_s)
    exact = exact_effective_time(10.0, interval_s, mtbf_s, lost_s=300.0)
    assert exact == pytest.approx(effective_time(10.0, interval_s, mtbf_s, lost_s=300.0), abs=1e-4)
    assert exact_effective_time(10.0, 1e6, 100.0, lost_s=300.0) == 0.0
