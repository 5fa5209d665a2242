"""The coordinator's view of a host. Immutable: every message of thousands of hosts makes a changed copy."""

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
    # When its last message came, less the coordinator's own pauses until then (`excused_s`).
    heard_s: float
    has_status: bool = False  # it has reported its processes
    gone_s: float | None = None  # when it disconnected, on the same clock
    alive: Mapping[int, int] = NO_PROCESSES  # slot -> process id
    progress: Progress | None = None  # of its ranks; None before any has reported
    # Slots that differ, or have not reported.
    exceptions: Mapping[int, Progress | None] = NO_EXCEPTIONS
    # Found by its preflight; the host takes no part.
    problems: tuple[str, ...] = ()
    # The newest membership that was sent over this connection.
    announced_generation: int = 0
    ready: dict[str, Any] | None = None
    # Every rank that the present membership has here is ready.
    is_ready: bool = False
    # Slot -> (waits for other ranks, place in the code).
    stacks: Mapping[int, tuple[bool, str]] | None = None

    def changed(self, **fields: Any) -> HostView:
        """Return the same host with other values."""
        return self._replace(**fields)

    def moved(self, heard_s: float, progress: Progress | None, exceptions: Mapping[int, Progress | None]) -> HostView:
        """Return the host after a heartbeat: a quarter of the cost of `changed`."""
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
        """Return the host after it has reported which ranks are ready; as cheap as `moved`."""
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
        """Return the host after it has reported its processes and the membership it knows; as cheap as `moved`."""
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
        """Return the host after a new membership was sent to it: not ready, without progress. As cheap as `moved`."""
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
        """True when its agent is connected and has reported its processes."""
        return self.has_status and self.gone_s is None

    def progress_of(self, slot: int) -> Progress | None:
        """Return step, phase and age of the rank in a slot; None before it has reported."""
        return self.exceptions.get(slot, self.progress)

    def age_s(self, slot: int) -> float:
        """Return the seconds since the rank in a slot made progress."""
        progress = self.progress_of(slot)
        return progress[2] if progress is not None else 0.0

    def num_usable(self, quarantined: Collection[HostSlot]) -> int:
        """Return the number of living processes that may become ranks."""
        if not self.is_here or self.problems:
            return 0
        return sum((self.name, slot) not in quarantined for slot in self.alive) if quarantined else len(self.alive)
