"""What a run did, from its records alone: every execution of every step, and which of them stayed.

A rank's state after a step is known by its *lineage*: from which state, in which layout, the step was taken. Two
executions of one lineage are the same computation and must give the same bits, whether one of them was undone by a
restore, or done in another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.record.events import Event, read_events
from phalanx.record.run import Run

START = "start"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationMember:
    """A rank of a generation, and where it ran."""

    rank: int
    host: str
    slot: int
    pid: int


@dataclass(slots=True)
class StepExecution:
    """One step in one generation, as its ranks told it. `step` is the step's number, from 0."""

    generation: int
    step: int
    world: int
    lineage: str = ""
    skipped: bool = False
    loss: float | None = None
    ended_s: float = 0.0  # when the last rank said so
    ranks: dict[int, Event] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every rank told of it."""
        return len(self.ranks) == self.world

    @property
    def held(self) -> int:
        """The newest number of steps whose state memory held on every rank when this one ended."""
        return max((int(event["held"]) for event in self.ranks.values() if event.get("held") is not None), default=0)

    @property
    def digests(self) -> dict[int, str]:
        """Digest of the parameters by rank, of the ranks that told it."""
        return {rank: str(event["digest"]) for rank, event in self.ranks.items() if event.get("digest")}

    @property
    def samples(self) -> dict[int, list[int]]:
        """Samples by rank."""
        return {rank: event["samples"] for rank, event in self.ranks.items() if isinstance(event.get("samples"), list)}


@dataclass(slots=True)
class GenerationHistory:
    """One membership: what it began from and what it did."""

    number: int
    began_s: float
    layout: dict[str, Any]
    world: int
    members: tuple[GenerationMember, ...]
    reason: str = ""
    restore_step: int = 0
    source: str = START  # memory, disk or start
    restored: bool = False  # whether a restore was logged
    went_s: float | None = None  # when all members had left what they were in, and were let go
    found: dict[int, tuple[int, str]] = field(default_factory=dict)  # step and source, as each rank found them
    steps: dict[int, StepExecution] = field(default_factory=dict)
    undone: list[StepExecution] = field(default_factory=list)  # of earlier generations, by this one's restore
    kept: dict[int, str] = field(default_factory=dict)  # checkpoint step -> lineage, as this generation found it
    rejoined: set[int] = field(default_factory=set)  # ranks of model replicas that were left out and came back

    @property
    def membership_key(self) -> str:
        """Two generations of the same membership compute alike."""
        return json.dumps(self.layout, sort_keys=True)


@dataclass(slots=True)
class DrillHistory:
    """All generations, and the chain of executions that stayed: index = step."""

    generations: list[GenerationHistory]
    chain: list[StepExecution]
    incidents: list[Event]
    replacements: list[Event]  # processes that were lost while they left a generation that had ended
    quarantines: list[Event]
    replicas: list[Event]  # model replicas that were left out or came back, as the coordinator told it
    checkpoints: list[Event]  # commits, as ranks told them
    ranks: list[Event]  # every event of every rank, in the order of time
    end: Event | None
    torn: int  # lines that were no events

    @property
    def trained(self) -> list[GenerationHistory]:
        """Those that came to be: a member may fall before the others have answered, and nothing was restored then."""
        return [generation for generation in self.generations if generation.restored or generation.steps]

    @property
    def executions(self) -> list[StepExecution]:
        """Everything that was done, undone or not, in order."""
        return [one for generation in self.generations for _, one in sorted(generation.steps.items())]

    @property
    def undone(self) -> list[StepExecution]:
        """What restores took back."""
        return [one for generation in self.generations for one in generation.undone]

    def generation(self, number: int) -> GenerationHistory | None:
        """The generation of a number."""
        return next((one for one in self.generations if one.number == number), None)


def read_history(run: Run) -> DrillHistory:
    """The history of a run that has ended, or as far as it has come."""
    supervisor, torn = read_events(run.path / "supervisor.jsonl")
    ranks: list[Event] = []
    for path in run.event_files():
        events, damaged = read_events(path)
        ranks += events
        torn += damaged
    return build_history(supervisor, ranks, torn=torn)


def build_history(supervisor: Iterable[Event], ranks: Iterable[Event], *, torn: int = 0) -> DrillHistory:
    """Generations from the supervisor's events, executions from the ranks', and the chain that stayed."""
    reported = sorted(ranks, key=lambda event: float(event.get("t") or 0.0))
    history = DrillHistory(
        generations=[],
        chain=[],
        incidents=[],
        replacements=[],
        quarantines=[],
        replicas=[],
        checkpoints=[],
        ranks=reported,
        end=None,
        torn=torn,
    )
    _read_supervisor(history, supervisor)
    by_number = {generation.number: generation for generation in history.generations}
    for event in reported:
        generation = by_number.get(int(event.get("epoch", -1)))
        if event["event"] == "step" and generation is not None:
            _add_step(generation, event)
        elif event["event"] == "ready" and generation is not None and event.get("source") == "replica":
            generation.rejoined.add(int(event["rank"]))  # takes the state of those that train: nothing is restored
        elif event["event"] == "ready" and generation is not None:
            # What a rank found counts, not what it was told to take: a damaged copy makes all of them go further back.
            source = str(event.get("source") or generation.source)
            generation.found[int(event["rank"])] = (int(event.get("step") or 0), source)
            generation.restore_step, generation.source = generation.found[int(event["rank"])]
        elif event["event"] == "checkpoint" and event.get("path"):
            history.checkpoints.append(event)
    _build_chain(history)
    return history


def _read_supervisor(history: DrillHistory, events: Iterable[Event]) -> None:
    generations: dict[int, GenerationHistory] = {}
    for event in events:
        number = int(event.get("epoch", -1))
        match event["event"]:
            case "epoch":
                generations[number] = _generation_history(event)
            case "restore" if number in generations:
                generation = generations[number]
                generation.restored, generation.restore_step = True, int(event.get("step") or 0)
                generation.source, generation.went_s = str(event.get("source") or START), float(event.get("t") or 0.0)
            case "incident":
                history.incidents.append(event)
            case "replacement":
                history.replacements.append(event)
            case "replica":
                history.replicas.append(event)
            case "quarantine":
                history.quarantines.append(event)
            case "end":
                history.end = event
    history.generations = [generations[number] for number in sorted(generations)]


def _generation_history(event: Event) -> GenerationHistory:
    members = tuple(
        GenerationMember(
            rank=int(one.get("rank", -1)),
            host=str(one.get("host", "")),
            slot=int(one.get("slot", -1)),
            pid=int(one.get("pid") or -1),
        )
        for one in event.get("members") or ()
    )
    layout = event.get("layout")
    return GenerationHistory(
        number=int(event["epoch"]),
        began_s=float(event.get("t") or 0.0),
        layout=dict(layout) if isinstance(layout, Mapping) else {"name": layout},
        world=int(event.get("world") or len(members)),
        members=members,
        reason=str(event.get("reason") or ""),
    )


def _add_step(generation: GenerationHistory, event: Event) -> None:
    step = int(event["step"])
    one = generation.steps.setdefault(
        step, StepExecution(generation=generation.number, step=step, world=generation.world)
    )
    one.ranks[int(event["rank"])] = event
    one.skipped |= bool(event.get("skipped"))
    one.loss = event.get("loss") if one.loss is None else one.loss
    one.ended_s = max(one.ended_s, float(event["t"]))


def _build_chain(history: DrillHistory) -> None:
    """Apply the restores: each cuts the chain, each generation grows it. Steps that leave a gap are not in it."""
    saved: dict[int, str] = {}  # checkpoint step -> lineage of what it holds
    commits = {(int(event.get("epoch", -1)), int(event["step"])) for event in history.checkpoints}
    chain = history.chain
    for generation in history.trained:
        generation.kept = dict(saved)
        lineage = _lineage_at(chain, generation, saved)
        generation.undone = chain[generation.restore_step :]
        del chain[generation.restore_step :]
        for step, one in sorted(generation.steps.items()):
            text = json.dumps([lineage, generation.membership_key, step, one.skipped])
            child = hashlib.sha256(text.encode()).hexdigest()[:16]
            lineage = one.lineage = child
            if step == len(chain):
                chain.append(one)
            if (generation.number, step + 1) in commits:
                saved[step + 1] = lineage


def _lineage_at(chain: list[StepExecution], generation: GenerationHistory, saved: Mapping[int, str]) -> str:
    step = generation.restore_step
    if step == 0:
        return START
    if generation.source == "disk" and step in saved:
        return saved[step]
    return chain[step - 1].lineage if step <= len(chain) else f"unknown {generation.number}"


def layout_sequence(history: DrillHistory) -> list[dict[str, Any]]:
    """The member sequence of the chain: `[{"from_step": 0, "layout": {...}}, …]`, for a replay without faults."""
    found: list[dict[str, Any]] = []
    before = ""
    for one in history.chain:
        generation = history.generation(one.generation)
        if generation is not None and generation.membership_key != before:
            before = generation.membership_key
            found.append({"from_step": one.step, "layout": generation.layout})
    return found
