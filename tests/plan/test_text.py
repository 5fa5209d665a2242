import phalanx
from phalanx.plan import compare
from phalanx.plan.text import WIDTH, render


def test_the_page_holds_every_section_within_the_width(make_job):
    page = render(phalanx.plan(make_job("mixtral-8x7b", cluster="8xH100:8", batch=256)))
    for title in (
        "WHERE THE STEP GOES",
        "MEMORY PER DEVICE",
        "WHICH AXIS RUNS WHERE",
        "WHY NOT …",
        "NOTHING BEATS THESE",
        "FAILURES AND CHECKPOINTS",
        "BILL",
        "SEARCH",
    ):
        assert title in page
    assert max(len(line) for line in page.splitlines()) <= WIDTH
    assert "46.7B (12.9B active) parameters" in page
    assert "\x1b" not in page


def test_top_limits_the_runners_up(make_job):
    plan = phalanx.plan(make_job(cluster="8xH100:4"))
    assert "WHY NOT" not in render(plan, top=0)
    assert render(plan, top=1).count("another") < render(plan, top=6).count("another")


def test_warnings_are_on_the_page(make_job):
    page = render(phalanx.plan(make_job(parallel__framework="megatrn")))
    assert 'no efficiency profile for framework "megatrn"' in page


def test_comparison_shows_what_differs_and_by_how_much(make_job):
    job = make_job()
    plans = [phalanx.plan(job, spec) for spec in ("8xH100:2", "8xA100:2")]
    rows = {row.name: row for row in compare.compare(plans)}
    assert rows["cluster"].shown == ("8xH100-80GB-SXM:2", "8xA100-80GB-SXM:2")
    assert rows["step"].ratios[1] > 1.5
    assert "layout precision" not in rows
    text = compare.render(list(rows.values()))
    assert f"({rows['step'].ratios[1] - 1:+.1%})" in text
