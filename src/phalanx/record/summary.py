"""What a run came to, computed from its folder alone: prediction beside measurement, losses, ranks, checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.record.events import Event, read_events
from phalanx.record.incidents import Incident, incidents, supervisor_events
from phalanx.record.run import Run

WARM_UP_SHARE = 0.2  # first share of the steps that timings leave out, as `phalanx calibrate` does
STRAGGLES = 1.1  # a rank that computes this much longer than the median of its stage is worth naming
MOST_RANKS = 4096  # event files read for the table of ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A quantity as predicted and as measured; None where it is not known."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Measured over predicted, less one."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The model on held-out text, and what counting letters or pairs of tokens would have reached."""

    step: int
    loss: float | None
    bits_per_byte: float | None
    unigram_bits_per_byte: float | None
    bigram_bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime:
    """Mean seconds per step that one rank computed and waited, and its largest memory."""

    rank: int
    place: str  # such as "pipeline 1, data 0"; empty when the run has one rank
    compute_s: float | None
    wait_s: float | None
    memory_bytes: float | None
    bytes_sent: float | None  # per step


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run at a glance; every time in seconds."""

    run: str
    state: str
    message: str
    model: str
    parameters: int
    cluster: str
    layout: str
    world: int
    steps: int  # done, in all starts of the run
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
    memory_bytes: Pair  # the fullest rank
    training_s: Pair
    first_loss: float | None
    last_loss: float | None
    skipped_steps: int
    evaluation: Evaluation | None
    samples: tuple[str, ...]
    ranks: tuple[RankTime, ...]
    straggler: int | None
    stage_compute_s: tuple[float, ...]  # mean seconds per step that the ranks of each pipeline stage compute
    expert_imbalance: float | None  # tokens of the busiest expert over the mean, mean over the steps
    checkpoints: tuple[int, ...]  # steps
    checkpoint_s: float | None  # mean
    checkpoint_bytes: float | None  # of the newest
    unreadable_lines: int
    incidents: tuple[Incident, ...] = ()
    recovery_s: Pair = field(default_factory=Pair)  # per incident, noticing it included
    effective_time: Pair = field(default_factory=Pair)  # share of the wall clock that was spent on steps that stayed


def summarize(run: Run) -> Summary:
    """Read the folder; a run that is still going, or that never took a step, has a summary too."""
    plan, launch, status = run.plan(), _or_empty(run.launch), run.status()
    events, unreadable = read_events(run.events(0))
    found = incidents(run)
    steps = _steps(events)
    timed = [seconds for step in _settled(steps) if (seconds := _number(step, "duration_s"))]
    ranks = tuple(_ranks(run, plan))
    rate = _rate(_settled(steps))
    saved = [event for event in events if event["event"] == "checkpoint"]
    prediction, duration = _at(plan, "prediction"), _at(plan, "duration")
    spent = [seconds for step in steps if (seconds := _number(step, "duration_s"))]
    complete = len(steps) and len(steps) == _integer(duration, "steps")
    return Summary(
        run=str(run.path),
        state=str(status.get("state", "unknown")),
        message=str(status.get("message", "")),
        model=str(_at(plan, "job", "model").get("name", "")),
        parameters=_integer(prediction, "parameters") or 0,
        cluster=str(_at(plan, "cluster").get("name", "")),
        layout=str(launch.get("layout", "")),
        world=_integer(launch, "world") or 0,
        steps=len(steps),
        planned_steps=_integer(duration, "steps"),
        tokens=int(sum(_number(step, "tokens") or 0 for step in steps)),
        starts=_starts(run, events),
        wall_s=_span(events),
        first_step_s=_first_step(events, launch),
        step_s=Pair(predicted=_number(prediction, "step_s"), measured=statistics.median(timed) if timed else None),
        step_s_low=_number(prediction, "step_s_low"),
        step_s_high=_number(prediction, "step_s_high"),
        step_s_p90=_quantile(timed, 0.9),
        tokens_per_s=Pair(predicted=_number(prediction, "tokens_per_s"), measured=rate),
        mfu=_mfu(prediction, rate),
        memory_bytes=Pair(
            predicted=_number(_at(plan, "memory"), "total_bytes"),
            measured=max((one.memory_bytes for one in ranks if one.memory_bytes), default=None),
        ),
        training_s=Pair(
            predicted=_number(duration, "training_s") if complete else None, measured=sum(spent) if spent else None
        ),
        first_loss=next((loss for step in steps if (loss := _number(step, "loss")) is not None), None),
        last_loss=next((loss for step in reversed(steps) if (loss := _number(step, "loss")) is not None), None),
        skipped_steps=sum(bool(step.get("skipped")) for step in steps),
        evaluation=_evaluation(events, launch),
        samples=_samples(events),
        ranks=ranks,
        straggler=_straggler(ranks),
        stage_compute_s=_stages(ranks, _at(plan, "layout")),
        expert_imbalance=_mean(_number(step, "expert_imbalance") for step in _settled(steps)),
        checkpoints=tuple(run.saved_steps()),
        checkpoint_s=_mean(_number(event, "seconds") for event in saved),
        checkpoint_bytes=_number(saved[-1], "bytes") if saved else None,
        unreadable_lines=unreadable,
        incidents=tuple(found),
        recovery_s=_recovery(plan, found),
        effective_time=_effective(run, plan) if found else Pair(),
    )


def _recovery(plan: Mapping[str, Any], found: Sequence[Incident]) -> Pair:
    fault = _at(plan, "job", "fault")
    planned = (_number(fault, "detect_s") or 0.0) + (_number(fault, "restart_s") or 0.0)
    return Pair(predicted=planned or None, measured=_mean(one.recovery_s for one in found))


def _effective(run: Run, plan: Mapping[str, Any]) -> Pair:
    from phalanx.record.ledger import ledger

    return Pair(predicted=_number(_at(plan, "reliability"), "effective_time"), measured=ledger(run).effective)


def _starts(run: Run, events: Sequence[Event]) -> int:
    """Launches: a new formation within one is none."""
    formed = [event for event in supervisor_events(run) if event["event"] == "epoch"]
    launches = len([event for event in formed if event.get("reason") == "start"])
    return launches or len([event for event in events if event["event"] == "run_start"])


def _or_empty(read: Any) -> dict[str, Any]:
    try:
        return dict(read())
    except PhalanxError:
        return {}


def _at(data: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A nested table; empty when it is not there."""
    here: Any = data
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(data: Mapping[str, Any], name: str) -> int | None:
    value = _number(data, name)
    return None if value is None else int(value)


def _steps(events: Sequence[Event]) -> list[Event]:
    """The steps that count, in order: a restart that goes back undoes the later ones of the start before."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "step" and isinstance(event.get("step"), int):
            while kept and kept[-1]["step"] >= event["step"]:
                kept.pop()
            kept.append(event)
    return kept


def _settled(steps: Sequence[Event]) -> Sequence[Event]:
    """The steps without warm-up: allocators, caches and compilation settle in the first ones."""
    return steps[int(len(steps) * WARM_UP_SHARE) :]


def _rate(steps: Sequence[Event]) -> float | None:
    known = [(_number(step, "tokens"), _number(step, "duration_s")) for step in steps]
    pairs = [(tokens, seconds) for tokens, seconds in known if tokens and seconds]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs) if pairs else None


def _mfu(prediction: Mapping[str, Any], rate: float | None) -> Pair:
    """Measured against the same peak and by the same count of FLOPs as the prediction."""
    mfu, predicted = _number(prediction, "mfu"), _number(prediction, "tokens_per_s")
    measured = mfu * rate / predicted if mfu and rate and predicted else None
    return Pair(predicted=mfu or None, measured=measured)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _span(events: Sequence[Event]) -> float | None:
    times = [time for event in events if (time := _number(event, "t")) is not None]
    return max(times) - min(times) if times else None


def _first_step(events: Sequence[Event], launch: Mapping[str, Any]) -> float | None:
    started = _number(launch, "started")
    ends = [time for event in events if event["event"] == "step" and (time := _number(event, "t")) is not None]
    data_s = _number(launch, "data_s") or 0.0
    return min((end - started - data_s for end in ends if end >= started), default=None) if started else None


def _evaluation(events: Sequence[Event], launch: Mapping[str, Any]) -> Evaluation | None:
    last = next((event for event in reversed(events) if event["event"] == "evaluate"), None)
    if last is None:
        return None
    known = {**_at(launch, "baselines"), **last}
    return Evaluation(
        step=_integer(last, "step") or 0,
        loss=_number(last, "loss"),
        bits_per_byte=_number(last, "bits_per_byte"),
        unigram_bits_per_byte=_number(known, "unigram_bits_per_byte"),
        bigram_bits_per_byte=_number(known, "bigram_bits_per_byte"),
    )


def _samples(events: Sequence[Event]) -> tuple[str, ...]:
    """The texts of the last time the model was asked to write."""
    found = [event for event in events if event["event"] == "sample" and isinstance(event.get("text"), str)]
    newest = found[-1].get("step") if found else None
    return tuple(event["text"] for event in found if event.get("step") == newest)


def _ranks(run: Run, plan: Mapping[str, Any]) -> Iterable[RankTime]:
    files = run.event_files()[:MOST_RANKS]
    for path in files:
        events, _ = read_events(path)
        steps = _settled(_steps(events))
        rank = next((event["rank"] for event in events if isinstance(event.get("rank"), int)), 0)
        memory = [size for event in events if (size := _number(event, "memory_bytes"))]
        yield RankTime(
            rank=rank,
            place=place(rank, _at(plan, "layout")) if len(files) > 1 else "",
            compute_s=_mean(_number(step, "compute_s") for step in steps),
            wait_s=_mean(_number(step, "wait_s") for step in steps),
            memory_bytes=max(memory, default=None),
            bytes_sent=_mean(_number(step, "bytes_sent") for step in steps),
        )


def place(rank: int, layout: Mapping[str, Any]) -> str:
    """Where a rank stands on the axes that are split; tensor peers are neighbours.

    >>> place(5, {"pipeline": 2, "data": 2, "context": 1, "tensor": 2})
    'pipeline 1, data 0, tensor 1'
    """
    words = []
    for axis in ("tensor", "context", "data", "pipeline"):
        size = _integer(layout, axis) or 1
        if size > 1:
            words.append(f"{axis} {rank % size}")
        rank //= size
    return ", ".join(reversed(words))


def _stages(ranks: Sequence[RankTime], layout: Mapping[str, Any]) -> tuple[float, ...]:
    """Mean compute time of each pipeline stage; empty where there is one stage, or a rank did not say."""
    stages = _integer(layout, "pipeline") or 1
    known = [one.compute_s for one in sorted(ranks, key=lambda one: one.rank) if one.compute_s is not None]
    per_stage, rest = divmod(len(known), stages)
    if stages < 2 or not per_stage or rest or len(known) != len(ranks):
        return ()
    return tuple(statistics.fmean(known[stage * per_stage : (stage + 1) * per_stage]) for stage in range(stages))


def _straggler(ranks: Sequence[RankTime]) -> int | None:
    """The rank that the others wait for, if one stands out."""
    stages: dict[str, list[tuple[float, int]]] = {}
    for one in ranks:
        if one.compute_s:
            # Stages differ by design (the head is heavy): a straggler is slower than others with the same work.
            stage = one.place.split(",")[0] if one.place.startswith("pipeline") else ""
            stages.setdefault(stage, []).append((one.compute_s, one.rank))
    found = []
    for members in stages.values():
        slowest, rank = max(members)
        usual = statistics.median_low(seconds for seconds, _ in members)
        if len(members) > 1 and slowest > STRAGGLES * usual:
            found.append((slowest / usual, rank))
    return max(found)[1] if found else None
