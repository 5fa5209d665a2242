"""PRC001: fp16 trains with a dynamic loss scale, formats with wider exponents with none."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

AUTO = Edit(key="precision.loss_scale", value="auto", safe=False, note="found while training in fp16, 1 otherwise")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check the number format of matrix products against the kind of loss scale."""
    compute, kind = evidence.the_job.precision.compute, _scale_kind(evidence)
    scale = evidence.the_job.precision.loss_scale
    scale_text = f'"auto", {kind or "not known"}' if isinstance(scale, str) else f"{scale:g}, {kind}"
    formula = (f"compute = {compute}; loss scale = {scale_text}",)
    if kind is None:
        return unknown(
            f"it is not known how {evidence.practice.trainer} scales the loss in {compute}",
            fix="set precision.loss_scale as that trainer does",
            at="precision.loss_scale",
        )
    if compute in limits.words("scaled_formats"):
        return _judge_scaled(compute, kind, formula)
    return _judge_unscaled(compute, kind, formula)


def _scale_kind(evidence: Evidence) -> str | None:
    """Return the kind of loss scale: dynamic, static or none; None where it is not known."""
    scale = evidence.the_job.precision.loss_scale
    if not isinstance(scale, str):
        return "static" if scale != 1.0 else "none"
    if evidence.the_job.precision.compute != "fp16":
        return "none"
    # "auto" is dynamic by the job schema; for another trainer its default behaviour counts.
    return evidence.practice.loss_scale or ("dynamic" if evidence.practice.trainer == "phalanx" else None)


def _judge_scaled(compute: str, kind: str, formula: tuple[str, ...]) -> Outcome:
    if kind == "dynamic":
        return passed(f"{compute} with a dynamic loss scale", formula=formula, value=kind, threshold="dynamic")
    return failed(
        f"{compute} with {'a fixed' if kind == 'static' else 'no'} loss scale",
        formula=formula,
        value=kind,
        threshold="dynamic",
        at="precision.loss_scale",
        impact=Impact(
            note="gradients below 2^-24 are lost, or one overflow too many ends the run: no share can be told"
        ),
        edits=(AUTO,),
    )


def _judge_unscaled(compute: str, kind: str, formula: tuple[str, ...]) -> Outcome:
    if kind == "none":
        return passed(f"{compute} without a loss scale", formula=formula, value=kind, threshold="none")
    return failed(
        f"{compute} has the exponents of fp32, and the loss is scaled anyway ({kind})",
        formula=formula,
        value=kind,
        threshold="none",
        at="precision.loss_scale",
        impact=Impact(note="no time lost, but a setting without effect, or gradients that are skipped for nothing"),
        edits=(AUTO,),
    )


RULE = Rule(
    id="PRC001",
    slug="loss-scaling",
    severity="error",
    requires="J",
    requirement="fp16 arithmetic trains with a dynamic loss scale; bf16, fp32 and the 8-bit formats train without one.",
    why="""
fp16 has five bits of exponent: nothing below 2⁻²⁴ = 6·10⁻⁸ is left of a gradient. The SSD detector of Micikevicius et
al. diverged in fp16 until the loss was multiplied by 8, and then learnt as in fp32. How large the factor may be
changes while the model learns, so it has to be searched: doubled after 2,000 good steps, halved after an overflow
(2,000, 2 and ½ are the numbers of `torch.amp.GradScaler`). bf16 has the exponents of fp32: a scale there only adds a
way to overflow.
""",
    how="""
`precision.compute = "fp16"` ⇔ the scale is dynamic. `loss_scale = "auto"` is dynamic in fp16 and 1 elsewhere; a
number is a static scale; 1 is none. Of another trainer its documented default is taken.
""",
    limits={
        "scaled_formats": Limit(
            value=("fp16",), note="formats with too few bits of exponent for gradients: arXiv:1710.03740"
        ),
    },
    bad="""
[precision]
compute = "fp16"
loss_scale = 1024.0
""",
    good="""
[precision]
compute = "fp16"
loss_scale = "auto"
""",
    fix='`loss_scale = "auto"`; better, on hardware that has it: `compute = "bf16"`.',
    waive="A static scale that was found by a search on this very model and data, with the run that shows it.",
    references=(
        Reference(text="Micikevicius et al., Mixed precision training, arXiv:1710.03740 section 3.2", mark="recalled"),
        Reference(text="torch.amp.GradScaler defaults: 2^16, growth 2, backoff 0.5, interval 2000", mark="read"),
    ),
    check=check,
)
