"""PRC002: sums are kept in fp32: gradients over ranks and micro-batches, moments over steps, weights over the run."""

from __future__ import annotations

from phalanx.rules.catalog.shared import unstated_key
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

RECIPES = {
    "bf16": "DeepSeek-V3 kept both moments in bf16 beside fp32 master weights (arXiv:2412.19437)",
    "int8": 'block-wise 8-bit Adam (arXiv:2110.02861) is optim.name = "adamw8bit"',
}
# Bits of the significand, including the leading one.
BITS = {"bf16": 8, "fp16": 11}
LEARNS = Impact(note="no time lost, but what the model learns is at stake, and no share of the run can be told")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check three sums: gradients, moments, and weights."""
    return (_judge_gradients(evidence, limits), _judge_moments(evidence, limits), _judge_weights(evidence, limits))


def _judge_gradients(evidence: Evidence, limits: Limits) -> Outcome:
    precision = evidence.the_job.precision
    # Values computed in fp32 are summed in fp32 whatever the key contains.
    kind = "fp32" if precision.compute == "fp32" else precision.grad_reduce
    if kind in limits.words("reduce_formats"):
        return passed(f"gradients are summed in {kind}", value=kind, threshold="fp32", at="precision.grad_reduce")
    trainer = evidence.practice.trainer
    if missing := unstated_key(evidence, "precision.grad_reduce", f"in which format {trainer} sums gradients"):
        return missing
    # The job schema has no value fp16 for it.
    kind = evidence.practice.sums_in or kind
    if evidence.plan is None:
        return unknown(
            f"gradients are summed in {kind}; without a plan nobody knows over how many terms",
            fix="name a cluster the planner knows (--cluster 8xH100:16)",
            at="precision.grad_reduce",
        )
    layout = evidence.plan.layout
    terms = layout.data * layout.context * layout.accumulation
    formula = (
        f"terms = data {layout.data} × context {layout.context} × accumulation {layout.accumulation} = {terms:,}",
    )
    if terms <= limits.number("most_terms"):
        return passed(f"{kind} gradients of a single term", formula=formula, value=terms, at="precision.grad_reduce")
    declared = layout.compression != "none"
    bits = BITS.get(kind, 8)
    return failed(
        f"gradients are summed in {kind} over {terms:,} terms",
        formula=(
            *formula,
            f"{kind} keeps {bits} bits: each addition rounds by up to 2^-{bits}, {terms - 1:,} of them by up to "
            f"{min(1.0, (terms - 1) * 2.0**-bits):.2%} of the sum; in fp32 by {(terms - 1) * 2.0**-24:.2g}",
        ),
        value=kind,
        threshold="fp32",
        at="precision.grad_reduce",
        severity=_sum_severity(evidence, declared=declared, lost=(terms - 1) * 2.0**-bits, limits=limits),
        impact=LEARNS,
        edits=(Edit(key="precision.grad_reduce", value="fp32", safe=False, note="twice the bytes on the wire"),),
    )


def _sum_severity(evidence: Evidence, *, declared: bool, lost: float, limits: Limits) -> Severity | None:
    if evidence.is_foreign and lost < limits.number("small_loss"):
        return "info"
    # Declared compression is judged by COM002.
    return "warning" if declared else None


def _judge_moments(evidence: Evidence, limits: Limits) -> Outcome:
    job = evidence.the_job
    kind, at = job.precision.optimizer_state, "precision.optimizer_state"
    if missing := unstated_key(evidence, at, f"in which format {evidence.practice.trainer} keeps moments"):
        return missing
    if job.optim.name == "adamw8bit":
        return passed("8-bit moments by a named recipe: block-wise 8-bit Adam, arXiv:2110.02861", value="int8", at=at)
    if job.optim.name == "adafactor" or kind in limits.words("moment_formats"):
        statement = "fp32, factored" if job.optim.name == "adafactor" else kind
        return passed(f"moments are kept in {statement}", value=kind, threshold="fp32", at=at)
    return failed(
        f"moments are kept in {kind}; a recipe that does so: {RECIPES.get(kind, 'none is known')}",
        value=kind,
        threshold="fp32",
        at=at,
        severity="warning",
        impact=LEARNS,
        fix="waive the rule and name the recipe you follow, or keep them in fp32",
        edits=(Edit(key=at, value="fp32", safe=False, note="8 bytes of moments per parameter"),),
    )


def _judge_weights(evidence: Evidence, limits: Limits) -> Outcome:
    precision, at = evidence.the_job.precision, "precision.master_weights"
    if precision.compute != "fp32" and (
        missing := unstated_key(evidence, at, f"whether {evidence.practice.trainer} updates weights in fp32")
    ):
        return missing
    if precision.compute == "fp32" or precision.master_weights or not limits.flag("needs_master"):
        return passed("the weights that are updated are fp32", value=True, threshold=True, at=at)
    return failed(
        f"{precision.compute} weights are updated without an fp32 copy",
        formula=(_format_spacing("fp16" if precision.compute == "fp16" else "bf16"),),
        value=False,
        threshold=True,
        at=at,
        impact=LEARNS,
        edits=(Edit(key=at, value=True, safe=False, note="4 bytes more per parameter, sharded as the optimizer is"),),
    )


def _format_spacing(kind: str) -> str:
    bits = BITS[kind]
    low, high = 2.0 ** -(bits + 1), 2.0**-bits
    return (
        f"half the spacing of {kind} is 2^-{bits + 1} to 2^-{bits} of a weight ({low:.2%} to {high:.2%}): smaller "
        + ("updates are lost")
    )


RULE = Rule(
    id="PRC002",
    slug="fp32-accumulate",
    severity="error",
    requires="J",
    uses="P",
    requirement="Gradients are accumulated and reduced in fp32; master weights and moments are fp32 unless "
    "a named recipe says otherwise.",
    why="""
A sum in bf16 keeps 8 bits: adding 256 equal terms one by one stops growing, whatever comes after. torchtitan allows no
other format than fp32 for the reduction (`mixed_precision_reduce: Literal["float32"]`), Megatron-LM has
`--accumulate-allreduce-grads-in-fp32`. The same holds for the weights: an update below half of the spacing of the
format is lost, and with bf16 that is every update below 0.2 to 0.4 % of a weight (fp16: 0.02 to 0.05 %). Moments are
forgiving: published recipes keep them in bf16 (DeepSeek-V3) or in blocks of 8 bits (8-bit Adam), so they warn.
""",
    how="""
`grad_reduce ∈ {fp32}` where data · context · accumulation > 1 (a warning where compression of gradients is declared:
COM002 weighs that). `master_weights = true` unless `compute = "fp32"`. `optimizer_state ∈ {fp32}`, else a warning
that names the recipe; `optim.name = "adamw8bit"` is one by name.
""",
    limits={
        "reduce_formats": Limit(value=("fp32",), note="formats of the sum of gradients: torchtitan, Megatron-LM"),
        "most_terms": Limit(
            value=1, unit="terms", note="terms of a sum that any format may hold: computed, one is no sum"
        ),
        "small_loss": Limit(value=0.05, note="of the sum, below which another trainer's is a remark: our choice"),
        "moment_formats": Limit(value=("fp32",), note="formats of moments that need no recipe: our choice"),
        "needs_master": Limit(value=True, note="an fp32 copy beside narrower weights: arXiv:1710.03740"),
    },
    bad="""
[precision]
grad_reduce = "bf16"
""",
    good="""
[precision]
grad_reduce = "fp32"
""",
    fix='`grad_reduce = "fp32"`, `master_weights = true`, `optimizer_state = "fp32"`.',
    waive="A published recipe that you follow whole, named in the reason; or a parity run over at "
    "least a tenth of the tokens.",
    references=(
        Reference(text='torchtitan: mixed_precision_reduce is Literal["float32"]', mark="read"),
        Reference(text="Megatron-LM: --accumulate-allreduce-grads-in-fp32", mark="read"),
        Reference(text="Micikevicius et al., arXiv:1710.03740 section 3.1 (master weights)", mark="recalled"),
        Reference(text="DeepSeek-V3, arXiv:2412.19437 section 3.3 (bf16 moments)", mark="recalled"),
        Reference(text="Dettmers et al., 8-bit optimizers, arXiv:2110.02861", mark="recalled"),
    ),
    check=check,
)
