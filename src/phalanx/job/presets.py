"""Models by name: their shapes, and how they were trained where that is published (presets.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from phalanx.job.model import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A known model: `shape` holds ModelShape keys, `train` the published sequence, global_tokens, tokens."""

    name: str
    source: str
    shape: Mapping[str, int | bool | str | float]
    train: Mapping[str, int]

    def model(self) -> ModelShape:
        """The shape as a value."""
        return ModelShape(name=self.name, **self.shape)  # type: ignore[arg-type]


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name, in the order of the file."""
    table = tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: _preset(name, dict(entry)) for name, entry in table.items()}


def _preset(name: str, entry: dict[str, object]) -> Preset:
    train = entry.pop("train", {})
    source = entry.pop("source")
    return Preset(name=name, source=str(source), shape=entry, train=train)  # type: ignore[arg-type]
