"""Judge a drill of peers from their records alone: was a round committed twice, lost, or spoilt? Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.record.events import Event
from phalanx.train.drill.faults import Fault
from phalanx.train.drill.firings import Firing
from phalanx.train.drill.judge import Verdict, evidence_text
from phalanx.units import plural

# Faults whose updates must be left out.
SCREENED = ("nan", "poison", "liar")
# Faults after which the other peers train on without those that were hit.
LOSES = ("kill", "leave", "hang", "partition", "lie")
NAMED = ("lost", "left", "evicted")  # kinds of events that name a peer that is gone
EXCLUDED = ("excluded", "revoked")  # kinds of events that name a peer that a vote excluded
# Nats by which liars may raise the final loss above that of honest training.
LOSS_MARGIN = 0.02
# The keys of a round's event that must be the same for all peers.
PARTS = (
    "step",
    "kind",
    "members",
    "weights",
    "dropped",
    "capped",
    "aggregation",
    "paces",
    "digest",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRecord:
    """The events that one peer recorded, in order of time."""

    number: int
    id: str
    events: Sequence[Event]
    has_true_clock: bool = True

    def of(self, kind: str) -> list[Event]:
        """Return its events of one kind."""
        return [event for event in self.events if event["event"] == kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFaultOutcome:
    """One firing and what followed from it; None where nothing of the kind followed."""

    fault: str
    kind: str
    peers: tuple[int, ...]
    fired_s: float
    step: int
    # Until another peer recorded which peer is gone, or a round that left the update out.
    noticed_s: float | None
    # Until another peer committed a round without those that were hit, or with them again.
    stalled_s: float | None
    members: int | None  # in that round
    # Until all that were hit took part in a round again; None where no peer noticed that they were gone.
    back_s: float | None
    round: int = -1  # the round whose update was spoilt


def rounds_of(records: Sequence[PeerRecord]) -> dict[int, list[tuple[PeerRecord, Event]]]:
    """Return every record of every round, by round number."""
    entries: dict[int, list[tuple[PeerRecord, Event]]] = defaultdict(list)
    for record in records:
        for event in record.of("exchange"):
            entries[int(event["round"])].append((record, event))
    return dict(sorted(entries.items()))


def judge_peers(records: Sequence[PeerRecord], *, sequence: int, batches: Mapping[int, int]) -> list[Verdict]:
    """Return the verdicts on the rounds; `batches` are the samples of each step's global batch."""
    rounds = rounds_of(records)
    return [
        judge_one_result(rounds),
        judge_no_gap(records, rounds),
        judge_credit(rounds, sequence=sequence),
        judge_batches(rounds, sequence=sequence, batches=batches),
    ]


def judge_one_result(rounds: Mapping[int, Sequence[tuple[PeerRecord, Event]]]) -> Verdict:
    """No two peers have different results of one round: two halves of a network never both commit it."""
    wrong, compared = [], 0
    for number, entries in rounds.items():
        compared += sum(bool(event.get("digest")) for _, event in entries)
        first = entries[0][1]
        for record, event in entries[1:]:
            differs = [key for key in PARTS if event.get(key) != first.get(key)]
            if differs:
                wrong.append(f"round {number}: peers {entries[0][0].number} and {record.number} differ in {differs[0]}")
                break
    many = sum(len({record.number for record, _ in entries}) > 1 for entries in rounds.values())
    if rounds and not compared:
        wrong.append("there is no digest to compare")
    text = f"{plural(len(rounds), 'round')}, {compared:,} digests, {many:,} rounds recorded by several peers"
    return Verdict(name="one digest per round", ok=bool(rounds) and not wrong, evidence=evidence_text(text, wrong))


def judge_no_gap(records: Sequence[PeerRecord], rounds: Mapping[int, Sequence[tuple[PeerRecord, Event]]]) -> Verdict:
    """Rounds follow each other; a peer misses some only where it recorded that it took the others' state."""
    numbers = sorted(rounds)
    wrong = [f"round {a + 1} to {b - 1} recorded by nobody" for a, b in itertools.pairwise(numbers) if b > a + 1]
    num_caught_up = 0
    for record in records:
        last: int | None = None
        for event in record.events:
            if event["event"] == "ready" or (event["event"] == "peer" and event.get("kind") == "caught-up"):
                num_caught_up += event["event"] == "peer"
                last = None
            elif event["event"] == "exchange":
                number = int(event["round"])
                if last is not None and number != last + 1:
                    wrong.append(f"peer {record.number}: round {number} after {last}")
                last = number
    text = f"rounds {numbers[0]} to {numbers[-1]}, state taken {num_caught_up:,} times" if numbers else "no round"
    return Verdict(name="no round is missing", ok=bool(numbers) and not wrong, evidence=evidence_text(text, wrong))


def judge_credit(rounds: Mapping[int, Sequence[tuple[PeerRecord, Event]]], *, sequence: int) -> Verdict:
    """The samples that peers count for all rounds so far are the sum of all rounds: none misses a committed one."""
    wrong, compared = [], 0
    sums: dict[str, int] = defaultdict(int)
    for number, entries in rounds.items():
        first = entries[0][1]
        if first["kind"] != "meet":
            for peer, tokens in first["weights"].items():
                sums[peer] += round(tokens / sequence)
        expected = {peer: count for peer, count in sums.items() if count}
        for record, event in entries:
            compared += 1
            if {peer: count for peer, count in event["credit"].items() if count} != expected:
                wrong.append(f"round {number}: peer {record.number} counts other samples than were committed")
    text = f"{compared:,} records hold the {sum(sums.values()):,} samples of all rounds before"
    return Verdict(
        name="nothing committed is lost", ok=bool(compared) and not wrong, evidence=evidence_text(text, wrong)
    )


def judge_batches(
    rounds: Mapping[int, Sequence[tuple[PeerRecord, Event]]], *, sequence: int, batches: Mapping[int, int]
) -> Verdict:
    """Every synchronous step counted its global batch, even when peers were lost in it; the last may be cut short."""
    counted: dict[int, int] = defaultdict(int)
    for entries in rounds.values():
        event = entries[0][1]
        if event["kind"] == "gradient":
            counted[int(event["step"])] += sum(round(tokens / sequence) for tokens in event["weights"].values())
    wrong = [
        f"step {step} counted {count:,} of {batches[step]:,} samples"
        for step, count in sorted(counted.items())[:-1]
        if count != batches.get(step)
    ]
    text = f"{plural(len(counted), 'synchronous step')}, {sum(counted.values()):,} samples"
    return Verdict(name="every sample counts once", ok=not wrong, evidence=evidence_text(text, wrong))


def peer_outcomes(
    records: Sequence[PeerRecord], faults: Sequence[Fault], shots: Sequence[Firing]
) -> list[PeerFaultOutcome]:
    """Return the outcome of every firing in the order of time."""
    by_id = {fault.id: fault for fault in faults}
    outcomes = []
    for shot in sorted(shots, key=lambda firing: firing.t_s):
        fault = by_id[shot.id]
        hit = (shot.rank,) if fault.of.inside else fault.peer
        ids = {record.id for record in records if record.number in hit}
        # When a network breaks in two, either side may be the one that continues.
        observers = [record for record in records if record.number not in hit or fault.kind == "partition"]
        outcomes.append(_outcome(fault, shot, hit, ids, [record for record in observers if record.has_true_clock]))
    return outcomes


def _outcome(
    fault: Fault, shot: Firing, hit: tuple[int, ...], ids: set[str], others: Sequence[PeerRecord]
) -> PeerFaultOutcome:
    named = [float(event["t"]) for record in others for event in record.events if _names(event, fault, ids, shot)]
    later = [(float(event["t"]), event) for record in others for event in record.of("exchange")]
    rounds = sorted((pair for pair in later if pair[0] > shot.t_s), key=lambda pair: pair[0])
    gone_s = min(named, default=shot.t_s)
    # The next round is one without the peer, or with it again: after a pause that ends before any peer is left out,
    # the first round without that peer may be much later and belong to another fault.
    back = [(t, event) for t, event in rounds if t > gone_s and ids < set(event["members"])]
    after = [(t, event) for t, event in rounds if _is_without(fault, ids, set(event["members"]))]
    resumed = min([*after[:1], *back[:1]], key=lambda pair: pair[0], default=None)
    was_away = fault.kind not in LOSES or bool(named)
    return PeerFaultOutcome(
        fault=fault.text,
        kind=fault.kind,
        peers=hit,
        fired_s=shot.t_s,
        step=shot.step,
        noticed_s=min(named) - shot.t_s if named else None,
        stalled_s=resumed[0] - shot.t_s if resumed else None,
        members=len(resumed[1]["members"]) if resumed else None,
        back_s=back[0][0] - shot.t_s if back and was_away else None,
        round=int(shot.note.removeprefix("round ")) if shot.note.startswith("round ") else -1,
    )


def _is_without(fault: Fault, ids: set[str], members: set[str]) -> bool:
    """True when a round with these members shows that training continued after the fault."""
    if fault.kind == "partition":
        return members <= ids or not members & ids
    return fault.kind not in LOSES or not members & ids


def _names(event: Event, fault: Fault, ids: set[str], shot: Firing) -> bool:
    # A peer fires first, then sends; the clocks are this machine's.
    if float(event["t"]) < shot.t_s - 1.0:
        return False
    if fault.kind in SCREENED:
        spoilt = event["event"] == "exchange" and f"round {event['round']}" == shot.note
        return spoilt and bool(ids & {*(event.get("dropped") or ()), *(event.get("capped") or ())})
    if event["event"] != "peer" or fault.kind not in LOSES:
        return False
    if fault.kind == "lie":
        return event.get("kind") in EXCLUDED and event.get("peer") in ids
    if fault.kind == "partition" and event.get("kind") == "no-majority":
        return True
    return event.get("kind") in NAMED and (fault.kind == "partition" or event.get("peer") in ids)


def judge_named(
    records: Sequence[PeerRecord],
    found: Sequence[PeerFaultOutcome],
    *,
    dead_after_s: float,
    end_s: float,
    lasting: Mapping[str, float],
) -> Verdict:
    """Peers that are gone, or send what must not count, are named; and no other peer was left out of a round.

    A fault that heals before `dead_after_s` is over (`lasting`: length by the text of a fault; 0 is for good) needs no
    notice.
    """
    rounds, ids = rounds_of(records), {record.number: record.id for record in records}
    must, late, wrong = [], 0, []
    for outcome in found:
        if outcome.kind not in (*SCREENED, *LOSES) or (
            outcome.kind in ("hang", "partition") and 0.0 < lasting.get(outcome.fault, 0.0) <= 2 * dead_after_s
        ):
            continue
        counted = rounds[outcome.round][0][1]["weights"].get(ids[outcome.peers[0]]) if outcome.round in rounds else None
        is_capped = outcome.round in rounds and ids[outcome.peers[0]] in (
            rounds[outcome.round][0][1].get("capped") or ()
        )
        if outcome.kind in SCREENED and counted and not (outcome.kind == "liar" and is_capped):
            wrong.append(f"{outcome.fault}: round {outcome.round} counts it")
        is_late = outcome.fired_s > end_s - 2 * dead_after_s
        if outcome.noticed_s is None and not counted and (is_late or outcome.kind in SCREENED):
            # The run ended, or the peer was out of its round for another reason.
            late += 1
        else:
            must.append(outcome)
    wrong += [f"{outcome.fault} was named by nobody" for outcome in must if outcome.noticed_s is None]
    faulty = {number for outcome in found if outcome.kind in (*SCREENED, "lie") for number in outcome.peers}
    numbers = {record.id: record.number for record in records}
    excluded = {str(event["peer"]) for record in records for event in record.of("peer") if event["kind"] == "excluded"}
    innocent = sorted(numbers.get(peer, 0) for peer in excluded if numbers.get(peer) not in faulty)
    wrong += [f"peer {number}, which did nothing wrong, was excluded" for number in innocent]
    for number, entries in rounds.items():
        for peer, why in {**(entries[0][1].get("capped") or {}), **(entries[0][1].get("dropped") or {})}.items():
            if numbers.get(peer) not in faulty:
                wrong.append(f"round {number} named peer {numbers.get(peer)}, which did nothing wrong: {why}")
    text = f"{len(must) - len(wrong):,} of {plural(len(must), 'fault')} that must be noticed"
    text += f", {late:,} that nobody had to notice" if late else ""
    return Verdict(name="dropped peers are named", ok=not wrong, evidence=evidence_text(text, wrong))


def judge_loss(records: Sequence[PeerRecord], honest: Sequence[PeerRecord], liars: Collection[int]) -> Verdict:
    """The final held-out loss of honest peers is at most LOSS_MARGIN above that of the same run without lies.

    Both runs are evaluated on the same sequences, so the standard error is that of the differences by sequence. Where
    it is more than half of the limit, nothing can be concluded.
    """
    name = "the loss is that of honest training"
    ends = [
        [record.of("evaluate")[-1] for record in records_of if record.number not in left_out and record.of("evaluate")]
        for records_of, left_out in ((records, liars), (honest, ()))
    ]
    if not all(ends):
        return Verdict(name=name, ok=False, judged=False, evidence="no final loss: set train.evaluate_sequences")
    with_liars = max(ends[0], key=lambda event: float(event["loss"]))
    without = min(ends[1], key=lambda event: float(event["loss"]))
    rise, error = _paired_rise(with_liars, without)
    text = f"{float(with_liars['loss']):.4f} nats, {rise:+.4f} ± {error:.4f}"
    text += f" over {float(without['loss']):.4f} without lies"
    if not error <= LOSS_MARGIN / 2:
        count = len(with_liars.get("sequence_losses") or ())
        text += f"; {plural(count, 'held-out sequence')} cannot tell: set train.evaluate_sequences higher"
        return Verdict(name=name, ok=False, judged=False, evidence=text)
    return Verdict(name=name, ok=rise <= LOSS_MARGIN, evidence=text)


def _paired_rise(with_liars: Event, without: Event) -> tuple[float, float]:
    """Return how far one final loss is above the other, and the standard error over the sequences of both."""
    pairs = list(zip(with_liars.get("sequence_losses") or (), without.get("sequence_losses") or (), strict=False))
    differences = [float(above) - float(below) for above, below in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return float(with_liars["loss"]) - float(without["loss"]), error
