"""The values that `decide` works on: the coordinator's state, its inputs, and its actions.

Every value in a `CoordinatorState` is immutable, so that a copy of its fields is a copy of the state: a message costs
the same whether the run has 4 hosts or 16,384.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.elastic.failure import Failure
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.heartbeat_board import NO_STEP
from phalanx.elastic.host_view import HostView
from phalanx.elastic.incident_history import IncidentHistory
from phalanx.elastic.membership import HostSlot, Membership
from phalanx.elastic.replica_ring import ReplicaTable
from phalanx.elastic.restore_point import Lineage
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout

# A message with its "kind" and JSON values.
Message = dict[str, Any]


# ---- the state
# --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """The facts that do not change during a launch."""

    run_path: str
    job: Job
    planned: Layout
    num_slots: int = 0  # of all hosts that were launched
    num_hosts: int = 0  # that were launched or are to join
    # By host: slots from this one on are spare.
    first_spare: Mapping[str, int] = field(default_factory=dict)
    prescribed: tuple[Message, ...] = ()  # layouts that a replay follows, each from a step on
    num_plans: int = 1  # that the run has had; goes into its record
    # The newest generation with which ranks of this run were ever fenced; the next is above it.
    newest_generation: int = 0
    # Hosts that fail together: replicas go to another rack where there is one.
    rack_hosts: int = 1
    # By host, for hosts that share a machine: tasks of another launcher.
    machines: Mapping[str, str] = field(default_factory=dict)

    def layout_at(self, step: int) -> Layout:
        """Return the layout for a step: the plan's, or the one that a replay prescribes from this step on."""
        layouts = [layout for layout in self.prescribed if int(layout["from_step"]) <= max(step, 0)]
        return Layout(**layouts[-1]["layout"]) if layouts else self.planned

    @property
    def most_devices(self) -> int:
        """Ranks of the plan, or of a replay's largest layout, whose hosts must be present from the start."""
        return max((Layout(**layout["layout"]).devices for layout in self.prescribed), default=self.planned.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejoiningReplica:
    """A model replica that was left out and is being built again."""

    # When new processes were asked to take its ranks.
    asked_s: float
    went: bool = False  # they were sent the address where to meet
    built: frozenset[int] = frozenset()  # ranks that have built their part


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """The state that the next coordinator needs; saved before any agent is notified. Agents report the rest again."""

    generation: int = 0
    membership: Membership | None = None
    pids: tuple[int, ...] = ()  # of the members' processes, by rank
    running: bool = False  # there is a membership, and the run is not over
    forming: bool = False  # its members have not been sent "go" yet
    go: Message | None = None  # the "go" message, the same for all members
    # By host, its part of the "go" message: the peers that take the replicas of its ranks.
    peers: Mapping[str, Message] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    step: int = NO_STEP  # where the run stands
    best_step: int = NO_STEP  # the furthest it ever came
    failures: int = 0  # in a row, without a new furthest step between them
    at_most: int | None = None  # state of more steps than these is not to be trusted
    rolled_back: tuple[int, ...] = ()
    # Unix time at which the first membership of this launch began to train.
    went_s: float = 0.0
    # Replicas that differed, where it is unknown which one is wrong.
    divergence: Message | None = None
    quarantined: frozenset[HostSlot] = frozenset()
    slot_failures: Mapping[HostSlot, int] = field(default_factory=dict)
    # Around a slot that failed again and again, since the furthest step.
    has_shrunk: bool = False
    # Model replicas that are left out of this generation at present.
    absent: tuple[int, ...] = ()
    # Of this generation: how often the set of present replicas has changed.
    round: int = 0
    history: IncidentHistory = field(default_factory=IncidentHistory)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {**self.progress_json(), **self.members_json()}

    def progress_json(self) -> dict[str, Any]:
        """Return the part that is written every second: the same few lines for any number of ranks."""
        return {
            "epoch": self.generation,
            "running": self.running,
            "forming": self.forming,
            "go": self.go,
            "lineage": self.lineage.to_json(),
            "step": self.step,
            "best_step": self.best_step,
            "failures": self.failures,
            "at_most": self.at_most,
            "rolled_back": list(self.rolled_back),
            "went_s": self.went_s,
            "case": self.divergence,
            "quarantined": [[place.host, place.slot] for place in sorted(self.quarantined)],
            "seat_failures": [[place.host, place.slot, count] for place, count in sorted(self.slot_failures.items())],
            "has_shrunk": self.has_shrunk,
            "absent": list(self.absent),
            "round": self.round,
            "history": self.history.to_json(),
        }

    def members_json(self) -> dict[str, Any]:
        """Return the part that changes only with the membership."""
        return {
            "formation": self.membership.to_json() if self.membership is not None else None,
            "pids": list(self.pids),
            "peers": dict(self.peers),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SavedState:
        """Read what `to_json` returned; raises KeyError, TypeError or ValueError on anything else."""
        return cls(
            generation=int(body["epoch"]),
            membership=Membership.from_json(body["formation"]) if body["formation"] else None,
            pids=tuple(int(pid) for pid in body["pids"]),
            running=bool(body["running"]),
            forming=bool(body["forming"]),
            go=body["go"],
            peers=body["peers"],
            lineage=Lineage.from_json(body["lineage"]),
            step=int(body["step"]),
            best_step=int(body["best_step"]),
            failures=int(body["failures"]),
            at_most=body["at_most"],
            rolled_back=tuple(int(step) for step in body["rolled_back"]),
            went_s=float(body["went_s"]),
            divergence=body["case"],
            quarantined=frozenset(HostSlot(str(host), int(slot)) for host, slot in body["quarantined"]),
            slot_failures={HostSlot(str(host), int(slot)): int(count) for host, slot, count in body["seat_failures"]},
            has_shrunk=bool(body.get("has_shrunk")),
            absent=tuple(int(replica) for replica in body.get("absent", ())),
            round=int(body.get("round", 0)),
            # Version 0.7 saved no history.
            history=IncidentHistory.from_json(body.get("history", {})),
        )


@dataclass(kw_only=True)
class CoordinatorState:
    """The whole state of `decide`. Fields are assigned only to a copy, by `decide`, and no value is ever changed.

    Times are of the monotonic clock of the coordinator's host unless a comment names another.
    """

    settings: CoordinatorSettings
    saved: SavedState
    began_s: float
    # When the last message was received, if nothing but time has passed since.
    listened_s: float
    stepped_s: float  # when the run last did a new step
    # The step that ranks were asked to restore, until one reports the step it restored.
    awaited_restore: int | None = None
    step_s: float = 0.0  # duration of a step
    is_over: bool = False
    # True for a run that another coordinator began, while not all of its hosts are back.
    takes_over: bool = False
    arrived_s: float = -1e9  # when a host last reported its processes

    hosts: FrozenMap[str, HostView] = field(default_factory=FrozenMap)
    host_order: tuple[str, ...] = ()
    known_hosts: frozenset[str] = frozenset()  # the names of `hosts` and `host_order`
    num_processes: int = 0  # on all hosts
    # Processes that may become ranks: as many as there are `living_slots`.
    num_usable: int = 0
    # Hosts that are connected and have reported their processes.
    num_here: int = 0
    num_ready: int = 0  # hosts of the membership whose ranks are all ready
    bad_hosts: frozenset[str] = frozenset()  # hosts with problems
    check_hosts_s: float = -1e9  # when the next host may have been silent for too long
    # Seconds in all during which this process did not listen: no host is to blame for those.
    excused_s: float = 0.0
    # The last of these pauses: when each ended, and `heard_s` of that moment.
    own_pauses: tuple[tuple[float, float], ...] = ()
    # Up to this time agents have been sent signs of life.
    sign_s: float = -1e9
    # The same for the agents whose turn to start a coordinator comes first.
    watcher_sign_s: float = -1e9
    # The bucket of `hosts` whose sign of life is due next.
    sign_bucket: int = 0

    failures: FrozenMap[int, Failure] = field(default_factory=FrozenMap)  # by rank, since the last membership
    noticed_s: float | None = None  # when the first of them was noticed
    # Of the failures, those that belong to the incident before.
    consequences: frozenset[int] = frozenset()
    # Members lost while the membership forms.
    replacing: FrozenMap[int, tuple[Failure, float]] = field(default_factory=FrozenMap)
    rejoining: FrozenMap[int, RejoiningReplica] = field(default_factory=FrozenMap)  # by replica
    cleared: FrozenMap[int, float] = field(default_factory=FrozenMap)  # by replica, when its processes were to end
    # Replicas of the present round that are not known to be connected yet.
    unconnected: frozenset[int] = frozenset()
    # The replica that the present round added.
    newcomer: int | None = None
    # Since when there are no slots for a replica that is left out.
    short_s: float | None = None
    incident_recorded: bool = False
    # Why the rank that failed must not have its slot or host again.
    limit_reason: str = ""
    out_of_memory: bool = False

    before: Membership | None = None  # the membership before this one
    # With `alive` by host; not saved for the next coordinator.
    formed: tuple[Membership, Mapping[str, Mapping[int, int]]] | None = None
    # Of the last membership that was sent "go"; not saved for the next coordinator.
    peer_table: ReplicaTable | None = None
    # Unix time and clock when a membership was announced; not saved for the next coordinator.
    asked_at: tuple[float, float] | None = None
    # When it was first found that the membership cannot form, because of bad hosts.
    unfit_s: float | None = None
    # By rank, the message with which it left its loop.
    left: FrozenMap[int, Message] = field(default_factory=FrozenMap)
    left_s: float | None = None  # when the first rank left
    # Of ranks that left for this generation.
    last_collectives: FrozenMap[int, str] = field(default_factory=FrozenMap)
    # Since when there are slots for a larger membership.
    regrow_s: float | None = None
    regrow_asked: bool = False
    stacks_asked_s: float | None = None
    killed_s: float = -1e9  # when a rank that hung was killed

    stop_requests: int = 0
    stop_asked_s: float | None = None
    # When a cluster manager asked to stop, which does not wait.
    hurry_s: float | None = None

    def copy(self) -> CoordinatorState:
        """Return another state with the same values."""
        state = object.__new__(CoordinatorState)
        state.__dict__.update(self.__dict__)
        return state

    @property
    def job(self) -> Job:
        """The job of the run."""
        return self.settings.job

    @property
    def membership(self) -> Membership:
        """The present membership; only where there is one."""
        assert self.saved.membership is not None
        return self.saved.membership

    @property
    def is_settled(self) -> bool:
        """True while all train and nothing is under way: then only the passing of time can give reason to act."""
        saved = self.saved
        is_calm = self.left_s is None and self.stop_asked_s is None and self.stacks_asked_s is None
        is_complete = self.num_here == len(self.hosts) and not self.failures and not self.takes_over
        return saved.membership is not None and not saved.forming and not saved.absent and is_calm and is_complete

    @property
    def is_new_incident(self) -> bool:
        """True when some failure is neither recorded yet nor only a consequence of the incident before."""
        return not self.incident_recorded and not self.failures.keys() <= self.consequences

    def living_slots(self) -> list[HostSlot]:
        """Return the slots with a living process that may become a rank, host by host."""
        return [
            place
            for name in self.host_order
            if (host := self.hosts.get(name)) is not None and host.is_here and not host.problems
            for slot in sorted(host.alive)
            if (place := HostSlot(name, slot)) not in self.saved.quarantined
        ]

    def is_spare(self, place: HostSlot) -> bool:
        """True for a slot that is used only when the others are not enough."""
        return place.slot >= self.settings.first_spare.get(place.host, place.slot + 1)

    def refusals(self) -> list[str]:
        """Return the problems of bad hosts, except those of hosts that this launch excluded."""
        excluded = self.saved.history.excluded
        return [
            text
            for name in self.host_order
            if name in self.bad_hosts
            for text in self.hosts[name].problems
            if text != excluded.get(name)
        ]

    def is_usable(self, place: HostSlot) -> bool:
        """True when a process in this slot, now or later, may become a rank."""
        host = self.hosts.get(place.host)
        return host is not None and not host.problems and place not in self.saved.quarantined

    def is_living(self, place: HostSlot) -> bool:
        """True when a process in this slot may become a rank: when the slot is one of `living_slots`."""
        host = self.hosts.get(place.host)
        return host is not None and host.is_here and place.slot in host.alive and self.is_usable(place)

    def pid_at(self, place: HostSlot) -> int | None:
        """Return the process id in a slot, or None."""
        host = self.hosts.get(place.host)
        return host.alive.get(place.slot) if host is not None else None


# ---- its inputs
# -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMessage:
    """A message of an agent, or that it connected ("joined") or disconnected ("gone")."""

    now_s: float
    unix_s: float
    host: str
    body: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMessages:
    """Messages of several agents, in this order: the same as so many `AgentMessage`s, at a fraction of their cost."""

    now_s: float
    unix_s: float
    messages: Sequence[tuple[str, Message]]  # host and body


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockTick:
    """Time has passed. Decisions are made only at ticks: messages only update the state."""

    now_s: float
    unix_s: float
    stop_file: bool = False  # a user has made the file `stop` in the run folder


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointList:
    """The answer to `ListCheckpoints`: the steps of all committed checkpoints."""

    now_s: float
    unix_s: float
    steps: tuple[int, ...]


Input = AgentMessage | AgentMessages | ClockTick | CheckpointList


# ---- its actions
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to agents; one that is gone does not receive it."""

    hosts: tuple[str, ...]
    message: Message
    # By host, the fields that only this host is sent.
    shares: Mapping[str, Message] = field(default_factory=dict)

    def message_for(self, host: str) -> Message:
        """Return the whole message to one of the hosts."""
        share = self.shares.get(host)
        return {**self.message, **share} if share else self.message


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEvent:
    """Append an event to the coordinator's event file."""

    event: str
    fields: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveState:
    """Write the state that the next coordinator needs, before the actions that follow."""

    saved: SavedState


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginGeneration:
    """Raise the fence: from now on no rank of an older generation commits a checkpoint."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ListCheckpoints:
    """List the checkpoints; answered with a `CheckpointList`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEvidence:
    """Record the evidence that ranks of the generations before left: last collectives, flight recorders."""

    generation: int
    last_collectives: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RollBack:
    """Set the checkpoints of more than `target` steps aside, and record it."""

    generation: int  # of the membership that found it
    step: int  # steps done when the state was found untrusted
    target: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkRunning:
    """Set the status of the run to "running", with so many ranks."""

    world: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """The reason why a run has failed: the first cause, and the other failures."""

    cause: Failure
    others: tuple[Failure, ...]
    # Why it was not recovered from; empty where the cause explains it.
    why: str
    world: int
    host: str  # of the cause; empty on a run of one host
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRun:
    """Write how the run ended; coordinator_actions.py completes the message with the checkpoints on the disk."""

    state: Literal["done", "stopped", "failed"]
    exit_code: int
    message: str
    generation: int
    how: Literal["plain", "finished", "stopped", "killed", "killed at once", "unfit", "given up"] = "plain"
    # Checkpoints of more steps are not to be trusted: they are set aside.
    at_most: int | None = None
    given_up: GivenUp | None = None
    # For a run that ends because its state is untrusted.
    rollback: RollBack | None = None


Action = (
    Send
    | RecordEvent
    | SaveState
    | BeginGeneration
    | ListCheckpoints
    | RecordEvidence
    | RollBack
    | MarkRunning
    | EndRun
)
