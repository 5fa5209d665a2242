"""CKP001: the good job's optimum is taken from its own plan, so that the boundary is exact."""

from __future__ import annotations

from rules.kit import Case, Flip, evidence


def at_ratio(ratio: float):
    best_s = evidence().the_plan.reliability.optimal_interval_s
    return lambda: evidence(f"checkpoint.interval_s={best_s * ratio!r}")


CASES = [
    Case(rule="CKP001", name="auto", verdict="pass", evidence=evidence),
    Case(rule="CKP001", name="twice", verdict="pass", evidence=at_ratio(1.99), boundary=True),
    Case(
        rule="CKP001",
        name="more than twice",
        verdict="fail",
        evidence=at_ratio(2.01),
        boundary=True,
        severity="warning",
    ),
    Case(rule="CKP001", name="half", verdict="fail", evidence=at_ratio(0.49), boundary=True, severity="warning"),
    Case(
        rule="CKP001",
        name="a day",
        verdict="fail",
        evidence=lambda: evidence("checkpoint.interval_s=86400"),
        severity="error",
        says="interval 86,400 s",
        at="checkpoint.interval_s",
    ),
    Case(
        rule="CKP001",
        name="a small job is only warned",
        verdict="fail",
        evidence=lambda: evidence("checkpoint.interval_s=864000", cluster="8xH100:8"),
        severity="warning",
    ),
]
FLIPS = [Flip(rule="CKP001", limit="warn_ratio", value=1.5, evidence=at_ratio(1.8), before="pass", after="fail")]
