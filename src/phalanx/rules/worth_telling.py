"""The weight of findings about another trainer's file: defaults of the trainer and small losses do not count."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.job.parameter_counts import count_parameters
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome
from phalanx.rules.rule import Rule
from phalanx.units import DAY_S, HOUR_S

# Rules about how a trainer behaves. In another trainer's file, a finding of such a rule that points at no line, because
# it comes from a default or from the framework, is the same for each file of that trainer and is not counted.
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
# A value left out is a choice all the same: every supported trainer has a key for it.
CHOSEN_BY_FILE = ("optim.clip",)
# Rules whose findings cost time, and harm neither the run nor what it learns.
COSTS_TIME = ("BAT004", "CKP001", "CKP004", "COM003", "COM004", "EFF", "TOP002", "TOP004")
# Rules about what a run learns or leaves behind, and about settings for finding faults: irrelevant to a trial run.
OF_REAL_RUNS = ("OPT001", "PRC", "CKP006", "DAT", "ENV001", "SEC001")
# In another trainer's file, a loss of time below both of the first two is a remark, and so is one that costs the job
# less than the last: not worth rewriting a script. Our choice.
SMALL_POINTS, SMALL_USD, LEAST_USD = 1.0, 10_000.0, 1_000.0
# A run that its own script ends within this time is a trial: it loses time only once. Our choice.
TRIAL_S, FEW_STEPS = 4 * HOUR_S, 100
# Tokens per parameter: compute-optimal runs have 20 (arXiv:2203.15556); the limit is our choice.
LEAST_TOKENS = 1.0
_TRIAL_FILE = re.compile(r"(?<![a-z])(debug|smoke|dry|profil\w*|toy|sanity|trial)(?![a-z])", re.IGNORECASE)
_TRIAL_JOB = re.compile(rf"{_TRIAL_FILE.pattern}|(?<![a-z])(test|tests|testing)(?![a-z])", re.IGNORECASE)
_LIMIT = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,4}))?(?::(\d{1,4}))?")


def is_habit(rule: Rule, outcome: Outcome, evidence: Evidence, line: int) -> bool:
    """Return whether a finding is default behaviour of another trainer, the same for each of its files."""
    if not evidence.is_foreign or outcome.verdict != "fail" or rule.origin:
        return False
    # PRC002 points at the line of the number format even when the sum is a default of the trainer.
    if rule.id == "PRC002":
        origin = evidence.origins.get(str(outcome.at))
        return origin is None or "default of" in origin.where
    return rule.id.startswith(ABOUT_TRAINERS) and not line and outcome.at not in CHOSEN_BY_FILE


def is_small(rule: Rule, outcome: Outcome, evidence: Evidence) -> bool:
    """Return whether a finding of another trainer's file costs too little time to ask for an edit."""
    impact = outcome.impact
    if not evidence.is_foreign:
        return False
    # A leaked credential is known to others, however short the run.
    if rule.id == "ENV001" and outcome.severity == "error":
        return False
    if rule.id.startswith((*COSTS_TIME, *OF_REAL_RUNS)) and is_trial(evidence):
        return True
    if rule.id.startswith(OF_REAL_RUNS) and learns_nothing(evidence):
        return True
    # The seconds of a wait are stated by the file itself; a share of the training needs the length of the training.
    if rule.id.startswith(COSTS_TIME) and rule.id != "COM004" and not evidence.says_length:
        return True
    cheap = impact.points is not None and impact.usd is not None and impact.usd < LEAST_USD
    if cheap and rule.id.startswith(COSTS_TIME):
        return True
    if impact.points is None or impact.points >= SMALL_POINTS:
        return False
    return impact.usd is None or impact.usd < SMALL_USD


def is_trial(evidence: Evidence) -> bool:
    """Return whether another trainer's file states that it ends within hours, or exists to find a fault.

    Signs: Slurm's time limit or job name, the file's own name, few steps, mock data, a profiler.
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
    """Return whether a Megatron script trains new weights on less than one token per parameter, as speed tests do."""
    job, steps = evidence.the_job, evidence.setting_number("train_iters")
    shape = evidence.origins.get("model.hidden")
    if evidence.practice.trainer != "megatron" or not steps or shape is None or "stand-in" in shape.where:
        return False
    batch, length = evidence.setting_number("global_batch_size"), evidence.setting_number("seq_length")
    if not batch or not length or evidence.find_setting("load", "finetune", "pretrained_checkpoint") is not None:
        return False
    return 0 < steps * batch * length < LEAST_TOKENS * count_parameters(job.model).total


def slurm_seconds(text: str) -> float:
    """Return the seconds of a time limit of sbatch; 0 when it is not a time.

    The forms are minutes, minutes:seconds, hours:minutes:seconds, and days before any of these.

    >>> slurm_seconds("30"), slurm_seconds("00-03:00:00"), slurm_seconds("2-0"), slurm_seconds("UNLIMITED")
    (1800.0, 10800.0, 172800.0, 0.0)
    """
    match = _LIMIT.fullmatch(text.strip())
    if match is None:
        return 0.0
    days, *parts = match.groups()
    numbers = [int(text_part) for text_part in parts if text_part is not None]
    units = (HOUR_S, 60.0, 1.0) if days is not None or len(numbers) == 3 else (60.0, 1.0)
    return int(days or 0) * DAY_S + sum(number * unit for number, unit in zip(numbers, units, strict=False))
