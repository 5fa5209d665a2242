"""A run as it goes: reads rank 0's events while they are written, so that watching costs the ranks nothing."""

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

SLOW_GROUPS_S = 5.0  # process groups that took longer to make are worth a line
RECENT = 20  # steps behind the rate and the time that is left
# What the lines hold on which `remark_of_rank` has something to say.
REMARKED = (
    *(b'"evaluate"', b'"checkpoint"', b'"memory"', b'"ready"', b'"remark"'),
    *(b'"communicators"', b'"compile_check"', b'"peer"'),
)
# Of a group of peers: what changes who learns with whom. Connections that end and return are not.
TOLD_OF_PEERS = (
    *("joined", "left", "evicted", "rejoined", "no-majority", "no-answer", "forced", "dropped", "capped", "revoked"),
    *("aggregation", "harmful", "excluded", "doubtful-update", "gate", "doubtful-progress", "measured", "behind"),
    "caught-up",
)
# Their text does not name the peer.
NAMED_PEERS = ("dropped", "capped", "revoked", "excluded", "doubtful-update", "doubtful-progress", "measured")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands after its last step."""

    step: int  # steps done
    steps: int  # in all; 0 when not known
    loss: float | None
    tokens_per_s: float | None
    left_s: float | None
    memory_bytes: float | None
    lr: float | None

    def line(self) -> str:
        """One line for a person."""
        of = f"/{self.steps:,}" if self.steps else ""
        parts = [f"step {self.step:,}{of}"]
        parts += [f"loss {self.loss:.4f}"] if self.loss is not None else []
        parts += [f"{format_count(self.tokens_per_s)} tokens/s"] if self.tokens_per_s else []
        parts += [f"{format_seconds(self.left_s)} left"] if self.left_s else []
        parts += [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        parts += [f"lr {self.lr:.2e}"] if self.lr is not None else []
        return "  ".join(parts)


class Follower:
    """Turns new events into progress and remarks; ask it as often as you like."""

    def __init__(self, run: Run, *, steps: int, since_s: float) -> None:
        self._reader = EventReader(run.events(0))
        self._supervisor = EventReader(run.supervisor)
        self._steps = steps
        self._since_s = since_s
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # tokens, seconds

        self.progress: Progress | None = None

    def read(self) -> list[str]:
        """Look at what is new; the remarks worth a line of their own."""
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
        """Failures, and how the run goes on."""
        remarks = []
        for event in self._supervisor.read():
            if (number(event, "t") or 0.0) >= self._since_s:
                remarks += remark_of_supervisor(event)
        return remarks

    def _take_step(self, event: Event) -> None:
        seconds, tokens = number(event, "duration_s"), number(event, "tokens")
        if seconds:
            self._recent.append((tokens or 0.0, seconds))
        spent = sum(seconds for _, seconds in self._recent)
        done = (integer(event, "step") or 0) + 1
        rate = sum(tokens for tokens, _ in self._recent) / spent if spent else None
        left = max(0, self._steps - done) * spent / len(self._recent) if self._recent and self._steps else None
        self.progress = Progress(
            step=done,
            steps=self._steps,
            loss=number(event, "loss"),
            tokens_per_s=rate,
            left_s=left,
            memory_bytes=number(event, "memory_bytes"),
            lr=number(event, "lr"),
        )


def remark_of_supervisor(event: Event) -> list[str]:
    """Failures, how the run goes on, and hosts that join or are lost."""
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
    """Where the run goes back to, and which checkpoints lie aside."""
    given = event.get("set_aside")
    steps = [step for step in given if isinstance(step, int)] if isinstance(given, list) else []
    aside = f"; checkpoints of step {', '.join(f'{step:,}' for step in steps)} are set aside" if steps else ""
    found, target = integer(event, "step") or 0, integer(event, "target") or 0
    return f"step {found:,}: roll-back to step {target:,}{aside}"


def _skipped_line(event: Event) -> list[str]:
    """A line for a step that no rank took."""
    if event.get("skipped") is not True:
        return []
    step = integer(event, "step") or 0
    return [f"step {step:,}: skipped, since the gradient was not finite or far too large; no weight changed"]


def remark_of_rank(event: Event) -> list[str]:
    """What a person wants to see pass by, apart from steps."""
    step = integer(event, "step") or 0
    if event["event"] == "evaluate":
        parts = [f"loss {event['loss']:.4f}"] if number(event, "loss") is not None else []
        parts += [f"{event['bits_per_byte']:.3f} bits per byte"] if number(event, "bits_per_byte") is not None else []
        return [f"step {step:,}: held-out {', '.join(parts)}"]
    if event["event"] == "checkpoint":
        return _checkpoint_lines(event, step)
    if event["event"] == "peer":
        is_named = event.get("kind") in NAMED_PEERS
        named = f"{text(event, 'name')}: " if is_named else ""
        return [f"step {step:,}: {named}{text(event, 'text')}"] if event.get("kind") in TOLD_OF_PEERS else []
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
        given = event.get("warnings")
        noted = [printable(one) for one in given if isinstance(one, str)] if isinstance(given, list) else []
        waited = f" after {format_seconds(seconds)}" if seconds else ""
        return [*(f"warning: {one}" for one in noted), f"ranks ready{waited}{at}"]
    return []


def _compile_check(event: Event) -> str:
    """What the comparison of compiled and eager code found, and what it cost."""
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
    """How long the process groups took, where that is worth a line, and on which ranks the settings differ."""
    given = event.get("differences")
    lines = [f"warning: {printable(one)}" for one in given if isinstance(one, str)] if isinstance(given, list) else []
    took_s = number(event, "seconds") or 0.0
    if took_s >= SLOW_GROUPS_S:
        lines.append(f"process groups made in {format_seconds(took_s)} ({text(event, 'backend')})")
    return lines


def _copies_text(event: Event) -> str:
    """How the copies of the state in host memory are."""
    if event.get("is_skipped") is True:
        return f"in-memory checkpoint skipped: {text(event, 'trouble') or 'the last one is not safe yet'}"
    trouble = text(event, "trouble")
    return (
        f"in-memory checkpoint without a replica: {trouble}" if trouble else "in-memory checkpoints have replicas again"
    )


def _checkpoint_lines(event: Event, step: int) -> list[str]:
    """A checkpoint has two events where it is written in the background: taken, and safe on the disk."""
    if event.get("error"):
        return [f"step {step:,}: checkpoint NOT saved: {printable(event['error'])}"]
    blocked_s = number(event, "blocked_s")
    if number(event, "seconds") is None and blocked_s is not None:
        return [f"step {step:,}: checkpoint taken, training waited {format_seconds(blocked_s)}"]
    cost = checkpoint_cost(event)
    return [f"step {step:,}: checkpoint saved" + (f" ({cost})" if cost else "")]


def checkpoint_cost(event: Event) -> str:
    """Size and seconds of a checkpoint; before 0.7 only the size of rank 0's shards was recorded.

    >>> checkpoint_cost({"bytes": 1e6, "total_bytes": 4e6, "seconds": 0.5}), checkpoint_cost({"bytes": 1e6})
    ('4.00 MB, 500 ms', '1.00 MB of rank 0')
    """
    whole, own, seconds = (number(event, name) for name in ("total_bytes", "bytes", "seconds"))
    parts = [format_bytes(whole)] if whole else [f"{format_bytes(own)} of rank 0"] if own else []
    return ", ".join([*parts, *([format_seconds(seconds)] if seconds else [])])


# ---- watching: what is cheap at every look, what is dear now and then ------------------------------------------------


# The whole record is read again at most this often, and never for more than a twentieth of the time.
LEAST_S = 2.0
SHARE = 0.05
OVER = (*ENDED, "interrupted")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run at one look."""

    state: str
    progress: Progress | None
    loss: tuple[float | None, ...]  # over the whole run
    tokens_per_s: tuple[float | None, ...]
    summary: Summary
    effective: Effective
    scores: StragglerScores
    saved_step: int | None  # newest checkpoint
    saved_age_s: float | None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in OVER


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeRecord:
    """What takes a look at the whole record."""

    summary: Summary
    effective: Effective
    scores: StragglerScores
    loss: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]


class Watcher:
    """Looks at a run again and again."""

    def __init__(self, run: Run, *, points: int = 120, clock: Callable[[], float] = time.time) -> None:
        self.run, self._points, self._clock = run, points, clock
        self._history = RunHistory.open(run)
        # Read on from where they stopped: a long run has more of them than can be looked through twice a second.
        self._rank, self._supervisor = EventReader(run.events(0)), EventReader(run.supervisor)
        self._changed_s = last_written(run)
        self._next_s = 0.0
        self._dear: _WholeRecord | None = None

    def look(self) -> View:
        """What there is now."""
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
        """What happened since the last time this was asked, a line each."""
        new = [(event, remark_of_rank) for event in self._rank.stream(only=REMARKED)]
        new += [(event, remark_of_supervisor) for event in self._supervisor.stream()]
        new.sort(key=lambda one: number(one[0], "t") or 0.0)
        return [line for event, remark in new for line in remark(event)]

    def _read_costly(self, *, force: bool) -> _WholeRecord:
        """The ledger, the curves and all else that needs the whole record."""
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
        timed = [(number(one, "tokens") or 0.0, took) for one in recent if (took := seconds(one, "duration_s"))]
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
        begun = self._history.events("run_start")
        detail = integer(begun[-1], "steps") if begun else None
        try:
            return detail or integer(at(self.run.plan(), "duration"), "steps") or 0
        except PhalanxError:
            return detail or 0
