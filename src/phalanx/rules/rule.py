"""A rule of the specification: its text, its limits, and the predicate, in one value."""

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
    """Where a number or a claim comes from, and how well we know it.

    `read`: we read the primary text or code. `secondary`: read in a source that names it. `recalled`: known from the
    abstract or a datasheet. `computed`: our arithmetic. `our choice`: a number we chose.
    """

    text: str  # "ByteRobust, arXiv:2509.16293 table 3"
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A named constant of a rule. A profile's value goes before a class's, which goes before the plain one."""

    value: Value
    note: str  # what it bounds and where the number comes from
    unit: str = ""
    profiles: Mapping[str, Value] = field(default_factory=dict)  # profile name -> value
    classes: Mapping[str, Value] = field(default_factory=dict)  # "S3" -> value from that class on

    def resolve(self, profile: str, scaling: Scaling) -> Value:
        """The value that holds for a profile and a size."""
        if profile in self.profiles:
            return self.profiles[profile]
        held = [name for name in self.classes if at_least(scaling, name)]
        return self.classes[max(held)] if held else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one rule as they hold here."""

    values: Mapping[str, Value]

    def number(self, name: str) -> float:
        """A limit that is a number."""
        value = self.values[name]
        assert isinstance(value, int | float), name
        return float(value)

    def words(self, name: str) -> tuple[str, ...]:
        """A limit that is a set of words."""
        value = self.values[name]
        assert isinstance(value, tuple), name
        return value

    def flag(self, name: str) -> bool:
        """A limit that is true or false."""
        value = self.values[name]
        assert isinstance(value, bool), name
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule. Every text is Markdown; `explain`, `docs/rules/` and SARIF are made of nothing else."""

    id: str  # "CKP001": never used for anything else again
    slug: str  # "interval-daly"
    severity: Severity
    requires: str  # letters of the evidence without which the verdict is unknown, as "JP"
    uses: str = ""  # further letters it looks at where they are there
    requirement: str  # one sentence
    # Every rule of the edition has all of these texts (a test asks for them); a user's own may leave them out.
    why: str = ""  # with number and source
    how: str = ""  # what is compared with what, as formulas
    limits: Mapping[str, Limit] = field(default_factory=dict)
    bad: str = ""  # a few lines of a job file, or of a log, that fail
    good: str = ""  # the same, mended
    fix: str = ""
    waive: str = ""  # when it is right to
    history: str = "2026.1: first edition."
    references: tuple[Reference, ...] = ()
    check: Callable[[Evidence, Limits], Outcome | tuple[Outcome, ...]]
    softer_in: tuple[str, ...] = ()  # classes in which its errors are warnings
    harder_from: str = ""  # class from which its warnings are errors
    profiles: tuple[str, ...] = ()  # where it applies; empty is everywhere
    origin: str = ""  # of a user's own rule: where it comes from; empty for rules of the edition

    def __repr__(self) -> str:
        return f"<Rule {self.id} {self.slug} ({self.severity})>"

    @property
    def group(self) -> str:
        """The letters of the id."""
        return self.id.rstrip("0123456789")

    def with_limit(self, name: str, value: Value) -> Rule:
        """The rule with one constant changed everywhere: for tests, and for those who ask "what if"."""
        changed = replace(self.limits[name], value=value, profiles={}, classes={})
        return replace(self, limits={**self.limits, name: changed})
