"""The report of a drill: the printed text, and the signed record that later checks read as evidence."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.elastic.handshake import make_secret, read_secret
from phalanx.errors import Problem, SystemFailure, UserError
from phalanx.io.files import replace_text
from phalanx.io.tables import text_table
from phalanx.io.write_errors import write_failure
from phalanx.record.drill_record import NAME, VERSION, folder_digests, read_record, sign_record
from phalanx.record.provenance import our_code
from phalanx.record.run import Run
from phalanx.train.drill.outcomes import FaultOutcome
from phalanx.train.drill.perform import DrillNumbers, DrillResult
from phalanx.units import first_few, format_seconds, plural

# More faults than this are shown by kind.
MOST_ROWS = 40


def render_drill(result: DrillResult) -> str:
    """Return the faults, the verdicts and the plan's predictions next to the measurements, as text."""
    numbers = result.numbers
    length = f"{plural(numbers.steps, 'step')}, {format_seconds(numbers.wall_s)}"
    count = len(result.outcomes)
    head = f"{plural(count, 'fault')} in {length}; run state: {result.state}"
    rows = [(verdict.word, verdict.name, verdict.evidence) for verdict in result.verdicts]
    verdicts = "\n".join(["verdicts", *text_table(rows, indent=2)])
    parts = [head, _outcome_table(result.outcomes), _not_fired(result.not_fired), verdicts, _prediction_lines(numbers)]
    return "\n".join(part for part in parts if part)


def _outcome_table(found: Sequence[FaultOutcome]) -> str:
    if not found:
        return ""
    if len(found) > MOST_ROWS:
        return _by_kind(found)
    rows = [
        (
            outcome.fault,
            _outcome_place(outcome),
            _seconds_text(outcome.detected_s) if outcome.judged else "not judged",
            _seconds_text(outcome.recovered_s),
            "" if outcome.steps_lost is None else str(outcome.steps_lost),
            "" if outcome.steps_redone is None else str(outcome.steps_redone),
            outcome.source,
            "" if outcome.world is None else str(outcome.world),
        )
        for outcome in found
    ]
    return _indented_table(
        ("fault", "where", "detected", "recovered", "steps lost", "redone", "restored from", "ranks"), rows
    )


def _outcome_place(one: FaultOutcome) -> str:
    rank_text = f"rank {one.rank}, " if one.rank >= 0 else ""
    step = f", step {one.step}" if one.step >= 0 else ""
    return f"{rank_text}generation {one.generation}{step}"


def _by_kind(found: Sequence[FaultOutcome]) -> str:
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        of_kind = [outcome for outcome in found if outcome.kind == kind]
        times = [outcome.recovered_s for outcome in of_kind if outcome.recovered_s is not None]
        lost = sum(outcome.steps_lost or 0 for outcome in of_kind)
        rows.append(
            (
                kind,
                f"{len(of_kind)}×",
                _seconds_text(_known_median([outcome.detected_s for outcome in of_kind])),
                _seconds_text(_known_median(times)),
                _seconds_text(max(times, default=None)),
                str(lost),
                str(sum(outcome.steps_redone or 0 for outcome in of_kind)),
            )
        )
    return _indented_table(("fault", "injected", "detected", "recovered", "at worst", "steps lost", "redone"), rows)


def _known_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _indented_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in text_table([head, *rows], right=(2, 3, 4, 5)))


def _not_fired(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f"  not injected, because the run had ended: {first_few(texts, 4)}"


def _prediction_lines(numbers: DrillNumbers) -> str:
    """Lines that compare the plan's predictions with the measurements."""
    worst = (
        f", at worst {_seconds_text(numbers.recovery_worst_s)}"
        if numbers.recovery_worst_s != numbers.recovery_s
        else ""
    )
    measured = f"{_seconds_text(numbers.recovery_s)}{worst}"
    lines = []
    if numbers.recovery_s is not None:
        lines.append(f"recovery: {measured}; the plan assumed {format_seconds(numbers.planned_recovery_s)}")
    if numbers.effective is not None:
        lines.append(
            f"effective training time without start-up and shutdown: {numbers.effective:.1%}; "
            f"with the plan's assumptions these faults would have left {numbers.planned_effective:.1%}"
        )
    return "\n".join(lines)


def _seconds_text(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


# The signed record: the injected faults, their outcomes, the verdicts, and digests of the evidence.
# `phalanx.record.drill_record` reads and verifies it, and documents what a signature proves.

# Copies in the user's store, some kilobytes each.
MOST_STORED = 64


def drill_key(path: Path) -> bytes:
    """Return the signing key; made when there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            return make_secret(path)
    except OSError as error:
        what = f"cannot be made: {error.strerror or error}"
        raise SystemFailure(
            Problem(where=str(path), what=what, fix="set XDG_CONFIG_HOME to a writable folder")
        ) from None
    except UserError:
        # Another drill made it at the same time.
        pass
    return read_secret(path)


def write_record(run: Run, body: Mapping[str, Any], secret: bytes, *, clock: Callable[[], float] = time.time) -> Path:
    """Sign the record and write it into the run, with the time, versions and digests of the evidence added."""
    ran = {"made_s": round(clock(), 3), "world": run.world() or 0, "versions": software_versions(), "code": our_code()}
    record = {"v": VERSION, **body, **ran, "files": folder_digests(run.path)}
    signed = {**record, "signature": sign_record(record, secret)}
    path = run.path / NAME
    replace_text(path, json.dumps(signed, indent=1, ensure_ascii=False) + "\n")
    return path


def store_record(record: Path, folder: Path) -> Path:
    """Copy the record to the folder where later checks look; it replaces an older one of the same kind.

    Raises SystemFailure when it cannot be written.
    """
    name = _record_name(read_record(record))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / name, record.read_text(encoding="utf-8"))
        stored = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in stored[MOST_STORED:]:
            with suppress(OSError):
                path.unlink()
    except OSError as error:
        raise write_failure(folder, error, fix="set XDG_DATA_HOME to a writable folder") from None
    return folder / name


def _record_name(record: Mapping[str, Any]) -> str:
    """Return the file name: one per profile, part of the suite and job; drills outside the suite are part "other"."""
    words = [str(record.get(name) or "other") for name in ("profile", "part")]
    words.append(_subject_name(record.get("subject")))
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower())[:40] for word in words if word) + ".json"


def _subject_name(subject: object) -> str:
    """Return the job's name with part of its digest, so that two jobs of one name get different files."""
    if not isinstance(subject, dict):
        return ""
    reported = f"{subject.get('digest')} {subject.get('splits')}"
    return f"{str(subject.get('job'))[:24]}-{hashlib.sha256(reported.encode()).hexdigest()[:12]}"


def software_versions() -> dict[str, str]:
    """Return the versions of the software that ran the drill."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("phalanx", "torch", "safetensors"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "from source"
    return versions
