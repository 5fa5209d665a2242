"""Which findings about another trainer's file count: habits of the trainer stand apart, small losses are remarks."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.job.parameter_counts import count_parameters
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome
from phalanx.rules.rule import Rule
from phalanx.units import DAY_S, HOUR_S

# Rules that ask how a trainer behaves. Of another trainer's file what they find without a line of it, by a default or
# by what the framework does, is the same for each file of that trainer and no finding of this one.
ABOUT_TRAINERS = (
    "FLT",
    "TEL",
    "SEC",
    "COM003",
    "COM004",
    "CKP002",
    "CKP003",
    "CKP005",
    "CKP006",
    "BAT002",
    "EFF001",
    "PRC004",
)
CHOSEN_BY_FILE = ("optim.clip",)  # left out, it is a choice all the same: every trainer here has a key for it
# Rules whose findings cost time, and neither the run nor what it learns.
COSTS_TIME = ("BAT004", "CKP001", "CKP004", "COM003", "COM004", "EFF", "TOP002", "TOP004")
# Rules about what a run learns or leaves behind, and about settings for finding faults: no matter of a trial.
OF_REAL_RUNS = ("OPT001", "PRC", "CKP006", "DAT", "ENV001", "SEC001")
# Of another trainer's file, lost time below both is a remark, and so is what costs the job less than the last: nobody
# rewrites a script for it. Our choice.
SMALL_POINTS, SMALL_USD, LEAST_USD = 1.0, 10_000.0, 1_000.0
# A run that its own script ends within so long is a trial: what it loses is lost once. Our choice.
TRIAL_S, FEW_STEPS = 4 * HOUR_S, 100
LEAST_TOKENS = 1.0  # for each parameter: compute-optimal runs have 20 (arXiv:2203.15556); our choice
_TRIAL_FILE = re.compile(r"(?<![a-z])(debug|smoke|dry|profil\w*|toy|sanity|trial)(?![a-z])", re.IGNORECASE)
_TRIAL_JOB = re.compile(rf"{_TRIAL_FILE.pattern}|(?<![a-z])(test|tests|testing)(?![a-z])", re.IGNORECASE)
_LIMIT = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,4}))?(?::(\d{1,4}))?")


def is_habit(rule: Rule, outcome: Outcome, evidence: Evidence, line: int) -> bool:
    """Whether it is what the trainer does or lacks, the same for each of its files."""
    if not evidence.is_foreign or outcome.verdict != "fail" or rule.origin:
        return False
    if rule.id == "PRC002":  # it points at the line of the format: a sum by default is the trainer's all the same
        origin = evidence.origins.get(str(outcome.at))
        return origin is None or "default of" in origin.where
    return rule.id.startswith(ABOUT_TRAINERS) and not line and outcome.at not in CHOSEN_BY_FILE


def is_small(rule: Rule, outcome: Outcome, evidence: Evidence) -> bool:
    """Whether a finding of another trainer's file costs too little time to ask for an edit."""
    impact = outcome.impact
    if not evidence.is_foreign:
        return False
    if rule.id == "ENV001" and outcome.severity == "error":  # a credential is known to everybody, however short the run
        return False
    if rule.id.startswith((*COSTS_TIME, *OF_REAL_RUNS)) and is_trial(evidence):
        return True
    if rule.id.startswith(OF_REAL_RUNS) and learns_nothing(evidence):
        return True
    # Seconds of a wait are the file's own; what is lost of a training needs to know how long that is.
    if rule.id.startswith(COSTS_TIME) and rule.id != "COM004" and not evidence.says_length:
        return True
    cheap = impact.points is not None and impact.usd is not None and impact.usd < LEAST_USD
    if cheap and rule.id.startswith(COSTS_TIME):
        return True
    if impact.points is None or impact.points >= SMALL_POINTS:
        return False
    return impact.usd is None or impact.usd < SMALL_USD


def is_trial(evidence: Evidence) -> bool:
    """Whether another trainer's file says itself that it ends within hours, or is there to find a fault.

    Slurm's limit or the name of its job, the file's own name, few steps, made-up data, a profiler.
    """
    limit, name = evidence.find_setting("SBATCH.time"), evidence.find_setting("SBATCH.job-name")
    if limit is not None and 0 < slurm_seconds(str(limit.value)) <= TRIAL_S:
        return True
    if _TRIAL_JOB.search(str(name.value) if name is not None else "") or _TRIAL_FILE.search(Path(evidence.target).stem):
        return True
    if evidence.practice.trainer != "megatron":
        return False
    steps = evidence.setting_number("train_iters")
    if evidence.setting_flag("mock_data") or (steps is not None and 0 < steps <= FEW_STEPS):
        return True
    last = evidence.setting_number("exit_interval")
    if last is not None and 0 < last <= FEW_STEPS:
        return True
    if last is not None and evidence.plan is not None and 0 < last * evidence.plan.prediction.step_s <= TRIAL_S:
        return True
    return evidence.setting_flag("profile")


def learns_nothing(evidence: Evidence) -> bool:
    """Whether a Megatron script trains new weights on less than a token for each: a test of speed, whatever it says."""
    job, steps = evidence.the_job, evidence.setting_number("train_iters")
    shape = evidence.origins.get("model.hidden")
    if evidence.practice.trainer != "megatron" or not steps or shape is None or "stand-in" in shape.where:
        return False
    batch, length = evidence.setting_number("global_batch_size"), evidence.setting_number("seq_length")
    if not batch or not length or evidence.find_setting("load", "finetune", "pretrained_checkpoint") is not None:
        return False
    return 0 < steps * batch * length < LEAST_TOKENS * count_parameters(job.model).total


def slurm_seconds(text: str) -> float:
    """A limit as sbatch takes it: minutes, minutes:seconds, hours:minutes:seconds, or days before any of these.

    >>> slurm_seconds("30"), slurm_seconds("00-03:00:00"), slurm_seconds("2-0"), slurm_seconds("UNLIMITED")
    (1800.0, 10800.0, 172800.0, 0.0)
    """
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        return 0.0
    days, *parts = found.groups()
    numbers = [int(one) for one in parts if one is not None]
    units = (HOUR_S, 60.0, 1.0) if days is not None or len(numbers) == 3 else (60.0, 1.0)
    return int(days or 0) * DAY_S + sum(number * unit for number, unit in zip(numbers, units, strict=False))
