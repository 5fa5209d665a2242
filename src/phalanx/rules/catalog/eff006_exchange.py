"""EFF006: an exchange over slow links takes no longer than the steps between two exchanges."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the exposed time of an exchange with the compute between two exchanges."""
    sites = evidence.the_plan.sites
    if sites is None or not evidence.the_job.sync.has_peers:
        return exempt("no exchange over slow links")
    prediction, sync = sites.row.prediction, evidence.the_job.sync
    wall_s = prediction.step_s * prediction.inner_steps
    compute_s = wall_s - prediction.exposed_s
    ratio, max_ratio = prediction.exposed_s / compute_s, limits.number("most_ratio")
    period = f"{prediction.inner_steps:,} steps" if prediction.inner_steps > 1 else "the step"
    message = (
        f"an exchange holds compute up for {format_seconds(prediction.exposed_s)}, and {period} take "
        + format_seconds(compute_s)
    )
    formula = (f"{prediction.exposed_s:.4g} s / {compute_s:.4g} s = {ratio:.3g}, at most {max_ratio:g}",)
    at = "sync.inner_steps" if prediction.inner_steps > 1 else "sync.mode"
    if ratio <= max_ratio:
        return passed(message, formula=formula, value=ratio, threshold=max_ratio, at=at)
    row = next(entry for entry in sites.grid if entry.codec == sync.codec)
    edits = []
    if row.smallest_inner_steps is not None:
        note = f"{sites.target_utilisation:.0%} utilisation with {sync.codec}"
        edits.append(Edit(key="sync.inner_steps", value=row.smallest_inner_steps, safe=False, note=note))
    return failed(
        f"{message}: sites wait longer than they compute",
        formula=formula,
        value=ratio,
        threshold=max_ratio,
        at=at,
        impact=evidence.loses(1.0 - prediction.utilisation, "utilisation after the synchronous steps, as planned"),
        fix="a smaller codec, more inner steps, or delay_steps that hide the exchange; phalanx plan has the table",
        edits=tuple(edits),
    )


RULE = Rule(
    id="EFF006",
    slug="exchange-fits-rounds",
    severity="warning",
    requires="JP",
    requirement="An exchange over slow links takes no longer than the steps between two of them.",
    why="""
Where the exchange takes as long as the steps between two of them, half of every site's time and bill is waiting.
Published runs over the internet keep sites busy for 83 to 96 % (INTELLECT-1, arXiv:2412.01152) with 30 to 500 steps
between exchanges and updates of 8 bits or fewer.
""",
    how="""
The part of an exchange that compute does not hide, over the compute between two exchanges, is at most 1; both from the
plan of the cluster of sites.
""",
    limits={"most_ratio": Limit(value=1.0, note="waiting over computing: half of the time; our choice")},
    bad="""
[sync]
mode = "target-batch"   # 8B parameters over 500 Mbit/s: 10 minutes after every step
""",
    good="""
[sync]
mode = "diloco"
codec = "int8"
inner_steps = 200
""",
    fix="The smallest `inner_steps` of the plan's table for the codec.",
    waive="A trial that is about the exchange itself.",
    history="2026.1: added with training over slow links.",
    references=(
        Reference(text="INTELLECT-1, arXiv:2412.01152", mark="secondary"),
        Reference(text="threshold", mark="our choice"),
    ),
    check=check,
)
