"""TEL003: the gradient noise scale is the two-batch estimator, and can be recomputed from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, steps_of, still_reading, why_no_noise
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

NO_TIME = Impact(note="costs no time by itself: batch sizes are chosen by this number")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check that the log has the parts of the noise scale and that they give its value."""
    log, noise = evidence.the_log, evidence.the_log.noise
    if why := why_no_noise(evidence):
        return exempt(why)
    if noise is None or not noise.count:
        if steps_of(log) < limits.number("least_steps"):
            return exempt(f"{plural(steps_of(log), 'step')}: too few for a running mean")
        return still_reading(log, "the gradient noise") or unknown(
            "the log has no gradient noise", fix="TEL001 says what should be there"
        )
    if not noise.has_parts:
        return failed(
            "noise_scale stands alone: without noise_trace and grad_squared nobody can work it out again",
            value=False,
            threshold=True,
            at=file_of(log),
            impact=NO_TIME,
            fix="write the step's estimates of tr Σ and |G|² beside the quotient (docs/events.md, step)",
        )
    return _judge_parts(log, noise.count, finite_value(noise.error), limits.number("error"))


def _judge_parts(log: LogFacts, count: int, error: float | None, most: float) -> Outcome:
    if error is None:
        return exempt(f"{plural(count, 'value')}, too few with their parts to work out again")
    statement = f"the parts give noise_scale within {error:.2%}"
    formula = (f"|EMA(noise_trace) / EMA(grad_squared) / noise_scale - 1| = {error:.4f}; at most {most:g}",)
    if error <= most:
        return passed(statement, formula=formula, value=error, threshold=most)
    return failed(
        f"noise_scale is {error:.1%} from what its parts give",
        formula=formula,
        value=error,
        threshold=most,
        at=file_of(log),
        impact=NO_TIME,
        fix="keep running means of the two parts and divide these; the mean of the steps' own quotients is biased",
    )


RULE = Rule(
    id="TEL003",
    slug="noise-scale",
    severity="warning",
    requires="L",
    uses="P",
    requirement="Gradient variance is reported as B_simple of the two-batch estimator, with its parts.",
    why="""
`B_simple = tr Σ / |G|²` says how large a batch still pays: at B = B_simple, half of the tokens are spent on variance
(arXiv:1812.06162). It comes from two scalars that data ranks have anyway. The quotient of one step's estimates is
biased; running means of both, divided, are not. It is a proxy: critical batch sizes measured directly differ
(arXiv:2505.23971).
""",
    how="""
`noise_trace` and `grad_squared` stand beside `noise_scale`, and `EMA(noise_trace) / EMA(grad_squared)` gives it back
within 1 %. Layouts without two gradients to compare (context ranks, one micro-batch on one data rank) are exempt.
""",
    limits={
        "error": Limit(value=0.01, note="relative difference to what the parts give: our choice, far above rounding"),
        "least_steps": Limit(value=20, unit="steps", note="before which a running mean says little: our choice"),
    },
    bad='{"event": "step", "step": 400, "noise_scale": 512.0}',
    good='{"event": "step", "step": 400, "noise_scale": 512.0, "noise_trace": 900.1, "grad_squared": 1.758}',
    fix="Write the two estimates of every measured step; divide their running means.",
    waive="A trainer whose own estimator is documented and tested elsewhere.",
    references=(
        Reference(text="McCandlish et al., arXiv:1812.06162, appendix A", mark="recalled"),
        Reference(text="Merrill et al., arXiv:2505.23971: the proxy and its limits", mark="read"),
    ),
    check=check,
)
