"""CKP006: a resumed run continues as if it had not been interrupted."""

from __future__ import annotations

from phalanx.rules.catalog.ckp_drills import SUITE, drill_missing, is_asked
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import counted_records
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

OTHER = Impact(note="no time lost, but after each resume another run goes on, with data seen twice or never")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the content of checkpoints, and whether drills with a failure ended with the bits of a run without one."""
    parts = _judge_parts(evidence, limits)
    return (parts, _judge_proof(evidence, limits)) if is_asked(evidence, parts) else (parts,)


def _judge_parts(evidence: Evidence, limits: Limits) -> Outcome:
    practice = evidence.practice
    if practice.resumes_exactly is None:
        return unknown(
            f"it is not known what a resume of {practice.trainer} restores",
            fix="look up which parts of the state its checkpoints hold",
        )
    needed = [*limits.words("parts")]
    if evidence.the_job.precision.compute == "fp16":
        needed += limits.words("fp16_parts")
    missing = [name for name in needed if name not in practice.resumes_exactly]
    restored = [
        name for name in practice.resumes_exactly if not (name == "rng" and evidence.setting_flag("no_load_rng"))
    ]
    formula = (f"needed: {', '.join(needed)}", f"brought back: {', '.join(restored) or 'nothing'}")
    if not missing:
        return passed(f"a resume restores all {len(needed)} parts of the state", formula=formula)
    weights_only = "save_only_model" in evidence.settings
    resumed = "resume_from_checkpoint" in evidence.settings
    return failed(
        f"a resume of {practice.trainer} does not restore: {', '.join(missing)}",
        # Checkpoints that hold only weights for use are a choice; a run that resumes from one loses the rest.
        severity=("warning" if resumed else "info") if weights_only else None,
        formula=formula,
        value=", ".join(missing),
        at="practice:resumes_exactly",
        impact=OTHER,
        fix="save and restore them, or say in a waiver why this job does not need them",
    )


def _judge_proof(evidence: Evidence, limits: Limits) -> Outcome:
    message = "that a run with a failure ends bit-identical to one without"
    is_phalanx = evidence.practice.trainer == "phalanx"
    kinds = limits.words("restoring_faults")
    drills = [
        drill
        for drill in (counted_records(evidence.drills, profile=evidence.profile.name) if is_phalanx else ())
        if drill.replayed and any(kind in drill.fired for kind in kinds)
    ]
    if not drills:
        return drill_missing(evidence, message)
    drill = drills[0]
    if drill.bitwise and drill.clean:
        return passed(f"a drill shows {message}: {drill.statement}", value=True, threshold=True)
    if drill.clean and not limits.flag("bitwise"):
        return passed(f"drilled: a run with a failure went on like one without: {drill.statement}")
    differences = "; ".join(drill.wrong[:3]) or "its digests differ from the replay's, or there was no replay"
    return failed(
        f"drilled: a run with a failure did not end like one without: {differences}",
        value=drill.bitwise,
        threshold=True,
        impact=OTHER,
        fix=f"fix what the record {drill.path} reports, then {SUITE}",
    )


RULE = Rule(
    id="CKP006",
    slug="resume-equivalent",
    severity="error",
    requires="J",
    uses="D",
    requirement="A resumed run goes on as if it had not been interrupted.",
    why="""
A checkpoint without the sampler's place shows the model some data twice and some never; one without random states or
the loss scale goes on as another run, and a spike after a resume cannot be told from a fault. PaLM trained bitwise
reproducibly from any checkpoint.
""",
    how="""
A checkpoint holds weights, moments, schedule, random state of each rank, the sampler's place, tokens seen and layout,
in fp16 the loss scale too (the trainer's documentation or code); and in a signed drill a run that failed ended with the
digests of a replay without the fault: every bit on a CPU in fp32. On other profiles the order of sums is not fixed,
so a drill need only be clean there; how far losses may part is not judged.
""",
    limits={
        "parts": Limit(
            value=("weights", "moments", "scheduler", "rng", "sampler", "tokens", "layout"),
            note="of the state: spec.md 6.1; our choice where a recipe does without",
        ),
        "fp16_parts": Limit(value=("scaler",), note="further ones in fp16: the loss scale"),
        "restoring_faults": Limit(
            value=("kill", "hang", "save-kill", "corrupt", "host", "raise", "memory", "freeze"),
            note="drills that count: those after which a state is restored",
        ),
        "bitwise": Limit(
            value=False,
            note="whether a drill must give the same bits; cpu-gloo in fp32: yes, the order of sums is fixed there",
            profiles={"cpu-gloo": True},
        ),
    },
    bad="""
{"event":"restore","rank":0,"step":400}
{"event":"step","step":400,"loss":2.91,"digest":"a3…"}   (without the fault: loss 2.87, digest 5f…)
""",
    good="""
{"event":"restore","rank":0,"step":400}
{"event":"step","step":400,"loss":2.87,"digest":"5f…"}   (without the fault: loss 2.87, digest 5f…)
""",
    fix="Save the missing part of the state; `phalanx drill JOB --suite` proves the whole.",
    waive="Fine-tuning of minutes, where a failure means to begin again.",
    references=(
        Reference(text="PaLM, arXiv:2204.02311 section 5 (bitwise determinism)", mark="recalled"),
        Reference(text="torchtitan: docs on determinism and loss equivalence", mark="read"),
    ),
    check=check,
)
