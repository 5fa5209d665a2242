"""What launching returns: ids and texts, the queue, reasons, logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.api.results import PublicResult
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.launch.resource_request import LaunchRequest
    from phalanx.launch.system import JobExplanation, QueuedJob

QUEUE_HEAD = ("id", "job", "group", "system", "queue", "hosts", "state", "restarts", "step", "run")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchResult(PublicResult):
    """What was launched, or would be: ids, requests, and the texts that were submitted."""

    system: str
    ids: tuple[str, ...]  # empty in a dry run
    requests: tuple[LaunchRequest, ...]
    texts: Mapping[str, str]  # by file name
    final: tuple[QueuedJob, ...] = ()  # with `wait`: how they ended
    submitted: bool = True

    @property
    def exit_code(self) -> int:
        """3 when a job that was waited for failed."""
        return 3 if any(one.state != "done" for one in self.final) else 0

    def __str__(self) -> str:
        if not self.ids:
            return "\n".join(text.rstrip("\n") for text in self.texts.values())
        done = f"launched {plural(len(self.ids), 'job')} on {self.system}"
        lines = [done if self.submitted else f"wrote manifests of {plural(len(self.ids), 'job')}; nothing is submitted"]
        for job, request in zip(self.ids, self.requests, strict=True):
            lines.append(f"  {job}  {request.name}  {request.run}")
        lines += [f"  {one.id}: {state_text(one)}" for one in self.final]
        if not self.submitted:
            return "\n".join([*lines, f"kubectl apply --server-side -f {self.requests[0].run}/kubernetes.yaml"])
        first = self.ids[0]
        return "\n".join([*lines, f"phalanx why {first} · phalanx logs {first} · phalanx watch {self.requests[0].run}"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QueueTable(PublicResult):
    """Launched jobs, and how far they are."""

    jobs: tuple[QueuedJob, ...]
    steps: Mapping[str, int]  # that were done, by id
    notes: tuple[str, ...] = ()  # systems that could not be asked

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        if not self.jobs and self.notes:
            return "\n".join(self.notes)  # there may be jobs: nobody answers for them
        if not self.jobs:
            return "\n".join(["no jobs launched from here yet; phalanx launch JOB launches one", *self.notes])
        rows = [self._cells(one) for one in self.jobs]
        counts = Counter(one.state for one in self.jobs)
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        return "\n".join([*text_table([QUEUE_HEAD, *rows], right=(5, 7, 8)), summary, *self.notes])

    def _cells(self, one: QueuedJob) -> tuple[str, ...]:
        step = self.steps.get(one.id)
        return (
            *(one.id, one.name, one.group or "–", one.system, one.queue or "–", str(one.hosts)),
            *(state_text(one), str(one.restarts), "–" if step is None else f"{step:,}", Path(one.run).name),
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WhyResult(PublicResult):
    """Why a job waits or ended."""

    explanation: JobExplanation

    def __str__(self) -> str:
        one = self.explanation
        return f"{one.id} is {one.state}: {one.reason}; {one.cure}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LogText(PublicResult):
    """The ends of log files."""

    files: Mapping[str, str]

    def __str__(self) -> str:
        if len(self.files) == 1:
            return next(iter(self.files.values())).rstrip("\n")
        return "\n".join(f"==> {name} <==\n{text.strip() or '(empty)'}" for name, text in self.files.items())


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobAction(PublicResult):
    """A job that was cancelled or requeued."""

    id: str
    done: str
    run: str

    def __str__(self) -> str:
        return f"{self.id}: {self.done}; run folder: {self.run}"


def state_text(one: QueuedJob) -> str:
    """The state, and the system's own word for it where that says more."""
    return one.state if one.said in ("", one.state) else f"{one.state} ({one.said})"
