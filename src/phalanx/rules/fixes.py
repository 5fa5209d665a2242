"""Which edits fix a job, and how they are written into its file: values change, comments, order and spaces stay."""

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
    """The text with every edit in it; raises UserError when anything else would change with it."""
    mark, body = (BOM, text[1:]) if text.startswith(BOM) else ("", text)
    result = body
    for edit in edits:
        result = _put_value(result, edit, where)
    _prove_edit(body, result, edits, where)
    return mark + result


def _put_value(text: str, edit: Edit, where: str) -> str:
    """One value: replaced where it stands, else written after the last key of its section."""
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
    if tomlkit.dumps(document) != text:
        raise _refused_edit(where, "the editor would change its layout")
    return document


def _without_partner(text: str, key: str, where: str) -> str:
    """Of two keys that say the same, as global_tokens and global_sequences, the file gives one."""
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
    """A new line after the last key of a section; empty where it has no lines of its own, as an inline table."""
    numbers = key_lines(text)
    rows = text.splitlines(keepends=True)
    first = numbers.get((section,), 0) if section else 0
    if section and not re.match(rf"\s*\[\s*{re.escape(section)}\s*\]", rows[first - 1] if first else ""):
        return ""
    depth = 2 if section else 1
    own = [
        number
        for path, number in numbers.items()
        if len(path) == depth and path[: depth - 1] == ((section,) if section else ())
    ]
    # a line that is TOML by itself holds a whole key and value, and no header
    whole = [number for number in own if _is_pair(rows[number - 1])]
    after = max(whole, default=first)
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
    """The edited text says what it said, except for the edited keys."""
    old, new = (_table_leaves(tomllib.loads(text)) for text in (before, after))
    allowed = {edit.key for edit in edits}
    partners = {pair[1 - pair.index(key)] for key in allowed for pair in EXCLUSIVE if key in pair}
    changed = {key for key in {**old, **new} if old.get(key) != new.get(key) or (key in old) != (key in new)}
    wrong = sorted(changed - allowed - partners)
    missing = [edit.key for edit in edits if new.get(edit.key) != edit.value]
    if wrong or missing:
        raise _refused_edit(where, f"{', '.join(wrong or missing)} would not come out as meant")


def _table_leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _table_leaves(value, f"{name}.")
        else:
            found[name] = value
    return found


def _refused_edit(where: str, what: str) -> UserError:
    return mistake(where, f"is not edited: {what}", fix="change it by hand: phalanx check names the values")


def unified_difference(before: str, after: str, *, name: str) -> str:
    """A unified diff, as `patch` reads it; empty when nothing differs."""
    rows = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def read_exactly(path: Path) -> str:
    """The text with its own line ends and mark of byte order; raises UserError for what is no job file."""
    read_text(path, noun="job file")  # small, regular, UTF-8
    return path.read_bytes().decode("utf-8")


def write_exactly(path: Path, before: str, after: str) -> None:
    """Replace the file whole or not at all. A link stays a link, rights stay as they are."""
    real = resolve_path(path)
    try:
        if real.read_bytes() != before.encode("utf-8"):
            raise mistake(str(path), "was changed by someone else in the meantime", fix="check it again")
        replace_bytes(real, after.encode("utf-8"), mode=real.stat().st_mode & 0o7777)
    except OSError as error:
        raise write_failure(path, error, needed_bytes=len(after.encode()), fix="--diff shows the change") from error


# Which edits cure a job: those of its findings, tried together, without two rules that pull at the same key.


MOST_ROUNDS = 5  # a cure may uncover the next finding; no chain of more than two is known

Judge = Callable[[tuple[str, ...]], CheckReport]  # `--set` texts -> what the rules say of the job with them


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """The edits that one finding asks for: taken whole or not at all."""

    rule: str
    edits: tuple[Edit, ...]

    @property
    def statement(self) -> str:
        """For a person."""
        return f"{self.rule} asks for {', '.join(shown_setting(edit) for edit in self.edits)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFix:
    """What is to be edited, and what was left alone and why."""

    remedies: tuple[Remedy, ...]
    cured: int  # findings that are gone with them; a remedy of one rule may help another
    left: tuple[str, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits; no key has two."""
        return tuple(edit for remedy in self.remedies for edit in remedy.edits)


def find_fix(judge: Judge, *, unsafe: bool) -> JobFix:
    """The edits after which no finding asks for one that is allowed; a fixed point, so that a second call finds none.

    A key that two rules want to have different values is left alone: whoever mends it decides which rule to waive.
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
    else:  # they chase each other: better no edit than another one at every call
        chosen, report = [], first
        refused["*"] = f"the edits do not settle in {MOST_ROUNDS} rounds"
    cured = max(0, _count_broken(first) - _count_broken(report))
    return JobFix(remedies=tuple(chosen), cured=cured, left=tuple(dict.fromkeys(refused.values())))


def _without_replaced(chosen: Sequence[Remedy], newer: Sequence[Remedy]) -> list[Remedy]:
    """What was chosen, less what its own rule wants otherwise now, as an interval whose optimum another edit moved."""
    again = {edit.key for remedy in newer for edit in remedy.edits}
    return [remedy for remedy in chosen if not any(edit.key in again for edit in remedy.edits)]


def _count_broken(report: CheckReport) -> int:
    return sum(one.verdict == "fail" for one in report.findings)


def _wanted_remedies(report: CheckReport, *, unsafe: bool, refused: Mapping[str, str]) -> list[Remedy]:
    """What the findings ask for, the worst first; of two that want the same key, the first."""
    wanted: list[Remedy] = []
    taken = set(refused)
    for one in report.problems:
        edits = one.outcome.edits
        if one.verdict == "fail" and edits and all((edit.safe or unsafe) and edit.key not in taken for edit in edits):
            wanted.append(Remedy(rule=one.rule.id, edits=edits))
            taken |= {edit.key for edit in edits}
    return wanted


def _conflicting_keys(chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]) -> bool:
    """Whether a key that one rule had set is wanted otherwise by another; it is refused from here on."""
    owner = {edit.key: remedy.rule for remedy in chosen for edit in remedy.edits}
    asked = {edit.key: remedy.rule for remedy in wanted for edit in remedy.edits if edit.key in owner}
    torn = {key: rule for key, rule in asked.items() if rule != owner[key]}
    for key, rule in torn.items():
        refused[key] = f"{owner[key]} and {rule} want different values of {key}"
    return bool(torn)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemedyTrial:
    """How remedies are tried, and what the job was like before all of them."""

    judge: Judge
    first: CheckReport
    unsafe: bool

    def harm(self, report: CheckReport) -> str:
        """What an edited job lacks that the job had; empty when it is no worse.

        An error that a further edit cures is none: the next round takes it.
        """
        if "P" in self.first.evidence and "P" not in report.evidence:
            return "with which the job can no longer be planned"
        before = {one.rule.id for one in self.first.findings if _is_error(one)}
        new = [one for one in report.findings if _is_error(one) and one.rule.id not in before]
        broken = [
            one.rule.id
            for one in new
            if not one.outcome.edits or any(not (edit.safe or self.unsafe) for edit in one.outcome.edits)
        ]
        return f"which breaks {', '.join(dict.fromkeys(broken))}" if broken else ""


def _is_error(finding: Finding) -> bool:
    return finding.verdict == "fail" and finding.severity == "error"


def _that_hold(
    trial: _RemedyTrial, chosen: Sequence[Remedy], wanted: Sequence[Remedy], refused: dict[str, str]
) -> list[Remedy]:
    """Remedies with which the job can be read and no longer asks for them; the others are refused from here on."""
    if not wanted or not _trial_complaints(trial, [*chosen, *wanted], wanted):
        return list(wanted)
    held: list[Remedy] = []
    for remedy in wanted:
        if complaint := _trial_complaints(trial, [*chosen, *held, remedy], [remedy]):
            refused |= {edit.key: complaint for edit in remedy.edits}
        else:
            held.append(remedy)
    return held


def _trial_complaints(trial: _RemedyTrial, remedies: Sequence[Remedy], new: Sequence[Remedy]) -> str:
    """Why the new remedies do not help; empty when they do."""
    try:
        report = trial.judge(_override_texts(remedies))
    except UserError:
        return f"{new[0].statement}, with which the job cannot be read"
    if harm := trial.harm(report):
        return f"{new[0].statement}, {harm}"
    again = [
        remedy
        for remedy in new
        for one in report.findings
        if one.verdict == "fail" and one.rule.id == remedy.rule and set(remedy.edits) & set(one.outcome.edits)
    ]
    return f"{again[0].statement}, which does not cure it" if again else ""


def _override_texts(remedies: Sequence[Remedy]) -> tuple[str, ...]:
    return tuple(f"{edit.key}={as_toml(edit.value)}" for remedy in remedies for edit in remedy.edits)
