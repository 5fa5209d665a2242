"""Names of the folders and files of a checkpoint. They are computed here and never read from a file.

step-00000100/                  a commit
    manifest.json               written last
    rank-00000.safetensors      tensors of rank 0
    rank-00000.json             what is in them, with digests
.tmp-step-00000100-ATTEMPT/     the same while it is written, with rank-00000.done or rank-00000.failed per rank
.old-step-00000100-ATTEMPT/     a commit on its way out

In an object store the files of a rank lie in step-00000100/ATTEMPT/, and the manifest of step-00000100/ says which
attempt counts.
"""

from __future__ import annotations

import re

from phalanx.errors import mistake

MANIFEST = "manifest.json"
DRAFT = ".tmp-"
GOING = ".old-"
_COMMIT = re.compile(r"step-(\d{8,18})", re.ASCII)
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]{0,63}", re.ASCII)


def commit_name(step: int) -> str:
    """The folder of a committed step.

    >>> commit_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def draft_name(step: int, attempt: str) -> str:
    """The folder of a step that is being written; `attempt` keeps a restarted job apart from its dead predecessor."""
    if not is_attempt(attempt):
        raise mistake("attempt", f"{attempt!r} cannot be part of a folder name", fix="use letters, digits, '.' and '_'")
    return f"{DRAFT}{commit_name(step)}-{attempt}"


def family(attempt: str) -> str:
    """What all saves of one start of the job have in common: AsyncSaver numbers them.

    >>> family("64a1.12"), family("64a1")
    ('64a1', '64a1')
    """
    head, dot, number = attempt.rpartition(".")
    return head if dot and number.isdecimal() else attempt


def draft_attempt(name: str) -> str | None:
    """The attempt of a draft, or None.

    >>> draft_attempt(".tmp-step-00000100-64a1.12")
    '64a1.12'
    """
    step, _, attempt = name.removeprefix(DRAFT).rpartition("-")
    return attempt if name.startswith(DRAFT) and step_of(step) is not None else None


def going_name(step: int, attempt: str) -> str:
    """The name a commit gets before it is deleted, so that half of it is never taken for a whole."""
    return f"{GOING}{commit_name(step)}-{attempt}"


def is_attempt(text: object) -> bool:
    """Whether a text from a file may stand for an attempt: one name, without a way out of its folder."""
    return isinstance(text, str) and _ATTEMPT.fullmatch(text) is not None


def step_of(name: str) -> int | None:
    """The step a folder name stands for, or None.

    >>> step_of("step-00000100"), step_of(".tmp-step-00000100-a")
    (100, None)
    """
    match = _COMMIT.fullmatch(name)
    if match is None or commit_name(int(match.group(1))) != name:
        return None
    return int(match.group(1))


def going_step(name: str) -> int | None:
    """The step of a commit on its way out, or None.

    >>> going_step(".old-step-00000100-a")
    100
    """
    head, _, _ = name.removeprefix(GOING).rpartition("-")
    return step_of(head) if name.startswith(GOING) else None


def data_name(rank: int) -> str:
    """The tensors of a rank."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """The index of a rank."""
    return f"rank-{rank:05d}.json"


def done_name(rank: int) -> str:
    """The note of a rank that its files are on the disk."""
    return f"rank-{rank:05d}.done"


def failed_name(rank: int) -> str:
    """The note of a rank that it gave up."""
    return f"rank-{rank:05d}.failed"
