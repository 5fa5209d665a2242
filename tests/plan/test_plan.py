import json
import math
import re
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.request import framework_profile

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def plan(make_job) -> Plan:
    return phalanx.plan(make_job(cluster="8xH100:4"))


def test_json_round_trip_is_exact(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert Plan.from_json(again.to_json()).to_json() == again.to_json()


def test_round_trip_without_failures_or_price(make_job):
    plan = phalanx.plan(make_job("gpt2", cluster="local", sequence=256, batch=8, fault__failures_per_host_day=0))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_numbers_agree_with_each_other(plan):
    p, job = plan.prediction, plan.job
    assert p.step_s_low < p.step_s < p.step_s_high
    assert p.tokens_per_s == pytest.approx(job.batch.global_tokens / p.step_s)
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_s, rel=0.02)
    assert sum(plan.memory.parts_bytes.values()) == pytest.approx(plan.memory.total_bytes, rel=0.01)
    assert plan.duration.steps == -(-plan.duration.tokens // job.batch.global_tokens)
    assert plan.duration.wall_s == pytest.approx(plan.duration.training_s / plan.reliability.effective_time)
    assert 0.2 < p.mfu < 0.7
    assert p.parameters == 8_030_261_248


def test_mfu_convention(make_job):
    """Llama-3-8B at 4k: 6 x 7.505B + 3 x 32 layers x 4096 x 32 heads x 256 (causal half of 2 matmuls)."""
    p = phalanx.plan(make_job()).prediction
    assert p.model_flops_per_token == pytest.approx(6 * (8_030_261_248 - 128256 * 4096) + 3 * 32 * 4096 * 32 * 256)
    assert "causal attention" in p.mfu_convention


def test_auto_tokens_are_twenty_per_parameter(make_job):
    plan = phalanx.plan(make_job("gpt2", cluster="8xH100:1", sequence=1024, batch=64, data__tokens="auto"))
    assert plan.duration.tokens == 20 * 124_439_808


def test_a_ramp_takes_longer_than_none(make_job):
    plain = phalanx.plan(make_job(cluster="8xH100:4"))
    stage = "[{until_tokens = 500_000_000, global_tokens = 131072}]"
    ramped = phalanx.plan(make_job(cluster="8xH100:4", batch__ramp=stage))
    assert ramped.duration.steps > plain.duration.steps
    assert ramped.duration.training_s > plain.duration.training_s


def test_cluster_can_be_given_as_text_or_value(make_job):
    job = make_job(cluster="8xH100:4")
    assert phalanx.plan(job, "8xH100:1").layout.devices == 8
    assert phalanx.plan(job, resolve_cluster("8xA100:1")).cluster.accelerator.name == "A100-80GB-SXM"
    assert phalanx.plan(job.job).layout.devices == 32


def test_unknown_framework_is_planned_with_the_default_and_said(make_job):
    plan = phalanx.plan(make_job(parallel__framework="megatrn-core"))
    assert any('no efficiency profile for framework "megatrn-core"' in text for text in plan.warnings)
    assert any('did you mean "megatron-core"?' in text for text in plan.warnings)


def test_offload_and_optimizer_change_the_memory(make_job):
    adam = phalanx.plan(make_job(parallel__zero=0))
    eight = phalanx.plan(make_job(parallel__zero=0, optim__name="adamw8bit"))
    assert eight.memory.parts_bytes["optimizer"] < adam.memory.parts_bytes["optimizer"] or adam.layout != eight.layout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "plan: is not JSON: "),
        ("[]", "plan: schema 'None' is not 'phalanx.plan/1'"),
        ('{"schema": "phalanx.plan/99"}', "plan: schema 'phalanx.plan/99' is not 'phalanx.plan/1'"),
        ('{"schema": "phalanx.plan/1"}', "plan: lacks version, job, cluster"),
    ],
)
def test_what_is_no_plan_is_refused(text, told):
    with pytest.raises(UserError) as caught:
        Plan.from_json(text)
    assert told in str(caught.value)


def test_a_wrong_entry_is_named(plan):
    data = json.loads(plan.to_json())
    data["layout"]["tensor"] = "eight"
    with pytest.raises(UserError) as caught:
        Plan.from_dict(data)
    assert "plan.layout.tensor: eight is not a value of type int" in str(caught.value)


def test_a_run_of_years_says_what_a_season_would_take(make_job):
    plan = phalanx.plan(make_job(cluster="8xA100:1", data__tokens="15T"))
    (warning,) = (text for text in plan.warnings if "longer than a year" in text)
    years = plan.duration.wall_s / (365.25 * 86400)
    devices = -(-8 * plan.duration.wall_s / (90 * 86400) // 8) * 8
    assert f"8xA100-80GB-SXM:1: {years:.1f} years for 15.0T tokens is longer than a year" in warning
    assert f"90.0 days would take about {devices:,.0f} such devices at the same efficiency" in warning
    assert not [text for text in phalanx.plan(make_job(cluster="8xA100:1")).warnings if "year" in text]


def test_time_carries_the_interval_of_the_step_and_of_the_sites(plan):
    p, d, r = plan.prediction, plan.duration, plan.reliability
    worst, best = r.effective_time_interval
    quicker = math.hypot(math.log(p.step_s / p.step_s_low), math.log(best / r.effective_time))
    slower = math.hypot(math.log(p.step_s_high / p.step_s), math.log(r.effective_time / worst))
    assert d.wall_s_low / d.wall_s == pytest.approx(math.exp(-quicker))
    assert d.wall_s_high / d.wall_s == pytest.approx(math.exp(slower))
    assert d.wall_s_high / d.wall_s > p.step_s_high / p.step_s
    low, middle, high = plan.bill.usd
    assert low / middle < d.wall_s_low / d.wall_s, "the cheapest price comes on top of the quickest run"
    assert high / middle > d.wall_s_high / d.wall_s


def test_the_pareto_set_walks_the_batch_ramp_too(make_job):
    ramp = "[{ until_tokens = 500_000_000, global_tokens = 65_536 }]"
    plan = phalanx.plan(make_job(cluster="8xH100:4", batch__ramp=ramp))
    (own,) = (one for one in plan.pareto if one.layout == plan.layout)
    assert own.training_s == pytest.approx(plan.duration.training_s)


def test_failures_faster_than_recovery_are_refused_with_numbers(make_job):
    with pytest.raises(UserError) as caught:
        phalanx.plan(make_job(fault__failures_per_host_day=500))
    text = str(caught.value)
    assert text.startswith("8xH100-80GB-SXM:2: the run never finishes: a failure every 86.4 s costs ")
    assert "check failures_per_host_day = 500 over 2 hosts" in text


def test_an_endless_interval_is_blamed_not_the_failures(make_job):
    with pytest.raises(UserError) as caught:
        phalanx.plan(make_job(checkpoint__interval_s=100_000_000))
    text = str(caught.value)
    assert text.startswith("--set checkpoint.interval_s=100000000: the run never finishes: a failure every ")
    assert "use checkpoint.interval_s = " in text


@pytest.mark.parametrize("rate", [0, 0.004])
def test_a_tiny_interval_is_named_as_the_cause(make_job, rate):
    plan = phalanx.plan(make_job(checkpoint__interval_s=0.1, fault__failures_per_host_day=rate))
    (warning,) = (text for text in plan.warnings if "of the time is spent training" in text)
    assert warning.startswith("--set checkpoint.interval_s=0.1: only ")
    assert "checkpoint.interval_s = 0.1, training waits " in warning
    assert (
        "or leave it out: then 100% of the time is spent training" in warning
        or "leave checkpoint.interval_s out" in warning
    )
    assert "detect" not in warning


def test_a_path_is_loaded(make_job):
    job = make_job()
    assert phalanx.plan(str(job.path)).layout == phalanx.plan(job.path).layout == phalanx.plan(job).layout


def test_what_is_no_job_and_no_cluster_is_refused(make_job):
    with pytest.raises(UserError) as caught:
        phalanx.plan(5)
    assert str(caught.value) == ("phalanx.plan: job = '5' is of type int\n  pass the result of phalanx.load, or a path")
    for call in (lambda: phalanx.cluster(5), lambda: phalanx.plan(make_job(), 5)):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).startswith("cluster: '5' is of type int, not a text\n  write 8xH100:16")


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("megatron-lm", "megatron-core"),
        ("Megatron", "megatron-core"),
        ("bridge", "megatron-bridge"),
        ("megatron-bridge", "megatron-bridge"),
        ("megatron-lm-2021", "megatron-lm"),
        ("megatron-lm-2024", "megatron-core"),
        ("megatron-deepspeed", "megatron-deepspeed"),
    ],
)
def test_a_framework_without_a_year_is_the_current_one(name, profile):
    assert framework_profile(name, "job.toml:1") == (profile, ())


def test_an_unknown_framework_lists_the_names():
    _, (problem,) = framework_profile("megatrn", "job.toml:1")
    assert 'did you mean "megatron"?' in problem.fix
    assert "megatron-core" in problem.fix
    assert "megatron-lm-2021" in problem.fix


def test_the_settings_in_the_bloom_example_price_what_was_published():
    path = EXAMPLES / "bloom-176b-48x8xA100.toml"
    comments = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    plan = phalanx.plan(phalanx.load(path, overrides=re.findall(r"--set (\S+)", comments)))
    layout = plan.layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.micro_batch, layout.zero) == (4, 12, 8, 2, 1)
    assert layout.recompute == "full"
    assert plan.prediction.step_s_high > 103, "the fastest published step"
    assert f"{plan.prediction.step_s:.1f} s" in comments
