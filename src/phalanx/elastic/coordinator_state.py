"""What the coordinator knows, what it hears, and what it may do: the values that `decide` works on.

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

Message = dict[str, Any]  # of a kind, with JSON values


# ---- what it knows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """What does not change during a launch."""

    run_path: str
    job: Job
    planned: Layout
    num_slots: int = 0  # of all hosts that were launched
    num_hosts: int = 0  # that were launched or are to join
    first_spare: Mapping[str, int] = field(default_factory=dict)  # by host: from this slot on they are spare ones
    prescribed: tuple[Message, ...] = ()  # layouts that a replay takes up, each from a step on
    num_plans: int = 1  # that the run has had; goes into its record
    newest_generation: int = 0  # that ranks of this run were ever fenced with; the next is above it
    rack_hosts: int = 1  # that fail together: copies of state go to another rack where there is one
    machines: Mapping[str, str] = field(default_factory=dict)  # of hosts that share one: tasks of another launcher

    def layout_at(self, step: int) -> Layout:
        """What is wanted: the plan, or what a replay prescribes from this step on."""
        wanted = [one for one in self.prescribed if int(one["from_step"]) <= max(step, 0)]
        return Layout(**wanted[-1]["layout"]) if wanted else self.planned

    @property
    def most_devices(self) -> int:
        """Of the plan, or of the largest layout that a replay prescribes: its hosts must be there when it is due."""
        return max((Layout(**one["layout"]).devices for one in self.prescribed), default=self.planned.devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejoiningReplica:
    """A model replica that was left out and is being built again."""

    asked_s: float  # when new processes were asked to take its ranks
    went: bool = False  # they were told where to meet
    built: frozenset[int] = frozenset()  # ranks that have built their part


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What a coordinator must know of the one before it; saved before anybody is told. Agents tell the rest again."""

    generation: int = 0
    membership: Membership | None = None
    pids: tuple[int, ...] = ()  # of the members' processes, by rank
    running: bool = False  # there is a membership, and the run is not over
    forming: bool = False  # its members were not yet told to go
    go: Message | None = None  # what all were told
    peers: Mapping[str, Message] = field(default_factory=dict)  # and what each host: who takes the copies of its ranks
    lineage: Lineage = field(default_factory=Lineage)
    step: int = NO_STEP  # where the run stands
    best_step: int = NO_STEP  # the furthest it ever came
    failures: int = 0  # in a row, without a step further than ever between them
    at_most: int | None = None  # state of more steps than these is not to be trusted
    rolled_back: tuple[int, ...] = ()
    went_s: float = 0.0  # Unix time at which the first membership of this launch began to train
    divergence: Message | None = None  # copies that differed, and nobody could say which was wrong
    quarantined: frozenset[HostSlot] = frozenset()
    slot_failures: Mapping[HostSlot, int] = field(default_factory=dict)
    has_shrunk: bool = False  # around a slot that failed again and again, since the furthest step
    absent: tuple[int, ...] = ()  # model replicas that are left out of this generation at present
    round: int = 0  # of this generation: how often the replicas that are present have changed
    history: IncidentHistory = field(default_factory=IncidentHistory)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self.progress_json(), **self.members_json()}

    def progress_json(self) -> dict[str, Any]:
        """What is written down every second: the same few lines for any number of ranks."""
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
            "quarantined": [[one.host, one.slot] for one in sorted(self.quarantined)],
            "seat_failures": [[one.host, one.slot, count] for one, count in sorted(self.slot_failures.items())],
            "has_shrunk": self.has_shrunk,
            "absent": list(self.absent),
            "round": self.round,
            "history": self.history.to_json(),
        }

    def members_json(self) -> dict[str, Any]:
        """What changes only with the membership."""
        return {
            "formation": self.membership.to_json() if self.membership is not None else None,
            "pids": list(self.pids),
            "peers": dict(self.peers),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SavedState:
        """The reverse; raises KeyError, TypeError or ValueError on anything else."""
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
            history=IncidentHistory.from_json(body.get("history", {})),  # 0.7 kept none
        )


@dataclass(kw_only=True)
class CoordinatorState:
    """All that `decide` knows. Its fields are assigned only to a copy, by `decide`, and no value is ever changed.

    Times without a word on them are of the monotonic clock of the coordinator's host.
    """

    settings: CoordinatorSettings
    saved: SavedState
    began_s: float
    listened_s: float  # when we last heard anything, if only that time has passed
    stepped_s: float  # when the run last came a step further
    awaited_restore: int | None = None  # the step that ranks were asked to restore, until one reports its own
    step_s: float = 0.0  # how long a step takes
    is_over: bool = False
    takes_over: bool = False  # a run that another coordinator began, and not all of its hosts are back
    arrived_s: float = -1e9  # when a host last said which processes it has

    hosts: FrozenMap[str, HostView] = field(default_factory=FrozenMap)
    host_order: tuple[str, ...] = ()
    known_hosts: frozenset[str] = frozenset()  # the same
    num_processes: int = 0  # on all hosts
    num_usable: int = 0  # of them, those that may become ranks: as many as there are `living_slots`
    num_here: int = 0  # hosts that are connected and have said which processes they have
    num_ready: int = 0  # hosts of the membership whose ranks are all ready
    bad_hosts: frozenset[str] = frozenset()  # with problems
    check_hosts_s: float = -1e9  # when the next host may have been silent for too long
    excused_s: float = 0.0  # for which we ourselves did not listen, in all: no host is to blame for that
    own_pauses: tuple[tuple[float, float], ...] = ()  # the last of them: when each ended, and `heard_s` of that moment
    sign_s: float = -1e9  # up to when agents have been told that we live
    watcher_sign_s: float = -1e9  # when those were whose turn to start a coordinator comes first
    sign_bucket: int = 0  # of `hosts`, the next that are

    failures: FrozenMap[int, Failure] = field(default_factory=FrozenMap)  # by rank, since the last membership
    noticed_s: float | None = None  # the first of them
    consequences: frozenset[int] = frozenset()  # of the failures, those that belong to the incident before
    replacing: FrozenMap[int, tuple[Failure, float]] = field(default_factory=FrozenMap)  # members lost while forming
    rejoining: FrozenMap[int, RejoiningReplica] = field(default_factory=FrozenMap)  # by replica
    cleared: FrozenMap[int, float] = field(default_factory=FrozenMap)  # by replica, when its processes were to end
    unconnected: frozenset[int] = frozenset()  # replicas of the present round that are not known to be connected yet
    newcomer: int | None = None  # the replica that was taken in by the present round
    short_s: float | None = None  # since when there are no slots for a replica that is left out
    incident_recorded: bool = False
    limit_reason: str = ""  # why the rank that failed is not to have its slot or host again
    out_of_memory: bool = False

    before: Membership | None = None  # the membership before this one
    formed: tuple[Membership, Mapping[str, Mapping[int, int]]] | None = None  # with `alive` by host; not inherited
    peer_table: ReplicaTable | None = None  # of the last one that was told to go; not inherited
    asked_at: tuple[float, float] | None = None  # Unix time and clock when a membership was announced; not inherited
    unfit_s: float | None = None  # when it was first found that it cannot be, because of bad hosts
    left: FrozenMap[int, Message] = field(default_factory=FrozenMap)  # by rank, how it came out of its loop
    left_s: float | None = None  # when the first did
    last_collectives: FrozenMap[int, str] = field(default_factory=FrozenMap)  # of ranks that left for this generation
    regrow_s: float | None = None  # since when there are slots for a larger membership
    regrow_asked: bool = False
    stacks_asked_s: float | None = None
    killed_s: float = -1e9  # when a rank that hung was ended

    stop_requests: int = 0
    stop_asked_s: float | None = None
    hurry_s: float | None = None  # when a cluster manager asked, which does not wait

    def copy(self) -> CoordinatorState:
        """Another one with the same values."""
        made = object.__new__(CoordinatorState)
        made.__dict__.update(self.__dict__)
        return made

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
        """Whether all train and nothing is under way: only the passing of time can give reason to act."""
        saved = self.saved
        is_calm = self.left_s is None and self.stop_asked_s is None and self.stacks_asked_s is None
        is_whole = self.num_here == len(self.hosts) and not self.failures and not self.takes_over
        return saved.membership is not None and not saved.forming and not saved.absent and is_calm and is_whole

    @property
    def is_new_incident(self) -> bool:
        """Whether what failed is neither recorded yet nor only a consequence of the incident before."""
        return not self.incident_recorded and not self.failures.keys() <= self.consequences

    def living_slots(self) -> list[HostSlot]:
        """Slots with a living process that may be used, host by host."""
        return [
            place
            for name in self.host_order
            if (host := self.hosts.get(name)) is not None and host.is_here and not host.problems
            for slot in sorted(host.alive)
            if (place := HostSlot(name, slot)) not in self.saved.quarantined
        ]

    def is_spare(self, place: HostSlot) -> bool:
        """Whether this slot is taken only when others are not enough."""
        return place.slot >= self.settings.first_spare.get(place.host, place.slot + 1)

    def refusals(self) -> list[str]:
        """What was found on bad hosts."""
        excluded = self.saved.history.excluded
        return [
            text
            for name in self.host_order
            if name in self.bad_hosts
            for text in self.hosts[name].problems
            if text != excluded.get(name)
        ]

    def is_usable(self, place: HostSlot) -> bool:
        """Whether a process in this slot, now or later, may become a rank."""
        host = self.hosts.get(place.host)
        return host is not None and not host.problems and place not in self.saved.quarantined

    def is_living(self, place: HostSlot) -> bool:
        """Whether there is a process in this slot that may become a rank: whether it is one of `living_slots`."""
        host = self.hosts.get(place.host)
        return host is not None and host.is_here and place.slot in host.alive and self.is_usable(place)

    def pid_at(self, place: HostSlot) -> int | None:
        """The process in a slot."""
        host = self.hosts.get(place.host)
        return host.alive.get(place.slot) if host is not None else None


# ---- what it hears ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMessage:
    """What an agent said, or that it came ("joined") or hung up ("gone")."""

    now_s: float
    unix_s: float
    host: str
    body: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentMessages:
    """What several agents said, in this order: as so many `AgentMessage`s, at a fraction of their cost."""

    now_s: float
    unix_s: float
    messages: Sequence[tuple[str, Message]]  # host and body


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockTick:
    """Time has passed. Nothing is decided between ticks: messages are only taken note of."""

    now_s: float
    unix_s: float
    stop_file: bool = False  # somebody has made the file `stop` in the run folder


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointList:
    """The answer to `ListCheckpoints`: the steps of all committed checkpoints."""

    now_s: float
    unix_s: float
    steps: tuple[int, ...]


Input = AgentMessage | AgentMessages | ClockTick | CheckpointList


# ---- what it may do --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Say something to agents; one that is gone does not hear it."""

    hosts: tuple[str, ...]
    message: Message
    shares: Mapping[str, Message] = field(default_factory=dict)  # what only one host is told besides, by host

    def message_for(self, host: str) -> Message:
        """The whole message to one of them."""
        share = self.shares.get(host)
        return {**self.message, **share} if share else self.message


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEvent:
    """Append to the coordinator's events."""

    event: str
    fields: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveState:
    """Write down what the next coordinator must know, before what follows is done."""

    saved: SavedState


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginGeneration:
    """From now on no rank of an older generation commits a checkpoint."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ListCheckpoints:
    """Answer with a `CheckpointList`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEvidence:
    """Record what the ranks of the generations before this one left behind: collectives, flight recorders."""

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
    """The status of the run is "running", with so many ranks."""

    world: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """Why a run has failed: the first cause, and what else was seen."""

    cause: Failure
    others: tuple[Failure, ...]
    why: str  # it was not recovered from; empty where the cause says it all
    world: int
    host: str  # of the cause; empty on a run of one host
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRun:
    """Write down how the run ended. The message is completed with what lies on the disk: see coordinator_actions.py."""

    state: Literal["done", "stopped", "failed"]
    exit_code: int
    message: str
    generation: int
    how: Literal["plain", "finished", "stopped", "killed", "killed at once", "unfit", "given up"] = "plain"
    at_most: int | None = None  # checkpoints of more steps are not to be trusted: they are set aside
    given_up: GivenUp | None = None
    rollback: RollBack | None = None  # where the run ends because its state is untrusted


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
