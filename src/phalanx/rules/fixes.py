"""Edits that fix a job, and writing them into its file: values change; comments, order and spaces stay."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from phalanx.errors import UserError, mistake
from phalanx.io.files import read_text, replace_bytes
from phalanx.io.path_probes import resolve_path
from phalanx.io.toml import key_lines
from phalanx.io.write_errors import write_failure
from phalanx.job.draft import EXCLUSIVE
from phalanx.rules.formats.text import as_toml, shown_setting
from phalanx.rules.outcome import Edit
from phalanx.rules.run_rules import CheckReport, Finding

BOM = "\ufeff"


def edited_text(text: str, edits: Sequence[Edit], *, where: str) -> str:
    """Return the text with every edit applied; raises UserError when anything else would change with it."""
    bom, body = (BOM, text[1:]) if text.startswith(BOM) else ("", text)
    result = body
    for edit in edits:
        result = _put_value(result, edit, where)
    _prove_edit(body, result, edits, where)
    return bom + result


def _put_value(text: str, edit: Edit, where: str) -> str:
    """Replace one value in place, or add the key after the last key of its section."""
    section, _, name = edit.key.rpartition(".")
    document = _parse_toml(_without_partner(text, edit.key, where), where)
    table: Any = document
    if section:
        if section not in document:
            return _append_section(tomlkit.dumps(document), section, f"{name} = {_toml_value(edit, where)}")
        table = document[section]
    if not isinstance(table, MutableMapping):
        raise _refused_edit(where, f"{section} is no section in it")
    if name not in table:
        inserted = _insert_line(tomlkit.dumps(document), section, f"{name} = {_toml_value(edit, where)}")
        if inserted:
            return inserted
    table[name] = edit.value
    return tomlkit.dumps(document)


def _parse_toml(text: str, where: str) -> tomlkit.TOMLDocument:
    try:
        document = tomlkit.parse(text)
    except (TOMLKitError, ValueError, RecursionError) as error:
        raise _refused_edit(where, f"the editor cannot read it: {str(error)[:200]}") from error
    # Only a file that survives the round trip unchanged may be edited.
    if tomlkit.dumps(document) != text:
        raise _refused_edit(where, "the editor would change its layout")
    return document


def _without_partner(text: str, key: str, where: str) -> str:
    """Drop the other key of a pair that excludes it, such as global_tokens of global_sequences."""
    document: Any = _parse_toml(text, where)
    for pair in EXCLUSIVE:
        if key in pair:
            section, _, name = pair[1 - pair.index(key)].partition(".")
            table = document.get(section)
            if isinstance(table, MutableMapping) and name in table:
                del table[name]
    return tomlkit.dumps(document)


def _toml_value(edit: Edit, where: str) -> str:
    try:
        return tomlkit.item(edit.value).as_string()
    except (TOMLKitError, ValueError) as error:
        raise _refused_edit(where, f"{edit.key} = {edit.value!r} cannot be written") from error


def _append_section(text: str, section: str, line: str) -> str:
    end = _line_end(text)
    lead = "" if not text else end if text.endswith("\n") else end * 2
    return f"{text}{lead}[{section}]{end}{line}{end}"


def _insert_line(text: str, section: str, line: str) -> str:
    """Insert a line after the last key of a section.

    Returns an empty text where the section has no lines that can take it, such as an inline table.
    """
    numbers = key_lines(text)
    rows = text.splitlines(keepends=True)
    first = numbers.get((section,), 0) if section else 0
    if section and not re.match(rf"\s*\[\s*{re.escape(section)}\s*\]", rows[first - 1] if first else ""):
        return ""
    depth = 2 if section else 1
    section_lines = [
        number
        for path, number in numbers.items()
        if len(path) == depth and path[: depth - 1] == ((section,) if section else ())
    ]
    # A line that is TOML by itself holds a whole key and value, and no header.
    pair_lines = [number for number in section_lines if _is_pair(rows[number - 1])]
    after = max(pair_lines, default=first)
    if not after:
        return ""
    end = _line_end(text)
    if not rows[after - 1].endswith("\n"):
        rows[after - 1] += end
    return "".join([*rows[:after], line + end, *rows[after:]])


def _is_pair(row: str) -> bool:
    try:
        return bool(tomllib.loads(row)) and not row.lstrip().startswith("[")
    except (ValueError, RecursionError):
        return False


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _prove_edit(before: str, after: str, edits: Sequence[Edit], where: str) -> None:
    """Raise UserError unless only the edited keys differ between the two texts."""
    old, new = (_table_leaves(tomllib.loads(text)) for text in (before, after))
    allowed = {edit.key for edit in edits}
    partners = {pair[1 - pair.index(key)] for key in allowed for pair in EXCLUSIVE if key in pair}
    changed = {key for key in {**old, **new} if old.get(key) != new.get(key) or (key in old) != (key in new)}
    unwanted = sorted(changed - allowed - partners)
    missing = [edit.key for edit in edits if new.get(edit.key) != edit.value]
    if unwanted or missing:
        raise _refused_edit(where, f"{', '.join(unwanted or missing)} would not come out as meant")


def _table_leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key; a list is one value."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            leaves |= _table_leaves(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def _refused_edit(where: str, what: str) -> UserError:
    return mistake(where, f"is not edited: {what}", fix="change it by hand: phalanx check names the values")


def unified_difference(before: str, after: str, *, name: str) -> str:
    """Return a unified diff, as `patch` reads it; empty when the texts are equal."""
    rows = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def read_exactly(path: Path) -> str:
    """Return the text with its line ends and byte order mark; raises UserError for a file that is not a job file."""
    # Checks that the file is small, regular and UTF-8.
    read_text(path, noun="job file")
    return path.read_bytes().decode("utf-8")


def write_exactly(path: Path, before: str, after: str) -> None:
    """Replace the file atomically. A link stays a link, and permissions are kept."""
    real = resolve_path(path)
    try:
        # The file may have been edited since it was read.
        if real.read_bytes() != before.encode("utf-8"):
            raise mistake(str(path), "was changed by someone else in the meantime", fix="check it again")
        replace_bytes(real, after.encode("utf-8"), mode=real.stat().st_mode & 0o7777)
    except OSError as error:
        raise write_failure(path, error, needed_bytes=len(after.encode()), fix="--diff shows the change") from error


# The choice of edits for a job: those of its findings, tried together; rules that want different values of a key get
# none.


# An edit may uncover the next finding; no chain of more than two is known.
MOST_ROUNDS = 5

# `--set` texts -> the report on the job with them.
Judge = Callable[[tuple[str, ...]], CheckReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The edits that one finding asks for: applied together or not at all."""

    rule: str
    edits: tuple[Edit, ...]

    @property
    def statement(self) -> str:
        """A phrase for a person that names the rule and its edits."""
        return f"{self.rule} asks for {', '.join(shown_setting(edit) for edit in self.edits)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFix:
    """The edits to make, and the reasons why other edits were not made."""

    remedies: tuple[Remedy, ...]
    cured: int  # findings that disappear with the edits; an edit of one rule may fix another
    left: tuple[str, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits; each key occurs once."""
        return tuple(edit for remedy in self.remedies for edit in remedy.edits)


def find_fix(judge: Judge, *, unsafe: bool) -> JobFix:
    """Return the edits after which no finding asks for another allowed edit; a second call then finds none.

    A key for which two rules want different values is not edited: the user has to decide which rule to waive.
    """
    chosen: list[Remedy] = []
    refused: dict[str, str] = {}  # key -> why it is left alone
    first = report = judge(())
    for number in range(MOST_ROUNDS):
        report = judge(_override_texts(chosen)) if number else first
        wanted = _wanted_remedies(report, unsafe=unsafe, refused=refused)
        if _conflicting_keys(chosen, wanted, refused):
            chosen = []
            continue
        new = _that_hold(
            _RemedyTrial(judge=judge, first=first, unsafe=unsafe), _without_replaced(chosen, wanted), wanted, refused
        )
        if not new:
            break
        chosen = [*_without_replaced(chosen, new), *new]
    # The edits undo each other: no edit is better than a different one at every call.
    else:
        chosen, report = [], first
        refused["*"] = f"the edits do not settle in {MOST_ROUNDS} rounds"
    cured = max(0, _count_broken(first) - _count_broken(report))
    return JobFix(remedies=tuple(chosen), cured=cured, left=tuple(dict.fromkeys(refused.values())))


def _without_replaced(chosen: Sequence[Remedy], newer: Sequence[Remedy]) -> list[Remedy]:
    """Return the chosen remedies, except those whose keys a newer remedy sets again.

    An edit may move the optimum that an earlier edit had set, such as that of an interval.
    """
    new_keys = {edit.key for remedy in newer for edit in remedy.edits}
    return [remedy for remedy in chosen if not any(edit.key in new_keys for edit in remedy.edits)]


def _count_broken(report: CheckReport) -> int:
    return sum(finding.verdict == "fail" for finding in report.findings)


def _wanted_remedies(report: CheckReport, *, unsafe: bool, refused: Mapping[str, str]) -> list[Remedy]:
    """Return the remedies that the findings ask for, the worst first; of two for the same key, the first."""
    wanted: list[Remedy] = []
    used_keys = set(refused)
    for finding in report.problems:
        edits = finding.outcome.edits
        if (
            finding.verdict == "fail"
            and edits
            and all((edit.safe or unsafe) and edit.key not in used_keys for edit in edits)
        ):
            wanted.append(Remedy(rule=finding.rule.id, edits=edits))
            used_keys |= {edit.key for edit in edits}
    return wanted


def _conflicting_keys(chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]) -> bool:
    """Return whether a rule wants another value for a key that another rule had set, and refuse such keys."""
    owner = {edit.key: remedy.rule for remedy in chosen for edit in remedy.edits}
    rule_of_key = {edit.key: remedy.rule for remedy in wanted for edit in remedy.edits if edit.key in owner}
    torn = {key: rule for key, rule in rule_of_key.items() if rule != owner[key]}
    for key, rule in torn.items():
        refused[key] = f"{owner[key]} and {rule} want different values of {key}"
    return bool(torn)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemedyTrial:
    """A way to try remedies, and the report on the job before any of them."""

    judge: Judge
    first: CheckReport
    unsafe: bool

    def harm(self, report: CheckReport) -> str:
        """Return what an edited job lacks that the job had; empty when it is no worse.

        An error that a further allowed edit fixes does not count: the next round applies that edit.
        """
        if "P" in self.first.evidence and "P" not in report.evidence:
            return "with which the job can no longer be planned"
        before = {finding.rule.id for finding in self.first.findings if _is_error(finding)}
        new = [finding for finding in report.findings if _is_error(finding) and finding.rule.id not in before]
        broken = [
            finding.rule.id
            for finding in new
            if not finding.outcome.edits or any(not (edit.safe or self.unsafe) for edit in finding.outcome.edits)
        ]
        return f"which breaks {', '.join(dict.fromkeys(broken))}" if broken else ""


def _is_error(finding: Finding) -> bool:
    return finding.verdict == "fail" and finding.severity == "error"


def _that_hold(
    trial: _RemedyTrial, chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]
) -> list[Remedy]:
    """Return the remedies after which the job loads and no longer asks for them; refuse the others."""
    if not wanted or not _trial_complaints(trial, [*chosen, *wanted], wanted):
        return list(wanted)
    accepted: list[Remedy] = []
    for remedy in wanted:
        if complaint := _trial_complaints(trial, [*chosen, *accepted, remedy], [remedy]):
            refused |= {edit.key: complaint for edit in remedy.edits}
        else:
            accepted.append(remedy)
    return accepted


def _trial_complaints(trial: _RemedyTrial, remedies: Sequence[Remedy], new: Sequence[Remedy]) -> str:
    """Return why the new remedies do not help; empty when they do."""
    try:
        report = trial.judge(_override_texts(remedies))
    except UserError:
        return f"{new[0].statement}, with which the job cannot be read"
    if harm := trial.harm(report):
        return f"{new[0].statement}, {harm}"
    repeated = [
        remedy
        for remedy in new
        for finding in report.findings
        if finding.verdict == "fail"
        and finding.rule.id == remedy.rule
        and set(remedy.edits) & set(finding.outcome.edits)
    ]
    return f"{repeated[0].statement}, which does not cure it" if repeated else ""


def _override_texts(remedies: Sequence[Remedy]) -> tuple[str, ...]:
    return tuple(f"{edit.key}={as_toml(edit.value)}" for remedy in remedies for edit in remedy.edits)
