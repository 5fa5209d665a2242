"""What the coordinator knows of a host. Immutable; a changed copy is made with every message of thousands of hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from phalanx.elastic.heartbeat_board import Progress
from phalanx.elastic.membership import HostSlot

NO_PROCESSES: Mapping[int, int] = {}
NO_EXCEPTIONS: Mapping[int, Progress | None] = {}


class HostView(NamedTuple):
    """A host, as its agent describes it."""

    name: str
    address: str
    heard_s: float  # when it last spoke, less the pauses of our own until then (`excused_s`)
    has_status: bool = False  # it has said which processes it has
    gone_s: float | None = None  # when it hung up, on the same clock
    alive: Mapping[int, int] = NO_PROCESSES  # slot -> process
    progress: Progress | None = None  # of its ranks; None before any has told
    exceptions: Mapping[int, Progress | None] = NO_EXCEPTIONS  # slots that differ, or have not told
    problems: tuple[str, ...] = ()  # what its preflight found; it takes no part
    announced_generation: int = 0  # the newest that this connection has told it of
    ready: dict[str, Any] | None = None
    is_ready: bool = False  # every rank that the present membership has here
    stacks: Mapping[int, tuple[bool, str]] | None = None  # slot -> whether it waits for others, and where

    def changed(self, **fields: Any) -> HostView:
        """The same host with other values."""
        return self._replace(**fields)

    def moved(self, heard_s: float, progress: Progress | None, exceptions: Mapping[int, Progress | None]) -> HostView:
        """After a heartbeat: a quarter of the cost of `changed`."""
        return HostView(
            self.name,
            self.address,
            heard_s,
            self.has_status,
            self.gone_s,
            self.alive,
            progress,
            exceptions,
            self.problems,
            self.announced_generation,
            self.ready,
            self.is_ready,
            self.stacks,
        )

    def answered(self, heard_s: float, ready: dict[str, Any], is_ready: bool) -> HostView:
        """It has said who is ready; the same."""
        return HostView(
            self.name,
            self.address,
            heard_s,
            self.has_status,
            self.gone_s,
            self.alive,
            self.progress,
            self.exceptions,
            self.problems,
            self.announced_generation,
            ready,
            is_ready,
            self.stacks,
        )

    def with_processes(self, alive: Mapping[int, int], announced_generation: int) -> HostView:
        """It has said which processes it has, and which membership it knows; the same."""
        return HostView(
            self.name,
            self.address,
            self.heard_s,
            True,
            self.gone_s,
            alive,
            self.progress,
            self.exceptions,
            self.problems,
            announced_generation,
            self.ready,
            self.is_ready,
            self.stacks,
        )

    def announced(self, generation: int) -> HostView:
        """It is told of a membership that begins: it is not ready for it, and has got nowhere in it; the same."""
        return HostView(
            self.name,
            self.address,
            self.heard_s,
            self.has_status,
            self.gone_s,
            self.alive,
            None,
            NO_EXCEPTIONS,
            self.problems,
            generation,
            None,
            False,
            self.stacks,
        )

    @property
    def is_here(self) -> bool:
        """Whether its agent is connected and has said which processes it has."""
        return self.has_status and self.gone_s is None

    def progress_of(self, slot: int) -> Progress | None:
        """Step, phase and age of the rank in a slot; None before it has told."""
        return self.exceptions.get(slot, self.progress)

    def age_s(self, slot: int) -> float:
        """Seconds since the rank in a slot got anywhere."""
        told = self.progress_of(slot)
        return told[2] if told is not None else 0.0

    def num_usable(self, quarantined: Collection[HostSlot]) -> int:
        """Living processes that may become ranks."""
        if not self.is_here or self.problems:
            return 0
        return sum((self.name, slot) not in quarantined for slot in self.alive) if quarantined else len(self.alive)
