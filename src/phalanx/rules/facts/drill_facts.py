"""Facts that drills have proved, and the search for the drill records on disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.io.files import read_head
from phalanx.io.path_probes import is_file, resolve_path
from phalanx.io.values import at, integer, number, printable
from phalanx.record.drill_record import (
    FOREIGN,
    MET,
    MOST_EVIDENCE_BYTES,
    NAME,
    REFUSED,
    evidence_files,
    is_signed,
    known_key,
    read_record,
    record_differences,
    store_path,
)
from phalanx.record.provenance import our_code
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillFacts:
    """The facts of one drill record. Rules call `counted_records` and `newest_record` for the records that count.

    `signed`: the signature is valid, and so are the digests of the evidence where it lies next to the record. The
    kinds of faults are those of docs/drills.md, and in addition `save-kill` (SIGKILL at a point of a save) and
    `corrupt` (a checkpoint was damaged; in `fired` only when a restore met it and went further back).
    """

    path: str
    signed: bool
    version: str  # version of the drilled Phalanx
    profile: str  # hardware profile that it ran on, such as "cpu-gloo"
    faults: tuple[str, ...]  # injected kinds: kill, hang, corrupt, save-kill, nan, flip, partition, slow …
    fired: tuple[str, ...]  # the injected kinds that really happened
    clean: bool  # the oracle found nothing
    bitwise: bool  # every digest equals the replay without faults
    detect_s: tuple[float, ...] = ()
    recovery_s: tuple[float, ...] = ()
    named_right: bool | None = None  # a slow rank was injected, and only that rank was named
    wrong: tuple[str, ...] = ()  # complaints about the record, and failed claims of its oracle
    current: bool = True  # the code, file by file, is that of the Phalanx that checks
    save_points: tuple[str, ...] = ()  # points of a save at which a rank was killed
    part: str = ""  # name of the part of the suite
    world: int = 0  # ranks of the drilled job; 0: not stated
    replayed: bool = True  # a replay without faults was made for comparison; otherwise `bitwise` has no meaning
    job: str = ""  # name of the drilled job
    # Difference of the drilled job from the checked one, as a clause; empty if it is the same.
    other: str = ""
    made: str = ""  # day on which the record was signed, such as "2026-11-16"

    @property
    def statement(self) -> str:
        """A description of the drill for a finding: path, job, ranks and date."""
        parts = [self.job, plural(self.world, "rank") if self.world else "", self.made]
        return f"{self.path} ({', '.join(text for text in parts if text)})" if any(parts) else self.path


def counted_records(drills: Sequence[DrillFacts], *, profile: str) -> tuple[DrillFacts, ...]:
    """Return the records that count: signed, of this code, of this profile, and of the checked job."""
    return tuple(
        drill for drill in drills if drill.signed and drill.current and drill.profile == profile and not drill.other
    )


def newest_record(drills: Sequence[DrillFacts], *, profile: str, kind: str) -> DrillFacts | None:
    """Return the newest record that counts and in which a fault of this kind happened, clean or not."""
    return next((drill for drill in counted_records(drills, profile=profile) if kind in drill.fired), None)


def why_none(drills: Sequence[DrillFacts], *, profile: str) -> str:
    """Return why the existing records do not count, as a clause; empty when there are none, or when some count."""
    if not drills or counted_records(drills, profile=profile):
        return ""
    first = drills[0]
    if not first.signed:
        return f"the record {first.path} does not count: {first.wrong[0] if first.wrong else 'it is not signed'}"
    if first.profile != profile:
        return f"the newest record is of {first.profile or 'an unknown profile'}, not of {profile}"
    if first.other:
        return f"the newest record is of another job ({first.other})"
    return f"the newest record is of other code than this Phalanx (it was {first.version})"


# Search for drill records and their verification. Records are searched in the named folders, in the folder that
# contains a run, and in the user's own store. A record counts only for the job that was drilled
# (`record.drill_record.drill_subject`), whatever folder it lies in. Where the evidence lies next to a record, its
# digests are compared; in the store there is no evidence, and the signature alone proves that this user's Phalanx
# wrote the record. A record of another user, or a changed one, does not count.


# The newest records; each takes some milliseconds, with its evidence.
MOST_RECORDS = 24
MOST_READ = 256  # records whose signature is checked, to find the newest
MOST_LOOKED = 10_000  # entries of a folder that are read
MOST_ITEMS = 10_000  # faults or verdicts of a record
REPLAY = "equal to a fault-free replay"  # a verdict of the oracle
SILENT = (
    "kill",
    "hang",
    "mute",
    "raise",
    "memory",
    "host",
    "freeze",
    "partition",
)  # faults that the run itself must detect


def find_drills(
    roots: Sequence[Path], *, environ: Mapping[str, str], subject: Mapping[str, str] | None
) -> tuple[DrillFacts, ...]:
    """Return the drill records under these folders and in the user's store, those of this job first, then the
    newest.

    `subject` is the `drill_subject` of the checked job; with None, no record counts as being about it.
    """
    store = store_path(environ)
    paths = {resolve_path(path): folder == store for folder in (*roots, store) for path in _record_paths(folder)}
    if not paths:
        return ()
    key = known_key(environ)
    read = [_read_record(path, key) for path in sorted(paths, key=_changed_s, reverse=True)[:MOST_READ]]
    records = sorted((record for record in read if record is not None), key=_made_s, reverse=True)
    newest = sorted(records, key=lambda record: bool(_other_subject(record.body, subject)))[
        :MOST_RECORDS
    ]  # the sort is stable
    return tuple(
        _drill_facts(record, key=key, alone=paths[record.path], other=_other_subject(record.body, subject))
        for record in newest
    )


def _other_subject(record: Mapping[str, Any], subject: Mapping[str, str] | None) -> str:
    """Return how the drilled job differs from the checked one, as a clause; empty when it is the same."""
    drilled_subject = record.get("subject")
    if subject is None:
        return "what is checked names no job and layout"
    if not isinstance(drilled_subject, Mapping):
        return "it does not say which"
    for key, noun in (("job", "job"), ("model", "model")):
        if drilled_subject.get(key) != subject[key]:
            return f"{noun} {_plain_word(drilled_subject.get(key)) or 'without a name'}, not {subject[key]}"
    if drilled_subject.get("splits") != subject["splits"]:
        return f"its layout splits {_plain_word(drilled_subject.get('splits'))}, this one {subject['splits']}"
    if drilled_subject.get("digest") != subject["digest"]:
        return f"{subject['job']} with other settings of model, precision, optimizer, saving or recovery"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    path: Path
    body: Mapping[str, Any]
    is_signed: bool


def _record_paths(root: Path) -> Iterator[Path]:
    """Yield the path itself if it is a record, else the records in a folder and its direct subfolders."""
    try:
        if is_file(root):
            yield root
            return
        with os.scandir(root) as entries:
            for entry in islice(entries, MOST_LOOKED):
                path = Path(entry.path)
                if entry.name.endswith(".json") and entry.is_file() and b'"v"' in read_head(path, 64):
                    yield path
                elif entry.is_dir(follow_symlinks=False) and is_file(path / NAME):
                    yield path / NAME
    except OSError:
        return


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _made_s(record: _Record) -> tuple[float, float]:
    """Return the signed time of the drill, then the time of its file.

    A copy has another file time, and an unsigned time does not count.
    """
    made_s = number(record.body, "made_s") if record.is_signed else None
    return made_s or 0.0, _changed_s(record.path)


def _read_record(path: Path, key: bytes | None) -> _Record | None:
    try:
        body = read_record(path)
    except (PhalanxError, OSError):
        return None
    try:
        return _Record(path=path, body=body, is_signed=is_signed(body, key))
    except (ValueError, TypeError, RecursionError):
        return _Record(path=path, body=body, is_signed=False)


def _drill_facts(read: _Record, *, key: bytes | None, alone: bool, other: str) -> DrillFacts:
    path, record = read.path, read.body
    faults = _record_faults(read, key, alone=alone)
    # A claim that could not be judged counts neither way; its fault proves nothing either.
    verdicts = [verdict for verdict in _record_list(record, "verdicts") if verdict.get("judged") is not False]
    failed = [_plain_word(verdict.get("name")) for verdict in verdicts if verdict.get("ok") is not True]
    outcomes = [outcome for outcome in _record_list(record, "outcomes") if outcome.get("judged") is not False]
    fired = {kind for outcome in outcomes for kind in _fault_kinds(str(outcome.get("fault")))}
    if "corrupt" in fired and not _met_damage(record):
        fired.discard("corrupt")
    versions = record.get("versions")
    made_by = _plain_word(versions.get("phalanx")) if isinstance(versions, dict) else ""
    made_s = number(record, "made_s")
    return DrillFacts(
        path=str(path),
        signed=not faults,
        version=made_by,
        profile=_plain_word(record.get("profile")),
        faults=_sorted_words({kind for text in _record_texts(record, "faults") for kind in _fault_kinds(text)}),
        fired=_sorted_words(fired),
        clean=bool(verdicts) and not failed,
        bitwise=any(
            verdict.get("name") == REPLAY and verdict.get("ok") is True for verdict in _record_list(record, "verdicts")
        ),
        detect_s=_outcome_seconds(outcomes, "detected_s", kinds=SILENT),
        recovery_s=_outcome_seconds(outcomes, "recovered_s"),
        named_right=record.get("named_right") if isinstance(record.get("named_right"), bool) else None,
        wrong=(*faults, *(f"the oracle says no: {name}" for name in failed)),
        # The digest covers 800 files, so it is computed only for records that can count.
        current=not faults and not other and record.get("code") == our_code(),
        save_points=_sorted_words({point for outcome in outcomes if (point := _save_point(str(outcome.get("fault"))))}),
        part=_plain_word(record.get("part")),
        world=max(0, integer(record, "world") or 0),
        job=_plain_word(at(record, "subject").get("job")),
        other=other,
        made=time.strftime("%Y-%m-%d", time.gmtime(made_s)) if made_s is not None and 0 < made_s < 1e11 else "",
        replayed=any(verdict.get("name") == REPLAY for verdict in _record_list(record, "verdicts")),
    )


def _record_faults(read: _Record, key: bytes | None, *, alone: bool) -> list[str]:
    """Return the reasons why the record itself is not valid."""
    path, record = read.path, read.body
    if key is None:
        return ["there is no key of this user to verify it with"]
    if not read.is_signed:
        return [FOREIGN]
    try:
        if alone or path.name != NAME:  # a copy: its evidence is elsewhere
            return []
        if sum(file.stat().st_size for file in evidence_files(path.parent)) > MOST_EVIDENCE_BYTES:
            return [f"its evidence is larger than {MOST_EVIDENCE_BYTES:,} bytes and was not compared"]
        return [printable(text, most=200) for text in record_differences(record, path.parent)]
    except (OSError, ValueError, TypeError, RecursionError):
        return ["it is damaged"]


def _fault_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds that a fault counts as, from its text on the command line.

    >>> _fault_kinds("kill:rank=0,step=12,point=save-commit"), _fault_kinds("damage:step=3")
    (('kill', 'save-kill'), ('corrupt',))
    """
    kind = _plain_word(text.partition(":")[0])
    if kind == "damage":
        return ("corrupt",)
    return (kind, "save-kill") if kind == "kill" and _save_point(text) else (kind,)


def _save_point(text: str) -> str:
    points = [word.removeprefix("point=save-") for word in text.partition(":")[2].split(",")]
    words = [word for word in points if f"point=save-{word}" in text]
    return _plain_word(words[0]) if words else ""


def _met_damage(record: Mapping[str, Any]) -> bool:
    """Return whether a restore met a damaged checkpoint: the judge writes "generation 14 refused step-00000099 …"."""
    verdicts = [verdict for verdict in _record_list(record, "verdicts") if verdict.get("name") == REFUSED]
    return any(verdict.get("ok") is True and MET in str(verdict.get("evidence")) for verdict in verdicts)


def _outcome_seconds(
    outcomes: Sequence[Mapping[str, Any]], name: str, kinds: tuple[str, ...] = ()
) -> tuple[float, ...]:
    values = [outcome.get(name) for outcome in outcomes if not kinds or outcome.get("kind") in kinds]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return tuple(sorted(value for value in numbers if math.isfinite(value) and value >= 0))


def _record_list(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = record.get(name)
    return [item for item in value[:MOST_ITEMS] if isinstance(item, dict)] if isinstance(value, list) else []


def _record_texts(record: Mapping[str, Any], name: str) -> list[str]:
    value = record.get(name)
    return [item for item in value[:MOST_ITEMS] if isinstance(item, str)] if isinstance(value, list) else []


def _plain_word(value: object) -> str:
    return printable(value, most=80) if isinstance(value, str) else ""


def _sorted_words(words: set[str]) -> tuple[str, ...]:
    return tuple(sorted(words))
