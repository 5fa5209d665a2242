"""What a coordinator must know of the one before it: written down before anybody is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.elastic.heartbeat_board import NO_STEP
from phalanx.elastic.membership import HostSlot, Membership
from phalanx.elastic.restore_point import Lineage

Message = dict[str, Any]  # of a kind, with JSON values


@dataclass(kw_only=True, slots=True)
class Memory:
    """The state of the council; the rest it hears again from the agents."""

    epoch: int = 0
    formation: Membership | None = None
    pids: list[int] = field(default_factory=list)  # of the formation's processes, by rank
    running: bool = False  # there is a formation, and the run is not over
    forming: bool = False  # its members were not yet told to go
    go: Message | None = None  # what they were told
    lineage: Lineage = field(default_factory=Lineage)
    step: int = NO_STEP  # where the run stands
    best_step: int = NO_STEP  # the furthest it ever came
    failures: int = 0  # in a row, without a step further than ever between them
    at_most: int | None = None  # state of more steps than these is not to be trusted
    rolled_back: list[int] = field(default_factory=list)
    went_s: float = 0.0  # Unix time at which the first formation of this launch began to train
    case: Message | None = None  # copies that differed, and nobody could say which was wrong
    quarantined: set[HostSlot] = field(default_factory=set)
    seat_failures: dict[HostSlot, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "epoch": self.epoch,
            "formation": self.formation.to_json() if self.formation is not None else None,
            "pids": self.pids,
            "running": self.running,
            "forming": self.forming,
            "go": self.go,
            "lineage": self.lineage.to_json(),
            "step": self.step,
            "best_step": self.best_step,
            "failures": self.failures,
            "at_most": self.at_most,
            "rolled_back": self.rolled_back,
            "went_s": self.went_s,
            "case": self.case,
            "quarantined": [[seat.host, seat.slot] for seat in sorted(self.quarantined)],
            "seat_failures": [[seat.host, seat.slot, count] for seat, count in sorted(self.seat_failures.items())],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Memory:
        """The reverse; raises KeyError, TypeError or ValueError on anything else."""
        return cls(
            epoch=int(body["epoch"]),
            formation=Membership.from_json(body["formation"]) if body["formation"] else None,
            pids=[int(pid) for pid in body["pids"]],
            running=bool(body["running"]),
            forming=bool(body["forming"]),
            go=body["go"],
            lineage=Lineage.from_json(body["lineage"]),
            step=int(body["step"]),
            best_step=int(body["best_step"]),
            failures=int(body["failures"]),
            at_most=body["at_most"],
            rolled_back=[int(step) for step in body["rolled_back"]],
            went_s=float(body["went_s"]),
            case=body["case"],
            quarantined={HostSlot(str(host), int(slot)) for host, slot in body["quarantined"]},
            seat_failures={HostSlot(str(host), int(slot)): int(count) for host, slot, count in body["seat_failures"]},
        )
