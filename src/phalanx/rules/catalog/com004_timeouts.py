"""COM004: collective timeouts are set, and short once steps are steady."""

from __future__ import annotations

import math
from typing import TypedDict

from phalanx.plan.auto_settings import LEAST_S, MOST_S, bounded_timeout_s, steady_timeout_s
from phalanx.rules.catalog.shared import MARGIN, severity_above, unstated_key, without_measurement
from phalanx.rules.catalog.silences import ROOM, Silence, is_save_known, longest_silence
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, Severity, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import DAY_S


class Cure(TypedDict, total=False):
    """The fix of a finding: edits, or a text."""

    edits: tuple[Edit, ...]
    fix: str


# HANGS below is the share of implicit failures, which only a timeout detects: ByteRobust (arXiv:2509.16293) counts
# 5,948 implicit and 43,264 explicit ones.
# The bound of the job schema; readers of other trainers' files cut longer values.
LONGEST_S = 1e7
# The longest default of the supported trainers: DeepSpeed's, and that of gloo.
LONGEST_DEFAULT_S = 1_800.0
# Trainers with another default: Megatron's --distributed-timeout-minutes 10, torchtitan's start.
DEFAULTS_S = {"megatron": 600.0, "nemo": 600.0, "torchtitan": 300.0}
HANGS = 5_948 / (5_948 + 43_264)


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Compare both timeouts with their bounds, the steady one also with the measured steps."""
    if evidence.profile.name == "tpu":
        return (exempt("the TPU runtime owns the timeouts of its collectives"),)
    if _has_one_timeout(evidence):
        return _judge_steady(evidence, limits)
    return (_judge_first(evidence, limits), *_judge_steady(evidence, limits))


def _has_one_timeout(evidence: Evidence) -> bool:
    """Return whether one setting of another trainer is both timeouts, so that it is judged once."""
    job = evidence.the_job
    place = evidence.place("comm.init_timeout_s")
    same = job.comm.init_timeout_s == job.train.timeout_s and place == evidence.place("train.timeout_s")
    return evidence.is_foreign and same and place[1] > 0


def _judge_first(evidence: Evidence, limits: Limits) -> Outcome:
    if missing := unstated_key(
        evidence, "comm.init_timeout_s", f"how long {evidence.practice.trainer} waits at the start"
    ):
        return missing
    set_s, longest_silence_ = evidence.the_job.comm.init_timeout_s, _longest_at_first(evidence)
    wanted_s = max(limits.number("init_most_s"), _with_margin(longest_silence_))
    # A longer pause raises the bound.
    most_s = max(wanted_s, _default_s(evidence))
    if evidence.is_foreign and not is_save_known(evidence) and set_s > wanted_s:
        return unknown(
            f"until steps are steady a rank waits {_as_text(set_s)} for another; whether a save takes longer than "
            "that is not known",
            fix="name a cluster the planner knows (--cluster 8xH100:16) and the model (--set model.preset=…)",
            at="comm.init_timeout_s",
        )
    message = f"until steps are steady a rank waits {_as_text(set_s)} for another"
    if set_s < limits.number("init_least_s"):
        return _hasty(evidence, message, set_s, limits.number("init_least_s"), wanted_s)
    if _is_own(evidence) and longest_silence_ is not None and _across_s(evidence) < longest_silence_.seconds:
        return _cut_off(_across_s(evidence), longest_silence_, wanted_s)
    if set_s <= most_s:
        return passed(
            f"{message}, at most {most_s:g}", value=set_s, threshold=most_s, unit="s", at="comm.init_timeout_s"
        )
    return failed(
        f"{message}, more than {most_s:g}",
        value=set_s,
        threshold=most_s,
        unit="s",
        at="comm.init_timeout_s",
        severity=_late_severity(evidence, set_s, most_s, limits),
        impact=Impact(
            note=f"{set_s - most_s:,.0f} s for a rank that hangs before steps are steady; how often is not published"
        ),
        **_cure(evidence, _first_edit(most_s), lower=True),
    )


def _default_s(evidence: Evidence) -> float:
    """Return the default timeout of another trainer: users are not asked to go below it. 0 for Phalanx."""
    return DEFAULTS_S.get(evidence.practice.trainer, LONGEST_DEFAULT_S) if evidence.is_foreign else 0.0


def _first_cure(evidence: Evidence, wanted_s: float) -> Cure:
    return _cure(evidence, _first_edit(wanted_s))


def _cure(evidence: Evidence, edit: Edit, *, lower: bool = False) -> Cure:
    """Return an edit for our own job, and a text for another trainer.

    Its one timeout also applies across saves, which are only predicted. An edit would be called safe, and a timeout
    that is too short ends a healthy run.
    """
    if not evidence.is_foreign:
        return {"edits": (edit,)}
    name = evidence.their_keys.get(edit.key) or edit.key
    # One rank prepares the data while the others wait; no step shows how long that takes.
    if "ddp_timeout" in name:
        longest = "longer than the preparation of data, a save and an evaluation, during which other ranks wait too"
        return {"fix": f"a time {longest} ({name}); 1,800 s is the Trainer's own"}
    if not is_save_known(evidence):
        return {"fix": f"a timeout longer than its longest save and evaluation together, which nobody knows ({name})"}
    if lower and edit.value == _default_s(evidence):
        return {"fix": f"lower it to {edit.value:,} s, the trainer's default ({name}); measure a save before that"}
    if lower:
        return {"fix": f"lower it to {edit.value:,} s ({name}): {edit.note}; measure a save before that"}
    return {"fix": f"{edit.value} s or more ({name}): {edit.note}; measure a save before you go lower"}


def _late_severity(evidence: Evidence, set_s: float, most_s: float, limits: Limits) -> Severity | None:
    """Return the severity of a timeout that is too long; a warning for other trainers.

    Waiting too long costs time, waiting too short costs the run; those trainers have one timeout for both.
    """
    return "warning" if evidence.is_foreign else severity_above(set_s, most_s, limits)


def _first_edit(wanted_s: float) -> Edit:
    note = f"torchtitan's start, or {ROOM:g} times the longest step, save, evaluation or restore"
    return Edit(key="comm.init_timeout_s", value=math.ceil(wanted_s), safe=True, note=note)


def _as_text(seconds: float) -> str:
    """Format seconds for a message.

    >>> _as_text(600.0), _as_text(1e7)
    ('600 s', '10,000,000 s or more')
    """
    if seconds >= LONGEST_S:
        return f"{LONGEST_S:,.0f} s or more"
    return f"{seconds:,.0f} s" if seconds >= 1e4 else f"{seconds:.4g} s"


def _is_own(evidence: Evidence) -> bool:
    return evidence.practice.trainer == "phalanx"


def _across_s(evidence: Evidence) -> float:
    """Return the seconds for which Phalanx waits across a save or an evaluation (train/collective_timeouts.py)."""
    job = evidence.the_job
    return max(job.comm.init_timeout_s, 0.0 if isinstance(job.train.timeout_s, str) else job.train.timeout_s)


def _longest_at_first(evidence: Evidence) -> Silence | None:
    """Return the longest pause or step: the first steps are waited for as long as pauses outside of steps."""
    step_s, source = _slow_step(evidence)
    silences = [longest_silence(evidence)]
    if step_s is not None:
        silences.append(Silence(seconds=step_s, what="a step", measured=source.startswith("(measured")))
    return max(
        (silence for silence in silences if silence is not None), key=lambda silence: silence.seconds, default=None
    )


def _with_margin(longest: Silence | None) -> float:
    """Return the proposed timeout in whole seconds, which is also the bound; 0 without a known silence."""
    return math.ceil(ROOM * longest.seconds) if longest is not None else 0.0


def _cut_off(waits_s: float, longest: Silence, wanted_s: float) -> Outcome:
    """Return the failure for a job with a regular pause longer than its timeout."""
    return failed(
        f"until steps are steady, and across saves and evaluations, a rank waits {waits_s:g} s for another, and "
        f"{longest.statement}",
        formula=(f"max(comm.init_timeout_s, train.timeout_s) = {waits_s:g} s < {longest.seconds:.4g} s",),
        value=waits_s,
        threshold=longest.seconds,
        unit="s",
        at="comm.init_timeout_s",
        severity=None if longest.measured else "warning",
        impact=Impact(note=f"a healthy run is ended by {longest.what}, every time"),
        edits=(_first_edit(wanted_s),),
    )


def _hasty(evidence: Evidence, statement: str, set_s: float, least_s: float, wanted_s: float) -> Outcome:
    """Return the failure for a timeout that gives up processes that are still starting."""
    return failed(
        f"{statement}, less than {least_s:g}",
        value=set_s,
        threshold=least_s,
        unit="s",
        at="comm.init_timeout_s",
        impact=Impact(note="ranks that are still starting are given up: the job does not start, or not every time"),
        **_first_cure(evidence, wanted_s),
    )


def _judge_steady(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    trainer = evidence.practice.trainer
    missing = unstated_key(evidence, "train.timeout_s", f"how long {trainer} waits for a rank in a steady step")
    missing = missing or without_measurement(evidence, "how long to wait for a step")
    if missing is not None:
        return (missing,)
    step_s, source = _slow_step(evidence)
    written = evidence.the_job.train.timeout_s
    if step_s is None:
        return (_without_steps(written, evidence, limits),)
    set_s = written if not isinstance(written, str) else _auto_timeout(evidence, step_s)
    least_s = min(limits.number("steps") * step_s, limits.number("train_most_s"))
    least_s = max(least_s, limits.number("train_least_s"))
    longest, is_phalanx = longest_silence(evidence), _is_own(evidence)
    # A proposed number outlasts every silence, whatever trainer uses it.
    wanted_s = bounded_timeout_s(step_s, steps=limits.number("steps"), most_s=limits.number("train_most_s"))
    # For another trainer a save is only predicted, so no value below the bound is proposed.
    wanted_s = max(wanted_s, _with_margin(longest), 0.0 if is_phalanx else limits.number("train_most_s"))
    most_s = max(limits.number("train_most_s"), step_s, wanted_s, _default_s(evidence))
    formula = (
        f"from min({limits.number('steps'):g} × {step_s:.3g} s {source}, {limits.number('train_most_s'):g} s) and at "
        f"least {limits.number('train_least_s'):g} s = {least_s:.3g} s, to {most_s:.3g} s",
        *((longest.statement,) if longest is not None and longest.seconds > least_s else ()),
    )
    message = f"a rank waits {_as_text(set_s)} for another in a steady step"
    if not is_phalanx and longest is not None and least_s <= set_s < longest.seconds:
        return (_too_short(evidence, f"{message}, and {longest.statement}", set_s, longest, wanted_s, formula),)
    if least_s <= set_s <= most_s:
        message += f", and {_across_s(evidence):g} s across saves and evaluations" if is_phalanx else ""
        return (passed(message, formula=formula, value=set_s, threshold=most_s, unit="s", at="train.timeout_s"),)
    if set_s > most_s and evidence.is_foreign and set_s <= LONGEST_DEFAULT_S:
        reason = f"{message}, as trainers do by default"
        return (
            passed(reason, formula=formula, value=set_s, threshold=LONGEST_DEFAULT_S, unit="s", at="train.timeout_s"),
        )
    if set_s > most_s:
        proposed_s = max(wanted_s, _default_s(evidence))
        edit = _shorter_patience(evidence, set_s) or _timeout_edit(proposed_s)
        return (_too_long(evidence, limits, message, set_s, most_s, set_s - proposed_s, edit, formula),)
    floor = Silence(seconds=max(limits.number("train_least_s"), step_s), what="a step", measured=True)
    reason = f"{message}, less than {least_s:.4g}"
    return (_too_short(evidence, reason, set_s, floor, wanted_s, formula, least_s=least_s),)


def _auto_timeout(evidence: Evidence, step_s: float) -> float:
    """Return the timeout of "auto": from the plan, and in training at least from the steps so far.

    See train/collective_timeouts.py.
    """
    planned_s = 0.0
    if evidence.plan is not None:
        planned_s = steady_timeout_s(evidence.the_job, evidence.plan.prediction)
    return max(planned_s, bounded_timeout_s(step_s), evidence.the_job.fault.dead_after_s)


def _shorter_patience(evidence: Evidence, set_s: float) -> Edit | None:
    """Return an edit of fault.dead_after_s where an "auto" timeout is long because of it."""
    job = evidence.the_job
    if not isinstance(job.train.timeout_s, str) or set_s > job.fault.dead_after_s:
        return None
    return Edit(key="fault.dead_after_s", value=int(LEAST_S), safe=True, note="the default; auto waits no less")


def _without_steps(written: float | str, evidence: Evidence, limits: Limits) -> Outcome:
    """Judge the timeout without plan and log: a number may still be too long."""
    most_s = limits.number("train_most_s")
    if isinstance(written, str) or written <= most_s:
        return unknown(
            "how long a step takes is not known, so neither is how long to wait for one",
            fix="name a cluster the planner knows, or check the run's folder",
            at="train.timeout_s",
        )
    message = f"a rank waits {_as_text(written)} for another in a steady step"
    wanted_s = max(most_s, _with_margin(longest_silence(evidence)), _default_s(evidence))
    if evidence.is_foreign and (written <= LONGEST_DEFAULT_S or not is_save_known(evidence)):
        return unknown(
            f"{message}; whether a save takes longer than that is not known",
            fix="name a cluster the planner knows (--cluster 8xH100:16) and the model (--set model.preset=…)",
            at="train.timeout_s",
        )
    if written <= wanted_s:
        return passed(message, value=written, threshold=wanted_s, unit="s", at="train.timeout_s")
    return _too_long(evidence, limits, message, written, wanted_s, written - wanted_s, _timeout_edit(wanted_s), ())


def _slow_step(evidence: Evidence) -> tuple[float | None, str]:
    """Return the seconds of a slow step, measured if there is a log, else the slow end of the prediction; and the
    source.
    """
    steps = evidence.log.steps if evidence.log is not None else None
    if steps is not None and steps.duration_s is not None and math.isfinite(steps.duration_s.p99):
        return steps.duration_s.p99, "(measured, 99 of 100 are faster)"
    if evidence.plan is not None and math.isfinite(evidence.plan.prediction.step_s_high):
        return evidence.plan.prediction.step_s_high, "(predicted, slow end)"
    return None, ""


def _too_long(
    evidence: Evidence,
    limits: Limits,
    statement: str,
    set_s: float,
    most_s: float,
    late_s: float,
    edit: Edit,
    formula: tuple[str, ...],
) -> Outcome:
    return failed(
        f"{statement}, more than {most_s:.4g}",
        formula=formula,
        value=set_s,
        threshold=most_s,
        unit="s",
        at=edit.key,
        severity=_late_severity(evidence, set_s, most_s, limits),
        impact=_per_failure(evidence, late_s),
        **_cure(evidence, edit, lower=True),
    )


def _too_short(
    evidence: Evidence,
    statement: str,
    set_s: float,
    floor: Silence,
    wanted_s: float,
    formula: tuple[str, ...],
    *,
    least_s: float | None = None,
) -> Outcome:
    """Return the failure for a short timeout: an error below a measured silence or the floor, else a warning."""
    return failed(
        statement,
        formula=formula,
        value=set_s,
        threshold=least_s if least_s is not None else floor.seconds,
        unit="s",
        at="train.timeout_s",
        severity="error" if floor.measured and set_s < floor.seconds else "warning",
        impact=Impact(note="a healthy run is ended whenever a step or a network card is slow; how often is not known"),
        **_cure(evidence, _timeout_edit(wanted_s)),
    )


def _timeout_edit(wanted_s: float) -> Edit:
    """Return an edit in whole seconds on the allowed side: rounded up, beyond the bound rounded down."""
    whole_s = math.ceil(wanted_s) if wanted_s < MOST_S else math.floor(wanted_s)
    note = f"five steps, from 30 to 120 s, and {ROOM:g} times the longest save or evaluation"
    return Edit(key="train.timeout_s", value=whole_s, safe=True, note=note)


def _per_failure(evidence: Evidence, late_s: float) -> Impact:
    """Return the impact of noticing failures `late_s` later: hangs only, where ranks have heartbeats, else all
    failures.
    """
    share = HANGS if evidence.practice.heartbeat_s else 1.0
    note = (
        f"for the {share:.0%} of failures that only a timeout notices, as hangs" if share < 1 else "for every failure"
    )
    if evidence.plan is None:
        return Impact(note=f"{late_s:,.0f} s {note}")
    r = evidence.plan.reliability
    return evidence.loses(share * late_s * r.hosts * r.failures_per_host_day / DAY_S, note)


RULE = Rule(
    id="COM004",
    slug="timeouts-explicit",
    severity="error",
    requires="J",
    uses="PL",
    requirement="Collectives give up after at most 300 s at the start, and 120 s once steps are steady.",
    why="""
A hang shows only when something stops waiting. PyTorch waits 600 s for NCCL and 1,800 s for gloo (pytorch PR #110947);
finding a fault by such a timeout takes about 10 minutes where heartbeats take 2 to 60 s (ByteRobust, arXiv:2509.16293
table 3). Ten minutes instead of 90 s cost 0.3 points of effective time on 1,024 GPUs and 4.5 on 16,384. Too short is
wrong as well: a network card that flaps comes back within seconds (MegaScale, arXiv:2402.15627).
""",
    how="""
`30 ≤ comm.init_timeout_s ≤ 300` (from 5 s on CPUs) covers start and compilation. `train.timeout_s` lies between
`clamp(5 · step, 30 s, 120 s)` and 120 s; the step is the 99th percentile of the log's steady ones (the first five of a
membership left out), or the slow end of the plan's interval before there is a log. `"auto"` is that clamp, and no less
than `fault.dead_after_s`: a silent rank is found by its heartbeat first. A step longer than 120 s moves the upper
bound to one step (our choice). Too short is an error below 30 s or below one step, else a warning; too long is a
warning up to a tenth beyond the bound. CPU ranks may give up after 5 s.

No timeout may be shorter than a silence in which nothing is wrong: a synchronous save (`checkpoint.async = false`,
until it is written; else the copy it begins with), an evaluation, restoring a checkpoint, the first steps; as
measured (the longest), or as the plan has it. Our trainer waits `max(comm.init_timeout_s, train.timeout_s)` across
these, so that is held against the longest of them; of other trainers `train.timeout_s` is. Below a measured one is an
error, below a predicted one a warning. What is proposed is at least twice the longest, a save and an evaluation after
it counted together (our choice), and where that is beyond 120 or 300 s it is the bound. Of other trainers a timeout
that is too long, and longer than that trainer's own default, is a warning, its cure is a sentence and never a safe
edit, and nothing is said while no plan tells how long a save takes.
""",
    limits={
        "init_most_s": Limit(value=300.0, unit="s", note="torchtitan's start timeout"),
        "init_least_s": Limit(
            value=30.0,
            unit="s",
            profiles={"cpu-gloo": 5.0},
            note="processes import torch and build the model before they meet: our choice",
        ),
        "margin": MARGIN,
        "train_most_s": Limit(value=120.0, unit="s", note="near torchtitan's 100 s: our choice"),
        "train_least_s": Limit(
            value=30.0,
            unit="s",
            profiles={"cpu-gloo": 5.0},
            note="a flap of a network card lasts seconds (MegaScale); gloo: torchft's 5 s",
        ),
        "steps": Limit(value=5.0, unit="steps", note="NVIDIA resiliency extension: five times what was observed"),
    },
    bad="""
[comm]
init_timeout_s = 1800

[train]
timeout_s = 600
""",
    good="""
[comm]
init_timeout_s = 300

[train]
timeout_s = "auto"
""",
    fix='`timeout_s = "auto"`; `--fix` writes the number.',
    waive="Storage or a first compilation that is known to take longer than 300 s: say what takes how long.",
    references=(
        Reference(text="pytorch/pytorch PR #110947: defaults of 10 and 30 minutes", mark="read"),
        Reference(text="pytorch/torchtitan: 300 s at the start, 100 s in training", mark="read"),
        Reference(text="NVIDIA/nvidia-resiliency-ext: factor 5, 5 warm-up iterations", mark="read"),
        Reference(text="ByteRobust, arXiv:2509.16293 table 3; MegaScale, arXiv:2402.15627", mark="read"),
    ),
    check=check,
)
