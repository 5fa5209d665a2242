"""SEC001: no loaded file can run code."""

from __future__ import annotations

import re

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

TAKEN_OVER = Impact(note="no time by itself: who wrote the file runs code as you, on every host of the job")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the format of checkpoints, and that of the weights a job starts from."""
    return (_judge_checkpoints(evidence, limits), _judge_weights(evidence, limits))


def _judge_checkpoints(evidence: Evidence, limits: Limits) -> Outcome:
    practice, safe = evidence.practice, limits.words("formats")
    form = practice.checkpoint_format
    if form is None:
        return unknown(
            f"the format of {practice.trainer}'s checkpoints is not known", fix="say which format it is set to write"
        )
    statement = f"{practice.trainer} writes and reads {form}"
    if form in safe:
        return passed(statement, value=form, threshold=", ".join(safe))
    min_version = limits.words("torch")[0]
    torch = (evidence.host.packages or {}).get("torch", "") if evidence.host is not None else ""
    if torch and at_least(torch, min_version) and practice.verifies_digests:
        return passed(
            f"{statement}, with torch {torch} and digests that are verified", value=torch, threshold=min_version
        )
    return failed(
        f"{statement}, which holds pickles" + (f", with torch {torch}" if torch else ""),
        formula=(f"{form} is not one of {', '.join(safe)}; else torch >= {min_version}, weights_only and digests",),
        value=form,
        threshold=", ".join(safe),
        at="practice:checkpoint_format"
        if form == "torch-pickle"
        else "",  # this format was chosen, and there are better ones
        impact=TAKEN_OVER,
        fix=_safer_format(evidence, min_version),
    )


def _safer_format(evidence: Evidence, least: str) -> str:
    """Return advice on a format that the trainer can write instead: Megatron Core has no safetensors."""
    guarded = f"load with weights_only=True alone, torch {least} or newer, and verify a digest that came another way"
    if evidence.practice.trainer in ("megatron", "nemo"):
        flag = "--ckpt-format torch_dist" if evidence.practice.trainer == "megatron" else "ckpt_format: torch_dist"
        return f"{flag}, whose tensors are no pickles (its metadata is one); {guarded}"
    return f"write safetensors; else {guarded}"


def _judge_weights(evidence: Evidence, limits: Limits) -> Outcome:
    path = evidence.the_job.train.weights
    if not path:
        return exempt("the job starts from new weights")
    ending = "." + path.rsplit(".", 1)[-1].lower() if "." in path.rsplit("/", 1)[-1] else ""
    pickle_endings = limits.words("endings")
    if ending not in pickle_endings:
        return passed(f"train.weights = {path[:80]!r}: only safetensors are read from it", at="train.weights")
    return failed(
        f"train.weights = {path[:80]!r} names a pickle",
        value=ending,
        threshold="safetensors",
        at="train.weights",
        impact=TAKEN_OVER,
        fix="convert it where nothing is at stake, and name the folder with the safetensors files",
    )


def at_least(version: str, least: str) -> bool:
    """Return whether a version is at least as new as another; False for a version that cannot be parsed.

    >>> at_least("2.13.0+cpu", "2.10.0"), at_least("2.9.1", "2.10.0"), at_least("nightly", "2.10.0")
    (True, False, False)
    """
    parts = [re.match(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", text) for text in (version, least)]
    if parts[0] is None or parts[1] is None:
        return False
    first, second = ([int(digits or 0) for digits in match.groups()] for match in parts if match is not None)
    return first >= second


RULE = Rule(
    id="SEC001",
    slug="no-untrusted-pickle",
    severity="error",
    requires="J",
    uses="H",
    requirement="No format that can carry code is on any path by which a job loads weights or state.",
    why="""
A pickle is a program. `torch.load(weights_only=True)` could be made to run code until torch 2.6.0 (CVE-2025-32434)
and to corrupt memory until 2.10.0 (CVE-2026-24747); libraries that try again with `weights_only=False` undo it. The
`.metadata` of torch's distributed checkpoints is a pickle too.
""",
    how="""
The trainer's checkpoint format is safetensors (or raw tensors with a manifest); otherwise torch >= 2.10.0 and digests
that are verified. `train.weights` names no .bin, .pt, .pth, .ckpt or .pkl file.
""",
    limits={
        "formats": Limit(value=("safetensors", "raw"), note="formats without code: a bounded header and numbers"),
        "torch": Limit(value=("2.10.0",), note="first torch without CVE-2026-24747"),
        "endings": Limit(value=(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"), note="usual names of pickles"),
    },
    bad="""
[train]
weights = "downloads/pytorch_model.bin"
""",
    good="""
[train]
weights = "downloads/llama-3-8b"  # a folder with safetensors
""",
    fix="Convert once, in a container without secrets, and load safetensors from then on.",
    waive="Checkpoints that your own job wrote and nobody else can write, with the trainer you have.",
    references=(
        Reference(text="CVE-2025-32434, CVE-2026-24747", mark="read"),
        Reference(text="pytorch/pytorch: torch/distributed/checkpoint/filesystem.py", mark="read"),
    ),
    check=check,
)
