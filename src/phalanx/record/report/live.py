"""A live view of a run: reads rank 0's events while they are written, so that watching costs the ranks nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, printable, seconds, text
from phalanx.record.account.incidents import incident_text
from phalanx.record.account.ledger import walk_ledger
from phalanx.record.account.stragglers import StragglerScores, straggler_scores
from phalanx.record.account.summary import Summary, summarize_run
from phalanx.record.account.time_accounts import Effective, from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event, EventReader
from phalanx.record.run import Run
from phalanx.record.run_lock import ENDED, is_run_over, last_written
from phalanx.units import format_bytes, format_count, format_seconds, plural

# Process groups that took longer to make are reported.
SLOW_GROUPS_S = 5.0
RECENT = 20  # steps behind the rate and the remaining time
# Lines without one of these texts give no remark in `remark_of_rank`, and are skipped unparsed.
REMARKED = (
    *(b'"evaluate"', b'"checkpoint"', b'"memory"', b'"ready"', b'"remark"'),
    *(b'"communicators"', b'"compile_check"', b'"peer"'),
)
# Events of a peer group that change who trains with whom. Connections that end and return are left out.
TOLD_OF_PEERS = (
    *("joined", "left", "evicted", "rejoined", "no-majority", "no-answer", "forced", "dropped", "capped", "revoked"),
    *("aggregation", "harmful", "excluded", "doubtful-update", "gate", "doubtful-progress", "measured", "behind"),
    "caught-up",
)
# Kinds whose text does not contain the peer's name.
NAMED_PEERS = ("dropped", "capped", "revoked", "excluded", "doubtful-update", "doubtful-progress", "measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The state of a run after its last step."""

    step: int  # steps done
    steps: int  # in total; 0 if unknown
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    memory_bytes: float | None
    lr: float | None

    def line(self) -> str:
        """Format the progress in one line."""
        of = f"/{self.steps:,}" if self.steps else ""
        parts = [f"step {self.step:,}{of}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"{format_count(self.tokens_per_s)} tokens/s"] if self.tokens_per_s else []
        parts += [f"{format_seconds(self.left_s)} left"] if self.left_s else []
        parts += [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        parts += [f"lr {self.lr:.2e}"] if self.lr is not None else []
        return "  ".join(parts)


class Follower:
    """Turns new events into progress and remarks; may be called at any rate."""

    def __init__(self, run: Run, *, steps: int, since_s: float) -> None:
        self._reader = EventReader(run.events(0))
        self._supervisor = EventReader(run.supervisor)
        self._steps = steps
        self._since_s = since_s
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # tokens, seconds

        self.progress: Progress | None = None

    def read(self) -> list[str]:
        """Read the new events and return their remarks, one line each."""
        remarks = self._incident_lines()
        for event in self._reader.read():
            if (number(event, "t") or 0.0) < self._since_s:
                continue  # an earlier start of the same run
            if event["event"] == "step":
                self._take_step(event)
                remarks += _skipped_line(event)
            else:
                remarks += remark_of_rank(event)
                self._steps = integer(event, "steps") or self._steps if event["event"] == "run_start" else self._steps
        return remarks

    def _incident_lines(self) -> list[str]:
        """Return the remarks on new events of the coordinator."""
        remarks = []
        for event in self._supervisor.read():
            if (number(event, "t") or 0.0) >= self._since_s:
                remarks += remark_of_supervisor(event)
        return remarks

    def _take_step(self, event: Event) -> None:
        seconds, tokens = number(event, "duration_s"), number(event, "tokens")
        if seconds:
            self._recent.append((tokens or 0.0, seconds))
        spent_s = sum(seconds for _, seconds in self._recent)
        done = (integer(event, "step") or 0) + 1
        rate = sum(tokens for tokens, _ in self._recent) / spent_s if spent_s else None
        remaining_s = max(0, self._steps - done) * spent_s / len(self._recent) if self._recent and self._steps else None
        self.progress = Progress(
            step=done,
            steps=self._steps,
            loss=number(event, "loss"),
            tokens_per_s=rate,
            left_s=remaining_s,
            memory_bytes=number(event, "memory_bytes"),
            lr=number(event, "lr"),
        )


def remark_of_supervisor(event: Event) -> list[str]:
    """Return remarks on failures, recoveries, and hosts that join or are quarantined."""
    kind, host = event["event"], text(event, "host")
    if kind == "incident":
        return [f"step {integer(event, 'step') or 0:,}: failed: {incident_text(event)}"]
    if kind == "rollback":
        return [_rollback_line(event)]
    if kind == "evidence" and event.get("finding"):
        return [text(event, "finding")]
    if kind == "replica":
        happened = {"left out": "left out; the others train on", "rejoined": "built again: it rejoins the others"}
        return [f"model replica {integer(event, 'replica')} is {happened.get(text(event, 'state'), '?')}"]
    if kind == "replacement":
        return [f"failed with it and is replaced: {incident_text(event)}"]
    if kind == "epoch" and event.get("reason") != "start":
        return [f"generation {integer(event, 'epoch')}: continuing with {plural(integer(event, 'world') or 0, 'rank')}"]
    if kind == "coordinator":
        return ["the coordinator failed and another took over; no rank noticed"]
    if kind == "host" and event.get("state") == "joined" and integer(event, "epoch"):
        return [f"{host} joined"]
    if kind == "quarantine":
        slot = f" slot {event['slot']}" if isinstance(event.get("slot"), int) else ""
        return [f"{host}{slot} is quarantined: {text(event, 'reason')}"]
    return []


def _rollback_line(event: Event) -> str:
    """Format the target of a roll-back, and the checkpoints that were set aside."""
    recorded = event.get("set_aside")
    steps = [step for step in recorded if isinstance(step, int)] if isinstance(recorded, list) else []
    aside = f"; checkpoints of step {', '.join(f'{step:,}' for step in steps)} are set aside" if steps else ""
    detected_step, target_step = integer(event, "step") or 0, integer(event, "target") or 0
    return f"step {detected_step:,}: roll-back to step {target_step:,}{aside}"


def _skipped_line(event: Event) -> list[str]:
    """Return a line for a step that no rank took."""
    if event.get("skipped") is not True:
        return []
    step = integer(event, "step") or 0
    return [f"step {step:,}: skipped, since the gradient was not finite or far too large; no weight changed"]


def remark_of_rank(event: Event) -> list[str]:
    """Return remarks on an event of a rank other than a step."""
    step = integer(event, "step") or 0
    if event["event"] == "evaluate":
        parts = [f"loss {event['loss']:.4f}"] if number(event, "loss") is not None else []
        parts += [f"{event['bits_per_byte']:.3f} bits per byte"] if number(event, "bits_per_byte") is not None else []
        return [f"step {step:,}: held-out {', '.join(parts)}"]
    if event["event"] == "checkpoint":
        return _checkpoint_lines(event, step)
    if event["event"] == "peer":
        is_named = event.get("kind") in NAMED_PEERS
        name_prefix = f"{text(event, 'name')}: " if is_named else ""
        return [f"step {step:,}: {name_prefix}{text(event, 'text')}"] if event.get("kind") in TOLD_OF_PEERS else []
    if event["event"] == "memory":
        return [f"step {step:,}: {_copies_text(event)}"]
    if event["event"] == "remark" and event.get("is_warning") is True:
        return [f"warning: {text(event, 'text')}"]
    if event["event"] == "remark" and event.get("is_told") is True:
        return [text(event, "text")]
    if event["event"] == "compile_check":
        return [_compile_check(event)]
    if event["event"] == "communicators":
        return _communicator_lines(event)
    if event["event"] == "ready":
        seconds = number(event, "seconds")
        at = f", continuing at step {step:,}" if step else ""
        recorded = event.get("warnings")
        noted = (
            [printable(warning) for warning in recorded if isinstance(warning, str)]
            if isinstance(recorded, list)
            else []
        )
        waited = f" after {format_seconds(seconds)}" if seconds else ""
        return [*(f"warning: {warning}" for warning in noted), f"ranks ready{waited}{at}"]
    return []


def _compile_check(event: Event) -> str:
    """Format the result and cost of a comparison of compiled and eager code."""
    took_s, compile_s = number(event, "seconds") or 0.0, number(event, "compile_s") or 0.0
    cost = f"{format_seconds(took_s)}, {format_seconds(compile_s)} of it compiling"
    if event.get("passed") is None:
        return f"warning: compiled code could not be compared with eager code ({cost}): {text(event, 'reason')}"
    norms = [number(event, name) for name in ("grad_norm", "eager_grad_norm", "gradient_difference", "bound")]
    if event["passed"] is not True:
        detail = f": gradient norm {norms[0]:.4g} for {norms[1]:.4g}" if None not in norms[:2] else ""
        return f"compiled code is wrong ({cost}){detail}"
    off = f"gradients differ by {norms[2]:.1e}, rounding explains {norms[3]:.1e}" if None not in norms else ""
    return f"compiled code agrees with eager code ({cost}): {off}"


def _communicator_lines(event: Event) -> list[str]:
    """Report slow creation of process groups, and ranks with different settings."""
    recorded = event.get("differences")
    lines = (
        [f"warning: {printable(difference)}" for difference in recorded if isinstance(difference, str)]
        if isinstance(recorded, list)
        else []
    )
    took_s = number(event, "seconds") or 0.0
    if took_s >= SLOW_GROUPS_S:
        lines.append(f"process groups made in {format_seconds(took_s)} ({text(event, 'backend')})")
    return lines


def _copies_text(event: Event) -> str:
    """Describe the state of the in-memory checkpoints."""
    if event.get("is_skipped") is True:
        return f"in-memory checkpoint skipped: {text(event, 'trouble') or 'the last one is not safe yet'}"
    trouble = text(event, "trouble")
    return (
        f"in-memory checkpoint without a replica: {trouble}" if trouble else "in-memory checkpoints have replicas again"
    )


def _checkpoint_lines(event: Event, step: int) -> list[str]:
    """Report a checkpoint; one written in the background has two events: taken, and safe on disk."""
    if event.get("error"):
        return [f"step {step:,}: checkpoint NOT saved: {printable(event['error'])}"]
    blocked_s = number(event, "blocked_s")
    if number(event, "seconds") is None and blocked_s is not None:
        return [f"step {step:,}: checkpoint taken, training waited {format_seconds(blocked_s)}"]
    cost = checkpoint_cost(event)
    return [f"step {step:,}: checkpoint saved" + (f" ({cost})" if cost else "")]


def checkpoint_cost(event: Event) -> str:
    """Format size and seconds of a checkpoint; before 0.7 only the size of rank 0's shards was recorded.

    >>> checkpoint_cost({"bytes": 1e6, "total_bytes": 4e6, "seconds": 0.5}), checkpoint_cost({"bytes": 1e6})
    ('4.00 MB, 500 ms', '1.00 MB of rank 0')
    """
    total_bytes, rank_bytes, seconds = (number(event, name) for name in ("total_bytes", "bytes", "seconds"))
    parts = (
        [format_bytes(total_bytes)] if total_bytes else [f"{format_bytes(rank_bytes)} of rank 0"] if rank_bytes else []
    )
    return ", ".join([*parts, *([format_seconds(seconds)] if seconds else [])])


# ---- watching: cheap reads at every look, costly ones now and then ---------------------------------------------------


# The complete record is read again at most this often, and for at most a twentieth of the time.
LEAST_S = 2.0
SHARE = 0.05
OVER = (*ENDED, "interrupted")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The state of a run at one moment."""

    state: str
    progress: Progress | None
    loss: tuple[float | None, ...]  # over all steps of the run
    tokens_per_s: tuple[float | None, ...]
    summary: Summary
    effective: Effective
    scores: StragglerScores
    saved_step: int | None  # newest checkpoint
    saved_age_s: float | None

    @property
    def is_finished(self) -> bool:
        """True if the run has ended."""
        return self.state in OVER


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeRecord:
    """The part of a view that needs the complete record."""

    summary: Summary
    effective: Effective
    scores: StragglerScores
    loss: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]


class Watcher:
    """Reads a run repeatedly while it grows."""

    def __init__(self, run: Run, *, points: int = 120, clock: Callable[[], float] = time.time) -> None:
        self.run, self._points, self._clock = run, points, clock
        self._history = RunHistory.open(run)
        # Readers that continue where they stopped: a long run has too many events to read them twice a second.
        self._rank, self._supervisor = EventReader(run.events(0)), EventReader(run.supervisor)
        self._changed_s = last_written(run)
        self._next_s = 0.0
        self._dear: _WholeRecord | None = None

    def look(self) -> View:
        """Return the present view."""
        if self._history.refresh():
            self._changed_s = self._clock()
        state = str(self.run.status().get("state", "unknown"))
        if state not in ENDED and is_run_over(self.run, heard_s=self._changed_s, now_s=self._clock()):
            state = "interrupted"
        dear = self._read_costly(force=state in OVER)
        saved = [event for event in self._history.events("checkpoint") if event.get("path") and not event.get("error")]
        saved_s = number(saved[-1], "t") if saved else None
        return View(
            state=state,
            progress=self._run_progress(),
            loss=dear.loss,
            tokens_per_s=dear.tokens_per_s,
            summary=dear.summary,
            effective=dear.effective,
            scores=dear.scores,
            saved_step=integer(saved[-1], "step") if saved else None,
            saved_age_s=max(0.0, self._clock() - saved_s) if saved_s is not None else None,
        )

    def remarks(self) -> list[str]:
        """Return remarks on what happened since the last call, one line each."""
        new = [(event, remark_of_rank) for event in self._rank.stream(only=REMARKED)]
        new += [(event, remark_of_supervisor) for event in self._supervisor.stream()]
        new.sort(key=lambda event_remark: number(event_remark[0], "t") or 0.0)
        return [line for event, remark in new for line in remark(event)]

    def _read_costly(self, *, force: bool) -> _WholeRecord:
        """Read the ledger, the curves and all else that needs the complete record."""
        if self._dear is not None and not force and time.monotonic() < self._next_s:
            return self._dear
        began_s = time.monotonic()
        walked = walk_ledger(self.run, self._history)
        self._dear = _WholeRecord(
            summary=summarize_run(self.run, self._history, walked),
            effective=from_trail(walked.trail),
            scores=straggler_scores(self._history),
            loss=self._history.curve("loss", points=self._points).mean,
            tokens_per_s=self._history.curve("tokens_per_s", points=self._points).mean,
        )
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(LEAST_S, took_s / SHARE)
        return self._dear

    def _run_progress(self) -> Progress | None:
        last = self._history.last_step
        if last is None:
            return None
        recent: list[Event] = list(self._history.steps(self._history.witness, max(0, last - RECENT + 1), last))
        timed = [(number(event, "tokens") or 0.0, took) for event in recent if (took := seconds(event, "duration_s"))]
        spent_s, newest = sum(took for _, took in timed), recent[-1] if recent else {}
        steps = self._steps()
        return Progress(
            step=last + 1,
            steps=steps,
            loss=number(newest, "loss"),
            tokens_per_s=sum(tokens for tokens, _ in timed) / spent_s if spent_s else None,
            left_s=max(0, steps - last - 1) * spent_s / len(timed) if timed and steps else None,
            memory_bytes=number(newest, "memory_bytes"),
            lr=number(newest, "lr"),
        )

    def _steps(self) -> int:
        starts = self._history.events("run_start")
        detail = integer(starts[-1], "steps") if starts else None
        try:
            return detail or integer(at(self.run.plan(), "duration"), "steps") or 0
        except PhalanxError:
            return detail or 0
