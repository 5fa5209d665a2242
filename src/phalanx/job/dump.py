"""A Job as plain data: what `--json` prints and a run folder stores."""

from __future__ import annotations

from dataclasses import fields

from phalanx.job.load import ResolvedJob
from phalanx.job.rules import rule_of
from phalanx.job.schema import SECTIONS, Job


def to_dict(job: Job) -> dict[str, object]:
    """Nested tables under the names the job file uses, in the order of the schema."""
    result: dict[str, object] = {"spec": job.spec, "name": job.name, "profile": job.profile}
    if job.rules:
        result["rules"] = list(job.rules)
    if job.waiver:
        result["waiver"] = _plain(job.waiver)
    result["model"] = _plain(job.model)
    return result | {name: _plain(getattr(job, name)) for name in SECTIONS}


def to_rows(resolved: ResolvedJob) -> list[tuple[str, object, str]]:
    """(dotted key, value, origin) of every setting."""
    rows: list[tuple[str, object, str]] = []
    for section, value in to_dict(resolved.job).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for name, setting in inner:
            key = f"{section}.{name}" if name else section
            rows.append((key, setting, resolved.origins[key].where))
    return rows


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    result: dict[str, object] = {}
    for item in fields(value):  # type: ignore[arg-type]
        key = rule_of(item.metadata).key if item.metadata else ""
        result[key or item.name] = _plain(getattr(value, item.name))
    return result
