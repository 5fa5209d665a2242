"""The published and computed numbers the specification rests on, by the functions the rules use (spec.md 3.2, 6.6)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.kit import answers, evidence

from phalanx.plan.reliability import checkpoint_overhead, daly_interval, effective_time, spare_hosts
from phalanx.rules.edition import EDITION, all_rules
from phalanx.rules.outcome import Edit
from phalanx.rules.rule import GROUPS
from phalanx.units import DAY_S, HOUR_S, MINUTE_S

RATE = 3.8e-3  # failures per host of 8 H100 and day: Llama 3, 419 in 54 days on 2,048 hosts
SMALL_JOB = 3.5  # Meta RSC-1: jobs up to 1,024 GPUs fail so many times more often than their hardware alone

# devices, MTBF in hours, τ* in minutes for δ = 1, 10 and 60 s, effective time with 600 s and with 90 s per failure
TABLE = [
    (512, 99, (14, 44, 108), 0.991, 0.992),
    (1_024, 49, (10, 31, 76), 0.986, 0.989),
    (4_096, 12, (5, 16, 38), 0.966, 0.977),
    (16_384, 3.1, (2.5, 7.8, 19), 0.906, 0.951),
    (32_768, 1.5, (1.8, 5.5, 13), 0.837, 0.926),
    (100_000, 31 / 60, (1, 3, 7), 0.588, 0.854),
]


@pytest.mark.parametrize(("devices", "hours", "minutes", "slow", "fast"), TABLE, ids=lambda one: str(one))
def test_daly_and_effective_time(
    devices: int, hours: float, minutes: tuple[float, ...], slow: float, fast: float
) -> None:
    mtbf_s = DAY_S / (devices / 8 * RATE)
    assert mtbf_s / HOUR_S == pytest.approx(hours, rel=0.04), "the table rounds to two digits"
    for blocking_s, best in zip((1.0, 10.0, 60.0), minutes, strict=True):
        assert daly_interval(blocking_s, mtbf_s) / MINUTE_S == pytest.approx(best, rel=0.04, abs=0.05)
    best_s = daly_interval(10.0, mtbf_s)
    for lost_s, share in ((600.0, slow), (90.0, fast)):
        assert effective_time(10.0, best_s, mtbf_s, lost_s=lost_s) == pytest.approx(share, abs=6e-4)


def test_spares_of_byterobust() -> None:
    assert [spare_hosts(hosts, 1.25e-3) for hosts in (128, 256, 512, 1_024)] == [2, 2, 3, 4]


@pytest.mark.parametrize(("times", "more"), [(0.5, 0.25), (2, 0.25), (0.25, 1.125), (4, 1.125)])
def test_the_curve_is_flat(times: float, more: float) -> None:
    """Young's optimum, to first order: x times it costs (x + 1/x) / 2 of its overhead."""
    mtbf_s = 1e6
    best_s = (2 * 10.0 * mtbf_s) ** 0.5
    assert checkpoint_overhead(10.0, best_s * times, mtbf_s) / checkpoint_overhead(
        10.0, best_s, mtbf_s
    ) == pytest.approx(1 + more)


def test_the_worked_example() -> None:
    """Spec.md 6.6: 64 hosts for 720 h at $2.5 per device and hour, an interval of six hours, δ = 10 s."""
    found = evidence("checkpoint.interval_s=21600")
    plan = found.the_plan
    mtbf_s = DAY_S / (64 * RATE * SMALL_JOB)
    assert mtbf_s == pytest.approx(101_504, abs=1)
    failing = replace(
        plan.reliability,
        hosts=64,
        failures_per_host_day=RATE * SMALL_JOB,
        mtbf_s=mtbf_s,
        blocking_s=10.0,
        persist_s=1.0,
    )
    usd = 64 * 8 * 720 * 2.5
    plan = replace(
        plan,
        reliability=failing,
        duration=replace(plan.duration, wall_s=720 * HOUR_S),
        bill=replace(plan.bill, usd=(usd, usd, usd)),
    )
    told = answers("CKP001", replace(found, plan=plan))[0]
    assert (told.verdict, told.severity) == ("fail", "error")
    assert told.outcome.what == "interval 21,600 s is 15.23x the optimum 1,418 s"
    assert told.outcome.formula == (
        "M = 86400 / (64 hosts × 0.0133 failures per host and day) = 101,504 s",
        "τ* = Daly(δ = 10 s, M) = 1,418 s;  τ/τ* = 15.23",
        "overhead δ/τ + τ/2M now 10.7%, at the optimum 1.4%",
    )
    assert told.outcome.impact.points == pytest.approx(9.3, abs=0.05)
    assert usd == 921_600
    assert told.outcome.impact.usd == pytest.approx(85_500, rel=0.002)
    assert told.outcome.edits == (Edit(key="checkpoint.interval_s", value=1418, safe=True, note="Daly's optimum"),)


def test_the_edition_has_45_rules_with_sources() -> None:
    rules = [rule for rule in all_rules() if rule.group in GROUPS]
    assert EDITION == "2026.1"
    assert len(rules) >= 45, sorted(rule.id for rule in rules)
    assert {rule.group for rule in rules} == set(GROUPS)
    assert all(rule.references for rule in rules)
    assert len({rule.id for rule in all_rules()}) == len({rule.slug for rule in all_rules()}) == len(all_rules())
