"""CKP003: a restore verifies the checkpoint, and an older checkpoint exists to fall back to."""

from __future__ import annotations

import math

from phalanx.rules.catalog.ckp_drills import is_asked, judge_drill
from phalanx.rules.catalog.shared import unstated_key
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.log_facts import CheckpointFacts
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural

NAMED = 8  # steps that a message lists
WRONG = Impact(note="a flipped bit is trained on and never seen; what it costs cannot be told")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that enough checkpoints are kept, that a restore verifies them, and that a drill refused a damaged one."""
    count, verified, from_folder = (
        _judge_count(evidence, limits),
        _judge_verification(evidence),
        _judge_folder(evidence, limits),
    )
    if not is_asked(evidence, verified):
        return (count, verified, *from_folder)
    message = "a restore that meets a damaged checkpoint"
    return (
        count,
        verified,
        *from_folder,
        judge_drill(evidence, limits.words("damage_faults"), what=message, harm=WRONG),
    )


def _judge_count(evidence: Evidence, limits: Limits) -> Outcome:
    key, keep, min_kept = "checkpoint.keep", evidence.the_job.checkpoint.keep, limits.number("least_kept")
    if evidence.practice.saves is False:
        return exempt("checkpoints are off: there are none to keep")
    if missing := unstated_key(evidence, key, f"how many checkpoints {evidence.practice.trainer} keeps"):
        return missing
    if keep >= min_kept:
        return passed(f"the newest {keep:,} checkpoints are kept", value=keep, threshold=min_kept, at=key)
    return failed(
        f"{keep} checkpoint is kept: when it is damaged there is none to fall back to",
        value=keep,
        threshold=min_kept,
        at=key,
        impact=_half_job(evidence),
        edits=(Edit(key=key, value=int(min_kept), safe=True, note="one to fall back to"),),
    )


def _half_job(evidence: Evidence) -> Impact:
    """Return half of the job as the average cost; no points, since no rate of damaged checkpoints is published."""
    wall_s = evidence.wall_s
    half = f", {format_seconds(wall_s / 2)} on average" if wall_s and math.isfinite(wall_s) else ""
    return Impact(note=f"if it is damaged once, all work so far{half}; how often that happens is not published")


def _judge_verification(evidence: Evidence) -> Outcome:
    practice = evidence.practice
    if practice.verifies_digests is None:
        return unknown(
            f"it is not known whether {practice.trainer} verifies what it restores",
            fix="look up whether its checkpoints carry digests and a restore compares them",
        )
    if practice.verifies_digests:
        return passed(f"{practice.trainer} verifies every shard before it changes a number", value=True, threshold=True)
    return failed(
        f"{practice.trainer} restores without comparing digests",
        value=False,
        threshold=True,
        impact=WRONG,
        fix="write a digest per shard, and compare all of them before anything is loaded",
    )


def _judge_folder(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check how many checkpoints the folder of the run holds."""
    checkpoints = evidence.log.checkpoints if evidence.log is not None else None
    if checkpoints is None or checkpoints.kept is None:
        return ()
    due = min(checkpoints.commits, evidence.the_job.checkpoint.keep, int(limits.number("least_kept")))
    if checkpoints.kept >= due:
        return (
            passed(
                f"of {plural(checkpoints.commits, 'commit')} {checkpoints.kept} are kept, whole",
                value=checkpoints.kept,
                threshold=due,
            ),
        )
    if checkpoints.kept + len(checkpoints.given_up) >= due:
        return (_judge_rollback(checkpoints, evidence, due),)
    return (
        failed(
            f"{checkpoints.commits:,} checkpoints were committed and {checkpoints.kept} are there",
            value=checkpoints.kept,
            threshold=due,
            impact=_half_job(evidence),
            fix="find out what deletes them: a quota, a clean-up job, or another run in the same folder",
        ),
    )


def _judge_rollback(seen: CheckpointFacts, evidence: Evidence, due: int) -> Outcome:
    """Return the outcome for a folder in which only checkpoints that a roll-back set aside are missing."""
    steps = ", ".join(f"{step:,}" for step in seen.given_up[:NAMED])
    more = f" and {len(seen.given_up) - NAMED} more" if len(seen.given_up) > NAMED else ""
    message = f"the roll-back to step {seen.rolled_back_to or 0:,} set step {steps}{more} aside"
    if seen.kept:
        return passed(
            f"of {plural(seen.commits, 'commit')} {seen.kept} is kept: {message}", value=seen.kept, threshold=due
        )
    return failed(
        f"{seen.commits:,} checkpoints were committed and none can be restored: {message}",
        value=0,
        threshold=due,
        impact=_half_job(evidence),
        fix="find out why the state was not to be trusted (`rollback` in supervisor.jsonl) before starting again; the "
        "folders untrusted-step-… can be examined",
    )


RULE = Rule(
    id="CKP003",
    slug="verified-and-retained",
    severity="error",
    requires="J",
    uses="LD",
    requirement="Every shard is verified when it is restored, and an older checkpoint is there to fall back to.",
    why="""
Safetensors has no checksum and torch's distributed checkpoint none per file: a flipped bit loads without a word. With
one checkpoint kept, the day it is damaged is the day the run begins again. Even a good save can come too late: BLOOM
lost 7.3 hours to a crash two iterations before its save.
""",
    how="""
`checkpoint.keep ≥ 2`; the trainer compares digests of all shards before anything is loaded (its documentation or
code); as many whole checkpoints in the run's folder as were committed, up to two; and a signed drill in which a
restore met a damaged file, refused it and took the one before. That a run restores its first checkpoint once is not
asked: it would stop every device for a restore, and the drill and the digests say as much of it.
""",
    limits={
        "least_kept": Limit(value=2, note="checkpoints kept: the newest and one to fall back to; our choice"),
        "damage_faults": Limit(value=("corrupt",), note="drills that count: a restore met a damaged file; our choice"),
    },
    bad="""
[checkpoint]
keep = 1
""",
    good="""
[checkpoint]
keep = 3
""",
    fix="`keep = 2` or more; digests in the manifest, compared on restore.",
    waive="Storage that keeps versions and verifies by itself (object storage with checksums), named in the reason.",
    references=(
        Reference(text="PyTorch: torch/distributed/checkpoint/filesystem.py (no digest per file)", mark="read"),
        Reference(text="BLOOM chronicles: 7.3 h lost two iterations before a save", mark="secondary"),
        Reference(text="two kept", mark="our choice"),
    ),
    check=check,
)
