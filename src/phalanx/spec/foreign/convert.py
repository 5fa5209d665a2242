"""A configuration of another trainer as a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.job.load import ResolvedJob
from phalanx.spec.evidence import Unmapped
from phalanx.spec.facts.practice import Practice


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What came of it; `text` is the equivalent job file."""

    resolved: ResolvedJob
    practice: Practice
    unmapped: tuple[Unmapped, ...]
    text: str


def convert(path: Path, kind: str, *, cluster: str | None = None, overrides: Sequence[str] = ()) -> Converted:
    """Read a configuration of `kind`; raises UserError when it is none."""
    raise NotImplementedError
