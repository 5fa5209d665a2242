from dataclasses import replace

import phalanx
from phalanx.hardware.cluster import resolve_cluster
from phalanx.plan import text
from phalanx.plan.reasons import explain_alternative
from phalanx.plan.search import Candidate
from phalanx.plan.text import WIDTH, format_amount, plan_text


def test_the_page_holds_every_section_within_the_width(make_job):
    page = plan_text(phalanx.plan(make_job("mixtral-8x7b", cluster="8xH100:8", batch=256)))
    for title in (
        "STEP TIME",
        "MEMORY PER DEVICE",
        "COMMUNICATION BY AXIS",
        "ALTERNATIVES",
        "PARETO FRONT",
        "FAILURES AND CHECKPOINTS",
        "COST AND ENERGY",
        "SEARCH",
    ):
        assert title in page
    assert max(len(line) for line in page.splitlines()) <= WIDTH
    assert "46.7B (12.9B active) parameters" in page
    assert "\x1b" not in page


def test_top_limits_the_runners_up(make_job):
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    assert "WHY NOT" not in plan_text(plan, top=0)
    assert plan_text(plan, top=1).count("another") < plan_text(plan, top=6).count("another")


def test_warnings_are_on_the_page(make_job):
    page = plan_text(phalanx.plan(make_job(parallel__framework="megatrn")))
    assert 'no efficiency profile for framework "megatrn"' in page


def test_comparison_shows_what_differs_and_by_how_much(make_job):
    job = make_job()
    plans = [phalanx.plan(job, spec) for spec in ("8xH100:2", "8xA100:2")]
    rows = {row.name: row for row in text.compare_plans(plans)}
    assert rows["cluster"].shown == ("8xH100-80GB-SXM:2", "8xA100-80GB-SXM:2")
    assert rows["step"].ratios[1] > 1.5
    assert "layout precision" not in rows
    page = text.comparison_text(list(rows.values()))
    assert f"({rows['step'].ratios[1] - 1:+.1%})" in page


def test_the_faster_layout_that_was_passed_over_is_named(make_job):
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    rival = next(one.layout for one in plan.alternatives if one.layout != plan.layout)
    for lead, said in ((0.0123, "is 1.2% faster on paper"), (0.0001, "is as fast on paper")):
        found = replace(
            plan.search,
            fastest=rival,
            fastest_step_s=plan.prediction.step_s / (1 + lead),
            fastest_memory_bytes=plan.memory.total_bytes,
        )
        third = plan_text(replace(plan, search=found), top=0).splitlines()[2]
        assert third == f"{rival.short} {said}; chose the simpler layout"
    none = replace(plan.search, fastest=plan.layout, fastest_step_s=plan.prediction.step_s)
    assert "on paper" not in plan_text(replace(plan, search=none), top=0)


def test_why_a_faster_layout_was_passed_over(make_job, make_ask):
    """Held against a slower layout, the best one is faster; the page says why that alone does not decide."""
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    slower = next(one.layout for one in plan.alternatives if one.fits and one.slower > 0)
    best = Candidate(layout=plan.layout, step_s=plan.prediction.step_s, memory_bytes=1e9, fits=True, idea="fastest")
    told = explain_alternative(make_ask(cluster="8xH100:4"), slower, best)
    page = " ".join(plan_text(replace(plan, alternatives=(told,))).split())
    assert "too close to call (under 2%), and the chosen layout is simpler" in page


def test_offloaded_activations_are_named(make_job):
    job = make_job(cluster="8xA100:1", parallel__offload="activations", parallel__mode="fixed", parallel__zero=3)
    plan = phalanx.plan(job)
    assert plan.layout.offload == "activations"
    assert "host overhead and offload" in plan_text(plan)
    assert "host overhead and offload" not in plan_text(phalanx.plan(make_job()))


def test_automatic_tokens_are_explained(make_job):
    plan = phalanx.plan(make_job("gpt2", cluster="8xH100:1", sequence=1024, batch=64, data__tokens="auto"))
    page = " ".join(plan_text(plan).split())
    assert "data.tokens = auto: 20 per parameter (Hoffmann et al. 2022) are 2,488,796,160 tokens, 37,977 steps" in page
    assert "Hoffmann" not in plan_text(phalanx.plan(make_job("gpt2", cluster="8xH100:1", sequence=1024, batch=64)))


def test_hsdp_has_two_rows_of_data_traffic(make_job):
    job = make_job(cluster="8xH100:4", parallel__zero=3, parallel__shard=8, parallel__mode="fixed", parallel__data=32)
    rows = [line.split() for line in plan_text(phalanx.plan(job)).splitlines()]
    assert ["shard", "8", "1", "NVLink4", "scatter+gather", "Ring"] in [row[:6] for row in rows]
    assert ["replica", "4", "8", "NIC", "all-reduce"] in [row[:5] for row in rows]


def test_a_faster_layout_passed_over_for_its_memory_says_so(make_job):
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    rival = next(one.layout for one in plan.alternatives if one.layout != plan.layout)
    memory = replace(plan.memory, total_bytes=0.8 * plan.memory.usable_bytes)
    found = replace(
        plan.search,
        fastest=rival,
        fastest_step_s=plan.prediction.step_s / 1.025,
        fastest_memory_bytes=0.99 * plan.memory.usable_bytes,
    )
    page = " ".join(plan_text(replace(plan, search=found, memory=memory), top=0).split())
    assert f"{rival.short} is 2.5% faster on paper but fills 99.0% of the memory; chose one with headroom" in page


def test_the_headline_and_the_bill_carry_the_interval(make_job):
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    duration = replace(plan.duration, wall_s=58 * 86400.0, wall_s_low=45 * 86400.0, wall_s_high=176 * 86400.0)
    page = plan_text(replace(plan, duration=duration), top=0)
    assert "time    58.0 days (45.0 to 176) for 1.00B tokens" in page
    assert "over 58.0 days (80%: 45.0 days to 176 days), failures included" in page
    assert "lowest price and fastest run to highest price and slowest" in " ".join(page.split())
    low, high = plan.bill.kwh_interval
    assert f" kWh ({format_amount(low)} to {format_amount(high)}): " in page


def test_unknown_power_is_said_not_counted_as_none(make_job):
    cluster = resolve_cluster("8xH100:2")
    plan = phalanx.plan(make_job(), replace(cluster, accelerator=replace(cluster.accelerator, tdp_w=0.0)))
    page = plan_text(plan)
    assert "energy and carbon: unknown: set power_w_per_device in a cluster file" in page
    assert "kWh" not in page
    assert plan.to_dict()["bill"]["kwh"] is None
    assert text.compare_plans([plan, plan])[-1].name == "effective training time"


def test_columns_of_a_comparison_are_headed_by_their_files(make_job):
    plan = phalanx.plan(make_job())
    head, *_ = text.comparison_text(text.compare_plans([plan, plan], ["a.toml", "b.toml"])).splitlines()
    assert head.split() == ["file", "a.toml", "b.toml"]


def test_a_plan_prints_as_its_page_and_shows_as_one_line_or_html(make_job):
    plan = phalanx.plan(make_job(), cluster="8xH100:2", allow_unfinishable=False, calibration=None)
    assert str(plan) == plan_text(plan)
    assert repr(plan).startswith("<Plan test on 8xH100-80GB-SXM:2: ")
    assert "\n" not in repr(plan)
    named = replace(plan, job=replace(plan.job, name="<b>&"))
    page = named._repr_html_()
    assert "&lt;b&gt;&amp;: " in page
    assert "<b>&" not in page
    for words in ("<svg", "Step time", "headroom", "Pareto front", "MFU"):
        assert words in page
    assert page.count("<div") == page.count("</div>")
