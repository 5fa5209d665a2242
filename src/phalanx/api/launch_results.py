"""The results of launching: ids and submitted texts, the queue, explanations, logs."""

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
    """The jobs that were launched, or would be: ids, requests, and the submitted texts."""

    system: str
    ids: tuple[str, ...]  # empty in a dry run
    requests: tuple[LaunchRequest, ...]
    texts: Mapping[str, str]  # by file name
    final: tuple[QueuedJob, ...] = ()  # with `wait`: the jobs in their final state
    submitted: bool = True

    @property
    def exit_code(self) -> int:
        """3 if a job that was waited for failed."""
        return 3 if any(job.state != "done" for job in self.final) else 0

    def __str__(self) -> str:
        if not self.ids:
            return "\n".join(text.rstrip("\n") for text in self.texts.values())
        done = f"launched {plural(len(self.ids), 'job')} on {self.system}"
        lines = [done if self.submitted else f"wrote manifests of {plural(len(self.ids), 'job')}; nothing is submitted"]
        for job, request in zip(self.ids, self.requests, strict=True):
            lines.append(f"  {job}  {request.name}  {request.run}")
        lines += [f"  {job.id}: {state_text(job)}" for job in self.final]
        if not self.submitted:
            return "\n".join([*lines, f"kubectl apply --server-side -f {self.requests[0].run}/kubernetes.yaml"])
        first = self.ids[0]
        return "\n".join([*lines, f"phalanx why {first} · phalanx logs {first} · phalanx watch {self.requests[0].run}"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QueueTable(PublicResult):
    """Launched jobs and their progress."""

    jobs: tuple[QueuedJob, ...]
    steps: Mapping[str, int]  # steps done, by id
    notes: tuple[str, ...] = ()  # errors of systems that did not answer

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        if not self.jobs and self.notes:
            # There may be jobs, but no system answered.
            return "\n".join(self.notes)
        if not self.jobs:
            return "\n".join(["no jobs launched from here yet; phalanx launch JOB launches one", *self.notes])
        rows = [self._cells(job) for job in self.jobs]
        counts = Counter(job.state for job in self.jobs)
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
    """The reason why a job waits or ended."""

    explanation: JobExplanation

    def __str__(self) -> str:
        explanation = self.explanation
        return f"{explanation.id} is {explanation.state}: {explanation.reason}; {explanation.cure}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LogText(PublicResult):
    """The last lines of log files."""

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
    """Return the state, with the system's own word for it if that differs."""
    return one.state if one.said in ("", one.state) else f"{one.state} ({one.said})"
