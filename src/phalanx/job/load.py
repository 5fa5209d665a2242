"""Load a job file, reporting all its mistakes together, and convert a Job to plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, UserError
from phalanx.io.codec import json_values
from phalanx.io.toml import read_toml
from phalanx.io.visible import one_line
from phalanx.job.cross_checks import check_keys, use_multiples
from phalanx.job.draft import DEFAULT, Draft, Origin, apply_overrides, dotted_key
from phalanx.job.key_rules import rule_of, shown_value, value_kind
from phalanx.job.model import Preset
from phalanx.job.model_section import resolve_preset, resolve_shape
from phalanx.job.schema import NAME_PATTERN, SECTIONS, Data, Job, RampStage, Waiver
from phalanx.job.sync_checks import check_sync

DEFAULT_CLUSTER = "local"

# With parallel.mode = "fixed" there is no search: axes that the file omits are not split. data and shard stay "auto",
# because they follow from the number of devices.
FIXED = {
    "tensor": 1,
    "context": 1,
    "pipeline": 1,
    "virtual_pipeline": 1,
    "expert": 1,
    "zero": 0,
    "sequence_parallel": False,
    "recompute": "none",
    "schedule": "1f1b",
    "offload": "none",
}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ResolvedJob:
    """A Job, the file it came from, and the origin of every dotted key. `warnings` are settings without effect.

    `str()` is the table that `phalanx show` prints.

    >>> import phalanx
    >>> phalanx.load("examples/drill.toml")
    <ResolvedJob drill: drill-llama, 61.4k tokens, from examples/drill.toml>
    """

    job: Job
    path: Path
    origins: Mapping[str, Origin]  # empty for a Job without a file
    warnings: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        from phalanx.job.text import job_table

        return job_table(self)

    def __repr__(self) -> str:
        from phalanx.job.text import job_line

        return f"<ResolvedJob {job_line(self.job)}, from {one_line(str(self.path))}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import text_as_html

        return text_as_html(str(self))


def load(path: str | Path, *, overrides: Sequence[str] = ()) -> ResolvedJob:
    """Read a job file; raises one UserError with all mistakes, each with its file and line.

    `overrides` are texts of the form `section.key=value`, as `--set` takes them.
    """
    source = read_toml(Path(path), noun="job file")
    draft = Draft(path=source.path, table=source.table, lines=source.lines)
    apply_overrides(draft, overrides)
    return _resolved_job(draft)


def load_table(path: Path, table: dict[str, object], origins: Mapping[str, Origin]) -> ResolvedJob:
    """Return a job from a table that another file was translated into; `origins` are the lines of its keys.

    `path` is that file: paths in the job are relative to its folder. Raises UserError as `load` does.
    """
    return _resolved_job(Draft(path=path, table=table, lines={}, given=origins))


def load_waivers(path: Path) -> tuple[tuple[Waiver, ...], Mapping[str, Origin]]:
    """Read a file of `[[waiver]]` tables only, and the line of every key; raises UserError as `load` does."""
    source = read_toml(path, noun="job file")
    draft = Draft(path=source.path, table=source.table, lines=source.lines)
    for name in (name for name in source.table if name != "waiver"):
        draft.complain(
            name, f"a file of waivers has no key {shown_value(name)}", fix="only [[waiver]] tables belong in it"
        )
    top: dict[str, Any] = {"waiver": source.table.get("waiver", [])}
    _fill_list(draft, top, "waiver", Waiver, example="[[waiver]] with rule, reason and expires = 2026-12-31")
    if draft.problems:
        raise UserError(_in_order(draft.problems))
    return top["waiver"], draft.origins


def _resolved_job(draft: Draft) -> ResolvedJob:
    job = _build_job(draft)
    check_keys(draft, job)
    if not any(key.startswith("sync") for key in draft.bad):
        check_sync(draft, job)
    if draft.problems:
        raise UserError(_in_order(draft.problems))
    return ResolvedJob(job=job, path=draft.path, origins=draft.origins, warnings=tuple(draft.warnings))


def _build_job(draft: Draft) -> Job:
    """Build a Job from the values that could be read.

    Mistakes are recorded in the draft, and refused values are replaced by placeholders, so that the checks can
    continue.
    """
    _refuse_non_tables(draft)
    draft.refuse_unknown((), draft.table, {*SECTIONS, "spec", "name", "model", "profile", "rules", "waiver"})
    preset = resolve_preset(draft)
    _derive_name(draft)
    top = _table_values(draft, (), draft.table, tuple(item for item in fields(Job) if item.metadata))
    _fill_list(draft, top, "waiver", Waiver, example="[[waiver]] with rule, reason and expires = 2026-12-31")
    model = resolve_shape(draft, preset=preset, job_name=str(top.get("name") or "model"))
    sections = {name: _table_values(draft, (name,), draft.section(name), fields(cls)) for name, cls in SECTIONS.items()}
    _fill_fixed(draft, sections["parallel"])
    _fill_sequence(draft, sections["data"], preset, max_positions=model.max_positions)
    if "tokens" not in sections["data"] and preset is not None and "tokens" in preset.train:
        sections["data"]["tokens"] = preset.train["tokens"]
        draft.origins["data.tokens"] = _preset_origin(preset)
    _fill_batch(draft, sections["batch"], preset, sequence=sections["data"].get("sequence"))
    example = 'ramp = [{ until_tokens = "100B", global_tokens = "4M" }]'
    _fill_list(draft, sections["batch"], "batch.ramp", RampStage, example=example)
    cluster = sections["cluster"]
    if cluster.get("spec") and cluster.get("file"):
        draft.complain("cluster.file", "[cluster] gives both a spec and a file", fix="keep one of the two")
    elif not cluster.get("file") and not draft.bad & {"cluster.spec", "cluster.file"} and not cluster.get("spec"):
        cluster["spec"] = DEFAULT_CLUSTER
    section_values = {name: cls(**_sound_values(sections[name])) for name, cls in SECTIONS.items()}
    return Job(model=model, **({"name": "refused"} | _sound_values(top)), **section_values)


def _refuse_non_tables(draft: Draft) -> None:
    for name in (*SECTIONS, "model"):
        value = draft.table.setdefault(name, {})
        if not isinstance(value, dict):
            what = f"{name} = {shown_value(value)} is {value_kind(value)}, not a section"
            draft.complain(name, what, fix=f"write [{name}] and its keys below")
            draft.table[name] = {}


def _table_values(
    draft: Draft, prefix: tuple[str | int, ...], written: Mapping[str, object], wanted: Sequence[Field[Any]]
) -> dict[str, Any]:
    """Return the values of one table by field name.

    None marks a refused value; a field that keeps its default is absent.
    """
    values: dict[str, Any] = {}
    by_key = {rule_of(item.metadata).key or item.name: item for item in wanted}
    if prefix:
        draft.refuse_unknown(prefix, written, by_key)
    for name, item in by_key.items():
        key = dotted_key((*prefix, name))
        if name in written:
            values[item.name] = draft.read(key, written[name], rule_of(item.metadata))
        elif item.default is MISSING:
            draft.complain(
                key, f"{dotted_key(prefix)} does not say {name}", fix=f"add {name}: {rule_of(item.metadata).note}"
            )
            values[item.name] = None
        else:
            draft.origins[key] = DEFAULT
    return values


def _sound_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _derive_name(draft: Draft) -> None:
    """Derive the name of a job without one from the file name."""
    if "name" in draft.table:
        return
    stem = re.sub(r"[^a-z0-9._-]+", "-", draft.path.stem.lower())[:63]
    draft.table["name"] = stem if re.fullmatch(NAME_PATTERN, stem) else "job"
    draft.settings["name"] = "file name"


def _fill_fixed(draft: Draft, parallel: dict[str, Any]) -> None:
    if parallel.get("mode") != "fixed":
        return
    for name, value in FIXED.items():
        if name not in parallel:
            parallel[name] = value
            draft.origins[f"parallel.{name}"] = Origin(kind="derived", where='parallel.mode = "fixed"')


def _fill_sequence(draft: Draft, data: dict[str, Any], preset: Preset | None, *, max_positions: int) -> None:
    if "sequence" in data:
        return
    if preset is not None and "sequence" in preset.train:
        data["sequence"] = preset.train["sequence"]
        draft.origins["data.sequence"] = _preset_origin(preset)
    elif 0 < max_positions < Data().sequence:
        data["sequence"] = max_positions
        draft.origins["data.sequence"] = Origin(kind="derived", where="model.max_positions")
    else:
        data["sequence"] = Data().sequence


def _preset_origin(preset: Preset) -> Origin:
    return Origin(kind="preset", where=f"preset {preset.name}")


def _fill_batch(draft: Draft, batch: dict[str, Any], preset: Preset | None, *, sequence: int | None) -> None:
    """Fill in both sizes of the global batch from the one that is set."""
    given_sizes = [name for name in ("global_tokens", "global_sequences") if name in batch]
    if not given_sizes and preset is not None and "global_tokens" in preset.train:
        batch["global_tokens"] = preset.train["global_tokens"]
        draft.origins["batch.global_tokens"] = _preset_origin(preset)
        given_sizes = ["global_tokens"]
    if not given_sizes:
        fix = 'add global_tokens = "4M" or global_sequences = 512 under [batch]'
        draft.complain(
            "batch",
            "[batch] says neither global_tokens nor global_sequences",
            why="the batch is part of the experiment, not of the layout",
            fix=fix,
        )
        return
    if sequence is None or any(batch[name] is None for name in given_sizes):
        return
    if len(given_sizes) == 2:
        _check_batch(draft, batch, sequence)
    elif given_sizes == ["global_tokens"]:
        _sequences_from_tokens(draft, batch, sequence)
    else:
        batch["global_tokens"] = batch["global_sequences"] * sequence
        origin = Origin(kind="derived", where="batch.global_sequences × data.sequence")
        draft.origins["batch.global_tokens"] = origin


def _sequences_from_tokens(draft: Draft, batch: dict[str, Any], sequence: int) -> None:
    """Derive the number of sequences; an exact number of tokens must be a whole number of sequences.

    A number with a unit is approximate: "4M" is rounded, even where it divides exactly, because "512k" tokens of 1,024
    are 500 sequences, which eight replicas cannot share.
    """
    tokens, given_tokens = batch["global_tokens"], draft.section("batch").get("global_tokens")
    sequences, remainder = divmod(tokens, sequence)
    origin = Origin(kind="derived", where="batch.global_tokens / data.sequence")
    rounded = round_batch(tokens / sequence)
    if isinstance(given_tokens, str) and not given_tokens.strip()[-1:].isdigit() and rounded * sequence != tokens:
        sequences = rounded
        batch["global_tokens"] = sequences * sequence
        origin = Origin(
            kind="derived", where=f"{shown_value(given_tokens)} in whole sequences, within 5 %, rich in factors of two"
        )
    elif remainder:
        draft.complain(
            "batch.global_tokens",
            f"batch.global_tokens = {tokens:,} is not a whole number of sequences of {sequence:,} tokens",
            why="every step takes whole sequences",
            fix=use_multiples(tokens, sequence),
        )
    batch["global_sequences"] = sequences
    draft.origins["batch.global_sequences"] = origin


def round_batch(wanted: float) -> int:
    """Return the number of sequences within 5 % that divides best over ranks: most factors of two, then the nearest.

    "4M" tokens of 8,192 are 488.3 sequences, which 64 replicas cannot share; users who write 4M mean 512.

    >>> round_batch(4e6 / 8192), round_batch(3.2e6 / 2048)
    (512, 1536)
    """
    for power in range(60, -1, -1):
        rounded = max(1, round(wanted / (1 << power))) << power
        if abs(rounded - wanted) <= 0.05 * wanted:
            return rounded
    return max(1, round(wanted))


def _check_batch(draft: Draft, batch: dict[str, Any], sequence: int) -> None:
    tokens, sequences = batch["global_tokens"], batch["global_sequences"]
    if tokens != sequences * sequence:
        draft.complain(
            "batch.global_tokens",
            f"batch.global_tokens = {tokens:,} is not "
            f"batch.global_sequences = {sequences:,} × data.sequence = {sequence:,}",
            fix="give one of the two",
        )


def _fill_list(draft: Draft, table: dict[str, Any], key: str, kind_of: type[Any], *, example: str) -> None:
    """Read a list of tables into a tuple of dataclasses."""
    name = key.rpartition(".")[2]
    tables = table.get(name)
    if tables is None:
        return
    table[name] = None
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        what = f"{key} = {shown_value(tables)} is {value_kind(tables)}, not a list of tables"
        draft.complain(key, what, fix=f"use {example}")
        return
    path = tuple(key.split("."))
    items = [_table_values(draft, (*path, index), item, fields(kind_of)) for index, item in enumerate(tables)]
    if all(len(_sound_values(item)) == len(fields(kind_of)) for item in items):
        table[name] = tuple(kind_of(**item) for item in items)
    else:
        draft.bad.add(key)


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Sort problems by line; those without a line come first."""

    def line(problem: Problem) -> int:
        tail = problem.where.rpartition(":")[2]
        return int(tail) if tail.isdigit() else 0

    return sorted(problems, key=line)


# A Job as plain data, which `--json` prints and a run folder stores.


def job_to_dict(job: Job) -> dict[str, object]:
    """Return nested tables under the names of the job file, in the order of the schema."""
    result: dict[str, object] = {"spec": job.spec, "name": job.name, "profile": job.profile}
    if job.rules:
        result["rules"] = list(job.rules)
    if job.waiver:
        result["waiver"] = json_values(job.waiver)
    result["model"] = json_values(job.model)
    for name in SECTIONS:
        section = getattr(job, name)
        if name in Job.JSON_UNLESS_DEFAULT and section == SECTIONS[name]():
            continue
        # An empty list is omitted, so that jobs keep the digests they had before the key existed.
        omitted = getattr(section, "JSON_UNLESS_DEFAULT", ())
        keys = {
            item.name: rule_of(item.metadata).key or item.name
            for item in fields(section)
            if item.name not in omitted or getattr(section, item.name)
        }
        result[name] = {key: json_values(getattr(section, field)) for field, key in keys.items()}
    return result


def job_to_rows(resolved: ResolvedJob) -> list[tuple[str, object, str]]:
    """Return (dotted key, value, origin) of every setting."""
    rows: list[tuple[str, object, str]] = []
    for section, value in job_to_dict(resolved.job).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, setting in inner:
            key = f"{section}.{name}" if name else section
            rows.append((key, setting, resolved.origins[key].where if resolved.origins else ""))
    return rows
