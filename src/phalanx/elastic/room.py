"""What the coordinator knows and waits for: the state that its decisions read and change, and questions to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.elastic.failure import Failure
from phalanx.elastic.fence import begin_epoch
from phalanx.elastic.hosts import Host
from phalanx.elastic.membership import HostSlot, Membership
from phalanx.elastic.memory import Memory, Message
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run


class Room:
    """Where the council sits. `memory` outlives this coordinator, the rest the agents tell the next one again.

    `save` writes the memory down. It is called before agents are told of an epoch, so that whoever takes over knows
    of everything that may be going on.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        send: Callable[[str, Message], None],
        events: EventWriter,
        *,
        memory: Memory,
        save: Callable[[Memory], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.job, self.planned, self.events = run, plan.job, plan.layout, events
        self.memory, self.progressed, self.is_over = memory, False, False
        self.send, self.save, self.clock = send, save, clock
        launch = run.launch()
        self.hosts: dict[str, Host] = {}
        self.order = [str(name) for name in launch.get("hosts", ())]
        self.slots = sum(int(count) for count in launch.get("slots", ()))
        self.formations: list[Message] = list(launch.get("formations", ()))
        self.takes_over = memory.running
        if memory.running:
            events.write("coordinator", epoch=memory.epoch, state="took over")
        self.began_s = self.ticked_s = clock()
        self.failures: dict[int, Failure] = {}
        self.consequences: set[int] = set()  # of the failures, those that belong to the incident before
        self.replacing: dict[int, tuple[Failure, float]] = {}  # members of the formation being made, and since when
        self.told_incident = self.out_of_memory = False
        self.noticed_s: float | None = None
        self.asked_at: tuple[float, float] | None = None  # Unix time and clock when a formation was told; not inherited
        self.unfit_s: float | None = None
        self.before: Membership | None = None
        self.left: dict[int, Message] = {}
        self.left_s: float | None = None
        self.words: dict[int, str] = {}  # the last collective of each rank that left for the present epoch
        self.told_flights = 0  # newest epoch whose flight recorders were told of
        self.wishes = 0
        self.wished_s: float | None = None
        self.hurry_s: float | None = None  # when a cluster manager asked, which does not wait
        self.told_reform = False
        self.grow_s: float | None = None
        self.looked_s = self.beat_s = -1e9
        self.asked_s: float | None = None
        self.killed_s = -1e9
        self.step_s, self.stepped_s = 0.0, clock()
        if memory.forming:
            begin_epoch(run, memory.epoch)  # whoever wrote this down may not have come so far

    def is_here(self, name: str) -> bool:
        host = self.hosts.get(name)
        return host is not None and host.told and host.gone_s is None

    def alive(self) -> list[HostSlot]:
        """Seats with a living process, host by host."""
        return [
            seat
            for name in self.order
            if self.is_here(name) and not self.hosts[name].problems
            for slot in sorted(self.hosts[name].alive)
            if (seat := HostSlot(name, slot)) not in self.memory.quarantined
        ]

    def refused(self) -> list[str]:
        return [text for host in self.hosts.values() for text in host.problems]

    def layout_at(self, step: int) -> Layout:
        """What is wanted: the plan, or what a replay prescribes from this step on."""
        wanted = [one for one in self.formations if int(one["from_step"]) <= max(step, 0)]
        return Layout(**wanted[-1]["layout"]) if wanted else self.planned

    def is_usable(self, seat: HostSlot) -> bool:
        host = self.hosts.get(seat.host)
        return host is not None and not host.problems and seat not in self.memory.quarantined

    def rank_of(self, host: Host, slot: int) -> int | None:
        return self.memory.formation.rank(HostSlot(host.name, slot)) if self.memory.formation is not None else None

    def members(self, host: Host) -> dict[int, int]:
        return self.memory.formation.of_host(host.name) if self.memory.formation is not None else {}

    def pid(self, seat: HostSlot) -> int | None:
        host = self.hosts.get(seat.host)
        return host.alive.get(seat.slot) if host is not None else None

    def age_s(self, host: Host, slot: int) -> float:
        return host.progress[slot][2] if slot in host.progress else 0.0

    def tell_all(self, message: Message) -> None:
        for name in self.hosts:
            self.send(name, message)

    def fail(self, rank: int, failure: Failure) -> None:
        known = self.failures.get(rank)
        if known is None or known.is_consequence:  # what a process says of its end counts more than that it is gone
            self.failures[rank] = failure
        self.noticed_s = self.noticed_s or self.clock()

    def replace(self, rank: int, failure: Failure) -> None:
        """A member of the formation being made was lost before it had left the one before: another takes its place."""
        self.replacing.setdefault(rank, (failure, self.clock()))

    def fail_replacing(self) -> None:
        """Another formation is needed: what was to be replaced in this one has failed, as part of the same incident."""
        replacing, self.replacing = self.replacing, {}
        for rank, (failure, _) in replacing.items():
            if rank not in self.failures:
                self.consequences.add(rank)
                self.fail(rank, failure)

    @property
    def is_new_incident(self) -> bool:
        """Whether what failed is neither told of yet nor only a consequence of the incident before."""
        return not self.told_incident and not self.failures.keys() <= self.consequences

    def forget_failures(self) -> None:
        self.failures, self.left = {}, {}
        self.consequences, self.replacing = set(), {}
        self.noticed_s = self.left_s = self.grow_s = self.asked_s = None
        self.told_incident = self.told_reform = self.out_of_memory = False

    def came_to(self, step: int) -> None:
        """The run has done so many steps, as a beat says or the last word of a rank: a beat may come too late."""
        if self.memory.forming:
            return
        if step > self.memory.step:
            self.memory.step, self.progressed = step, True
            self.memory.at_most = None  # what could not be trusted was left behind
        if step > self.memory.best_step:
            self.memory.best_step, self.memory.failures = step, 0
            self.memory.seat_failures.clear()
