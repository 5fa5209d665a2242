"""The election of a run's coordinator: one small interface, implemented with files, etcd or a Kubernetes Lease.

The process that holds the newest term coordinates. A term is a number that only grows: the fencing number. Its holder
shows that it lives by renewing; a holder that is frozen (SIGSTOP, a host that swaps, a paused virtual machine) does
not, and loses its lease. When it wakes up it finds a newer term, and exits before it does anything. The state that the
next coordinator needs is in the run folder in any case (coordinator_memory.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.job.run_sections import ELECTION_PATTERN
from phalanx.record.run import Run

# Without a sign of life for so long, a holder has lost its term.
LEASE_S = 4.0
# Between two signs of life, and between two checks for those of another holder.
RENEW_S = 1.0
FILE = "file"
KINDS = "file, etcd:URL[,URL…], kubernetes[:NAMESPACE[/NAME]]"


class Deposed(Exception):
    """Raised when another process holds a newer term: this process must not write, send or end anything any more."""


class ElectionUnavailable(Exception):
    """Raised when the service that stores the terms cannot be reached, or refuses this process."""


class Election(Protocol):
    """The interface of an election. `term` is 0 before `take` has succeeded.

    Where a service is out of reach, all methods but `renew` and `check` raise ElectionUnavailable; those two trust a
    lease that is not over yet.
    """

    term: int

    def take(self) -> bool:
        """Become the coordinator; False when another process is and shows that it lives, which may take `LEASE_S`."""
        ...

    def renew(self) -> None:
        """Show that this process lives, at most every `RENEW_S`; raises Deposed."""
        ...

    def check(self) -> None:
        """Raise Deposed when another process has become the coordinator."""
        ...

    def release(self) -> None:
        """Give the term up, so that the next coordinator can begin at once."""
        ...

    def is_held(self) -> bool:
        """True when some process coordinates now."""
        ...


def elected_by(run: Run) -> str:
    """Return the election that the launcher of a run chose; files for a run of an older version."""
    return str(run.launch().get("election") or FILE)


def open_election(choice: str, run: Run, *, watched: str = "") -> Election:
    """Open the election that a job file or `phalanx agent --election` names; `watched` is the text of a `Watched`."""
    check_election(choice)
    kind, _, where = choice.partition(":")
    if kind == "etcd":
        from phalanx.elastic.etcd_election import EtcdElection

        return EtcdElection(where.split(","), run_name(run))
    if kind == "kubernetes":
        from phalanx.elastic.kubernetes_election import KubernetesElection

        namespace, _, name = where.partition("/")
        return KubernetesElection.in_cluster(namespace=namespace, name=name or run_name(run))
    from phalanx.elastic.file_election import FileElection, Watched

    return FileElection(run, watched=Watched.parse(watched))


def check_election(choice: str) -> None:
    """Raise UserError for a text that names no election."""
    if re.fullmatch(ELECTION_PATTERN, choice) is None:
        raise mistake("", f"the election {choice!r} is not known", fix=f"use {KINDS}")


def choose_election(choices: Sequence[str], run: Run) -> str:
    """Return the first choice that works here, tried before anything depends on it; raises SystemFailure if none does.

    The launcher chooses once, and its choice is in launch.json: hosts that chose for themselves might differ.
    """
    problems: list[str] = []
    for choice in choices:
        try:
            if choice == FILE:
                from phalanx.elastic.file_election import check_locks

                check_locks(run.path)
            else:
                open_election(choice, run).is_held()
            return choice
        except ElectionUnavailable as error:
            problems.append(f"{choice}: {error}")
    raise SystemFailure(
        Problem(
            where=str(run.path),
            what="; ".join(problems) or "fault.election names no election",
            why="hosts could not agree on which of them coordinates the run",
            fix=f"set fault.election to another one: {KINDS}",
        )
    )


def run_name(run: Run) -> str:
    """Return a run's name in a shared service: its folder's name and its id, in characters of a host name.

    A run of 0.6 has no id; there the folder's name must do.
    """
    stem = re.sub(r"[^a-z0-9-]+", "-", run.path.name.lower()).strip("-")[:40].strip("-") or "run"
    return f"phalanx-{stem}-{run.run_id[:12]}".rstrip("-")
