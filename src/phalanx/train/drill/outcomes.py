"""The outcome of each injected fault: how long until it was noticed and recovered from, and the work it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from phalanx.plan.layout import Layout
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.record.drill_record import REFUSED
from phalanx.record.events import Event
from phalanx.train.drill.faults import FAULT_KINDS, Fault
from phalanx.train.drill.firings import Firing
from phalanx.train.drill.judge import Verdict, evidence_text
from phalanx.train.drill.step_history import DrillHistory, GenerationHistory, StepExecution
from phalanx.units import plural

LEFT_OUT_S = 1.0  # the coordinator decides on a failure and on who is left out in one go; its clock is one
# Faults after which the other hosts cannot reach this one or anything in its memory.
TAKES_HOST = ("host", "freeze", "partition")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """One firing and what followed from it; None where nothing of the kind followed."""

    fault: str  # as on the command line
    kind: str
    fired_s: float  # Unix time
    rank: int
    generation: int
    step: int
    note: str
    detected_s: float | None  # until an incident was noticed
    blamed: int | None  # the rank that the incident names
    # Until all ranks of a later generation had committed a step, or the other replicas had one without this rank.
    recovered_s: float | None
    # Steps whose in-memory checkpoints were held on all ranks, and that are still behind the restored step.
    steps_lost: int | None
    # Steps that all ranks finished, that were not held yet and were done again.
    steps_redone: int | None
    # Of that restore: memory, disk or start; "left out": the other replicas trained on without this one.
    source: str
    world: int | None  # number of ranks afterwards
    # False: it was not noticed, and the run ended before it had to be.
    judged: bool = True


def fault_outcomes(
    history: DrillHistory, faults: Sequence[Fault], firings: Sequence[Firing], *, patience_s: float = 0.0
) -> list[FaultOutcome]:
    """Return the outcome of every firing in the order of time; a fault may go unnoticed for `patience_s`."""
    texts = {fault.id: fault.text for fault in faults}
    end_s = float(history.end["t"]) if history.end is not None else inf
    incidents = _match_incidents(history, firings, patience_s)
    outcomes = [_fault_outcome(history, firing, incidents.get(at), texts) for at, firing in enumerate(firings)]
    late_s = end_s - patience_s
    return [
        replace(
            outcome, judged=not (_must_be_noticed(outcome) and outcome.detected_s is None and outcome.fired_s >= late_s)
        )
        for outcome in outcomes
    ]


def _must_be_noticed(one: FaultOutcome) -> bool:
    """True for a fault that requires a recovery; one with `for_s` may pass before it is noticed."""
    return FAULT_KINDS[one.kind].ends and "for_s=" not in one.fault


def judge_noticed(found: Sequence[FaultOutcome], *, asked: int, patience_s: float, drawn: bool = False) -> Verdict:
    """Judge whether every fault that requires a recovery was noticed, and the rank of a flipped bit named.

    A fault that was neither noticed nor had `patience_s` until the end of the run cannot be judged, and with it the
    whole claim; of faults that were `drawn` at random one that can be judged is enough. If `asked` is not 0, some
    fault must have fired: a drill without any proves nothing.
    """
    name = "every fault was noticed"
    must = [outcome for outcome in found if _must_be_noticed(outcome) and outcome.judged]
    late = [outcome for outcome in found if not outcome.judged]
    wrong = [f"{outcome.fault} was not noticed" for outcome in must if outcome.detected_s is None]
    flips = [outcome for outcome in must if outcome.kind == "flip" and outcome.blamed is not None]
    wrong += [
        f"{outcome.fault} was attributed to rank {outcome.blamed}"
        for outcome in flips
        if outcome.blamed != outcome.rank
    ]
    text = f"{len(must) - len(wrong):,} of {plural(len(must), 'fault')}"
    if asked and not found:
        wrong, text = ["nothing was tried"], f"0 of {plural(asked, 'fault')} fired"
    elif not must and not late:
        passing = sum(FAULT_KINDS[outcome.kind].ends for outcome in found)
        counts = ((len(found) - passing, "harmless"), (passing, "that pass by themselves"))
        why_none = ", ".join(f"{count} {text}" for count, text in counts if count) or "none was asked for"
        text = f"no fault fired that needs noticing: {why_none}"
    if wrong or not late:
        return Verdict(name=name, ok=not wrong, evidence=evidence_text(text, wrong))
    reported = (
        f"{late[0].fault} fired less than {patience_s:g} s before the end of the run and had not been noticed by then"
    )
    more = f", and {len(late) - 1:,} more" if len(late) > 1 else ""
    if drawn and must:
        return Verdict(name=name, ok=True, evidence=f"{text}; {len(late):,} more fired too late to be judged")
    evidence = f"{text + '; ' if must else ''}{reported}{more}: use more steps or an earlier fault"
    return Verdict(name=name, ok=False, judged=False, evidence=evidence)


def _match_incidents(history: DrillHistory, firings: Sequence[Firing], patience_s: float) -> dict[int, Event]:
    """Return the incident in which each firing was noticed, by index in `firings`; firings not noticed are missing.

    An incident belongs to the faults whose rank or host it names, and to all faults that came before it and were not
    yet due to be noticed: processes fail together, and only the first that is detected is named. An older fault gets
    an incident only where no newer fault explains it. A rank that hangs on a host that is then frozen or lost is
    noticed with its host, however long that takes: no process is left to report it.
    """
    waiting = {at: firing for at, firing in enumerate(firings) if FAULT_KINDS[firing.kind].ends}
    noticed: dict[int, Event] = {}
    owned: set[int] = set()  # indices of incidents that a fault explains
    reported = sorted([*history.incidents, *history.replacements], key=lambda event: float(event["t"]))
    for by_name in (True, False):
        for number, incident in enumerate(reported):
            before = [
                at
                for at, firing in waiting.items()
                if at not in noticed
                and firing.t_s <= float(incident["t"])
                and _generation_of(history, firing) <= int(incident.get("epoch", -1))
                and (_names_firing(history, incident, firing) or not by_name)
            ]
            near = [at for at in before if _noticed_s(incident) - firings[at].t_s <= patience_s]
            newest = max(before, key=lambda at: firings[at].t_s, default=None)
            explained = near or ([newest] if newest is not None and number not in owned else [])
            explained = (
                [*explained, *_gone_with_host(history, incident, firings, before, patience_s)] if explained else []
            )
            noticed |= dict.fromkeys(explained, incident)
            owned |= {number} if explained else set()
    return noticed


def _names_firing(history: DrillHistory, incident: Event, one: Firing) -> bool:
    if one.rank >= 0:
        named = one.rank in (incident.get("rank"), *(incident.get("others") or ()))
        return named or (_is_host_lost(incident) and _host_of(history, one) == incident.get("host"))
    return bool(one.host) and incident.get("host") == one.host


def _gone_with_host(
    history: DrillHistory, incident: Event, firings: Sequence[Firing], before: Sequence[int], patience_s: float
) -> list[int]:
    """Return faults of ranks whose host was hit before they had to be noticed, where this is the host's loss."""
    if not _is_host_lost(incident):
        return []
    host = incident.get("host")
    hits = [firings[at].t_s for at in before if firings[at].rank < 0 and firings[at].host == host]
    return [
        at
        for at in before
        if firings[at].rank >= 0
        and _host_of(history, firings[at]) == host
        and any(0.0 <= hit_s - firings[at].t_s <= patience_s for hit_s in hits)
    ]


def _is_host_lost(incident: Event) -> bool:
    cause = incident.get("cause")
    return isinstance(cause, Mapping) and cause.get("kind") == "HostLost"


def _host_of(history: DrillHistory, one: Firing) -> str:
    """Return the name of the host of the firing's rank, as the run's events write it."""
    generation = history.generation(_generation_of(history, one))
    return (
        next((member.host for member in generation.members if member.rank == one.rank), "")
        if generation is not None
        else ""
    )


def _generation_of(history: DrillHistory, one: Firing) -> int:
    if one.epoch >= 0:
        return one.epoch
    return max((generation.number for generation in history.generations if generation.began_s <= one.t_s), default=0)


def _fault_outcome(
    history: DrillHistory, fired: Firing, incident: Event | None, texts: Mapping[int, str]
) -> FaultOutcome:
    generation = _generation_of(history, fired)
    later = None
    left_out = _left_out_event(history, incident) if incident is not None else None
    if incident is not None and left_out is None:
        # A process that is replaced while a generation forms joins that generation.
        ended = int(incident.get("epoch", generation)) - (incident["event"] == "replacement")
        later = _next_generation(history, fired, ended)
    first = _first_step(later)
    lost = redone = None
    if later is not None:
        held_steps = [
            execution.held
            for execution in later.undone
            if not _went_with_host(history, fired, execution.generation, later)
        ]
        lost = max(0, max(held_steps, default=0) - later.restore_step)
        # A step that was cut short was never done.
        redone = sum(execution.complete for execution in later.undone)
    if left_out is not None:
        # The other replicas hold the newest state and repeat the step that was discarded.
        lost = redone = 0
        first = _step_without(history, left_out)
    return FaultOutcome(
        fault=texts.get(fired.id, fired.kind),
        kind=fired.kind,
        fired_s=fired.t_s,
        rank=fired.rank,
        generation=generation,
        step=fired.step,
        note=fired.note,
        detected_s=_noticed_s(incident) - fired.t_s if incident is not None else None,
        blamed=int(incident["rank"]) if incident is not None else None,
        recovered_s=first.ended_s - fired.t_s if first is not None else None,
        steps_lost=lost,
        steps_redone=redone,
        source="left out" if left_out is not None else later.source if later is not None else "",
        world=later.world if later is not None else _num_present(history, left_out) if left_out is not None else None,
    )


def _left_out_event(history: DrillHistory, incident: Event) -> Event | None:
    """Return the coordinator's event that left the incident's replica out; None where all ranks were restored."""
    replicas = (event for event in history.replicas if event.get("state") == "left out")
    near = (event for event in replicas if event.get("epoch") == incident.get("epoch"))
    return next((event for event in near if 0.0 <= float(event["t"]) - float(incident["t"]) <= LEFT_OUT_S), None)


def _num_present(history: DrillHistory, left_out: Event) -> int | None:
    """Return the number of ranks that trained on without the replica that was left out."""
    generation = history.generation(int(left_out["epoch"]))
    return generation.world - ModelReplicas.of(Layout(**generation.layout)).size if generation is not None else None


def _step_without(history: DrillHistory, left_out: Event) -> StepExecution | None:
    """Return the first step that ended after a replica was left out."""
    generation = history.generation(int(left_out["epoch"]))
    steps = sorted(generation.steps.items()) if generation is not None else []
    return next((execution for _, execution in steps if execution.ended_s > float(left_out["t"])), None)


def _went_with_host(history: DrillHistory, fired: Firing, number: int, later: GenerationHistory) -> bool:
    """True when the fault removed the only host of a generation, and with it all in-memory checkpoints."""
    generation = history.generation(number)
    hosts = {member.host for member in generation.members} if generation is not None else set[str]()
    is_taken = hosts.isdisjoint(member.host for member in later.members)
    return fired.kind in TAKES_HOST and hosts == {fired.host} and is_taken


def _noticed_s(incident: Event) -> float:
    """Return when the incident was noticed.

    Its event is written once something can be done about it; `waited_s` is the time that it waited for that.
    """
    return float(incident["t"]) - float(incident.get("waited_s") or 0.0)


def _next_generation(history: DrillHistory, fired: Firing, generation: int) -> GenerationHistory | None:
    """Return the first later generation with a committed step; it may have been forming when the fault fired."""
    later = (
        candidate
        for candidate in history.generations
        if candidate.number > generation and (candidate.went_s or candidate.began_s) >= fired.t_s
    )
    return next((candidate for candidate in later if _first_step(candidate) is not None), None)


def _first_step(generation: GenerationHistory | None) -> StepExecution | None:
    complete = (
        [execution for _, execution in sorted(generation.steps.items()) if execution.complete]
        if generation is not None
        else []
    )
    return complete[0] if complete else None


def judge_refused(history: DrillHistory, found: Sequence[FaultOutcome], *, drawn: bool = False) -> list[Verdict]:
    """Judge whether damaged checkpoints were refused; an empty list where no file was damaged.

    The ranks have their state in memory, and the disk is read only when every copy of a part is gone. A damaged file
    that was never read proves nothing, so the verdict is not judged, unless the faults were `drawn` at random.
    """
    hits = [outcome for outcome in found if outcome.kind == "damage"]
    if not hits:
        return []
    wrong, met = [], []
    for outcome in hits:
        folder = outcome.note.partition(":")[0]
        readers = [
            event for event in history.ranks if event["event"] == "ready" and float(event["t"]) > outcome.fired_s
        ]
        if restored := [event for event in readers if _took_damaged(history, event, folder, since_s=outcome.fired_s)]:
            wrong.append(f"generation {restored[0].get('epoch')} took {folder}, which was damaged")
        elif refused := [event for event in readers if folder in str(event.get("warnings") or "")]:
            met.append(
                f"generation {refused[0].get('epoch')} refused {folder} and went back to step {refused[0].get('step')}"
            )
    unread = len(hits) - len(met) - len(wrong)
    text = "; ".join(met) or "no restore read one"
    if unread:
        text += f"; {unread} of {len(hits)} never read, and so not judged"
    is_open = bool(unread) and not wrong and not drawn
    return [
        Verdict(name=REFUSED, ok=not wrong and not is_open, judged=not is_open, evidence=evidence_text(text, wrong))
    ]


def _took_damaged(history: DrillHistory, event: Event, folder: str, *, since_s: float) -> bool:
    """True when a rank restored the damaged checkpoint, and its step was not saved anew in between."""
    step = int(event.get("step") or 0)
    if event.get("source") != "disk" or folder != f"step-{step:08d}":
        return False
    anew = [
        checkpoint
        for checkpoint in history.checkpoints
        if int(checkpoint["step"]) == step and since_s < float(checkpoint["t"])
    ]
    return not any(float(checkpoint["t"]) < float(event["t"]) for checkpoint in anew)
