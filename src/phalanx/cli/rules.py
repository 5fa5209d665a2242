"""`phalanx rules`: the rules of the specification, as a list, as JSON, or as the pages of docs/rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.rules.profiles import Profile
    from phalanx.rules.rule import Rule


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx rules`."""
    parser.add_argument("--select", metavar="RULES", default="", help="only these rules or groups, as CKP,FLT001")
    parser.add_argument("--profile", metavar="NAME", help="only what holds for a hardware profile, with its limits")
    parser.add_argument("--format", choices=("text", "json", "md"), help="text (the default), json or md")
    parser.add_argument("--write", metavar="DIR", help="write an index and a page per rule into a folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List, or write the pages."""
    from phalanx.rules.edition import select_rules
    from phalanx.rules.profiles import find_profile

    if args.json and args.format not in (None, "json"):
        raise mistake("phalanx rules", f"--json and --format {args.format} exclude each other", fix="give one of them")
    if args.write and (args.select or args.profile):
        raise mistake("phalanx rules", "--write is for all rules", fix="leave --select and --profile out")
    profile = find_profile(args.profile) if args.profile else None
    rules = [
        one for one in select_rules(args.select) if profile is None or not one.profiles or profile.name in one.profiles
    ]
    if args.write:
        return _write(Path(args.write), rules)
    form = "json" if args.json else args.format or "text"
    if form == "json":
        print_json(_document(rules, profile))
    elif form == "md":
        from phalanx.rules.rule_page import rule_index

        sys.stdout.write(rule_index(rules))
    else:
        say(_list(rules, profile))
    return 0


def _write(folder: Path, rules: Sequence[Rule]) -> int:
    """All pages; a page of a rule that is no more is taken away, so that the folder is the edition."""
    from phalanx.io.files import write_text
    from phalanx.rules.rule_page import WROTE, rule_pages

    made = rule_pages(rules)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.md"):
            if old.name not in made and WROTE in old.read_text(encoding="utf-8", errors="replace"):
                old.unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise SystemFailure(Problem(where=str(folder), what=what, fix="name another --write")) from error
    for name, text in made.items():
        write_text(folder / name, text, fix="name another --write")
    note(f"wrote {len(made)} pages to {folder}")
    return 0


def _document(rules: Sequence[Rule], profile: Profile | None) -> dict[str, Any]:
    from phalanx.rules.edition import EDITION
    from phalanx.rules.rule_page import rule_sections

    return {
        "edition": EDITION,
        "profile": profile.name if profile is not None else None,
        "rules": [
            {
                "id": rule.id,
                "slug": rule.slug,
                "group": rule.group,
                "severity": rule.severity,
                "requires": rule.requires,
                "uses": rule.uses,
                "limits": {name: _limit(one, profile) for name, one in rule.limits.items()},
                "profiles": rule.profiles,
                "softer_in": rule.softer_in,
                "harder_from": rule.harder_from,
                "sources": [{"text": one.text, "mark": one.mark} for one in rule.references],
                "sections": rule_sections(rule),
            }
            for rule in rules
        ],
    }


def _limit(limit: Any, profile: Profile | None) -> dict[str, Any]:
    value = limit.profiles.get(profile.name, limit.value) if profile is not None else limit.value
    by_profile = {} if profile is not None else dict(limit.profiles)
    return {
        "value": value,
        "unit": limit.unit,
        "profiles": by_profile,
        "classes": dict(limit.classes),
        "note": limit.note,
    }


def _list(rules: Sequence[Rule], profile: Profile | None) -> str:
    from phalanx.rules.edition import EDITION
    from phalanx.rules.rule_page import TITLES, shown_limit

    lines = [f"{plural(len(rules), 'rule')}, edition {EDITION}; phalanx explain ID prints one", ""]
    group = ""
    for rule in rules:
        if rule.group != group:
            group = rule.group
            lines.append(f"{group}  {TITLES[group]}")
        lines.append(f"  {rule.id} {rule.severity[0].upper()} {rule.requires:<3} {rule.slug:<24} {rule.requirement}")
        if profile is not None:
            values = (
                f"{name} {shown_limit(one.profiles.get(profile.name, one.value), one.unit)}"
                for name, one in rule.limits.items()
            )
            lines.append(f"           {'; '.join(values)}")
    return "\n".join(lines)
