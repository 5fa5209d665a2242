"""Accelerators a person adds: the same columns as the shipped table, as CSV or as `[[accelerator]]` in TOML."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.catalog import ACCELERATOR_FIELDS, ACCELERATOR_TEXTS, read_numbers, unknown_keys
from phalanx.hardware.types import Accelerator
from phalanx.io.files import read_text
from phalanx.io.toml import TomlFile, read_toml

COLUMNS = (*ACCELERATOR_TEXTS, *(field.key for field in ACCELERATOR_FIELDS))
_OPTIONAL_ZERO = {field.attribute: 0.0 for field in ACCELERATOR_FIELDS if not field.required}

Where = Callable[[str], str]


def load_accelerators(path: Path) -> tuple[Accelerator, ...]:
    """All accelerators of a user's file; every mistake in it is reported at once with file:line."""
    if path.suffix == ".csv":
        records = list(_csv_records(read_text(path), path))
    elif path.suffix == ".toml":
        records = list(_toml_records(read_toml(path)))
    else:
        raise mistake(str(path), "is neither .csv nor .toml", fix="name it accelerators.toml or accelerators.csv")
    return _build_all(records)


def parse_table(text: str, path: Path) -> tuple[Accelerator, ...]:
    """Accelerators of a CSV text; `path` is only for messages."""
    return _build_all(list(_csv_records(text, path)))


def build_accelerator(record: Mapping[str, object], where: Where) -> tuple[Accelerator | None, list[Problem]]:
    """One accelerator from one record in file units, or what is wrong with it."""
    problems = unknown_keys(record, COLUMNS, where)
    numbers, complaints = read_numbers(record, ACCELERATOR_FIELDS, where)
    problems += complaints
    texts = {key: record.get(key, "") for key in ACCELERATOR_TEXTS}
    for key, text in texts.items():
        if not isinstance(text, str) or len(text) > 2000:
            problems.append(Problem(where=where(key), what=f"{key} is not a short text", fix=f'write {key} = "..."'))
    if not texts["name"]:
        problems.append(Problem(where=where("name"), what="the accelerator has no name", fix='write name = "..."'))
    if problems:
        return None, problems
    words = {key: str(text).strip() for key, text in texts.items()}
    words["family"] = words["family"] or "unknown"
    words["vendor"] = words["vendor"] or "unknown"
    return Accelerator(**words, **{**_OPTIONAL_ZERO, **numbers}), []  # type: ignore[arg-type]


def _build_all(records: list[tuple[Mapping[str, object], Where]]) -> tuple[Accelerator, ...]:
    built, problems = [], []
    for record, where in records:
        accelerator, complaints = build_accelerator(record, where)
        problems += complaints
        if accelerator is not None:
            built.append(accelerator)
    if problems:
        raise UserError(problems)
    return tuple(built)


def _csv_records(text: str, path: Path) -> Iterator[tuple[Mapping[str, object], Where]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        header = reader.fieldnames or []
        absent = [column for column in ("name", "peak_bf16_tflops", "memory_gib") if column not in header]
        if absent:
            raise mistake(f"{path}:1", f"columns missing: {', '.join(absent)}", fix=f"columns are {', '.join(COLUMNS)}")
        for row in reader:
            line = reader.line_num
            if None in row or None in row.values():
                fix = "quote texts that hold a comma"
                raise mistake(f"{path}:{line}", f"not {len(header)} columns as the header has", fix=fix)
            yield dict(row), lambda key, line=line: f"{path}:{line}"  # type: ignore[misc]
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"not readable as CSV: {error}", fix="check the quotes") from None


def _toml_records(file: TomlFile) -> Iterator[tuple[Mapping[str, object], Where]]:
    entries = file.table.get("accelerator")
    if set(file.table) - {"accelerator"}:
        raise UserError(unknown_keys(file.table, ["accelerator"], lambda key: file.where(key)))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        fix = "start each accelerator with a line [[accelerator]]"
        raise mistake(str(file.path), "holds no list of accelerators", fix=fix)
    for number, entry in enumerate(entries):
        yield entry, lambda key, number=number: file.where("accelerator", number, key)  # type: ignore[misc]
