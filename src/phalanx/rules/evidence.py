"""The evidence: everything a rule may read. It is gathered once; rules are pure functions of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING

from phalanx.errors import Problem
from phalanx.job.draft import Origin
from phalanx.job.schema import Job, Waiver
from phalanx.plan.plan import Plan
from phalanx.rules.facts.data_facts import DataFacts
from phalanx.rules.facts.drill_facts import DrillFacts
from phalanx.rules.facts.host import HostFacts
from phalanx.rules.facts.parity import ParityFacts
from phalanx.rules.facts.trainers import Practice
from phalanx.rules.outcome import Impact, Spot
from phalanx.rules.profiles import HardwareProfile, Scaling
from phalanx.units import HOUR_S

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

# Keys of another trainer's file. DECIDES_PLAN: keys that decide the plan. STANDS_FOR: the keys whose line is shown
# for a key that the file leaves to a default.
DECIDES_PLAN = ("batch.micro", "parallel.tensor", "parallel.zero", "batch.global_sequences", "model.layers")
STANDS_FOR: Mapping[str, tuple[str, ...]] = {
    "precision.grad_reduce": ("precision.compute",),
    "precision.loss_scale": ("precision.compute",),
    "precision.optimizer_state": ("precision.compute",),
    "precision.master_weights": ("precision.compute",),
    "batch.micro": ("batch.global_sequences",),
    "optim.warmup_tokens": ("optim.lr",),
    "optim.eps": ("optim.lr",),
    "checkpoint.async": ("checkpoint.interval_s",),
    "parallel.shard": ("parallel.zero",),
    "parallel.schedule": ("parallel.pipeline",),
    "parallel.virtual_pipeline": ("parallel.pipeline",),
    "parallel.sequence_parallel": ("parallel.tensor",),
    "parallel.recompute": ("batch.micro",),
}


NO_WORD = "the job schema has no word for it"


def differs(said: object, other: object) -> bool:
    """Return whether an argument and a value of the JSON are both whole numbers or booleans, and differ.

    >>> differs("4", 8), differs("4", 4), differs("4", "auto"), differs("True", False), differs("1", True)
    (True, False, False, True, False)
    """
    words = {"true": "1", "yes": "1", "false": "0", "no": "0"}
    first, second = (words.get(str(value).lower(), str(value)) for value in (said, other))
    return first.isdigit() and second.isdigit() and int(first) != int(second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmapped:
    """A setting of another trainer's configuration that the job schema has no key for."""

    key: str
    value: str
    why: str

    @property
    def is_own_flag(self) -> bool:
        """True for an argument unknown to us: it belongs to a fork, which may not need what the original needs."""
        return self.key.startswith("--") and self.why == NO_WORD


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignSetting:
    """A setting as written in another trainer's file, for rules about what that trainer itself asserts."""

    key: str  # as the file spells it
    value: object
    line: int  # from 1; 0 means the whole file
    comment: str = ""  # the author's comment on the same line
    # Line on which the same key has another value, which this one overrides; 0 means none.
    earlier: int = 0
    # The duplicate key, where it is a table that contains this setting.
    twice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The evidence on one target: J job and practice, P plan, L log, H host, D drills. None means missing."""

    target: str  # the file or folder that the user named
    job: Job | None
    practice: Practice
    profile: HardwareProfile
    scaling: Scaling
    today: date
    origins: Mapping[str, Origin] = field(default_factory=dict)  # dotted key -> where its value was written
    job_file: str = ""
    plan: Plan | None = None
    plan_file: str = ""
    refusals: tuple[Problem, ...] = ()  # reasons why there is no plan, from the planner
    log: LogFacts | None = None
    host: HostFacts | None = None
    drills: tuple[DrillFacts, ...] = ()
    parity: ParityFacts | None = None
    unmapped: tuple[Unmapped, ...] = ()
    their_keys: Mapping[str, str] = field(default_factory=dict)  # job key -> its name in another trainer's file
    # The trainer's name of a setting, or Megatron's argument -> the setting.
    settings: Mapping[str, ForeignSetting] = field(default_factory=dict)
    practice_keys: Mapping[str, str] = field(default_factory=dict)  # field of `practice` -> the setting that decides it
    # The setting that makes another trainer's file train only a part of the weights.
    partial: str = ""
    changed: str = ""  # an argument of a fork that changes how a step is computed
    open_why: str = ""  # the reason why another trainer's file may get settings from elsewhere
    # Remarks of the reader of another trainer's file that no rule judges.
    file_notes: tuple[str, ...] = ()
    data: DataFacts | None = None  # the training data, as far as this machine can see it
    # Devices of a job that cannot be planned, from its cluster or file; 0 means not stated.
    devices_said: int = 0
    waivers: tuple[Waiver, ...] = ()  # from a separate file of waivers, in addition to the job's
    damaged: Mapping[str, Problem] = field(default_factory=dict)  # letter -> the damaged file of a run, and its problem

    def has(self, letter: str) -> bool:
        """Return whether there is any evidence of the kind that a letter denotes."""
        evidence_by_letter = {"J": self.job, "P": self.plan, "L": self.log, "H": self.host, "D": self.drills or None}
        return evidence_by_letter[letter] is not None

    @property
    def the_job(self) -> Job:
        """The job, for rules that require J."""
        assert self.job is not None
        return self.job

    @property
    def the_plan(self) -> Plan:
        """The plan, for rules that require P."""
        assert self.plan is not None
        return self.plan

    @property
    def the_log(self) -> LogFacts:
        """The log, for rules that require L."""
        assert self.log is not None
        return self.log

    @property
    def the_host(self) -> HostFacts:
        """The host, for rules that require H."""
        assert self.host is not None
        return self.host

    @property
    def devices(self) -> int:
        """The number of devices of the job; 1 where it is not known."""
        return max(1, self.known_devices)

    @property
    def known_devices(self) -> int:
        """The number of devices of the job; 0 where it is not known."""
        if self.plan is not None:
            return self.plan.layout.devices
        return self.log.world if self.log is not None and self.log.world else max(0, self.devices_said)

    @property
    def all_waivers(self) -> tuple[Waiver, ...]:
        """The job's waivers, then those of the separate file; `waiver.N` of `origins` counts them in this order."""
        return (*(self.job.waiver if self.job is not None else ()), *self.waivers)

    @property
    def says_length(self) -> bool:
        """True if the training length is stated; another trainer's file may leave it to a default."""
        return not self.is_foreign or self.written("data.tokens")

    @property
    def usd(self) -> float | None:
        """The expected cost of the whole job in dollars, at the middle price, or None where it is not known.

        Where failures would keep the job from ending, the cost is that without failures.
        """
        if (
            not self.says_length
            or self.plan is None
            or not self.plan.bill.usd
            or not self.plan.bill.usd_per_device_hour
        ):
            return None
        if math.isfinite(self.plan.bill.usd[1]):
            return self.plan.bill.usd[1]
        hours = self.plan.duration.training_s / HOUR_S
        return self.plan.bill.usd_per_device_hour[1] * self.plan.layout.devices * hours

    @property
    def wall_s(self) -> float | None:
        """The expected wall time of the whole job in seconds."""
        return self.plan.duration.wall_s if self.plan is not None else None

    def written(self, key: str) -> bool:
        """Return whether a person wrote this key into the job file or set it."""
        return key in self.origins and self.origins[key].by_hand

    def stated(self, key: str) -> bool:
        """Return whether the run will use the job's value of a key; our defaults do not apply to another trainer."""
        return self.practice.trainer == "phalanx" or self.written(key)

    def loses(self, share: float, note: str = "") -> Impact:
        """Return the impact of losing `share` (0 to 1) of the effective training time of this job."""
        share = min(1.0, max(0.0, share))
        usd = self.usd
        return Impact(points=100 * share, usd=share * usd if usd is not None else None, note=note)

    def loses_once(self, seconds: float, note: str = "") -> Impact:
        """Return the impact of losing this many seconds, once, on all devices of this job."""
        wall_s = self.wall_s
        if not wall_s or wall_s == float("inf"):
            return Impact(note=note or f"{seconds / HOUR_S:.1f} h of all devices, once")
        return self.loses(min(1.0, seconds / wall_s), note or f"{seconds / HOUR_S:.1f} h of all devices, once")

    def place(self, at: str | Spot) -> tuple[str, int]:
        """Return the file and line (0: the whole file) that the `at` of an outcome refers to."""
        if isinstance(at, Spot):
            return at.file, at.line
        kind, _, name = at.partition(":")
        if kind == "practice":
            return self._setting_line(self.practice_keys.get(name, ""))
        if kind == "setting":
            return self._setting_line(name)
        if kind == "plan" and self.is_foreign:
            return self._first_line(DECIDES_PLAN)
        if kind == "plan" or not at:
            return (self.plan_file or self.job_file or self.target), 0
        return self._key_line(at)

    @property
    def is_foreign(self) -> bool:
        """True if the target is another trainer's file."""
        return bool(self.their_keys)

    def find_setting(self, *names: str) -> ForeignSetting | None:
        """Return the first of these settings that another trainer's file has; a null value counts as absent."""
        settings = (self.settings.get(name) for name in names)
        return next((setting for setting in settings if setting is not None and setting.value is not None), None)

    def setting_flag(self, *names: str) -> bool:
        """Return whether the first of these settings that is present is on; text such as "yes" counts."""
        setting = self.find_setting(*names)
        return setting is not None and str(setting.value).strip().lower() in ("true", "yes", "1", "on")

    def setting_number(self, *names: str) -> float | None:
        """Return a setting as a finite number, or None."""
        setting = self.find_setting(*names)
        if setting is None or isinstance(setting.value, bool) or not isinstance(setting.value, int | float | str):
            return None
        try:
            value = float(str(setting.value)[:40])
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def _setting_line(self, name: str) -> tuple[str, int]:
        setting = self.settings.get(name)
        return self.job_file or self.target, setting.line if setting is not None else 0

    def _first_line(self, keys: Sequence[str]) -> tuple[str, int]:
        """Return the line of the first of these job keys that was read from the file."""
        for key in keys:
            origin = self.origins.get(key)
            if origin is not None and origin.kind == "file":
                file, _, line = origin.where.rpartition(":")
                if line.isdigit():
                    return file, int(line)
        return self.job_file or self.target, 0

    def _key_line(self, key: str) -> tuple[str, int]:
        """Return the line of a job key: its own, else that of its section's first key, else 0 for the file.

        In another trainer's file, where sections differ, the keys of STANDS_FOR replace the section.
        """
        section = "" if self.their_keys else key.partition(".")[0]
        substitutes = STANDS_FOR.get(key, ()) if self.their_keys else ()
        return self._first_line(
            (
                key,
                *substitutes,
                *(origin_key for origin_key in self.origins if section and origin_key.partition(".")[0] == section),
            )
        )
