"""Judge drills of `fault.on_loss = "leave-out"` from the records alone: which model replicas learnt each step. Pure.

Within a generation ranks record which replicas are present each time that changes ("regroup" events), and from which
step they continue. A rank records no step where its replica was out, or where it took over a step that another replica
had finished.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.plan.layout import Layout
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.drill.judge import (
    LAST_STEPS,
    ExpectedSamples,
    Verdict,
    evidence_text,
    judge_digests,
    judge_fencing,
    judge_replay,
    judge_restores,
)
from phalanx.train.drill.step_history import DrillHistory, GenerationHistory, StepExecution
from phalanx.units import first_few, plural

# The largest number of replicas whose sum has the same bits in any order; of three or more the order of the sum
# depends on how many replicas there are.
MOST_EXACT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPresence:
    """The replicas of each generation's layout, and by step those that were present."""

    replicas: Mapping[int, ModelReplicas]
    # By (generation, step): the replicas present.
    present: Mapping[tuple[int, int], frozenset[int]]
    # By (generation, rank): the steps that it skipped when it regrouped.
    gaps: Mapping[tuple[int, int], tuple[range, ...]]
    # Ranks that recorded different replicas in one step, or steps out of order.
    wrong: tuple[str, ...]

    @classmethod
    def of(cls, history: DrillHistory) -> ReplicaPresence:
        """Read the presence from the events of the ranks, each in the order it wrote them."""
        replicas = {
            membership.number: ModelReplicas.of(Layout(**membership.layout))
            for membership in history.generations
            if "data" in membership.layout
        }
        reported: dict[tuple[int, int], dict[frozenset[int], int]] = defaultdict(dict)
        gaps: dict[tuple[int, int], list[range]] = defaultdict(list)
        newest: dict[tuple[int, int], frozenset[int]] = {}
        due: dict[tuple[int, int], int] = {}  # the step that a rank must record next
        wrong = []
        for event in history.ranks:
            number, rank = int(event.get("epoch", -1)), int(event["rank"])
            generation, key = history.generation(number), (number, rank)
            if generation is None or number not in replicas:
                continue
            expected = due.get(key, generation.restore_step)
            if event["event"] == "regroup":
                reached = int(event["step"])
                newest[key] = frozenset(int(replica) for replica in event["present"])
                if reached < expected - LAST_STEPS:
                    wrong.append(f"generation {number}, rank {rank}: went back from step {expected} to {reached}")
                if reached > expected:
                    gaps[key].append(range(expected, reached))
                    # It did these steps itself, and should have recorded them.
                    if not event.get("behind"):
                        wrong.append(f"generation {number}, rank {rank}: steps {expected} to {reached - 1} are missing")
                due[key] = reached
            elif event["event"] == "step":
                step = int(event["step"])
                if step != expected:
                    wrong.append(f"generation {number}, rank {rank}: step {step} where {expected} was due")
                present = newest.get(key, frozenset(range(replicas[number].count)))
                reported[number, step].setdefault(present, rank)
                due[key] = step + 1
        for (number, step), by_present in reported.items():
            if len(by_present) > 1:
                text = ", ".join(f"{sorted(present_)} (rank {rank})" for present_, rank in by_present.items())
                wrong.append(f"generation {number}, step {step}: present were {text}")
        return cls(
            replicas=replicas,
            present={key: next(iter(by_present)) for key, by_present in reported.items()},
            gaps={member: tuple(ranges) for member, ranges in gaps.items()},
            wrong=tuple(wrong),
        )

    def left_out(self, one: StepExecution) -> frozenset[int]:
        """Return the replicas that a step was done without."""
        replicas = self.replicas.get(one.generation)
        present = self.present.get((one.generation, one.step))
        if replicas is None or present is None:
            return frozenset()
        return frozenset(range(replicas.count)) - present

    def is_exact(self, history: DrillHistory) -> bool:
        """True when every sum has the same bits in a replay that counts the left-out replicas as nothing."""
        short = [execution for execution in history.chain if self.left_out(execution)]
        return all(len(self.present[execution.generation, execution.step]) <= MOST_EXACT for execution in short)


def left_out_ranks(history: DrillHistory, presence: ReplicaPresence) -> dict[str, list[int]]:
    """Return, by step of the chain, the ranks it was done without, which learn nothing from it in a replay either."""
    return {
        str(execution.step): sorted(
            rank for replica in out for rank in presence.replicas[execution.generation].ranks(replica)
        )
        for execution in history.chain
        if (out := presence.left_out(execution))
    }


def judge_replica_history(
    history: DrillHistory, presence: ReplicaPresence, *, expected: ExpectedSamples, replay: DrillHistory | None
) -> list[Verdict]:
    """Return all verdicts on a run whose replicas come and go within a generation, as `judge_history` does."""
    verdicts = [judge_digests(history)]
    if replay is not None:
        verdicts.append(judge_replay(history, replay, is_exact=presence.is_exact(history)))
    verdicts += [check(history, presence) for check in (judge_replica_digests, judge_replica_steps)]
    verdicts += [judge_restores(history), judge_replica_samples(history, presence, expected), judge_fencing(history)]
    return [*verdicts, judge_kept_processes(history, presence)]


def judge_replica_digests(history: DrillHistory, presence: ReplicaPresence) -> Verdict:
    """Ranks that hold the same shard in each replica have the same bits of it after every step."""
    wrong = []
    compared = 0
    for execution in history.executions:
        replicas = presence.replicas.get(execution.generation)
        by_position: dict[int, dict[str, int]] = defaultdict(dict)
        if replicas is None:
            continue
        for rank, digest in execution.digests.items():
            by_position[replicas.place(rank)[1]].setdefault(digest, rank)
            compared += 1
        for digests in by_position.values():
            if len(digests) > 1:
                digests_text = ", ".join(f"{digest[:12]} (rank {rank})" for digest, rank in digests.items())
                wrong.append(f"generation {execution.generation}, step {execution.step}: {digests_text}")
    if history.chain and not compared:
        wrong.append("there is no digest to compare")
    return Verdict(
        name="replicas agree", ok=not wrong, evidence=evidence_text(f"{plural(compared, 'digest')} compared", wrong)
    )


def judge_replica_steps(history: DrillHistory, presence: ReplicaPresence) -> Verdict:
    """Every rank took its steps one by one, except those it skipped when replicas regrouped."""
    wrong = list(presence.wrong)
    for generation in history.generations:
        if generation.steps and not generation.restored:
            wrong.append(f"generation {generation.number} trained without a logged restore")
        if len(states := sorted(set(generation.found.values()))) > 1:
            wrong.append(f"generation {generation.number}: ranks restored different states: {states}")
    short = sum(bool(presence.left_out(execution)) for execution in history.chain)
    generations, done_text = plural(len(history.generations), "generation"), plural(len(history.executions), "step")
    text = f"{generations}, {done_text} done, {short:,} without a replica, {len(history.undone):,} undone"
    return Verdict(name="steps in order", ok=not wrong, evidence=evidence_text(text, wrong))


def judge_replica_samples(history: DrillHistory, presence: ReplicaPresence, expected: ExpectedSamples) -> Verdict:
    """Replicas that were present learnt from their samples of the step, each once.

    The samples of absent replicas are skipped.
    """
    wrong = []
    total = skipped = unknown = 0
    for execution in history.chain:
        generation, replicas = history.generation(execution.generation), presence.replicas.get(execution.generation)
        if generation is None or replicas is None:
            wrong.append(f"step {execution.step}: its layout is not known")
            continue
        batch = expected(execution.step)
        dealing = BatchDeal.of(replicas.layout)
        out = presence.left_out(execution)
        skipped += len(out)
        for rank in range(generation.world):
            replica = replicas.place(rank)[0]
            recorded = execution.samples.get(rank)
            if replica in out:
                if recorded is not None:
                    wrong.append(
                        f"step {execution.step}: rank {rank} took part, and its replica {replica} was left out"
                    )
                continue
            positions = dealing.real(_data_rank(replicas.layout, rank), len(batch))
            if recorded is None:
                unknown += 1
                if not _has_gap(history, generation, presence, rank, execution.step):
                    wrong.append(f"step {execution.step}: rank {rank} did not record its samples")
            elif Counter(recorded) != Counter(batch[at] for at in positions):
                wrong.append(
                    f"step {execution.step}, rank {rank}: samples {first_few(sorted(recorded), 6)} are not its own"
                )
            else:
                total += len(recorded)
    text = f"{plural(total, 'sample')} in {plural(len(history.chain), 'step')}, each in its place"
    if skipped:
        text += f"; {plural(skipped, 'share')} of left-out replicas skipped"
    if unknown:
        text += f"; {plural(unknown, 'list')} went with a lost replica or a step that was taken over (see the replay)"
    return Verdict(name="every sample in one step", ok=not wrong, evidence=evidence_text(text, wrong))


def _data_rank(layout: Layout, rank: int) -> int:
    return rank // (layout.tensor * layout.context) % layout.data


def _has_gap(
    history: DrillHistory, generation: GenerationHistory, presence: ReplicaPresence, rank: int, step: int
) -> bool:
    """True when a rank may lack a step that it took part in: it was lost then, or took the step's result from others.

    This holds only for the first steps of a gap: a replica that is out does not take part, and a killed rank loses its
    last lines.
    """
    gaps = presence.gaps.get((generation.number, rank), ())
    if any(step in gap and step - gap.start < LAST_STEPS for gap in gaps):
        return True
    last = max((number for number, execution in generation.steps.items() if rank in execution.ranks), default=-1)
    lost_ranks = {
        int(event.get("rank", -1)) for event in history.incidents if int(event.get("epoch", -1)) == generation.number
    }
    replicas = presence.replicas[generation.number]
    lost = {replicas.place(lost_rank)[0] for lost_rank in lost_ranks if 0 <= lost_rank < generation.world}
    return last < step <= last + LAST_STEPS and replicas.place(rank)[0] in lost


def judge_kept_processes(history: DrillHistory, presence: ReplicaPresence) -> Verdict:
    """Only ranks of a replica that was left out were started again within a generation."""
    name = "other replicas kept their processes"
    wrong = []
    losses = [event for event in history.replicas if event.get("state") == "left out"]
    rejoined = sum(event.get("state") == "rejoined" for event in history.replicas)
    for generation in history.generations:
        replicas = presence.replicas.get(generation.number)
        out = {event.get("replica") for event in losses if event.get("epoch") == generation.number}
        for rank in sorted(generation.rejoined):
            if replicas is None or replicas.place(rank)[0] not in out:
                wrong.append(f"generation {generation.number}: rank {rank} was started again")
    rebuilt = max(0, len(history.trained) - 1)
    text = (
        f"{plural(len(losses), 'replica')} left out, {rejoined} came back, everything rebuilt {plural(rebuilt, 'time')}"
    )
    if not losses and not wrong:
        return Verdict(name=name, ok=False, judged=False, evidence=f"{text}: nothing was left out")
    return Verdict(name=name, ok=not wrong, evidence=evidence_text(text, wrong))
