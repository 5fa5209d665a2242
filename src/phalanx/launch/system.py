"""The interface of a launch system, and its result types; local.py, slurm.py and k8s.py implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.launch.resource_request import LaunchRequest

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
STATES = (WAITING, RUNNING, DONE, FAILED, CANCELLED)
OVER = (DONE, FAILED, CANCELLED)
# In the stop file: the launch system interrupts the run, which should resume later.
WANTS_TO_GO_ON = "requeue"
CONCLUDED = "phalanx: "  # prefix of the last line of a launch in its log
# EX_TEMPFAIL: the exit code of a host whose run was interrupted, has saved and should resume.
REQUEUE = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job that a launch system has accepted."""

    id: str
    request: LaunchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job as its launch system reports it now."""

    id: str
    system: str
    name: str
    state: str  # one of STATES
    said: str  # the system's own term, such as "PENDING (Resources)"
    queue: str = ""
    hosts: int = 0
    run: str = ""  # the run folder, where known
    group: str = ""
    restarts: int = 0
    seconds: float | None = None  # since it entered this state, where known


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExplanation:
    """The reason why a job waits or ended, in one sentence, and a remedy."""

    id: str
    state: str
    reason: str
    cure: str


class LaunchSystem(Protocol):
    """A system that launches jobs; methods raise UserError for a wrong call, SystemFailure if the system fails."""

    name: str

    @property
    def is_here(self) -> bool:
        """True if this machine can reach the system; otherwise only `render` works."""
        ...

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        """Check the requests against the live system; raises UserError with all problems, returns remarks.

        Without `submits`, texts are written and nothing else: a system that cannot be reached is then a remark.
        """
        ...

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """Return what would be submitted, as texts by file name; `launch --dry-run` prints it."""
        ...

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Submit all requests or none, in their order."""
        ...

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Return this user's jobs that Phalanx launched; only those of `ids` if given."""
        ...

    def explain(self, job: str) -> JobExplanation:
        """Explain why a job waits, or how it ended."""
        ...

    def logs(self, job: str) -> list[str]:
        """Return files that the system wrote for a job: the output of the batch script, or of a pod."""
        ...

    def cancel(self, job: str) -> None:
        """End a job and remove it from the system; its run folder stays."""
        ...

    def requeue(self, job: str) -> str:
        """Restart a job from its newest checkpoint and return its new id."""
        ...
