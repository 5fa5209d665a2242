"""Judge a drill from its records alone: was a step or sample lost, repeated or computed wrongly? Pure; no torch."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isclose

from phalanx.record.events import FLUSH_S, MOST_PENDING_BYTES, Event
from phalanx.record.run import Run
from phalanx.train.drill.step_history import DrillHistory, GenerationHistory, StepExecution
from phalanx.units import first_few, plural

# Clocks of several hosts differ; a zombie that wakes writes seconds later, not milliseconds.
SKEW_S = 0.05
ROUNDING = 1e-3  # relative, of losses whose sums had another order: bf16 has 8 bits, and steps carry it on
# Steps whose event lines can be lost with a rank that is killed.
LAST_STEPS = 2
# Kind of an incident in which every process lives and the numbers are wrong.
ASTRAY = "Astray"
MOST_NAMED = 3  # examples in a verdict's evidence

ExpectedSamples = Callable[[int], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One claim about a drill: whether it holds, and the numbers that show it.

    A claim that the run gave no chance to judge is neither `judged` nor `ok`: nothing was shown.
    """

    name: str
    ok: bool
    evidence: str
    judged: bool = True

    @property
    def word(self) -> str:
        """The verdict in one word, for a table."""
        return "ok" if self.ok else ("FAILED" if self.judged else "not judged")


@dataclass(frozen=True, kw_only=True, slots=True)
class FullDisk:
    """A period during which the files of one process could not grow."""

    pid: int
    begin_s: float  # Unix time
    end_s: float


def judge_history(
    history: DrillHistory,
    *,
    expected: ExpectedSamples | None = None,
    replay: DrillHistory | None = None,
    full: Collection[FullDisk] = (),
) -> list[Verdict]:
    """Return all verdicts that follow from one history, and from its replay where there is one.

    `expected` returns the samples of a step in the sampler's order; `full` lists the processes with a full disk, and
    when.
    """
    verdicts = [check(history) for check in (judge_digests, judge_step_order, judge_restores, judge_fencing)]
    verdicts.insert(3, judge_samples(history, expected, full))
    if replay is not None:
        verdicts.insert(1, judge_replay(history, replay))
    return verdicts


def judge_digests(history: DrillHistory) -> Verdict:
    """(a) Executions of the same step from the same state in the same layout gave the same bits on every rank."""
    by_lineage: dict[str, list[StepExecution]] = defaultdict(list)
    for execution in history.executions:
        by_lineage[execution.lineage].append(execution)
    wrong = []
    twice = 0
    for executions in by_lineage.values():
        twice += len(executions) > 1
        if difference := _first_difference(executions):
            wrong.append(difference)
    known = sum(bool(execution.digests) for execution in history.chain)
    ok = not wrong and (known > 0 or not history.chain)
    text = f"{known:,} of {len(history.chain):,} committed steps have a digest, "
    text += f"{plural(twice, 'step')} done more than once"
    return Verdict(name="one digest per step", ok=ok, evidence=evidence_text(text, wrong))


def judge_replay(history: DrillHistory, replay: DrillHistory, *, is_exact: bool = True) -> Verdict:
    """(b) A run without faults and with the same member sequence gave the same bits.

    Where sums had another order (not `is_exact`), the losses agree as far as rounding lets them.
    """
    wrong = []
    # The replay of a run that was cut short may continue a little longer.
    done = history.end is not None and history.end.get("state") == "done"
    if len(history.chain) > len(replay.chain) or (len(history.chain) < len(replay.chain) and done):
        wrong.append(f"{plural(len(history.chain), 'step')} against {len(replay.chain):,} in the replay")
    compared = 0
    for execution, replayed in zip(history.chain, replay.chain, strict=False):
        if execution.lineage != replayed.lineage:
            wrong.append(f"step {execution.step}: the replay reached it from another state")
        elif not is_exact:
            if (
                execution.loss is None
                or replayed.loss is None
                or not isclose(execution.loss, replayed.loss, rel_tol=ROUNDING)
            ):
                wrong.append(f"step {execution.step}: losses {execution.loss} and {replayed.loss}")
        elif difference := _first_difference([execution, replayed]):
            wrong.append(difference)
        compared += len(execution.digests.keys() & replayed.digests.keys()) if is_exact else 1
    if history.chain and not compared:
        wrong.append("there is no digest to compare")
    last = f", loss {history.chain[-1].loss} at the end" if history.chain else ""
    compared_text = plural(compared, "digest" if is_exact else "loss")
    text = f"{plural(len(history.chain), 'step')}, {compared_text} compared{last}"
    if not is_exact:
        text += "; sums of three replicas and more have another order in the replay, so bits were not compared"
    return Verdict(name="equal to a fault-free replay", ok=not wrong, evidence=evidence_text(text, wrong))


def judge_step_order(history: DrillHistory) -> Verdict:
    """(c) In every generation each rank took its steps one by one, from the step that was restored."""
    wrong = []
    for generation in history.generations:
        if generation.steps and not generation.restored:
            wrong.append(f"generation {generation.number} trained without a logged restore")
        if len(set(generation.found.values())) > 1:
            states = sorted(set(generation.found.values()))
            wrong.append(f"generation {generation.number}: ranks restored different states: {states}")
        steps_of: dict[int, list[int]] = defaultdict(list)
        for step, execution in sorted(generation.steps.items()):
            for rank in execution.ranks:
                steps_of[rank].append(step)
        for rank, steps in steps_of.items():
            if steps != list(range(generation.restore_step, generation.restore_step + len(steps))):
                which = f"generation {generation.number}, rank {rank}"
                wrong.append(f"{which}: steps {first_few(steps, 6)} after {generation.restore_step}")
    generations, done_text = plural(len(history.generations), "generation"), plural(len(history.executions), "step")
    text = f"{generations}, {done_text} done, {len(history.undone):,} undone"
    return Verdict(name="steps in order", ok=not wrong, evidence=evidence_text(text, wrong))


def judge_restores(history: DrillHistory) -> Verdict:
    """(d) What was restored was there before; from memory, it was the newest state that was held."""
    wrong = []
    counts: Counter[str] = Counter()
    done, held_step = 0, 0  # steps that stand, and the newest that memory held, before a generation
    for before, generation in zip([None, *history.trained], history.trained, strict=False):
        if before is not None:
            done = max([before.restore_step, *(step + 1 for step in before.steps)])
            held_step = max([held_step, *(execution.held for execution in before.steps.values())])
        step, source = generation.restore_step, generation.source
        if generation.restored:
            counts[source] += 1
            if source == "start" and step:
                wrong.append(f"generation {generation.number} starts afresh at step {step}")
            if (
                source == "disk"
                and step not in generation.kept
                and not _is_unreported(history, before, generation, done=done)
            ):
                wrong.append(f"generation {generation.number} restored step {step}, which was never on the disk")
            if source == "memory" and step > done:
                wrong.append(f"generation {generation.number} restored step {step}, but only {done} were done")
            if source == "memory" and step < held_step and not _rolled_back(history, generation.number):
                wrong.append(f"generation {generation.number} restored step {step} from memory, which held {held_step}")
        held_step = min(held_step, step)
    text = ", ".join(f"{count} from {source}" for source, count in sorted(counts.items())) or "no restore"
    return Verdict(name="every restore was committed", ok=not wrong, evidence=evidence_text(text, wrong))


def _is_unreported(
    history: DrillHistory, before: GenerationHistory | None, generation: GenerationHistory, *, done: int
) -> bool:
    """True when rank 0 died between a commit and its event line: the restored step is newer than its last line."""
    if before is None or not max(generation.kept, default=0) < generation.restore_step <= done:
        return False
    incidents = [event for event in history.incidents if int(event.get("epoch", -1)) == before.number]
    return any(0 in (int(incident.get("rank", -1)), *(incident.get("others") or ())) for incident in incidents)


def judge_samples(
    history: DrillHistory, expected: ExpectedSamples | None = None, full: Collection[FullDisk] = ()
) -> Verdict:
    """(e) The ranks of every committed step learnt from its samples, each once, and from nothing else."""
    wrong = []
    total = unknown = 0
    for execution in history.chain:
        generation = history.generation(execution.generation)
        reported = execution.samples
        counts = Counter(sample for ids in reported.values() for sample in ids)
        total += len(counts)
        silent = [rank for rank in range(generation.world if generation else 0) if rank not in reported]
        unknown += bool(silent)
        # Ranks that learn from the same sequences, as those of a tensor or pipeline group do.
        data = int(generation.layout.get("data", generation.world)) if generation is not None else 1
        holders = max(1, generation.world // max(1, data)) if generation is not None else 1
        if silent and not all(_died_at_step(history, execution, rank, full) for rank in silent):
            wrong.append(f"step {execution.step}: rank {first_few(silent, 6)} did not record its samples")
        elif difference := _other_samples(
            counts, holders, expected(execution.step) if expected else None, bool(silent)
        ):
            wrong.append(f"step {execution.step}: {difference}")
    if expected is None and (repeated := _repeated_sample(history)):
        wrong.append(repeated)
    text = f"{plural(total, 'sample')} in {plural(len(history.chain), 'step')}"
    if unknown:
        text += f"; of {plural(unknown, 'step')} a killed rank left no list (covered by the replay)"
    return Verdict(name="every sample in one step", ok=not wrong, evidence=evidence_text(text, wrong))


def _other_samples(counts: Counter[int], holders: int, expected: Sequence[int] | None, partial: bool) -> str:
    """Describe how a step's samples differ from the expected ones; `partial`: a lost rank recorded no list."""
    expected_counts = Counter(counts.keys()) if expected is None else Counter(expected)
    most = Counter({sample: count * holders for sample, count in expected_counts.items()})
    if more := counts - most:
        return f"{plural(len(more), 'sample')} repeated or not of this step, such as {first_few(sorted(more), 6)}"
    if not partial and (fewer := most - counts):
        return f"{plural(len(fewer), 'sample')} of the batch missing, such as {first_few(sorted(fewer), 6)}"
    return ""


def judge_fencing(history: DrillHistory) -> Verdict:
    """(f) After a newer generation began on a host, no rank of an older one there wrote an event or committed."""
    wrong = []
    ends = {generation.number: _host_ends(history, generation.number) for generation in history.generations}
    host_of = {(e.number, m.rank): m.host for e in history.generations for m in e.members}
    late = 0
    for event in history.ranks:
        number, rank = int(event.get("epoch", -1)), int(event["rank"])
        end_s = ends.get(number, {}).get(host_of.get((number, rank), ""))
        # Only rank 0 commits: on other ranks a finished save means that their shards are stored.
        commit = rank == 0 and event["event"] == "checkpoint" and event.get("path")
        if commit:
            end_s = min(ends.get(number, {}).values(), default=None)
        if end_s is not None and float(event["t"]) > end_s + SKEW_S:
            late += 1
            act = "committed a checkpoint" if commit else f"wrote {event['event']}"
            wrong.append(f"rank {rank} of generation {number} {act} {float(event['t']) - end_s:.2f} s after its end")
    generations, commits = plural(len(history.generations), "generation"), plural(len(history.checkpoints), "commit")
    text = f"{generations}, {commits}, {plural(late, 'late event')}"
    return Verdict(name="old generations are fenced", ok=not wrong, evidence=evidence_text(text, wrong))


def judge_ledger(run: Run) -> Verdict:
    """(g) Every second of the run is in one account."""
    from phalanx.record.account.ledger import read_ledger

    ledger = read_ledger(run)
    return Verdict(name="the ledger closes", ok=bool(ledger.closes), evidence=str(ledger))


def judge_ending(history: DrillHistory, *, state: str, wanted: Sequence[str], message: str = "") -> Verdict:
    """The run ended in one of the states `wanted`, and its record and its launcher agree on the state.

    `message` is the launcher's message about a run in another state.
    """
    reported = str(history.end.get("state")) if history.end is not None else "no end"
    text = f"the run is {state} after {plural(len(history.chain), 'step')}"
    wrong = [] if state in wanted else [f"it should be {' or '.join(wanted)}"]
    if wrong and message:
        wrong.append(message)
    if reported != state:
        wrong.append(f"its record says {reported}")
    return Verdict(name="the run ended well", ok=not wrong, evidence=evidence_text(text, wrong))


def _first_difference(same: Sequence[StepExecution]) -> str:
    """Describe the difference between executions that should be equal; "" when they are."""
    by_rank: dict[int, dict[str, int]] = defaultdict(dict)
    for execution in same:
        for rank, digest in execution.digests.items():
            by_rank[rank].setdefault(digest, execution.generation)
    for rank, digests in sorted(by_rank.items()):
        if len(digests) > 1:
            reported = ", ".join(f"{digest[:12]} (generation {generation})" for digest, generation in digests.items())
            return f"step {same[0].step}, rank {rank}: {reported}"
    losses = {execution.loss for execution in same if execution.loss is not None}
    return f"step {same[0].step}: losses {first_few(sorted(losses), 6)}" if len(losses) > 1 else ""


def _rolled_back(history: DrillHistory, number: int) -> bool:
    """True when the generation began because numbers were wrong: its newest state must then not be restored."""
    causes = [event for event in history.incidents if int(event.get("epoch", -1)) == number - 1]
    return any((event.get("cause") or {}).get("kind") == ASTRAY for event in causes)


def _died_at_step(history: DrillHistory, one: StepExecution, rank: int, full: Collection[FullDisk]) -> bool:
    """True when a silent rank died in this generation at this step, so that its last event lines were lost with it."""
    generation = history.generation(one.generation)
    if generation is None:
        return False
    lost_ranks = {
        int(event.get("rank", -1)) for event in history.incidents if int(event.get("epoch", -1)) == one.generation
    }
    if rank in lost_ranks and one.step > max(generation.steps) - LAST_STEPS:
        return True
    pid = next((member.pid for member in generation.members if member.rank == rank), -1)
    return any(disk.pid == pid and _took_along(history, one, rank, disk) for disk in full)


def _took_along(history: DrillHistory, one: StepExecution, rank: int, disk: FullDisk) -> bool:
    """True when a process was killed while it still held the event line of a step that its full disk had refused.

    Such lines wait in the memory of the process, up to a limit, and the first write that succeeds writes them all. So
    the line was written while the disk was full, no event came after it, and the process did not live to write when
    there was room again.
    """
    if one.ended_s < disk.begin_s - FLUSH_S - SKEW_S or one.ended_s > disk.end_s + SKEW_S:
        return False
    ranks = {
        generation.number: member.rank
        for generation in history.generations
        for member in generation.members
        if member.pid == disk.pid and generation.number >= one.generation
    }
    lost = [event for event in history.incidents if ranks.get(int(event.get("epoch", -1))) in _lost_ranks(event)]
    if not lost:
        return False
    last = int(lost[0]["epoch"])
    for event in history.ranks:
        number = int(event.get("epoch", -1))
        if one.generation <= number <= last and ranks.get(number) == event["rank"] and float(event["t"]) > one.ended_s:
            return False
    missed = [
        step
        for generation in history.generations
        if one.generation <= generation.number <= last
        for step in generation.steps.values()
    ]
    missed = [step for step in missed if step.ended_s >= one.ended_s and ranks.get(step.generation) not in step.ranks]
    # Estimated from the lines of another rank: the lines of one step hardly differ from rank to rank.
    pending_bytes = sum(max((len(json.dumps(event)) for event in step.ranks.values()), default=0) for step in missed)
    with_room = sum(step.ended_s > disk.end_s + SKEW_S for step in missed)
    return pending_bytes <= MOST_PENDING_BYTES and with_room <= LAST_STEPS


def _lost_ranks(incident: Event) -> set[int]:
    return {int(incident.get("rank", -1)), *map(int, incident.get("others") or ())} - {-1}


def _repeated_sample(history: DrillHistory) -> str:
    """Describe a sample that occurs in two committed steps; used where the sampler's order is unknown.

    The judgement holds only within one pass over the data.
    """
    step_of: dict[int, int] = {}
    for execution in history.chain:
        for sample in {sample for ids in execution.samples.values() for sample in ids}:
            if sample in step_of and step_of[sample] != execution.step:
                return f"sample {sample} in step {step_of[sample]} and again in step {execution.step}"
            step_of[sample] = execution.step
    return ""


def _host_ends(history: DrillHistory, number: int) -> dict[str, float]:
    """Return by host when the next generation began: its members had left generation `number` by then."""
    ends: dict[str, float] = {}
    for generation in history.generations:
        if generation.number > number and generation.went_s is not None:
            for member in generation.members:
                ends.setdefault(member.host, generation.went_s)
    return ends


def evidence_text(text: str, wrong: Sequence[str]) -> str:
    """Return the numbers with the first few of the violations."""
    if not wrong:
        return text
    more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
    return f"{text}: " + "; ".join(wrong[:MOST_NAMED]) + more
