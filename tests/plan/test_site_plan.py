"""Plans on a cluster of sites: typed, exact as JSON, on every page; and plans of one cluster as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx
from phalanx.plan.plan import Plan
from phalanx.plan.slow_modes import hiding_delay
from phalanx.rules.plan_consistency import find_contradictions

SITE = 'name = "{name}"\ndevices = "{devices}"\nup_mbit_s = {up}\ndown_mbit_s = 1000\nlatency_ms = 40\n'


@pytest.fixture
def sites(tmp_path: Path):
    def write(*devices: str, up: float = 300) -> Path:
        path = tmp_path / "sites.toml"
        blocks = (SITE.format(name=f"s{index}", devices=one, up=up) for index, one in enumerate(devices))
        path.write_text('name = "cities"\n' + "".join(f"[[site]]\n{block}" for block in blocks))
        return path

    return write


def plan_on(make_job, cluster: Path, **sync) -> Plan:
    sets = {f"sync__{name}": value for name, value in sync.items()}
    return phalanx.plan(make_job(batch=128, **sets), cluster)


def test_the_plan_holds_the_sites_and_survives_json(make_job, sites) -> None:
    plan = plan_on(make_job, sites("8xH100:1", "8xH100:1"), mode="diloco", codec="int8", inner_steps=100)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.sites is not None
    row = plan.sites.row
    assert (row.prediction.mode, row.prediction.codec, row.prediction.inner_steps) == ("diloco", "int8", 100)
    assert row.steps == plan.duration.steps
    assert row.warm_up_steps == round(0.2 * row.steps)
    assert row.run_utilisation < row.prediction.utilisation
    assert list(find_contradictions(plan)) == []


def test_pages_show_the_tables(make_job, sites) -> None:
    plan = plan_on(make_job, sites("8xH100:1", "8xA100:1"), mode="diloco", codec="int8", inner_steps=100)
    page = str(plan)
    assert "16 devices at 2 sites" in page
    assert "> diloco" in page
    assert "smallest H for 90%" in page
    assert "benchmarks/2026-11-19-slow-links.md" in page  # where the expected penalty comes from
    assert max(len(line) for line in page.splitlines()) <= 100
    assert "<h5>Sites</h5>" in plan._repr_html_()


def test_a_peer_on_its_own_cluster_is_planned_with_its_share_of_the_batch(make_job) -> None:
    """What its report compares its steps with."""
    whole, share = phalanx.plan(make_job(batch=128)), phalanx.plan(make_job(batch=64))
    peer = phalanx.plan(make_job(batch=128, sync__mode="diloco", sync__peers=2))
    assert peer.prediction.step_s == share.prediction.step_s
    assert peer.duration.steps == whole.duration.steps
    assert peer.duration.training_s == pytest.approx(peer.duration.steps * share.prediction.step_s, rel=0.01)
    assert peer.job.batch == whole.job.batch
    assert Plan.from_json(peer.to_json()) == peer
    assert list(find_contradictions(peer)) == []


def test_a_plan_of_one_cluster_says_nothing_of_sites(make_job) -> None:
    plan = phalanx.plan(make_job())
    assert plan.sites is None
    assert '"sites"' not in plan.to_json()
    assert '"sync"' not in plan.to_json()


def test_the_smallest_h_of_the_table_reaches_the_target(make_job, sites) -> None:
    cluster = sites("8xH100:1", "8xH100:1")
    first = plan_on(make_job, cluster, mode="diloco", codec="int8")
    assert first.sites is not None
    steps = next(one for one in first.sites.grid if one.codec == "int8").smallest_inner_steps
    again = plan_on(make_job, cluster, mode="diloco", codec="int8", inner_steps=steps)
    fewer = plan_on(make_job, cluster, mode="diloco", codec="int8", inner_steps=steps - 1)
    assert again.sites is not None
    assert fewer.sites is not None
    assert again.sites.row.prediction.utilisation >= 0.9 > fewer.sites.row.prediction.utilisation


def test_the_delay_that_the_page_names_is_the_smallest_that_hides_the_exchange(make_job, sites) -> None:
    cluster = sites("8xH100:1", "8xH100:1", up=1000)
    settings = {"mode": "diloco", "codec": "int8", "inner_steps": 200, "fragments": 2}
    plan = plan_on(make_job, cluster, **settings)
    assert plan.sites is not None
    delay = hiding_delay(plan.sites.row.prediction, plan.sites.row.sync)
    assert delay is not None
    assert f"with sync.delay_steps = {delay} sites compute while an update travels" in str(plan)

    def exposed_s(delay_steps: int) -> float:
        tried = plan_on(make_job, cluster, **settings, delay_steps=delay_steps)
        assert tried.sites is not None
        return tried.sites.row.prediction.exposed_s

    assert exposed_s(delay) == pytest.approx(0.0, abs=1e-9)
    assert exposed_s(delay - 1) > 1e-6
    # A slower link: the next fragment is due before any delay is over.
    slow = plan_on(make_job, sites("8xH100:1", "8xH100:1", up=1), **settings)
    assert "sync.delay_steps = " not in str(slow)


def test_a_useless_mode_is_warned_of_with_one_that_helps(make_job, sites) -> None:
    plan = plan_on(make_job, sites("8xH100:1", "8xH100:1"), mode="target-batch")
    told = [text for text in plan.warnings if "sites compute" in text]
    assert len(told) == 1
    assert 'sync.mode = "diloco" with codec = "int8" and inner_steps = ' in told[0]


def test_three_sites_share_a_batch_that_they_do_not_divide(make_job, sites) -> None:
    plan = plan_on(make_job, sites(*["8xH100:1"] * 3), mode="diloco")
    assert plan.sites is not None
    tokens = sum(site.tokens_per_s * site.step_s for site in plan.sites.sites)
    assert tokens == pytest.approx(plan.job.batch.global_tokens)


def test_cost_is_that_of_all_sites(make_job, sites) -> None:
    plan = plan_on(make_job, sites("8xH100:1", "8xA100:1"), mode="diloco")
    assert plan.sites is not None
    assert plan.bill.device_hours == pytest.approx(16 * plan.duration.wall_s / 3600)
    assert plan.sites.row.usd == pytest.approx(
        sum(site.usd_per_hour or 0 for site in plan.sites.sites) * plan.sites.row.training_s / 3600
    )
