"""Rebuild from its records what a run did: every execution of every step, and the chain of those that stayed.

A rank's state after a step is identified by its *lineage*: from which state, in which layout, the step was taken. Two
executions of one lineage are the same computation and must give the same bits, even when one of them was undone by a
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
    """A rank of a generation, with its host, slot and process."""

    rank: int
    host: str
    slot: int
    pid: int


@dataclass(slots=True)
class StepExecution:
    """One step in one generation, as its ranks recorded it. `step` is the step's number, from 0."""

    generation: int
    step: int
    world: int
    lineage: str = ""
    skipped: bool = False
    loss: float | None = None
    ended_s: float = 0.0  # Unix time at which the last rank recorded it
    ranks: dict[int, Event] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True when every rank recorded the step."""
        return len(self.ranks) == self.world

    @property
    def held(self) -> int:
        """The newest step whose in-memory checkpoints were held on every rank when this step ended."""
        return max((int(event["held"]) for event in self.ranks.values() if event.get("held") is not None), default=0)

    @property
    def digests(self) -> dict[int, str]:
        """The digest of the parameters by rank, for ranks that recorded one."""
        return {rank: str(event["digest"]) for rank, event in self.ranks.items() if event.get("digest")}

    @property
    def samples(self) -> dict[int, list[int]]:
        """The samples by rank, for ranks that recorded them."""
        return {rank: event["samples"] for rank, event in self.ranks.items() if isinstance(event.get("samples"), list)}


@dataclass(slots=True)
class GenerationHistory:
    """One membership: the state it began from, and the steps it did."""

    number: int
    began_s: float
    layout: dict[str, Any]
    world: int
    members: tuple[GenerationMember, ...]
    reason: str = ""
    restore_step: int = 0
    source: str = START  # memory, disk or start
    restored: bool = False  # True when a restore was logged
    # Unix time at which all members had left the generation before, and could start.
    went_s: float | None = None
    # By rank: the step and source that it restored.
    found: dict[int, tuple[int, str]] = field(default_factory=dict)
    steps: dict[int, StepExecution] = field(default_factory=dict)
    # Steps of earlier generations that this one's restore undid.
    undone: list[StepExecution] = field(default_factory=list)
    # Checkpoint step -> lineage, for the checkpoints that existed when this generation began.
    kept: dict[int, str] = field(default_factory=dict)
    # Ranks of model replicas that were left out and rejoined.
    rejoined: set[int] = field(default_factory=set)

    @property
    def membership_key(self) -> str:
        """The layout as text: two generations with the same key compute alike."""
        return json.dumps(self.layout, sort_keys=True)


@dataclass(slots=True)
class DrillHistory:
    """All generations, and the chain of executions that stayed: index = step."""

    generations: list[GenerationHistory]
    chain: list[StepExecution]
    incidents: list[Event]
    # Processes that were lost while they left a generation that had ended.
    replacements: list[Event]
    quarantines: list[Event]
    # Events of the coordinator: model replicas that were left out or rejoined.
    replicas: list[Event]
    checkpoints: list[Event]  # commits, as ranks recorded them
    ranks: list[Event]  # every event of every rank, in the order of time
    end: Event | None
    torn: int  # lines that are not events

    @property
    def trained(self) -> list[GenerationHistory]:
        """The generations that trained.

        A generation ends before its restore when a member fails before the others have answered.
        """
        return [generation for generation in self.generations if generation.restored or generation.steps]

    @property
    def executions(self) -> list[StepExecution]:
        """All executions in order, undone or not."""
        return [execution for generation in self.generations for _, execution in sorted(generation.steps.items())]

    @property
    def undone(self) -> list[StepExecution]:
        """The executions that restores undid."""
        return [execution for generation in self.generations for execution in generation.undone]

    def generation(self, number: int) -> GenerationHistory | None:
        """Return the generation with this number, or None."""
        return next((candidate for candidate in self.generations if candidate.number == number), None)


def read_history(run: Run) -> DrillHistory:
    """Read the history of a run from its event files; of a run in progress, its history so far."""
    supervisor, torn = read_events(run.path / "supervisor.jsonl")
    ranks: list[Event] = []
    for path in run.event_files():
        events, damaged = read_events(path)
        ranks += events
        torn += damaged
    return build_history(supervisor, ranks, torn=torn)


def build_history(supervisor: Iterable[Event], ranks: Iterable[Event], *, torn: int = 0) -> DrillHistory:
    """Build generations from the supervisor's events, executions from the ranks', and the chain that stayed."""
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
            # It takes the state of the replicas that train: nothing is restored.
            generation.rejoined.add(int(event["rank"]))
        elif event["event"] == "ready" and generation is not None:
            # The state that a rank restored counts, not the one that it was sent: a damaged copy makes all of them
            # go further back.
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
            rank=int(member.get("rank", -1)),
            host=str(member.get("host", "")),
            slot=int(member.get("slot", -1)),
            pid=int(member.get("pid") or -1),
        )
        for member in event.get("members") or ()
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
    execution = generation.steps.setdefault(
        step, StepExecution(generation=generation.number, step=step, world=generation.world)
    )
    execution.ranks[int(event["rank"])] = event
    execution.skipped |= bool(event.get("skipped"))
    execution.loss = event.get("loss") if execution.loss is None else execution.loss
    execution.ended_s = max(execution.ended_s, float(event["t"]))


def _build_chain(history: DrillHistory) -> None:
    """Apply the restores: each cuts the chain, then its generation extends it. Steps after a gap are left out."""
    saved: dict[int, str] = {}  # checkpoint step -> lineage of its state
    commits = {(int(event.get("epoch", -1)), int(event["step"])) for event in history.checkpoints}
    chain = history.chain
    for generation in history.trained:
        generation.kept = dict(saved)
        lineage = _lineage_at(chain, generation, saved)
        generation.undone = chain[generation.restore_step :]
        del chain[generation.restore_step :]
        for step, execution in sorted(generation.steps.items()):
            text = json.dumps([lineage, generation.membership_key, step, execution.skipped])
            child = hashlib.sha256(text.encode()).hexdigest()[:16]
            lineage = execution.lineage = child
            if step == len(chain):
                chain.append(execution)
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
    """Return the member sequence of the chain, for a replay: `[{"from_step": 0, "layout": {...}}, …]`."""
    sequence: list[dict[str, Any]] = []
    before = ""
    for execution in history.chain:
        generation = history.generation(execution.generation)
        if generation is not None and generation.membership_key != before:
            before = generation.membership_key
            sequence.append({"from_step": execution.step, "layout": generation.layout})
    return sequence
