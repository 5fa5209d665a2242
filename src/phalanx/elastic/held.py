"""What is held where: the words in which agents, coordinator and ranks speak of snapshots. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["own", "guest"]
KINDS: tuple[Kind, ...] = ("own", "guest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A complete snapshot in this host's vault. `slot` of a guest is its place among the host's guests."""

    rank: int
    world: int
    epoch: int
    step: int
    slot: int
    kind: Kind
    generation: int
    tensors: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Held:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in cls.__dataclass_fields__ if name != "kind"}
        return cls(kind=kind_of(message), **numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a copy of one rank's snapshot lies."""

    host: str
    slot: int
    kind: Kind
    generation: int
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Place:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in ("slot", "generation", "tensors")}
        return cls(host=str(message["host"]), kind=kind_of(message), **numbers)


def kind_of(message: Mapping[str, Any]) -> Kind:
    """The kind a message names."""
    for kind in KINDS:
        if message["kind"] == kind:
            return kind
    raise ValueError(f"{message['kind']!r} is neither of {', '.join(KINDS)}")
