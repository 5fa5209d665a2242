"""Everything a rule may look at. Gathered once; rules are pure functions of it."""

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

# Of another trainer's file: the keys whose lines decide a plan, and those that settle what a file leaves to a default.
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
    """Whether an argument and a value of the JSON are two of a kind, and not the same.

    >>> differs("4", 8), differs("4", 4), differs("4", "auto"), differs("True", False), differs("1", True)
    (True, False, False, True, False)
    """
    words = {"true": "1", "yes": "1", "false": "0", "no": "0"}
    one, two = (words.get(str(value).lower(), str(value)) for value in (said, other))
    return one.isdigit() and two.isdigit() and int(one) != int(two)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmapped:
    """A setting of another trainer's configuration that the job schema has no word for."""

    key: str
    value: str
    why: str

    @property
    def is_own_flag(self) -> bool:
        """An argument that we have never heard of: of a fork, which may do without what the original asks for."""
        return self.key.startswith("--") and self.why == NO_WORD


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignSetting:
    """A setting of another trainer's file as it stands there, for rules about what that trainer itself asserts."""

    key: str  # as the file spells it
    value: object
    line: int  # from 1; 0 is the file as a whole
    comment: str = ""  # what its author wrote beside it
    earlier: int = 0  # line on which the same key has another value, which is overruled; 0 is nowhere
    twice: str = ""  # the key that stands there twice, where it is a table around this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """J job and practice, P plan, L log, H host, D drills; None is missing."""

    target: str  # the file or folder that was named
    job: Job | None
    practice: Practice
    profile: HardwareProfile
    scaling: Scaling
    today: date
    origins: Mapping[str, Origin] = field(default_factory=dict)  # dotted key -> where its value was written
    job_file: str = ""
    plan: Plan | None = None
    plan_file: str = ""
    refusals: tuple[Problem, ...] = ()  # why there is no plan, in the planner's words
    log: LogFacts | None = None
    host: HostFacts | None = None
    drills: tuple[DrillFacts, ...] = ()
    parity: ParityFacts | None = None
    unmapped: tuple[Unmapped, ...] = ()
    their_keys: Mapping[str, str] = field(default_factory=dict)  # job key -> what another trainer's file calls it
    settings: Mapping[str, ForeignSetting] = field(default_factory=dict)  # their name, or Megatron's word -> setting
    practice_keys: Mapping[str, str] = field(default_factory=dict)  # field of `practice` -> the setting that says it
    partial: str = ""  # which setting makes another trainer's file train a part of the weights only
    changed: str = ""  # an argument of a fork's own that changes how a step is computed
    open_why: str = ""  # why another trainer's file may be given settings that do not stand in it
    file_notes: tuple[str, ...] = ()  # what a reader of another trainer's file noticed, and no rule judges
    data: DataFacts | None = None  # what it trains on, as far as this machine can tell
    devices_said: int = 0  # of a job that cannot be planned, by its cluster or file; 0 is not said
    waivers: tuple[Waiver, ...] = ()  # beside the job's own, from a file of them
    damaged: Mapping[str, Problem] = field(default_factory=dict)  # letter -> its file of a run, and why not

    def has(self, letter: str) -> bool:
        """Whether there is any evidence of a kind."""
        found = {"J": self.job, "P": self.plan, "L": self.log, "H": self.host, "D": self.drills or None}
        return found[letter] is not None

    @property
    def the_job(self) -> Job:
        """The job, in rules that require J."""
        assert self.job is not None
        return self.job

    @property
    def the_plan(self) -> Plan:
        """The plan, in rules that require P."""
        assert self.plan is not None
        return self.plan

    @property
    def the_log(self) -> LogFacts:
        """The log, in rules that require L."""
        assert self.log is not None
        return self.log

    @property
    def the_host(self) -> HostFacts:
        """The host, in rules that require H."""
        assert self.host is not None
        return self.host

    @property
    def devices(self) -> int:
        """Devices of the job; 1 where nothing says."""
        return max(1, self.known_devices)

    @property
    def known_devices(self) -> int:
        """Devices of the job; 0 where nothing says."""
        if self.plan is not None:
            return self.plan.layout.devices
        return self.log.world if self.log is not None and self.log.world else max(0, self.devices_said)

    @property
    def all_waivers(self) -> tuple[Waiver, ...]:
        """The job's own and those given beside it; `waiver.N` of `origins` counts them in this order."""
        return (*(self.job.waiver if self.job is not None else ()), *self.waivers)

    @property
    def says_length(self) -> bool:
        """Whether anybody said how long it trains: the tokens of a model's first training are none of a later one's."""
        return not self.is_foreign or self.written("data.tokens")

    @property
    def usd(self) -> float | None:
        """What the whole job is expected to cost, at the middle price; without failures where it would never end."""
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
        """How long the whole job is expected to take."""
        return self.plan.duration.wall_s if self.plan is not None else None

    def written(self, key: str) -> bool:
        """Whether a person wrote this key into the job file (or set it)."""
        return key in self.origins and self.origins[key].by_hand

    def stated(self, key: str) -> bool:
        """Whether the job's value of a key is what will happen: our defaults say nothing of another trainer."""
        return self.practice.trainer == "phalanx" or self.written(key)

    def loses(self, share: float, note: str = "") -> Impact:
        """The impact of losing `share` (0 to 1) of the effective training time of this job."""
        share = min(1.0, max(0.0, share))
        usd = self.usd
        return Impact(points=100 * share, usd=share * usd if usd is not None else None, note=note)

    def loses_once(self, seconds: float, note: str = "") -> Impact:
        """The impact of losing so many seconds, once, of all devices of this job."""
        wall_s = self.wall_s
        if not wall_s or wall_s == float("inf"):
            return Impact(note=note or f"{seconds / HOUR_S:.1f} h of all devices, once")
        return self.loses(min(1.0, seconds / wall_s), note or f"{seconds / HOUR_S:.1f} h of all devices, once")

    def place(self, at: str | Spot) -> tuple[str, int]:
        """File and line (0: the whole file) of what an Outcome points at."""
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
        """Whether the target is another trainer's file."""
        return bool(self.their_keys)

    def find_setting(self, *names: str) -> ForeignSetting | None:
        """The first of these settings that another trainer's file has; a null one counts as absent."""
        found = (self.settings.get(name) for name in names)
        return next((one for one in found if one is not None and one.value is not None), None)

    def setting_flag(self, *names: str) -> bool:
        """Whether one of these settings is on, also as text."""
        found = self.find_setting(*names)
        return found is not None and str(found.value).strip().lower() in ("true", "yes", "1", "on")

    def setting_number(self, *names: str) -> float | None:
        """A setting as a finite number; None where there is none."""
        found = self.find_setting(*names)
        if found is None or isinstance(found.value, bool) or not isinstance(found.value, int | float | str):
            return None
        try:
            value = float(str(found.value)[:40])
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def _setting_line(self, name: str) -> tuple[str, int]:
        found = self.settings.get(name)
        return self.job_file or self.target, found.line if found is not None else 0

    def _first_line(self, keys: Sequence[str]) -> tuple[str, int]:
        """The line of the first of some job keys that stands in the file."""
        for key in keys:
            origin = self.origins.get(key)
            if origin is not None and origin.kind == "file":
                file, _, line = origin.where.rpartition(":")
                if line.isdigit():
                    return file, int(line)
        return self.job_file or self.target, 0

    def _key_line(self, key: str) -> tuple[str, int]:
        """Of a job key: its own line, else that of its section's first key, else the file.

        Another trainer's file has other sections: what stands beside the key there is about something else.
        """
        section = "" if self.their_keys else key.partition(".")[0]
        beside = STANDS_FOR.get(key, ()) if self.their_keys else ()
        return self._first_line(
            (key, *beside, *(one for one in self.origins if section and one.partition(".")[0] == section))
        )
