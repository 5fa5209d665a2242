"""CKP002: a checkpoint is visible only when it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.ckp_drills import SUITE, is_asked, judge_drill
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import counted_records
from phalanx.rules.outcome import Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import CheckpointFacts

TORN = Impact(note="a restore may load half a checkpoint, or none: all work since the last whole one is at stake")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the known behaviour of the trainer, the run's log, and the drills."""
    log = evidence.log.checkpoints if evidence.log is not None else None
    from_log = (_judge_log(evidence, log),) if log is not None else ()
    trainer_outcome = _judge_trainer(evidence)
    if not is_asked(evidence, trainer_outcome):
        return (trainer_outcome, *from_log)
    return (trainer_outcome, *from_log, _judge_drills(evidence, limits))


def _judge_drills(evidence: Evidence, limits: Limits) -> Outcome:
    """Require that the newest drill of a save passed, and that all drills together hit every point of a save."""
    outcome = judge_drill(evidence, limits.words("save_faults"), what="a rank that dies while it saves", harm=TORN)
    counted = counted_records(evidence.drills, profile=evidence.profile.name)
    points = {point for drill in counted if drill.clean for point in drill.save_points}
    min_points = limits.number("least_points")
    if outcome.verdict == "pass" and len(points) < min_points:
        hit_points = ", ".join(sorted(points)) or "none"
        return unknown(f"drills killed a save at {len(points)} of its {min_points:.0f} points: {hit_points}", fix=SUITE)
    return outcome


def _judge_trainer(evidence: Evidence) -> Outcome:
    practice = evidence.practice
    if practice.atomic_commit is None:
        return unknown(
            f"it is not known how {practice.trainer} makes a checkpoint visible",
            fix="look up whether it renames a finished folder, or writes a marker last",
            at="checkpoint.path",
        )
    if practice.atomic_commit:
        return passed(f"{practice.trainer} shows a checkpoint only when it is complete", value=True, threshold=True)
    return failed(
        f"{practice.trainer} writes into a folder that readers already see",
        value=False,
        threshold=True,
        at="checkpoint.path",
        impact=TORN,
        fix="a new folder for every step, manifest last, then a rename; keep at least two",
    )


def _judge_log(evidence: Evidence, log: CheckpointFacts) -> Outcome:
    faults = {
        "restores of a step that nobody had committed": (log.restored_uncommitted, log.restored_spot),
        "commits without anything staged": (log.commits_without_stage, log.disorder_spot),
        "folders that look committed and lack their manifest": (log.incomplete or 0, None),
    }
    spots = {fault: spot for fault, (count, spot) in faults.items() if count}
    if not spots:
        return passed(f"commits: {log.commits:,}, restores: {log.restores:,}, in order", value=0, threshold=0)
    return failed(
        "; ".join(f"{faults[fault][0]:,} {fault}" for fault in spots),
        value=sum(count for count, _ in faults.values()),
        threshold=0,
        at=next((spot for spot in spots.values() if spot is not None), ""),
        impact=TORN,
        fix="resume from the newest folder that has its manifest, and not from these",
    )


RULE = Rule(
    id="CKP002",
    slug="atomic-commit",
    severity="error",
    requires="J",
    uses="LD",
    requirement="A checkpoint can be seen only when all of it is written; a restore takes nothing else.",
    why="""
Jobs are killed while they save, and the newest checkpoint is the one that everybody wants. Orbax writes into a
temporary folder and renames, or puts a marker last, and since 0.12.3 its readers refuse what has no marker. Torch's
distributed checkpoint removes the old `.metadata` and renames the new one: overwriting in place there leaves a moment
without any, and its documentation promises no consistency without `sync_files`.
""",
    how="""
The order stage → write → fsync → digest → manifest → rename → commit, a new folder per step (object stores: a marker
in place of the rename). From the trainer's documentation or code; in the log no commit without a stage and no restore
of what was not committed; and signed drills that killed a rank at each of the nine points of a save and lost nothing.
""",
    limits={
        "least_points": Limit(
            value=9,
            unit="points",
            note="of a save at which a rank was killed: all that Phalanx has, begin to prune; our choice",
        ),
        "save_faults": Limit(
            value=("save-kill", "disk-full"), note="drills that count: our choice, one fault inside a save"
        ),
    },
    bad="""
{"event":"checkpoint","rank":0,"step":400,"blocked_s":0.01}
{"event":"restore","rank":0,"step":400}
""",
    good="""
{"event":"checkpoint","rank":0,"step":400,"blocked_s":0.01}
{"event":"checkpoint","rank":0,"step":400,"path":"step-00000400","seconds":0.4,"bytes":10237440}
{"event":"restore","rank":0,"step":400}
""",
    fix="A trainer that renames a finished folder; `phalanx drill JOB --suite` proves it.",
    waive="A file system that takes snapshots, from which alone is restored.",
    references=(
        Reference(text="Orbax: checkpoint/_src/path/atomicity.py, CHANGELOG 0.12.3", mark="read"),
        Reference(text="PyTorch: torch/distributed/checkpoint/filesystem.py", mark="read"),
        Reference(text="etcd robustness tests: failpoints at every step of a commit", mark="read"),
    ),
    check=check,
)
