"""What came of each fault: how long it took to notice and to recover from, what it cost, and what that proves."""

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
TAKES_HOST = ("host", "freeze", "partition")  # out of reach of the others, with all that its memory holds


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """One firing and what came of it; None where nothing of the kind followed."""

    fault: str  # as on the command line
    kind: str
    fired_s: float  # Unix time
    rank: int
    generation: int
    step: int
    note: str
    detected_s: float | None  # until an incident was noticed
    blamed: int | None  # the rank that the incident names
    recovered_s: float | None  # until all ranks of a later generation had committed a step, or the other replicas one
    steps_lost: int | None  # held in memory on all ranks, and yet behind what was restored
    steps_redone: int | None  # finished by all ranks, not yet held, and done again
    source: str  # of that restore: memory, disk or start; "left out": the others trained on without the replica
    world: int | None  # ranks afterwards
    judged: bool = True  # False: nobody noticed it, and the run ended before somebody had to


def fault_outcomes(
    history: DrillHistory, faults: Sequence[Fault], firings: Sequence[Firing], *, patience_s: float = 0.0
) -> list[FaultOutcome]:
    """Every firing in the order of time; a fault may go unnoticed for `patience_s`."""
    texts = {fault.id: fault.text for fault in faults}
    end_s = float(history.end["t"]) if history.end is not None else inf
    incidents = _match_incidents(history, firings, patience_s)
    found = [_fault_outcome(history, one, incidents.get(at), texts) for at, one in enumerate(firings)]
    late_s = end_s - patience_s
    return [
        replace(one, judged=not (_must_be_noticed(one) and one.detected_s is None and one.fired_s >= late_s))
        for one in found
    ]


def _must_be_noticed(one: FaultOutcome) -> bool:
    """Whether somebody must recover from it; what passes by itself (`for_s`) may pass before it is noticed."""
    return FAULT_KINDS[one.kind].ends and "for_s=" not in one.fault


def judge_noticed(found: Sequence[FaultOutcome], *, asked: int, patience_s: float, drawn: bool = False) -> Verdict:
    """Whatever somebody must recover from was noticed, and a wrong number's rank named.

    A fault that was neither noticed nor had `patience_s` until the end of the run could not be judged, and with it the
    whole claim; of faults that were `drawn` by chance one that could be judged is enough. Of the faults that were
    `asked` for some must have fired: a drill without any proves nothing.
    """
    name = "every fault was noticed"
    must = [one for one in found if _must_be_noticed(one) and one.judged]
    late = [one for one in found if not one.judged]
    wrong = [f"{one.fault} was not noticed" for one in must if one.detected_s is None]
    flips = [one for one in must if one.kind == "flip" and one.blamed is not None]
    wrong += [f"{one.fault} was attributed to rank {one.blamed}" for one in flips if one.blamed != one.rank]
    text = f"{len(must) - len(wrong):,} of {plural(len(must), 'fault')}"
    if asked and not found:
        wrong, text = ["nothing was tried"], f"0 of {plural(asked, 'fault')} fired"
    elif not must and not late:
        passes = sum(FAULT_KINDS[one.kind].ends for one in found)
        counts = ((len(found) - passes, "harmless"), (passes, "that pass by themselves"))
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
    """The incident in which each firing was noticed, by its place in `firings`; none for those that nobody noticed.

    An incident belongs to the faults whose rank or host it names, and, of those that came before their time to be
    noticed was over, to all: processes fail together, and the first that is found is named. A fault that is older than
    that gets an incident only where no newer fault explains it. A rank that hangs on a host that is then frozen or lost
    is noticed with its host, however long that takes: whoever would have told of it is gone.
    """
    waiting = {at: one for at, one in enumerate(firings) if FAULT_KINDS[one.kind].ends}
    found: dict[int, Event] = {}
    owned: set[int] = set()  # incidents that a fault explains
    reported = sorted([*history.incidents, *history.replacements], key=lambda one: float(one["t"]))
    for by_name in (True, False):
        for number, incident in enumerate(reported):
            before = [
                at
                for at, one in waiting.items()
                if at not in found
                and one.t_s <= float(incident["t"])
                and _generation_of(history, one) <= int(incident.get("epoch", -1))
                and (_names_firing(history, incident, one) or not by_name)
            ]
            near = [at for at in before if _noticed_s(incident) - firings[at].t_s <= patience_s]
            newest = max(before, key=lambda at: firings[at].t_s, default=None)
            mine = near or ([newest] if newest is not None and number not in owned else [])
            mine = [*mine, *_gone_with_host(history, incident, firings, before, patience_s)] if mine else []
            found |= dict.fromkeys(mine, incident)
            owned |= {number} if mine else set()
    return found


def _names_firing(history: DrillHistory, incident: Event, one: Firing) -> bool:
    if one.rank >= 0:
        named = one.rank in (incident.get("rank"), *(incident.get("others") or ()))
        return named or (_is_host_lost(incident) and _host_of(history, one) == incident.get("host"))
    return bool(one.host) and incident.get("host") == one.host


def _gone_with_host(
    history: DrillHistory, incident: Event, firings: Sequence[Firing], before: Sequence[int], patience_s: float
) -> list[int]:
    """Faults of ranks whose host was hit before their time to be noticed was over, where this incident is its loss."""
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
    """The host of a rank, as the run calls it."""
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
        # A process that is replaced while a generation is made takes its place in that one.
        ended = int(incident.get("epoch", generation)) - (incident["event"] == "replacement")
        later = _next_generation(history, fired, ended)
    first = _first_step(later)
    lost = redone = None
    if later is not None:
        held = [one.held for one in later.undone if not _went_with_host(history, fired, one.generation, later)]
        lost = max(0, max(held, default=0) - later.restore_step)
        redone = sum(one.complete for one in later.undone)  # one that was cut short was never done
    if left_out is not None:
        lost = redone = 0  # the others hold the newest state, and repeat the step that came to nothing
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
    """The coordinator's word that the replica of an incident was left out; None where everything was rebuilt."""
    replicas = (one for one in history.replicas if one.get("state") == "left out")
    near = (one for one in replicas if one.get("epoch") == incident.get("epoch"))
    return next((one for one in near if 0.0 <= float(one["t"]) - float(incident["t"]) <= LEFT_OUT_S), None)


def _num_present(history: DrillHistory, left_out: Event) -> int | None:
    """Ranks that trained on."""
    generation = history.generation(int(left_out["epoch"]))
    return generation.world - ModelReplicas.of(Layout(**generation.layout)).size if generation is not None else None


def _step_without(history: DrillHistory, left_out: Event) -> StepExecution | None:
    """The first step that ended after a replica was left out."""
    generation = history.generation(int(left_out["epoch"]))
    steps = sorted(generation.steps.items()) if generation is not None else []
    return next((one for _, one in steps if one.ended_s > float(left_out["t"])), None)


def _went_with_host(history: DrillHistory, fired: Firing, number: int, later: GenerationHistory) -> bool:
    """Whether a fault took the only host of a generation, and with it all copies in memory: no other held any."""
    generation = history.generation(number)
    hosts = {member.host for member in generation.members} if generation is not None else set[str]()
    is_taken = hosts.isdisjoint(member.host for member in later.members)
    return fired.kind in TAKES_HOST and hosts == {fired.host} and is_taken


def _noticed_s(incident: Event) -> float:
    """An incident is written when something can be done about it; until then it waits for a place, or a while."""
    return float(incident["t"]) - float(incident.get("waited_s") or 0.0)


def _next_generation(history: DrillHistory, fired: Firing, generation: int) -> GenerationHistory | None:
    """The first later generation in which a step was committed; it may have been in the making when the fault fired."""
    later = (one for one in history.generations if one.number > generation and (one.went_s or one.began_s) >= fired.t_s)
    return next((one for one in later if _first_step(one) is not None), None)


def _first_step(generation: GenerationHistory | None) -> StepExecution | None:
    whole = [one for _, one in sorted(generation.steps.items()) if one.complete] if generation is not None else []
    return whole[0] if whole else None


def judge_refused(history: DrillHistory, found: Sequence[FaultOutcome], *, drawn: bool = False) -> list[Verdict]:
    """The verdict on damaged checkpoints; none where no file was damaged.

    A file that nobody read afterwards proves nothing, and the verdict is not judged: the ranks have their state in
    memory, and the disk is read only when every copy of some part is gone. Nobody asked for what was `drawn` by chance.
    """
    hits = [one for one in found if one.kind == "damage"]
    if not hits:
        return []
    wrong, met = [], []
    for one in hits:
        folder = one.note.partition(":")[0]
        readers = [event for event in history.ranks if event["event"] == "ready" and float(event["t"]) > one.fired_s]
        if taken := [event for event in readers if _took_damaged(history, event, folder, since_s=one.fired_s)]:
            wrong.append(f"generation {taken[0].get('epoch')} took {folder}, which was damaged")
        elif who := [event for event in readers if folder in str(event.get("warnings") or "")]:
            met.append(f"generation {who[0].get('epoch')} refused {folder} and went back to step {who[0].get('step')}")
    unread = len(hits) - len(met) - len(wrong)
    text = "; ".join(met) or "no restore read one"
    if unread:
        text += f"; {unread} of {len(hits)} never read, and so not judged"
    is_open = bool(unread) and not wrong and not drawn
    return [
        Verdict(name=REFUSED, ok=not wrong and not is_open, judged=not is_open, evidence=evidence_text(text, wrong))
    ]


def _took_damaged(history: DrillHistory, event: Event, folder: str, *, since_s: float) -> bool:
    """Whether a rank took up what was damaged; unless the same step was saved anew in between."""
    step = int(event.get("step") or 0)
    if event.get("source") != "disk" or folder != f"step-{step:08d}":
        return False
    anew = [one for one in history.checkpoints if int(one["step"]) == step and since_s < float(one["t"])]
    return not any(float(one["t"]) < float(event["t"]) for one in anew)
