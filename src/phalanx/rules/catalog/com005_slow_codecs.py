"""COM005: lossy codecs carry what they leave out to the next update, and do not thin out raw gradients."""

from __future__ import annotations

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule


def check(evidence: Evidence, limits: Limits) -> Outcome:
    """Check the codec of [sync] for the values it is used on."""
    sync = evidence.the_job.sync
    if not sync.has_peers:
        return exempt("no peers on slow links")
    if sync.mode == "target-batch" and sync.codec in limits.words("not_gradients"):
        return failed(
            f"{sync.codec} sends a few of the gradients of every step, and Adam takes the rest for zeros",
            value=sync.codec,
            at="sync.codec",
            impact=Impact(note="the loss ended 23 % higher in our runs: 3.05 instead of 2.48 nats per byte"),
            edits=(
                Edit(key="sync.codec", value="int8", safe=False, note="four times fewer bytes, same loss"),
                Edit(key="sync.mode", value="diloco", safe=False, note="where it belongs: on updates of H steps"),
            ),
        )
    if sync.codec not in limits.words("biased"):
        return passed(f"{sync.codec} rounds to the nearest number, without a bias that adds up", value=sync.codec)
    min_feedback = limits.number("least_feedback")
    message = f"{sync.codec} carries {sync.feedback:.0%} of what it leaves out to the next update"
    if sync.feedback >= min_feedback:
        return passed(message, value=sync.feedback, threshold=min_feedback, at="sync.feedback")
    return failed(
        f"{message}, less than {min_feedback:.0%}",
        value=sync.feedback,
        threshold=min_feedback,
        at="sync.feedback",
        impact=Impact(note="no time lost, but what is left out is lost, always of the same parameters"),
        edits=(Edit(key="sync.feedback", value=0.95, safe=False, note="SparseLoCo's"),),
    )


RULE = Rule(
    id="COM005",
    slug="slow-codec-feedback",
    severity="error",
    requires="J",
    requirement="Codecs that leave values out carry them to the next update, and never thin out raw gradients.",
    why="""
A codec that always drops the small values, or rounds to four bits, moves the model somewhere else unless what it left
out is added to the next update (Karimireddy et al., arXiv:1901.09847); SparseLoCo carries 95 % of it
(arXiv:2603.08163). On the gradients of every step even that does not help with Adam, whose moments then see zeros: top
1 % with feedback ended at 3.05 nats per byte in our runs, synchronous training at 2.48.
""",
    how="""
Of `[sync]` with peers: `codec = "topk-2bit"` with `mode = "target-batch"` is an error; for `int4` and `topk-2bit`,
`feedback >= 0.5`.
""",
    limits={
        "not_gradients": Limit(
            value=("topk-2bit",), note="codecs that are refused on gradients of every step: our runs"
        ),
        "biased": Limit(value=("int4", "topk-2bit"), note="codecs whose error adds up without feedback"),
        "least_feedback": Limit(value=0.5, note="share that is carried on; SparseLoCo has 0.95: our choice"),
    },
    bad="""
[sync]
mode = "target-batch"
codec = "topk-2bit"
""",
    good="""
[sync]
mode = "diloco"
codec = "topk-2bit"
feedback = 0.95
""",
    fix='`codec = "int8"` for gradients; `feedback = 0.95` for `int4` and `topk-2bit`.',
    waive="An optimizer made for sparse gradients, with the loss of both runs.",
    history="2026.1: added with training over slow links.",
    references=(
        Reference(text="error feedback: arXiv:1901.09847", mark="recalled"),
        Reference(text="SparseLoCo, Covenant-72B: arXiv:2603.08163", mark="secondary"),
        Reference(text="our runs: docs/slow-links.md", mark="computed"),
    ),
    check=check,
)
