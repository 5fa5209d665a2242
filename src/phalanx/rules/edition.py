"""The edition: loads the rules from the files of catalog/ and finds or selects them by id and slug."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable

from phalanx.errors import mistake, nearest
from phalanx.rules import catalog as package
from phalanx.rules.own_rules import installed_rules
from phalanx.rules.rule import GROUPS, Rule

EDITION = "2026.1"


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """Return every rule of the edition in the order of GROUPS.

    A file of catalog/ defines one rule as RULE or several as RULES.
    """
    rules: list[Rule] = []
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        rules += getattr(loaded, "RULES", None) or ([loaded.RULE] if hasattr(loaded, "RULE") else [])
    return tuple(sorted(rules, key=lambda rule: (list({**GROUPS, "SPC": ""}).index(rule.group), rule.id)))


def known_rules(own: Iterable[Rule] = ()) -> tuple[Rule, ...]:
    """Return the rules of the edition, then the user's own: those passed in and those of installed packages."""
    installed = (rule for _, rules, _ in installed_rules() for rule in rules)
    own_by_id = {rule.id: rule for rule in (*installed, *own)}
    return (*all_rules(), *sorted(own_by_id.values(), key=lambda rule: rule.id))


def find_rule(name: str, own: Iterable[Rule] = ()) -> Rule:
    """Return the rule with this id or slug, in any case; raises UserError that suggests the nearest name."""
    rules = known_rules(own)
    by_name = {rule.slug: rule for rule in reversed(rules)} | {rule.id.lower(): rule for rule in rules}
    if name.lower() in by_name:
        return by_name[name.lower()]
    close = nearest(name.lower(), by_name)
    fix = f"did you mean {by_name[close].id} ({by_name[close].slug})?" if close else "phalanx rules lists them"
    raise mistake(name[:60], "is not a rule of the specification", fix=fix)


def select_rules(chosen: str = "", ignored: str = "", own: Iterable[Rule] = ()) -> tuple[Rule, ...]:
    """Return rules by comma-separated ids or id prefixes, such as "CKP,FLT001".

    Raises UserError for a word that matches no rule, and when no rule remains.
    """
    selected_prefixes, ignored_prefixes, rules = _split_words(chosen), _split_words(ignored), known_rules(own)
    for word in (*selected_prefixes, *ignored_prefixes):
        if not any(rule.id.startswith(word) for rule in rules):
            names = [*dict.fromkeys(rule.group for rule in rules), *(rule.id for rule in rules)]
            close = nearest(word, names)
            raise mistake(
                word[:60], "selects no rule", fix=f"did you mean {close}?" if close else "phalanx rules lists them"
            )
    selected = tuple(
        rule
        for rule in rules
        if (not selected_prefixes or rule.id.startswith(selected_prefixes))
        and not (ignored_prefixes and rule.id.startswith(ignored_prefixes))
    )
    if not selected:
        select_option = f"--select {chosen[:60]} " if selected_prefixes else ""
        raise mistake(
            f"{select_option}--ignore {ignored[:60]}",
            "leaves no rule to check",
            why="a check without rules proves nothing",
            fix="ignore fewer rules",
        )
    return selected


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(word.strip().upper() for word in text.split(",") if word.strip())
