"""Peers that come and go: what is committed, what is lost, and when nobody may go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

import phalanx
from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Site
from phalanx.job.sync_section import SyncSettings
from phalanx.plan.slow_exchange import peer_link
from phalanx.plan.slow_modes import SitePace, predict_mode
from phalanx.sim.peer_churn import ChurnPolicy, simulate_churn

HOUR_S = 3600.0


def policy(*sessions_h: float, absence_h: float = 1.0, **sync: object) -> ChurnPolicy:
    cluster = resolve_cluster("1xH100:1")
    sites = tuple(
        Site(
            name=f"s{index}",
            cluster=cluster,
            up_bytes_per_s=12.5e6,
            down_bytes_per_s=12.5e6,
            latency_s=0.02,
            session_s=hours * HOUR_S,
            absence_s=absence_h * HOUR_S if hours else 0.0,
        )
        for index, hours in enumerate(sessions_h)
    )
    paces = tuple(
        SitePace(name=site.name, devices=1, step_s=0.5, tokens_per_step=1e4, link=peer_link(site)) for site in sites
    )
    settings = SyncSettings(**{"mode": "diloco", "inner_steps": 100, **sync})  # type: ignore[arg-type]
    return ChurnPolicy(sites=sites, paces=paces, values=10_000_000, sync=settings, state_bytes=120e6)


def test_nobody_leaving_gives_the_planned_utilisation() -> None:
    quiet = policy(0, 0, 0)
    (found,) = simulate_churn(quiet, days=3, count=1, seed=0)
    assert found.goodput == pytest.approx(predict_mode(quiet.paces, quiet.values, quiet.sync).utilisation)
    assert (found.departures, found.waiting_s, found.stalled_s) == (0, 0.0, 0.0)
    assert sum(found.credit) == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_runs() -> None:
    restless = policy(4, 4, 4)
    first, again = (list(simulate_churn(restless, days=10, count=3, seed=7)) for _ in range(2))
    assert first == again
    assert first[0] != first[1]


def test_goodput_is_bounded_by_who_is_there() -> None:
    for found in simulate_churn(policy(2, 2, 2, 2, 2), days=30, count=5, seed=1):
        assert 0 < found.goodput < sum(found.present) / 5
        assert found.lost_tokens > 0


def test_three_sites_go_on_without_one_and_two_do_not_without_the_first() -> None:
    (three,) = simulate_churn(policy(4, 0, 0), days=30, count=1, seed=2)
    assert three.departures > 0
    assert three.waiting_s == 0.0
    # Half of two peers may decide only with the first of them (no split brain).
    (second,) = simulate_churn(policy(0, 4), days=30, count=1, seed=2)
    (first,) = simulate_churn(policy(4, 0), days=30, count=1, seed=2)
    assert second.waiting_s == 0.0 < first.waiting_s
    assert first.goodput < second.goodput


def test_a_quorum_waits_until_it_is_complete() -> None:
    free, strict = (policy(4, 4, 4, 4, 4, mode="quorum", quorum=count) for count in (3, 5))
    relaxed, waiting = (next(simulate_churn(one, days=30, count=1, seed=3)) for one in (free, strict))
    assert waiting.waiting_s > relaxed.waiting_s
    assert waiting.goodput < relaxed.goodput


def test_a_death_is_noticed_later_costs_more() -> None:
    quick, slow = (policy(1, 1, 1, 1, dead_after_s=seconds) for seconds in (2.0, 600.0))
    stalls = [next(simulate_churn(one, days=10, count=1, seed=4)).stalled_s for one in (quick, slow)]
    assert stalls[0] < stalls[1]


def test_months_on_a_cluster_of_sites(tmp_path) -> None:
    text = "".join(
        f'[[site]]\nname = "{name}"\ndevices = "8xH100:1"\nup_mbit_s = 1000\ndown_mbit_s = 1000\nlatency_ms = 20\n'
        "session_h = 6\nabsence_h = 1\n"
        for name in "abc"
    )
    (tmp_path / "sites.toml").write_text(text)
    job = "examples/llama-3-8b-64xH100.toml"
    plan = phalanx.plan(job, tmp_path / "sites.toml", overrides=["sync.mode=diloco", "sync.codec=int8"])
    found = phalanx.simulate(plan, days=10, runs=3)
    assert "of all sites computing all the time" in str(found)
    assert found.to_dict()["goodput"]["mean"] < plan.sites.row.prediction.utilisation
    with pytest.raises(UserError, match="--levers has no effect on a cluster of sites"):
        phalanx.simulate(plan, days=10, levers=True)


def test_a_site_that_is_never_away_returns_at_once() -> None:
    restless = policy(4, 4, 4, absence_h=0.0)
    (found,) = simulate_churn(replace(restless, state_bytes=0.0), days=10, count=1, seed=5)
    assert min(found.present) == pytest.approx(1.0)
