"""What a launch system can do, and what it answers with; local.py, slurm.py and Kubernetes implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.launch.resource_request import LaunchRequest

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"
STATES = (WAITING, RUNNING, DONE, FAILED, CANCELLED)
OVER = (DONE, FAILED, CANCELLED)
WANTS_TO_GO_ON = "requeue"  # in the stop file: the system interrupts the run, nobody wants it to end
CONCLUDED = "phalanx: "  # before the last words of a launch in its log
REQUEUE = 75  # EX_TEMPFAIL: it saved, and wants to go on; the exit code of a host whose run was interrupted


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job that a system has taken."""

    id: str
    request: LaunchRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job as its launch system sees it now."""

    id: str
    system: str
    name: str
    state: str  # one of STATES
    said: str  # the system's own word, such as "PENDING (Resources)"
    queue: str = ""
    hosts: int = 0
    run: str = ""  # its run folder, where known
    group: str = ""
    restarts: int = 0
    seconds: float | None = None  # in this state, where known


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExplanation:
    """Why a job waits or ended: one sentence, and the cure."""

    id: str
    state: str
    reason: str
    cure: str


class LaunchSystem(Protocol):
    """Where jobs are launched. What cannot be done raises UserError (the call) or SystemFailure (the system)."""

    name: str

    @property
    def is_here(self) -> bool:
        """Whether this machine can reach the system; without it, `render` is all that works."""
        ...

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        """Hold the requests against the live system; raises UserError with all that is wrong, returns remarks.

        Without `submits`, texts are written and nothing else: a system that cannot be reached is a remark.
        """
        ...

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """What would be submitted, as texts by file name; `launch --dry-run` prints it."""
        ...

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Hand the requests over, all or none, in their order."""
        ...

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Jobs of this user that Phalanx launched; of `ids` alone where given."""
        ...

    def explain(self, job: str) -> JobExplanation:
        """Why a job waits, or how it ended."""
        ...

    def logs(self, job: str) -> list[str]:
        """Files that the system itself wrote of a job: the output of the batch script, of a pod."""
        ...

    def cancel(self, job: str) -> None:
        """End a job and leave nothing behind; its run folder stays."""
        ...

    def requeue(self, job: str) -> str:
        """Start a job again, which goes on from its newest checkpoint; its id from now on."""
        ...
