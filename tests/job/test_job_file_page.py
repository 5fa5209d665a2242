"""docs/job-file.md names every key of every section, and no key that does not exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.job import run_sections, schema, sync_section

PAGE = (Path(__file__).parents[2] / "docs" / "job-file.md").read_text(encoding="utf-8")
SECTIONS = {
    "precision": schema.Precision,
    "train": schema.Train,
    "comm": schema.Comm,
    "scale": schema.Scale,
    "waiver": schema.Waiver,
    "checkpoint": run_sections.Checkpoint,
    "fault": run_sections.FaultSettings,
    "telemetry": run_sections.Telemetry,
    "launch": run_sections.LaunchChoice,
    "sync": sync_section.SyncSettings,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(section: str) -> None:
    part = re.search(rf"## `?\[+{section}\]+`?.*?(?=\n## |\Z)", PAGE, re.DOTALL)
    assert part is not None
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|", part.group(0), re.MULTILINE))
    known = {field.metadata["rule"].key or field.name: field.default for field in fields(SECTIONS[section])}
    assert set(rows) == set(known)
    for key, default in known.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert rows[key] == f"`{default}`", key
