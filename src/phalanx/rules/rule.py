"""The `Rule` class: a rule's texts, its limits and its check function in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, Severity
from phalanx.rules.profiles import Scaling, at_least

GROUPS = {
    "TOP": "topology",
    "COM": "communication",
    "PRC": "precision",
    "BAT": "batch and accumulation",
    "MEM": "memory",
    "CKP": "checkpoints",
    "FLT": "faults",
    "TEL": "telemetry",
    "EFF": "efficiency",
    "SEC": "security",
    "OPT": "optimizer",
    "DAT": "data",
    "ENV": "environment",
}
LETTERS = {"J": "job", "P": "plan", "L": "run log", "H": "host", "D": "drill"}

Value = float | int | bool | str | tuple[str, ...]
Mark = Literal["read", "secondary", "recalled", "computed", "our choice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The source of a number or a claim, and how well it is known.

    `read`: we read the primary text or code. `secondary`: read in a source that cites it. `recalled`: known from
    the abstract or a datasheet. `computed`: our arithmetic. `our choice`: a number we chose.
    """

    text: str  # "ByteRobust, arXiv:2509.16293 table 3"
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A named constant of a rule.

    A profile's value overrides a scaling class's value, which overrides the plain one.
    """

    value: Value
    note: str  # what it bounds and where the number comes from
    unit: str = ""
    profiles: Mapping[str, Value] = field(default_factory=dict)  # profile name -> value
    classes: Mapping[str, Value] = field(default_factory=dict)  # "S3" -> value from that class on

    def resolve(self, profile: str, scaling: Scaling) -> Value:
        """Return the value for a hardware profile and a scaling class."""
        if profile in self.profiles:
            return self.profiles[profile]
        # The names S1 to S6 sort by size, so max() is the largest class that applies.
        matching_classes = [name for name in self.classes if at_least(scaling, name)]
        return self.classes[max(matching_classes)] if matching_classes else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one rule, resolved for one hardware profile and scaling class."""

    values: Mapping[str, Value]

    def number(self, name: str) -> float:
        """Return a numeric limit."""
        value = self.values[name]
        assert isinstance(value, int | float), name
        return float(value)

    def words(self, name: str) -> tuple[str, ...]:
        """Return a limit that is a tuple of words."""
        value = self.values[name]
        assert isinstance(value, tuple), name
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean limit."""
        value = self.values[name]
        assert isinstance(value, bool), name
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule of the specification.

    All texts are Markdown; `explain`, `docs/rules/` and SARIF output are generated from them alone.
    """

    id: str  # "CKP001"; an id is never reused for another rule
    slug: str  # "interval-daly"
    severity: Severity
    requires: str  # letters of the evidence without which the verdict is unknown, such as "JP"
    uses: str = ""  # letters of further evidence that the check reads if it exists
    requirement: str  # one sentence
    # A test requires all of these texts of every rule of the edition; a user's own rule may leave them out.
    why: str = ""  # with number and source
    how: str = ""  # what is compared with what, as formulas
    limits: Mapping[str, Limit] = field(default_factory=dict)
    bad: str = ""  # a few lines of a job file or a log that fail
    good: str = ""  # the same lines, corrected
    fix: str = ""
    waive: str = ""  # when a waiver is justified
    history: str = "2026.1: first edition."
    references: tuple[Reference, ...] = ()
    check: Callable[[Evidence, Limits], Outcome | tuple[Outcome, ...]]
    softer_in: tuple[str, ...] = ()  # scaling classes in which errors of the rule count as warnings
    harder_from: str = ""  # scaling class from which warnings of the rule count as errors
    profiles: tuple[str, ...] = ()  # hardware profiles to which the rule applies; empty means all
    origin: str = ""  # source of a user's own rule; empty for rules of the edition

    def __repr__(self) -> str:
        return f"<Rule {self.id} {self.slug} ({self.severity})>"

    @property
    def group(self) -> str:
        """The letters at the start of the id, such as "CKP"."""
        return self.id.rstrip("0123456789")

    def with_limit(self, name: str, value: Value) -> Rule:
        """Return the rule with one limit set to `value` for every profile and class, for tests and experiments."""
        changed = replace(self.limits[name], value=value, profiles={}, classes={})
        return replace(self, limits={**self.limits, name: changed})
