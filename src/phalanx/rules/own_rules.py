"""The user's own rules: Python objects, "file.py:name" texts, the job's key `rules`, and installed packages.

A package offers rules under the entry point group `phalanx.rules`. Code that a job file names runs only with the
user's consent.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.packages import offered_points
from phalanx.io.user_code import load_user_object, user_code_error
from phalanx.job.schema import RULE_ID_PATTERN
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, Severity
from phalanx.rules.rule import GROUPS, LETTERS, Limit, Limits, Reference, Rule

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "phalanx.rules"
RESERVED = (*GROUPS, "SPC")  # prefixes of ids that this and later editions use
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")

# A rule, or the place of one: "file.py:name", "package.module:name"; "file.py" means all rules of the file.
RuleSource = Rule | str


class Predicate(Protocol):
    """The signature of a function that `own_rule` decorates."""

    def __call__(self, evidence: Evidence, limits: Limits, /) -> Outcome | tuple[Outcome, ...]:
        """Return the outcome for the evidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A rule that was named but is not run."""

    name: str
    what: str
    fix: str
    is_fault: bool  # the rule is faulty; False: the consent to run it is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRules:
    """The user's rules for one target."""

    rules: tuple[Rule, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def named(self) -> int:
        """The number of rules that were named, run or not."""
        return len(self.rules) + len(self.left_out)


def own_rule(
    rule_id: str,
    requirement: str,
    *,
    slug: str = "",
    severity: Severity = "error",
    requires: str = "J",
    uses: str = "",
    why: str = "",
    how: str = "",
    fix: str = "",
    limits: Mapping[str, Limit] | None = None,
    references: tuple[Reference, ...] = (),
) -> Callable[[Predicate], Rule]:
    """Return a decorator that makes a rule of a function.

    Example: `@own_rule("ACME001", "Jobs name their owner.", severity="warning")`. `slug` defaults to the function's
    name and `how` to the function's docstring. `requires` holds letters of evidence (J job, P plan, L run log, H
    host, D drills); if one of these is missing, the verdict is unknown and the function is not called.
    """

    def decorate(check: Predicate) -> Rule:
        name = str(getattr(check, "__name__", "rule"))
        return Rule(
            id=rule_id,
            slug=slug or name.strip("_").replace("_", "-").lower(),
            severity=severity,
            requires=requires,
            uses=uses,
            requirement=requirement,
            why=why,
            how=how or " ".join((check.__doc__ or "").split()),
            limits=limits or {},
            fix=fix,
            references=references,
            check=check,
            origin=f"{getattr(check, '__module__', '')}.{name}".strip("."),
        )

    return decorate


def collect_own_rules(
    given: Iterable[RuleSource] = (), *, job_names: Sequence[str] = (), folder: Path = Path(), allow_code: bool = False
) -> OwnRules:
    """Return the rules that the caller passes, those a job names (in `folder`), and those of installed packages.

    Raises UserError for an unusable rule that the caller passes. An unusable rule of a job or a package is left out
    instead, with the reason, so that the other rules are still checked.
    """
    rules_by_id: dict[str, Rule] = {}
    for source in (given,) if isinstance(given, str) else given:
        for rule in _rules_of(source, Path()):
            _add_rule(rules_by_id, rule)
    left_out: list[LeftOut] = []
    for name in job_names:
        if not allow_code:
            reason = f"{name} was not run: code that a job file names needs your consent"
            fix = "read it, then give --allow-code (allow_code=True in Python)"
            left_out.append(LeftOut(name=name, what=reason, fix=fix, is_fault=False))
            continue
        _add_or_leave(rules_by_id, left_out, name, lambda name=name: _rules_of(name, folder))  # type: ignore[misc]
    for name, package_rules, problem in installed_rules():
        if problem is not None:
            left_out.append(_left_out(name, problem))
        _add_or_leave(rules_by_id, left_out, name, lambda rules=package_rules: rules)  # type: ignore[misc]
    return OwnRules(rules=tuple(sorted(rules_by_id.values(), key=lambda rule: rule.id)), left_out=tuple(left_out))


@functools.cache
def installed_rules() -> tuple[tuple[str, tuple[Rule, ...], Problem | None], ...]:
    """Return the rules of installed packages: name of the entry point, its rules, and the problem in loading it."""
    return tuple(_installed_rules(point) for point in offered_points(ENTRY_POINTS))


def _installed_rules(point: EntryPoint) -> tuple[str, tuple[Rule, ...], Problem | None]:
    package = point.dist.name if point.dist is not None else point.value
    name = f"{point.name} of {package}"
    try:
        rules = tuple(_checked_rule(rule, name, f"package {package}") for rule in _flat_rules(point.load(), name))
    except UserError as error:
        return name, (), error.problems[0]
    except (Exception, SystemExit) as error:
        return name, (), user_code_error(name, "cannot be imported", error).problems[0]
    return name, rules, None


def _rules_of(source: RuleSource, folder: Path) -> tuple[Rule, ...]:
    """Return the rules behind a source that a caller or a job named. Raises UserError."""
    if isinstance(source, str):
        loaded = load_user_object(source, folder=folder)
        return tuple(_checked_rule(rule, source, source) for rule in _flat_rules(loaded, source))
    return tuple(
        _checked_rule(rule, repr(source)[:60], rule.origin or "Python") for rule in _flat_rules(source, "rules")
    )


def _flat_rules(found: object, name: str) -> Iterator[Rule]:
    """Yield a rule, each rule of a list, or all rules of a module."""
    if isinstance(found, Rule):
        yield found
        return
    candidates: Iterable[Any] = ()
    if isinstance(found, ModuleType):
        unique = {id(member): member for member in vars(found).values() if isinstance(member, Rule)}
        candidates = unique.values()
    elif isinstance(found, list | tuple):
        candidates = found
    rules = [candidate for candidate in candidates if isinstance(candidate, Rule)]
    if not rules or len(rules) != len(list(candidates)):
        raise mistake(
            name,
            f"is {type(found).__name__}, not a rule",
            why="a rule is a phalanx.rules.specification.Rule, or a function that own_rule decorates",
            fix='write @own_rule("ACME001", "What every job must do.") above the function',
        )
    yield from rules


def _checked_rule(rule: Rule, name: str, origin: str) -> Rule:
    """Return the rule with its origin. Raises UserError when id, slug, severity or letters are not valid."""

    def wrong(what: str, fix: str) -> UserError:
        return mistake(name, what, fix=fix)

    if not isinstance(rule.id, str) or not re.fullmatch(RULE_ID_PATTERN, rule.id):
        raise wrong(f"the id {str(rule.id)[:60]!r} has the wrong form", "use capital letters and a number, as ACME001")
    if rule.id.startswith(RESERVED):
        raise wrong(
            f"the id {rule.id} begins with {rule.id[:3]}, which belongs to the specification",
            "begin ids of your own with other letters, as ACME001",
        )
    if not isinstance(rule.slug, str) or not _SLUG.fullmatch(rule.slug):
        raise wrong(
            f"{rule.id}: the slug {str(rule.slug)[:60]!r} has the wrong form",
            "use lower-case letters, digits and '-', at most 40",
        )
    if rule.severity not in ("error", "warning", "info"):
        raise wrong(f"{rule.id}: {rule.severity!r} is no severity", "use error, warning or info")
    if not set(rule.requires + rule.uses) <= set(LETTERS):
        letters = ", ".join(f"{letter} {noun}" for letter, noun in LETTERS.items())
        raise wrong(f"{rule.id}: requires = {rule.requires!r} names no evidence", f"the letters are {letters}")
    return replace(rule, origin=origin)


def _add_rule(found: dict[str, Rule], rule: Rule) -> None:
    if rule.id in found and found[rule.id].check is not rule.check:
        raise mistake(
            rule.origin, f"the id {rule.id} is also that of {found[rule.id].origin}", fix="give one of them another id"
        )
    found.setdefault(rule.id, rule)


def _add_or_leave(
    found: dict[str, Rule], left_out: list[LeftOut], name: str, load: Callable[[], tuple[Rule, ...]]
) -> None:
    try:
        for rule in load():
            _add_rule(found, rule)
    except UserError as error:
        left_out.append(_left_out(name, error.problems[0]))


def _left_out(name: str, problem: Problem) -> LeftOut:
    where = f"{problem.where}: " if problem.where and problem.where != name else ""
    message = problem.what if name in problem.what else f"{name} {problem.what}"
    return LeftOut(name=name, what=f"{where}{message}", fix=problem.fix or "correct the rule", is_fault=True)
