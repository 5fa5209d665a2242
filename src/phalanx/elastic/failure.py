"""The failure of a rank: the file it leaves, the first cause among several failures, and the message to the user."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import PhalanxError, Problem, SystemFailure
from phalanx.io.files import load_json, replace_text
from phalanx.io.values import integer
from phalanx.io.visible import visible
from phalanx.record.events import parse_event, read_events
from phalanx.record.host_file import open_events, opened_size
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.units import format_bytes, format_seconds, plural

# Characters of an exception's text that are stored.
MOST_MESSAGE = 4000
MOST_PART = 1000  # of its reason, and of its fix
HOST_LOST = "HostLost"
# Failures that do not show that a process or its host is gone: the rank to blame is unknown.
UNCLEAR = frozenset({"Left", "Deadlock", "Astray"})
# The end of rank 0's events that is searched for its last step: hundreds of events.
TAIL_BYTES = 2**18
# Errors of a rank that lost its peers: a consequence, never the cause.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|timed out|timeout|broken pipe|connectfullmesh|socket|"
    r"nccl|process group|peer",
    re.IGNORECASE,
)
# An error of this rank's own device, whatever else its text contains ("the launch timed out"). NCCL errors begin
# otherwise.
_OWN_DEVICE = re.compile(r"^\s*CUDA error:")
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|cannot allocate memory", re.IGNORECASE)
LESS_MEMORY = (
    'use a smaller batch.micro, parallel.recompute = "full", parallel.zero = 3, or more ranks; '
    "phalanx plan shows where the memory goes"
)


class LastSaveFailed(SystemFailure):
    """Raised when the last step could not be saved in its place; repeating the steps would end the same way.

    `is_rescued`: it was saved elsewhere, and the message names the place.
    """

    def __init__(self, problems: Problem | Sequence[Problem], *, is_rescued: bool = False) -> None:
        super().__init__(problems)
        self.is_rescued = is_rescued


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The end of one rank: by an exception (`kind` is its type), by a signal, or by silence."""

    rank: int
    step: int  # -1 before the first one
    at_s: float  # Unix time
    kind: str
    message: str
    module: str = ""
    exit_code: int = 3
    signal: int = 0
    # The rank's stack, where it could still be read.
    stack: str = ""
    why: str = ""  # of the error's first problem
    fix: str = ""
    # Another start of the ranks would not help.
    is_final: bool = False
    # The step it had is saved, and the message names the place.
    is_rescued: bool = False

    @property
    def is_user(self) -> bool:
        """True when the job or the call is to blame."""
        return self.exit_code == 2

    @property
    def is_consequence(self) -> bool:
        """True when the failure only shows that another rank is gone."""
        if self.kind == "Left":
            return True
        foreign = self.module.startswith(("torch", "builtins")) and self.kind not in (
            "MemoryError",
            "OutOfMemoryError",
            "ValueError",
        )
        if self.signal or self.is_user or _OWN_DEVICE.match(self.message):
            return False
        return foreign and bool(_LOST_PEER.search(self.message))


def failure_of(rank: int, error: BaseException, *, step: int) -> Failure:
    """Return the failure for an exception that ends a rank."""
    problems = error.problems if isinstance(error, PhalanxError) else ()
    parts = (problems[0].why, problems[0].fix) if problems else ("", "")
    why, fix = (redact(visible(text), os.environ)[:MOST_PART] for text in parts)
    return Failure(
        rank=rank,
        step=step,
        at_s=time.time(),
        kind=type(error).__name__,
        module=type(error).__module__,
        message=redact(str(error), os.environ)[:MOST_MESSAGE],
        exit_code=error.exit_code if isinstance(error, PhalanxError) else 3,
        stack=redact("".join(traceback.format_exception(error)), os.environ)[-MOST_MESSAGE:],
        why=why,
        fix=fix,
        is_final=isinstance(error, LastSaveFailed),
        is_rescued=isinstance(error, LastSaveFailed) and error.is_rescued,
    )


def write_error(run: Run, rank: int, error: BaseException, *, step: int) -> None:
    """Write the failure for the supervisor, as a complete file or none."""
    failure = failure_of(rank, error, step=step)
    try:
        run.error(rank).parent.mkdir(exist_ok=True)
        replace_text(run.error(rank), json.dumps(asdict(failure), ensure_ascii=False) + "\n")
    except OSError:
        # A full disk: the log still has the traceback.
        pass


def read_error(run: Run, rank: int) -> Failure | None:
    """Return the failure that a rank wrote, or None."""
    try:
        return Failure(**load_json(run.error(rank)))
    except (OSError, ValueError, TypeError):
        return None


def first(failures: Sequence[Failure]) -> Failure:
    """Return the cause among several failures: ranks that raised or were killed before those that lost their peer."""
    return min(failures, key=lambda failure: (failure.is_consequence, not failure.is_user, failure.at_s, failure.rank))


def steps_done(run: Run) -> int | None:
    """Return the steps that rank 0 has recorded since it last began; None where its newest events contain none."""
    try:
        with open_events(run.events(0)) as file:
            file.seek(max(0, opened_size(file) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return None
    for event in filter(None, map(parse_event, reversed(lines))):
        step = integer(event, "step")
        if step is not None and event["event"] in ("step", "run_start"):
            return step + 1 if event["event"] == "step" else step
    return None


def unsaved_steps(run: Run, saved: int | None) -> str:
    """Return a clause with the steps that are lost when the run resumes from step `saved`; "" when none are."""
    done = steps_done(run)
    lost = done - (saved or 0) if done is not None else 0
    if lost <= 0:
        return ""
    return f"NOT saved: {plural(lost, 'step')}, up to step {done:,}"


def tell(
    run: Run,
    cause: Failure,
    *,
    others: Sequence[Failure],
    world: int,
    out_of_memory: bool,
    host: str = "",
    at_most: int | None = None,
) -> str:
    """Return the one message about a failed run: first failing rank, step, cause, meaning, and remedy.

    `host` is the rank's host, left out on this machine. Checkpoints of more steps than `at_most` are not to be trusted.
    """
    rest, saved = _rest(cause, others, world), last_checkpoint(run, at_most=at_most)
    checkpoint_text = (
        "no checkpoint was written yet" if at_most is None else f"no checkpoint is of step {at_most:,} or before"
    )
    if cause.is_rescued or ("can be read" in cause.message and saved is not None):
        # The cause names the place of the newest step; or the checkpoints are what failed.
        checkpoint_text = ""
    elif saved is not None:
        checkpoint_text = f"last good checkpoint: step {saved:,}; resume with: phalanx train --resume {run.path}"
    when = f"step {cause.step:,}" if cause.step >= 0 else "before the first step"
    if cause.is_user:
        head = cause.message
        lines = [f"said by rank {cause.rank}, {when}", rest, checkpoint_text if saved is not None else ""]
    else:
        happened, why, fix = _explain(run, cause, out_of_memory=out_of_memory)
        head = f"{when}: rank {cause.rank} of {world} (host {host or platform.node() or 'localhost'}): {happened}"
        lines = [why, fix, rest, checkpoint_text, f"log: {run.log(cause.rank)}"]
    return "\n".join([head, *(f"  {line}" for line in lines if line)])


def _explain(run: Run, cause: Failure, *, out_of_memory: bool) -> tuple[str, str, str]:
    """Return (what happened, why, what to do)."""
    if cause.signal:
        return _signal(run, cause, out_of_memory=out_of_memory)
    if cause.kind == "Silence":
        return cause.message, "every other rank waits for it", f"its stack is in {run.stack(cause.rank)}"
    first_line = next(iter(cause.message.strip().splitlines()), "")
    if cause.kind in ("MemoryError", "OutOfMemoryError") or _NO_MEMORY.search(cause.message):
        detail = f": {first_line[:300]}" if first_line else ""
        return f"ran out of memory{detail}", _memory(run, cause.rank), cause.fix or LESS_MEMORY
    if cause.is_final:
        return first_line[:500], cause.why, cause.fix
    return f"{cause.kind}: {first_line[:500] or 'no message'}", cause.why, cause.fix


def _signal(run: Run, cause: Failure, *, out_of_memory: bool) -> tuple[str, str, str]:
    name = signal.Signals(cause.signal).name if cause.signal in signal.valid_signals() else f"signal {cause.signal}"
    if cause.signal == signal.SIGKILL and out_of_memory:
        return f"was killed ({name}) by the kernel for want of memory", _memory(run, cause.rank), LESS_MEMORY
    if cause.signal == signal.SIGKILL:
        return f"was killed ({name}) from outside", _memory(run, cause.rank), f"if memory was short: {LESS_MEMORY}"
    if cause.signal == signal.SIGBUS:
        why = "a memory-mapped file was cut short while it was read, or the disk or /dev/shm is full"
        return f"died of {name}", why, "check the data folder and the free space"
    return f"died of {name}", "native code failed; its last words are in the log", ""


def _memory(run: Run, rank: int) -> str:
    """Return the memory the rank used, the plan's prediction, and the host's memory, as text."""
    parts = []
    used = [event.get("memory_bytes") for event in read_events(run.events(rank))[0] if event["event"] == "step"]
    known = [size for size in used if isinstance(size, int | float)]
    if known:
        parts.append(f"it had used {format_bytes(max(known))}")
    with contextlib.suppress(PhalanxError, KeyError, TypeError):
        parts.append(f"the plan expected {format_bytes(run.plan()['memory']['total_bytes'])} per rank")
    total, available = host_memory()
    if total:
        parts.append(f"the host has {format_bytes(available)} free of {format_bytes(total)}")
    return "; ".join(parts)


def _rest(cause: Failure, others: Sequence[Failure], world: int) -> str:
    """Return one line about the other ranks."""
    same = sum(failure.message == cause.message for failure in others)
    lost = sum(failure.is_consequence and failure.message != cause.message for failure in others)
    counted = (
        (same, "said the same"),
        (lost, "lost their peer"),
        (len(others) - same - lost, "failed in other ways"),
        (world - 1 - len(others), "stopped by us"),
    )
    words = [f"{count} {text}" for count, text in counted if count > 0]
    return f"other ranks: {', '.join(words)}" if words else ""


def last_checkpoint(run: Run, *, at_most: int | None = None) -> int | None:
    """Return the step of the newest committed checkpoint that can be trusted, or None."""
    return max((step for step in run.saved_steps() if at_most is None or step <= at_most), default=None)


def host_memory() -> tuple[float, float]:
    """Return bytes of this host's memory, and those still available; zeros where /proc does not exist."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0.0, 0.0
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return float(fields.get("MemTotal", 0)) * 1024, float(fields.get("MemAvailable", 0)) * 1024


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for want of memory, as seen by this container."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            match = re.search(r"^oom_kill (\d+)", Path(path).read_text(encoding="ascii"), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match.group(1))
    return 0


def silence(rank: int, step: int, *, silent_s: float, where: str) -> Failure:
    """Return the failure of a rank that stopped answering."""
    place = f" in {where}" if where else ""
    message = f"stopped answering {format_seconds(silent_s)} ago{place}"
    return Failure(rank=rank, step=step, at_s=time.time() - silent_s, kind="Silence", message=message)


def by_signal(rank: int, step: int, number: int) -> Failure:
    """Return the failure of a rank that a signal ended."""
    return Failure(rank=rank, step=step, at_s=time.time(), kind="Signal", message="", signal=number)


def unexplained(rank: int, step: int, code: int) -> Failure:
    """Return the failure of a rank that exited and left no reason."""
    message = f"ended with exit code {code} and left no reason"
    return Failure(rank=rank, step=step, at_s=time.time(), kind="SystemExit", message=message)


def clear(run: Run) -> None:
    """Delete the failure files of an earlier start."""
    for path in (*run.path.glob("errors/rank-*.json"), *run.path.glob("flight/epoch-*.json")):
        path.unlink(missing_ok=True)
    os.makedirs(run.path / "errors", exist_ok=True)
