"""PRC003: narrow formats are used only where the hardware has them, spare sensitive modules, and have shown parity."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_count

SPARED = "embeddings, norms, head and router"


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that the hardware has the format, that sensitive modules are spared, and that parity was shown."""
    supported = _lacking_format(evidence, limits) or _judge_support(evidence)
    if evidence.the_job.precision.compute not in limits.words("narrow_formats") or supported.verdict == "fail":
        return (supported,)
    return (supported, _judge_exclusions(evidence), _judge_parity(evidence, limits))


def _judge_parity(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the losses of two runs in the narrow format and a wider one.

    Runs of smaller models count, as they did for DeepSeek-V3.
    """
    kind, parity, max_gap = evidence.the_job.precision.compute, evidence.parity, limits.number("most_gap")
    if parity is None or parity.narrow_format != kind:
        return unknown(
            f"nothing shows that {kind} learns as bf16 does on this model",
            fix="train a hundredth of the tokens in both, then phalanx check … --parity RUN RUN",
            at="precision.compute",
        )
    text = "held-out" if parity.held_out else "last training"
    formula = (
        f"{parity.model}, {format_count(parity.tokens)} tokens: {text} loss {parity.narrow_loss:.4f} in {kind} "
        f"({parity.narrow}), {parity.wide_loss:.4f} in {parity.wide_format} ({parity.wide})",
        f"gap = {parity.narrow_loss:.4f} / {parity.wide_loss:.4f} - 1 = {parity.gap:+.3%}",
    )
    statement = f"{kind} ends {parity.gap:+.3%} from {parity.wide_format}"
    if parity.gap <= max_gap:
        return passed(statement, formula=formula, value=parity.gap, threshold=max_gap, at="precision.compute")
    return failed(
        statement,
        formula=formula,
        value=parity.gap,
        threshold=max_gap,
        at="precision.compute",
        impact=Impact(note="no time lost, but the model learns less from the same tokens"),
        edits=(Edit(key="precision.compute", value="bf16", safe=False, note="until parity is shown"),),
    )


def _lacking_format(evidence: Evidence, limits: Limits) -> Outcome | None:
    """Return a failure for bf16 on devices without it, whatever their profile lists; else None."""
    kind = evidence.the_job.precision.compute
    accelerator = evidence.plan.cluster.accelerator if evidence.plan is not None else None
    if kind != "bf16" or accelerator is None or accelerator.family not in limits.words("without_bf16"):
        return None
    return failed(
        f"{accelerator.name} ({accelerator.family}) does not multiply in bf16",
        value=kind,
        threshold="fp16, fp32",
        at="precision.compute",
        impact=Impact(note="the job does not start, or computes in fp32 at an eighth of the rate it was planned with"),
        edits=(Edit(key="precision.compute", value="fp16", safe=False, note="with dynamic loss scaling: PRC001"),),
    )


def _judge_support(evidence: Evidence) -> Outcome:
    kind, profile = evidence.the_job.precision.compute, evidence.profile
    formats = ", ".join(profile.formats)
    if kind in profile.formats:
        if profile.must_measure and kind not in ("fp32", "bf16"):
            return _judge_declared(evidence, kind)
        return passed(f"{profile.name} multiplies in {kind}", value=kind, threshold=formats, at="precision.compute")
    nearest = "bf16" if "bf16" in profile.formats else profile.formats[0]
    return failed(
        f"{profile.name} does not multiply in {kind}",
        value=kind,
        threshold=formats,
        at="precision.compute",
        impact=Impact(note="the job does not start, or computes in a wider format than it says"),
        edits=(Edit(key="precision.compute", value=nearest, safe=False, note=f"{profile.name} has {formats}"),),
    )


def _judge_declared(evidence: Evidence, kind: str) -> Outcome:
    """Judge hardware that has no profile by the peak rates that its own entry declares."""
    at = "precision.compute"
    if evidence.plan is None:
        return unknown(f"nothing is known of {kind} on this hardware", fix="name its profile, or a cluster file", at=at)
    accelerator = evidence.plan.cluster.accelerator
    peaks = {"fp8": accelerator.peak_fp8_flops, "fp4": accelerator.peak_fp4_flops, "fp16": accelerator.peak_bf16_flops}
    if peaks.get(kind, 0.0) > 0:
        return passed(f"{accelerator.name} declares a peak of {peaks[kind]:.3g} FLOP/s in {kind}", value=kind, at=at)
    return unknown(f"{accelerator.name} declares no peak in {kind}", fix=f"give peak_{kind}_flops in a file", at=at)


def _judge_exclusions(evidence: Evidence) -> Outcome:
    practice, at = evidence.practice, "precision.compute"
    if practice.fp8_spares_sensitive is None:
        return unknown(
            f"it is not known what {practice.trainer} leaves in 16 bit",
            fix=f"look up which modules it converts: {SPARED} must not be among them",
            at=at,
        )
    if practice.fp8_spares_sensitive:
        return passed(f"{practice.trainer} leaves {SPARED} in 16 bit or more", value=True, threshold=True, at=at)
    return failed(
        f"{practice.trainer} does not spare all of {SPARED}",
        value=False,
        threshold=True,
        at=at,
        impact=Impact(note="no time lost, but the loss is at stake, by an amount only a parity run tells"),
        fix=f"exclude {SPARED} from the conversion",
    )


RULE = Rule(
    id="PRC003",
    slug="format-supported-and-parity",
    severity="error",
    requires="J",
    uses="P",
    requirement="A format of matrix products is one the hardware has; 8- and 4-bit ones spare sensitive "
    "modules and have shown parity.",
    why="""
bf16 came to NVIDIA's tensor cores with Ampere: V100 and T4 have fp16 only. fp8 is in Hopper, Blackwell and CDNA 3, fp4
in Blackwell alone; A100, TPU before v7 and CPUs multiply in neither. DeepSeek-V3 trained in fp8 with embedding, head,
norms, gates and attention left in bf16 or fp32, and accepted it because the loss of two smaller models stayed within
0.25 % of bf16. A model that went through a format nobody compared cannot be told from one that learnt less.
""",
    how="""
`precision.compute ∈ formats(profile)`, and no bf16 on devices of the families volta and turing. For fp8 and fp4 also:
the trainer spares embeddings, norms, head and router (its documentation or code), and parity: `loss / loss_bf16 − 1 ≤
0.25 %` of two runs that differ in nothing else, named with `--parity RUN RUN`. Runs of a smaller model count; without
any that part is `unknown`.
""",
    limits={
        "most_gap": Limit(
            value=0.0025, note="relative loss over that of bf16: DeepSeek-V3, arXiv:2412.19437 section 3.3"
        ),
        "without_bf16": Limit(
            value=("volta", "turing"),
            note="families whose tensor cores have fp16 and no bf16 (V100, T4): NVIDIA's datasheets, recalled",
        ),
        "narrow_formats": Limit(value=("fp8", "fp4"), note="formats that need parity: arXiv:2412.19437 section 3.3"),
    },
    bad="""
[precision]
compute = "fp4"
""",
    good="""
[precision]
compute = "bf16"
""",
    fix="A format that the profile lists; `phalanx explain PRC003 JOB` names them for this job.",
    waive="With the parity run as the reason: same data, same steps, both losses.",
    references=(
        Reference(text="DeepSeek-V3, arXiv:2412.19437 section 3.3 (fp8 training, 0.25 %)", mark="recalled"),
        Reference(text="formats by device: vendors' datasheets", mark="recalled"),
    ),
    check=check,
)
