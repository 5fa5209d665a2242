"""What drills have proved: the facts, and the records on disk they are read from."""

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
    """One drill on record, the newest first by the time that was signed. Rules ask `proofs` and `proof` which count.

    `signed`: its signature is right, and so are the digests of its evidence where that lies beside it. Kinds of faults
    are those of docs/drills.md, and beside them `save-kill` (SIGKILL at a point of a save) and `corrupt` (a checkpoint
    was damaged; in `fired` only when a restore met it and went further back).
    """

    path: str
    signed: bool
    version: str  # of the Phalanx that was drilled
    profile: str  # the specification's profile that it ran on, as "cpu-gloo"
    faults: tuple[str, ...]  # kinds injected: kill, hang, corrupt, save-kill, nan, flip, partition, slow …
    fired: tuple[str, ...]  # of these, the kinds that really happened
    clean: bool  # the oracle found nothing
    bitwise: bool  # every digest equals the replay without faults
    detect_s: tuple[float, ...] = ()
    recovery_s: tuple[float, ...] = ()
    named_right: bool | None = None  # a slow rank was injected and exactly it was named
    wrong: tuple[str, ...] = ()  # what the record or its oracle complains of
    current: bool = True  # the code, file by file, is that of the Phalanx that checks
    save_points: tuple[str, ...] = ()  # points of a save at which a rank was killed
    part: str = ""  # of the suite
    world: int = 0  # ranks of the drilled job; 0 is not said
    replayed: bool = True  # a replay without faults was made to compare with; else `bitwise` says nothing
    job: str = ""  # name of the drilled job
    other: str = ""  # how the drilled job differs from the one that is checked, in a clause; empty: it is the same
    made: str = ""  # day on which it was signed, as "2026-11-16"

    @property
    def statement(self) -> str:
        """Which drill this is, for a finding."""
        parts = [self.job, plural(self.world, "rank") if self.world else "", self.made]
        return f"{self.path} ({', '.join(part for part in parts if part)})" if any(parts) else self.path


def counted_records(drills: Sequence[DrillFacts], *, profile: str) -> tuple[DrillFacts, ...]:
    """The records that count: signed, of this code, of this profile, and of the job that is checked."""
    return tuple(one for one in drills if one.signed and one.current and one.profile == profile and not one.other)


def newest_record(drills: Sequence[DrillFacts], *, profile: str, kind: str) -> DrillFacts | None:
    """The newest record that counts and in which a fault of this kind happened; clean or not."""
    return next((one for one in counted_records(drills, profile=profile) if kind in one.fired), None)


def why_none(drills: Sequence[DrillFacts], *, profile: str) -> str:
    """Why the records there are do not count, in a clause; empty when there is none, or when some do."""
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


# Find the records of drills, verify them, and say what they prove.
#
# A record is sought in the folders that were named, in those beside a run, and in the user's own store. It counts for
# the job that was drilled alone (`record.drill.drill_subject`), in whatever folder it lies. Where the
# evidence lies beside a record its digests are compared; in the store there is none, and the signature alone says that
# the record is what this user's Phalanx wrote. A record of another user, or one that was changed, does not count.


MOST_RECORDS = 24  # the newest ones; each takes some milliseconds, with its evidence
MOST_READ = 256  # whose signature is looked at, to know which are the newest
MOST_LOOKED = 10_000  # entries of a folder
MOST_ITEMS = 10_000  # faults or verdicts of a record
REPLAY = "equal to a fault-free replay"  # a verdict of the oracle
SILENT = ("kill", "hang", "mute", "raise", "memory", "host", "freeze", "partition")  # somebody must notice them


def find_drills(
    roots: Sequence[Path], *, environ: Mapping[str, str], subject: Mapping[str, str] | None
) -> tuple[DrillFacts, ...]:
    """Drills on record under these folders and in the user's own store, those of the same job first, newest first.

    `subject` is `drill_subject` of the job that is checked; None: nothing says what it is, and no drill is about it.
    """
    store = store_path(environ)
    paths = {resolve_path(path): root == store for root in (*roots, store) for path in _record_paths(root)}
    if not paths:
        return ()
    key = known_key(environ)
    read = [_read_record(path, key) for path in sorted(paths, key=_changed_s, reverse=True)[:MOST_READ]]
    known = sorted((one for one in read if one is not None), key=_made_s, reverse=True)
    newest = sorted(known, key=lambda one: bool(_other_subject(one.body, subject)))[:MOST_RECORDS]  # a stable sort
    return tuple(
        _drill_facts(one, key=key, alone=paths[one.path], other=_other_subject(one.body, subject)) for one in newest
    )


def _other_subject(record: Mapping[str, Any], subject: Mapping[str, str] | None) -> str:
    """How the drilled job differs from the one that is checked, in a clause; empty when it is the same."""
    drilled = record.get("subject")
    if subject is None:
        return "what is checked names no job and layout"
    if not isinstance(drilled, Mapping):
        return "it does not say which"
    for key, noun in (("job", "job"), ("model", "model")):
        if drilled.get(key) != subject[key]:
            return f"{noun} {_plain_word(drilled.get(key)) or 'without a name'}, not {subject[key]}"
    if drilled.get("splits") != subject["splits"]:
        return f"its layout splits {_plain_word(drilled.get('splits'))}, this one {subject['splits']}"
    if drilled.get("digest") != subject["digest"]:
        return f"{subject['job']} with other settings of model, precision, optimizer, saving or recovery"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    path: Path
    body: Mapping[str, Any]
    is_signed: bool


def _record_paths(root: Path) -> Iterator[Path]:
    """A record itself, or those in a folder and in its folders."""
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
    """When the drill was; a copy changes the time of a file, and what nobody signed says nothing."""
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
    wrong = _record_faults(read, key, alone=alone)
    # A claim that could not be judged speaks for nothing and against nothing; its fault proves nothing either.
    verdicts = [one for one in _record_list(record, "verdicts") if one.get("judged") is not False]
    failed = [_plain_word(one.get("name")) for one in verdicts if one.get("ok") is not True]
    outcomes = [one for one in _record_list(record, "outcomes") if one.get("judged") is not False]
    fired = {kind for one in outcomes for kind in _fault_kinds(str(one.get("fault")))}
    if "corrupt" in fired and not _met_damage(record):
        fired.discard("corrupt")
    versions = record.get("versions")
    made_by = _plain_word(versions.get("phalanx")) if isinstance(versions, dict) else ""
    made_s = number(record, "made_s")
    return DrillFacts(
        path=str(path),
        signed=not wrong,
        version=made_by,
        profile=_plain_word(record.get("profile")),
        faults=_sorted_words({kind for text in _record_texts(record, "faults") for kind in _fault_kinds(text)}),
        fired=_sorted_words(fired),
        clean=bool(verdicts) and not failed,
        bitwise=any(one.get("name") == REPLAY and one.get("ok") is True for one in _record_list(record, "verdicts")),
        detect_s=_outcome_seconds(outcomes, "detected_s", kinds=SILENT),
        recovery_s=_outcome_seconds(outcomes, "recovered_s"),
        named_right=record.get("named_right") if isinstance(record.get("named_right"), bool) else None,
        wrong=(*wrong, *(f"the oracle says no: {name}" for name in failed)),
        current=not wrong and not other and record.get("code") == our_code(),  # a digest of 800 files: where it counts
        save_points=_sorted_words({point for one in outcomes if (point := _save_point(str(one.get("fault"))))}),
        part=_plain_word(record.get("part")),
        world=max(0, integer(record, "world") or 0),
        job=_plain_word(at(record, "subject").get("job")),
        other=other,
        made=time.strftime("%Y-%m-%d", time.gmtime(made_s)) if made_s is not None and 0 < made_s < 1e11 else "",
        replayed=any(one.get("name") == REPLAY for one in _record_list(record, "verdicts")),
    )


def _record_faults(read: _Record, key: bytes | None, *, alone: bool) -> list[str]:
    """What speaks against the record itself."""
    path, record = read.path, read.body
    if key is None:
        return ["there is no key of this user to verify it with"]
    if not read.is_signed:
        return [FOREIGN]
    try:
        if alone or path.name != NAME:  # a copy: its evidence is elsewhere
            return []
        if sum(one.stat().st_size for one in evidence_files(path.parent)) > MOST_EVIDENCE_BYTES:
            return [f"its evidence is larger than {MOST_EVIDENCE_BYTES:,} bytes and was not compared"]
        return [printable(text, most=200) for text in record_differences(record, path.parent)]
    except (OSError, ValueError, TypeError, RecursionError):
        return ["it is damaged"]


def _fault_kinds(text: str) -> tuple[str, ...]:
    """The kinds a fault counts as, from how it is written on the command line.

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
    """Whether a restore met a damaged checkpoint: the judge writes "generation 14 refused step-00000099 …"."""
    verdicts = [one for one in _record_list(record, "verdicts") if one.get("name") == REFUSED]
    return any(one.get("ok") is True and MET in str(one.get("evidence")) for one in verdicts)


def _outcome_seconds(
    outcomes: Sequence[Mapping[str, Any]], name: str, kinds: tuple[str, ...] = ()
) -> tuple[float, ...]:
    values = [one.get(name) for one in outcomes if not kinds or one.get("kind") in kinds]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return tuple(sorted(value for value in numbers if math.isfinite(value) and value >= 0))


def _record_list(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = record.get(name)
    return [one for one in value[:MOST_ITEMS] if isinstance(one, dict)] if isinstance(value, list) else []


def _record_texts(record: Mapping[str, Any], name: str) -> list[str]:
    value = record.get(name)
    return [one for one in value[:MOST_ITEMS] if isinstance(one, str)] if isinstance(value, list) else []


def _plain_word(value: object) -> str:
    return printable(value, most=80) if isinstance(value, str) else ""


def _sorted_words(words: set[str]) -> tuple[str, ...]:
    return tuple(sorted(words))
