"""DAT002: the training does not read its corpus more often than repetition helps."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_count

REPEATS = Impact(note="no time lost, but tokens that are seen again teach less, and after 40 times nothing")


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Compare the tokens of the job with those of the corpus."""
    data, plan = evidence.data, evidence.plan
    tokens = plan.duration.tokens if plan is not None else evidence.the_job.data.tokens
    if evidence.is_foreign and not evidence.stated("data.tokens"):
        return exempt("how many tokens the job trains on does not follow from the file")
    if data is None or not data.tokens or not isinstance(tokens, int):
        return exempt("how many tokens the corpus has is not known here")
    steps = evidence.setting_number("training.steps") or evidence.setting_number("train_iters")
    flavour = evidence.find_setting("model.flavor")
    if evidence.is_foreign and flavour is not None and str(flavour.value).lower().startswith("debug"):
        return exempt("a model for tests: nothing is learnt")
    if evidence.is_foreign and steps is not None and steps <= limits.number("least_steps"):
        return exempt(f"{steps:,.0f} steps are a test: nothing is learnt")
    epochs, max_epochs = tokens / data.tokens, limits.number("most_epochs")
    message = f"{format_count(tokens)} tokens of a corpus of {format_count(data.tokens)}: {epochs:,.1f} epochs"
    formula = (f"{tokens:.4g} / {data.tokens:.4g} = {epochs:.3g} epochs",)
    if epochs <= max_epochs:
        return passed(message, formula=formula, value=epochs, threshold=max_epochs, unit="epochs")
    return failed(
        f"{message}, more than {max_epochs:g}",
        formula=formula,
        value=epochs,
        threshold=max_epochs,
        unit="epochs",
        at=f"setting:{data.setting}" if data.setting else "data.tokens",
        impact=REPEATS,
        fix=f"train on {format_count(max_epochs * data.tokens)} tokens or fewer, or add text",
    )


RULE = Rule(
    id="DAT002",
    slug="epochs",
    severity="warning",
    requires="J",
    uses="P",
    requirement="The corpus is read at most four times.",
    why="""
Up to four epochs repeated text is nearly as good as new; beyond, its worth decays, and after 40 epochs it is worth
nothing (Muennighoff et al., arXiv:2305.16264). A job whose tokens are far beyond its corpus is mostly a slip: the small
corpus of a test, or a step count for another batch.
""",
    how="""
`tokens of the job / tokens of the corpus <= 4`. Tokens are counted where the data is on this machine (`.bin` and
`.idx` of Megatron, manifests of `phalanx data build`), or the corpus is known by its name (`c4`). Other trainers'
files with at most 100 steps are tests and are not judged.
""",
    limits={
        "least_steps": Limit(value=100, unit="steps", note="of another trainer's file that is no test: our choice"),
        "most_epochs": Limit(value=4.0, unit="epochs", note="as good as new up to here: arXiv:2305.16264"),
    },
    bad="torchtitan: training.dataset = c4_test, training.steps = 100000",
    good="torchtitan: training.dataset = c4, training.steps = 100000",
    fix="Fewer tokens, or more text.",
    waive="Fine-tuning on a small set by intent; a test of speed.",
    history="2026.1: added in 0.7.",
    references=(Reference(text="Muennighoff et al., arXiv:2305.16264", mark="recalled"),),
    check=check,
)
