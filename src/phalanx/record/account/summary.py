"""The summary of a run, computed from its folder alone: predicted and measured values, losses, ranks, checkpoints."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, text
from phalanx.record.account.communication import Communication, read_communication
from phalanx.record.account.cost import Cost, run_cost
from phalanx.record.account.incidents import Incident, read_incidents
from phalanx.record.account.ledger import Ledger, LedgerWalk, walk_ledger
from phalanx.record.account.memberships import LayoutSpan, files_of, layout_spans, raw_lines
from phalanx.record.account.rank_places import rank_place
from phalanx.record.account.stragglers import Straggler, find_stragglers
from phalanx.record.account.time_accounts import Accounts
from phalanx.record.archive.history import Curve, Damage, RunHistory
from phalanx.record.archive.series import FREQUENT, KINDS
from phalanx.record.events import Event
from phalanx.record.run import Run

__all__ = ["Evaluation", "LayoutResult", "Pair", "RankTime", "Summary", "summarize_briefly", "summarize_run"]

# First share of the steps, left out of timings as in `phalanx calibrate`.
WARM_UP_SHARE = 0.2
MOST_RANKS = 4096  # maximum number of ranks in the table
COLUMNS = 64
SOME = 64  # number of ranks whose utilization is read
# Seconds, bytes or tokens of a step beyond this are a damaged record.
ABSURD = 1e18
# Steps × ranks up to which memory is read step by step.
FEW = 10_000
# Timelines are long, and hold nothing for the summary.
RARE = tuple(kind for kind in KINDS if kind not in (*FREQUENT, "timeline"))
# Buckets behind medians and sums; exact up to this many steps.
POINTS = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A predicted and a measured value; None where unknown."""

    JSON_PROPERTIES: ClassVar = ("error",)

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Measured over predicted, minus one."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results on held-out text, and those of unigram and bigram counts for comparison."""

    step: int
    loss: float | None
    bits_per_byte: float | None
    unigram_bits_per_byte: float | None
    bigram_bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """Mean seconds per step that one rank computed and waited, and its largest memory."""

    rank: int
    place: str  # such as "pipeline 1, data 0"; empty if the run has one rank
    compute_s: float | None
    wait_s: float | None
    memory_bytes: float | None
    bytes_sent: float | None  # per step


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """Predicted and measured results of one layout of a run, over the steps it took."""

    layout: str
    world: int
    first_step: int
    last_step: int
    steps: int
    step_s: Pair  # median over the steps, without the first fifth
    step_s_low: float | None  # the prediction's 80 % interval
    step_s_high: float | None
    step_s_p90: float | None
    tokens_per_s: Pair
    mfu: Pair
    memory_bytes: Pair  # the rank of this layout with the most memory
    training_s: float  # sum over its steps
    planned: bool  # True if there is a plan of this layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The results of a run; every time in seconds.

    If a run changed its layout, step time, tokens per second, MFU, memory and ranks are those of the newest layout,
    with the prediction for it; `layouts` has all of them.
    """

    run: str
    state: str
    message: str
    model: str
    parameters: int
    cluster: str
    layout: str
    world: int
    steps: int  # done, over all launches of the run
    planned_steps: int | None
    tokens: int
    starts: int
    wall_s: float | None  # from the first start to the last event, pauses between starts included
    first_step_s: float | None  # from the last launch to the end of its first step
    step_s: Pair
    step_s_low: float | None  # the prediction's 80 % interval
    step_s_high: float | None
    step_s_p90: float | None
    tokens_per_s: Pair
    mfu: Pair
    memory_bytes: Pair  # the rank with the most memory
    training_s: Pair
    first_loss: float | None
    last_loss: float | None
    skipped_steps: int | None  # None: not counted
    evaluation: Evaluation | None
    samples: tuple[str, ...]
    ranks: tuple[RankTime, ...]
    straggler: int | None  # the first of `stragglers`
    stage_compute_s: tuple[float, ...]  # mean seconds per step of computing, for each pipeline stage
    expert_imbalance: float | None  # tokens of the busiest expert over the mean, averaged over the steps
    checkpoints: tuple[int, ...]  # steps
    checkpoint_s: float | None  # mean
    checkpoint_bytes: float | None  # of the newest checkpoint: rank 0's part
    unreadable_lines: int
    incidents: tuple[Incident, ...] = ()
    recovery_s: Pair = field(default_factory=Pair)  # per incident, with detection
    effective_time: Pair = field(default_factory=Pair)  # share of the wall time spent on steps that stayed
    noise_scale: float | None = None  # gradient noise, in samples, as last estimated
    utilization: float | None = None  # mean of the newest readings, of 64 ranks or more if there are as many
    stragglers: tuple[Straggler, ...] = ()  # in the last 100 steps
    ledger: Ledger | None = None
    cost: Cost | None = None
    damage: tuple[Damage, ...] = ()
    layouts: tuple[LayoutResult, ...] = ()  # oldest first
    communication: Communication | None = None
    checkpoint_total_bytes: float | None = None  # of the newest checkpoint, all ranks; unknown for runs before 0.7
    zero_gradient_steps: int | None = None  # None: not counted
    device_family: str = ""  # of the plan's accelerator: "cpu", "nvidia"


def summarize_run(run: Run, history: RunHistory | None = None, walked: LedgerWalk | None = None) -> Summary:
    """Summarize a run from its folder; a run that is still going, or that never took a step, has a summary too.

    `history` and `walked` save reading the run again.
    """
    history = history if history is not None else RunHistory.open(run)
    walked = walked if walked is not None else walk_ledger(run, history)
    brief = summarize_briefly(run, history, walked)
    step_count = walked.ledger.steps + walked.ledger.steps_lost
    effective = walked.ledger.effective if brief.steps and step_count else None
    skipped, still = count_odd_steps(run, last=history.last_step)
    return replace(
        brief,
        skipped_steps=skipped,
        zero_gradient_steps=still,
        effective_time=replace(brief.effective_time, measured=effective),
        ledger=walked.ledger,
        cost=run_cost(run, history, walked.ledger),
    )


def summarize_briefly(run: Run, history: RunHistory, walked: LedgerWalk | None = None) -> Summary:
    """Summarize a run from its index alone: without ledger, cost, effective time and count of skipped steps.

    Without `walked`, the cost of incidents is unknown as well.
    """
    walked = walked if walked is not None else _empty_walk()
    plan, launch, status = _or_empty(run.plan), _or_empty(run.launch), run.status()
    coordinator_events, events = history.supervisor(), history.events(*RARE)
    incidents = read_incidents(run, walked, coordinator_events)
    steps = _Steps(history)
    pieces = layout_spans(run, history)
    layouts = tuple(_layout_result(history, piece) for piece in pieces)
    newest = layouts[-1] if layouts else None
    ranks = tuple(_rank_times(history, pieces[-1])) if pieces else ()
    saved = [event for event in events if event["event"] == "checkpoint"]
    prediction, duration = at(plan, "prediction"), at(plan, "duration")
    complete = bool(steps.count) and steps.count == integer(duration, "steps")
    slow = tuple(find_stragglers(history))
    damage = tuple(history.damage())
    return Summary(
        run=str(run.path),
        state=text(status, "state") or "unknown",
        message=str(status.get("message", "")),
        model=text(at(plan, "job", "model"), "name"),
        parameters=integer(prediction, "parameters") or 0,
        cluster=text(at(plan, "cluster"), "name"),
        device_family=text(at(plan, "cluster", "accelerator"), "family"),
        layout=newest.layout if newest is not None and len(layouts) > 1 else text(launch, "layout"),
        world=run.world() or 0,
        steps=steps.count,
        planned_steps=integer(duration, "steps"),
        tokens=int(steps.tokens),
        starts=_count_launches(coordinator_events, events),
        wall_s=_event_span([*events, *steps.ends]),
        first_step_s=_first_step(history, launch),
        step_s=newest.step_s if newest is not None else Pair(predicted=number(prediction, "step_s")),
        step_s_low=newest.step_s_low if newest is not None else number(prediction, "step_s_low"),
        step_s_high=newest.step_s_high if newest is not None else number(prediction, "step_s_high"),
        step_s_p90=newest.step_s_p90 if newest is not None else None,
        tokens_per_s=newest.tokens_per_s if newest is not None else Pair(predicted=number(prediction, "tokens_per_s")),
        mfu=newest.mfu if newest is not None else Pair(predicted=number(prediction, "mfu") or None),
        memory_bytes=(
            newest.memory_bytes if newest is not None else Pair(predicted=number(at(plan, "memory"), "total_bytes"))
        ),
        training_s=Pair(
            predicted=_training_s(layouts, duration) if complete else None, measured=steps.training_s or None
        ),
        first_loss=steps.first_loss,
        last_loss=steps.last_loss,
        skipped_steps=None,
        evaluation=_last_evaluation(events, launch),
        samples=_last_samples(events),
        ranks=ranks,
        straggler=slow[0].rank if slow else None,
        stage_compute_s=_stage_compute(ranks, pieces[-1].layout if pieces else {}),
        expert_imbalance=_mean_or_none(
            history.curve(
                "expert_imbalance", first=_first_settled_step(pieces[-1]) if pieces else 0, points=POINTS
            ).mean
        ),
        checkpoints=tuple(_saved_steps(run)),
        checkpoint_s=_mean_or_none(number(event, "seconds") for event in saved),
        checkpoint_bytes=next((size for event in reversed(saved) if (size := number(event, "bytes"))), None),
        checkpoint_total_bytes=number(saved[-1], "total_bytes") if saved else None,
        unreadable_lines=sum(damage_entry.count for damage_entry in damage if "line" in damage_entry.what),
        incidents=tuple(incidents),
        recovery_s=_recovery_pair(plan, incidents),
        effective_time=Pair(predicted=number(at(plan, "reliability"), "effective_time")),
        noise_scale=steps.noise_scale,
        utilization=_mean_utilization(history),
        stragglers=slow,
        damage=damage,
        layouts=layouts,
        communication=read_communication(history),
    )


def _first_settled_step(piece: LayoutSpan) -> int:
    """Return the first step of a span that timings count: after the warm-up share."""
    return piece.first + int(piece.steps * WARM_UP_SHARE)


def _layout_result(history: RunHistory, piece: LayoutSpan) -> LayoutResult:
    """Compare prediction and measurement of one layout, over its own steps only."""
    settled, prediction = _first_settled_step(piece), at(piece.plan, "prediction")
    took = history.curve("duration_s", first=settled, last=piece.last, points=POINTS)
    step_times = sorted(value for value in took.mean if value and _can_be(value))
    spent_s = _curve_sum(took, piece.last)
    learnt = _curve_sum(history.curve("tokens", first=settled, last=piece.last, points=POINTS), piece.last)
    rate = learnt / spent_s if spent_s and learnt else None
    memory = _peak_memory(history, piece)
    return LayoutResult(
        layout=piece.name,
        world=piece.world,
        first_step=piece.first,
        last_step=piece.last,
        steps=piece.steps,
        step_s=Pair(
            predicted=number(prediction, "step_s"), measured=statistics.median(step_times) if step_times else None
        ),
        step_s_low=number(prediction, "step_s_low"),
        step_s_high=number(prediction, "step_s_high"),
        step_s_p90=step_times[min(len(step_times) - 1, int(0.9 * len(step_times)))] if step_times else None,
        tokens_per_s=Pair(predicted=number(prediction, "tokens_per_s"), measured=rate),
        mfu=Pair(
            predicted=number(prediction, "mfu") or None,
            measured=piece.mfu_per_token * rate if piece.mfu_per_token is not None and rate is not None else None,
        ),
        memory_bytes=Pair(
            predicted=number(at(piece.plan, "memory"), "total_bytes"), measured=max(memory.values(), default=None)
        ),
        training_s=_curve_sum(
            history.curve("duration_s", first=piece.first, last=piece.last, points=POINTS), piece.last
        ),
        planned=bool(piece.plan),
    )


def _training_s(layouts: Sequence[LayoutResult], duration: Mapping[str, Any]) -> float | None:
    """Return the predicted seconds of all steps, each by its own layout; None if one layout was not planned."""
    if len(layouts) < 2:
        return number(duration, "training_s")
    layout_seconds = [
        result.step_s.predicted * result.steps for result in layouts if result.step_s.predicted is not None
    ]
    return sum(layout_seconds) if len(layout_seconds) == len(layouts) else None


def _empty_walk() -> LedgerWalk:
    nothing = Ledger(
        wall_s=0.0,
        accounts=Accounts(),
        overlap_s=0.0,
        steps=0,
        steps_lost=0,
        incidents=0,
        formations=0,
        unreadable_lines=0,
    )
    return LedgerWalk(ledger=nothing, trail=[], recoveries=[])


class _Steps:
    """Sums over the steps that stayed, in any layout, and the first and last losses."""

    def __init__(self, history: RunHistory) -> None:
        first, last = history.first_step, history.last_step
        self.count = 0 if first is None or last is None else last - first + 1
        took = history.curve("duration_s", points=POINTS)
        tokens = history.curve("tokens", points=POINTS)
        self.training_s, self.tokens = _curve_sum(took, last), _curve_sum(tokens, last)
        near = min(10, max(0, self.count - 1))
        first_steps = [] if first is None else list(history.steps(history.witness, first, first + near))
        last_steps = [] if last is None else list(history.steps(history.witness, last - near, last))
        self.ends = first_steps[:1] + last_steps[-1:]
        self.first_loss = next((loss for event in first_steps if (loss := number(event, "loss")) is not None), None)
        self.last_loss = next(
            (loss for event in reversed(last_steps) if (loss := number(event, "loss")) is not None), None
        )
        self.noise_scale = next(
            (b for event in reversed(last_steps) if (b := number(event, "noise_scale")) is not None), None
        )


def _curve_sum(curve: Curve, last: int | None) -> float:
    """Return the sum over all steps of a curve: each bucket's mean times its number of steps."""
    ends = [*curve.step[1:], (last or 0) + 1]
    sized = zip(curve.mean, curve.step, ends, strict=False)
    return sum((mean or 0.0) * max(0, end - begin) for mean, begin, end in sized if _can_be(mean))


def _saved_steps(run: Run) -> list[int]:
    try:
        return run.saved_steps()
    # The plan does not contain the checkpoint path.
    except (PhalanxError, OSError, KeyError, TypeError, ValueError):
        return []


def _mean_utilization(history: RunHistory) -> float | None:
    sampled_ranks = history.ranks[:: max(1, len(history.ranks) // SOME)]
    newest = (history.latest("monitor", rank) for rank in sampled_ranks)
    return _mean_or_none(number(event, "utilization") for event in newest if event is not None)


def _recovery_pair(plan: Mapping[str, Any], found: Sequence[Incident]) -> Pair:
    fault = at(plan, "job", "fault")
    planned_s = (number(fault, "detect_s") or 0.0) + (number(fault, "restart_s") or 0.0)
    return Pair(predicted=planned_s or None, measured=_mean_or_none(incident.recovery_s for incident in found))


def _count_launches(reported: Sequence[Event], events: Sequence[Event]) -> int:
    """Return the number of launches; a new membership within a launch does not count."""
    launches = len([event for event in reported if event["event"] == "epoch" and event.get("reason") == "start"])
    return launches or len([event for event in events if event["event"] == "run_start"])


def _or_empty(read: Any) -> dict[str, Any]:
    try:
        return dict(read())
    except PhalanxError:
        return {}


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    finite_values = [value for value in values if value is not None and _can_be(abs(value))]
    return statistics.fmean(finite_values) if finite_values else None


def _event_span(events: Sequence[Event]) -> float | None:
    times = [time for event in events if (time := number(event, "t")) is not None]
    return max(times) - min(times) if times else None


def _first_step(history: RunHistory, launch: Mapping[str, Any]) -> float | None:
    """Return the seconds from the last launch to the end of the first step after it, without preparing the data."""
    started, data_s = number(launch, "started"), number(launch, "data_s") or 0.0
    starts = [event for event in history.events("run_start") if started and (number(event, "t") or 0.0) >= started]
    start_step = integer(starts[0], "step") if starts else None
    first = history.first_step if start_step is None else start_step
    if started is None or first is None:
        return None
    ends = [
        end for event in history.steps(history.witness, first, first + 10) if (end := number(event, "t")) is not None
    ]
    return min((end - started - data_s for end in ends if end >= started), default=None)


def _last_evaluation(events: Sequence[Event], launch: Mapping[str, Any]) -> Evaluation | None:
    last = next((event for event in reversed(events) if event["event"] == "evaluate"), None)
    if last is None:
        return None
    values = {**at(launch, "baselines"), **last}
    return Evaluation(
        step=integer(last, "step") or 0,
        loss=number(last, "loss"),
        bits_per_byte=number(last, "bits_per_byte"),
        unigram_bits_per_byte=number(values, "unigram_bits_per_byte"),
        bigram_bits_per_byte=number(values, "bigram_bits_per_byte"),
    )


def _last_samples(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the texts of the newest step at which the model generated samples."""
    samples = [event for event in events if event["event"] == "sample" and isinstance(event.get("text"), str)]
    newest = samples[-1].get("step") if samples else None
    return tuple(event["text"] for event in samples if event.get("step") == newest)


def _rank_times(history: RunHistory, piece: LayoutSpan) -> Iterable[RankTime]:
    """Yield times and memory of each rank of one layout, over its own steps."""
    means = {
        name: _rank_means(history, name, _first_settled_step(piece)) for name in ("compute_s", "wait_s", "bytes_sent")
    }
    memory, present_ranks = _peak_memory(history, piece), [rank for rank in history.ranks if rank < piece.world]
    for rank in present_ranks[:MOST_RANKS]:
        yield RankTime(
            rank=rank,
            place=rank_place(rank, piece.layout) if len(present_ranks) > 1 else "",
            compute_s=means["compute_s"].get(rank),
            wait_s=means["wait_s"].get(rank),
            memory_bytes=memory.get(rank),
            bytes_sent=means["bytes_sent"].get(rank),
        )


def _peak_memory(history: RunHistory, piece: LayoutSpan) -> dict[int, float]:
    """Return the peak memory of each rank of a layout; in large runs, the largest mean over a 64th of the steps."""
    peaks: dict[int, float] = {}
    span = {"first": piece.first, "last": piece.last}
    for name in {"memory_bytes", "memory_used_bytes"}.intersection(history.names()):
        mesh = history.mesh(name, columns=COLUMNS, **span)
        for rank, values in zip(mesh.ranks, mesh.values, strict=True):
            peaks[rank] = max(peaks.get(rank, 0.0), max((value for value in values if value), default=0.0))
    if len(history.ranks) * piece.steps <= FEW:
        for rank in history.ranks:
            most = [value for value in history.curve("memory_bytes", rank=rank, points=1, **span).high if value]
            peaks[rank] = max([peaks.get(rank, 0.0), *most])
    return {rank: most for rank, most in peaks.items() if most and rank < piece.world}


def _rank_means(history: RunHistory, name: str, first: int) -> dict[int, float | None]:
    """Return the mean per step of each rank; None for values that are out of range."""
    if name not in history.names():
        return {}
    mesh = history.mesh(name, columns=1, first=first)
    means = {rank: next(iter(values), None) for rank, values in zip(mesh.ranks, mesh.values, strict=True)}
    return {rank: value if _can_be(value) else None for rank, value in means.items()}


def _can_be(value: float | None) -> bool:
    """Return True if a number may be the seconds, bytes or tokens of a step."""
    return value is not None and 0.0 <= value < ABSURD


def _stage_compute(ranks: Sequence[RankTime], layout: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the mean compute time of each pipeline stage; empty if there is one stage, or a rank has no value."""
    stages = integer(layout, "pipeline") or 1
    compute_times = [
        rank_time.compute_s
        for rank_time in sorted(ranks, key=lambda rank_time: rank_time.rank)
        if rank_time.compute_s is not None
    ]
    per_stage, rest = divmod(len(compute_times), stages)
    if stages < 2 or not per_stage or rest or len(compute_times) != len(ranks):
        return ()
    return tuple(
        statistics.fmean(compute_times[stage * per_stage : (stage + 1) * per_stage]) for stage in range(stages)
    )


# ---- skipped steps ---------------------------------------------------------------------------------------------------


_SKIPPED = re.compile(rb'"skipped"\s*:\s*true')
_ZERO_NORM = re.compile(rb'"grad_norm"\s*:\s*0(?:\.0)?\s*[,}]')
_STEP = re.compile(rb'"step"\s*:\s*(\d{1,18})')


def skipped_steps(run: Run, *, last: int | None) -> int:
    """Return the number of skipped steps of rank 0 up to `last`; lines are matched, not parsed: 0.2 s per 100,000."""
    return count_odd_steps(run, last=last)[0]


def count_odd_steps(run: Run, *, last: int | None) -> tuple[int, int]:
    """Count the steps of rank 0 up to `last` that were skipped, and those with a gradient norm of exactly 0."""
    skipped: set[int] = set()
    still: set[int] = set()
    for path in files_of(run, 0):
        for line in raw_lines(path):
            matching_steps = skipped if _SKIPPED.search(line) else still if _ZERO_NORM.search(line) else None
            if matching_steps is not None and (match := _STEP.search(line)):
                matching_steps.add(int(match.group(1)))
    within = 0 if last is None else last + 1
    return sum(step < within for step in skipped), sum(step < within for step in still)
