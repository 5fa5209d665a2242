"""The exceptions of Phalanx, as one tree.

PhalanxError
├── RuleError      a rule failed with severity error             exit 1
├── UserError      the job, the file or the call is wrong        exit 2
└── SystemFailure  the machine, disk or network failed           exit 3
    └── TrainingFailure  a run failed; its folder is in `.run`
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.visible import one_line, visible

# Characters of a place in a message; a longer path cannot exist.
MAX_WHERE = 1000
# Problems in one message: more are not read, and a hostile file has a million.
MOST_SHOWN = 100
# A line break before an unindented line; a part of a message may be rendered already.
_FURTHER = re.compile(r"\n(?!  )")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake in four parts: where it is, what is wrong with which values, why it matters, what to do."""

    where: str
    what: str
    why: str = ""
    fix: str = ""

    def render(self) -> str:
        """Return the message, most important line first, without control characters of the file or call."""
        place = one_line(self.where)
        if len(place) > MAX_WHERE:
            place = f"{place[: MAX_WHERE // 2]}…{place[-MAX_WHERE // 2 :]}"
        head = f"{place}: {self.what}" if self.where else self.what
        parts = [head, *(f"  {line}" for line in (self.why, self.fix) if line)]
        # Further lines of a part are indented, so that none of them looks like a separate message.
        return "\n".join(_FURTHER.sub("\n  ", visible(part)) for part in parts)


class PhalanxError(Exception):
    """Base of all intentional exceptions; carries all problems found, not only the first."""

    exit_code = 3

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [problem.render() for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"and {len(self.problems) - MOST_SHOWN:,} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[PhalanxError], tuple[tuple[Problem, ...]]]:
        """Support pickling between processes: an exception is recreated from the returned arguments."""
        return type(self), (self.problems,)


class RuleError(PhalanxError):
    """A rule failed with severity error. The findings have already been printed."""

    exit_code = 1


class UserError(PhalanxError):
    """The job, the file or the call is wrong; the message states what to change.

    >>> import phalanx
    >>> try:
    ...     phalanx.load("none.toml")
    ... except phalanx.UserError as error:
    ...     print(error.problems[0].what)
    there is no such job file
    """

    exit_code = 2


class SystemFailure(PhalanxError):
    """The machine, the disk or the network failed; the request itself was correct."""

    exit_code = 3


class TrainingFailure(SystemFailure):
    """A run failed. `run` is its folder as far as it got: it can be read, checked and resumed.

    >>> try:  # doctest: +SKIP
    ...     phalanx.train("job.toml")
    ... except phalanx.TrainingFailure as error:
    ...     phalanx.train(resume=error.run)
    """

    def __init__(self, problems: Problem | Sequence[Problem], *, run: Any = None, exit_code: int = 3) -> None:
        super().__init__(problems)
        self.run = run
        self.exit_code = exit_code


def mistake(where: str, what: str, *, why: str = "", fix: str = "") -> UserError:
    """Return a UserError with a single problem."""
    return UserError(Problem(where=where, what=what, why=why, fix=fix))


# Similarity below which a suggestion is noise: "colour" and "cluster" have 0.62, "seqlen" and "sequence" 0.71.
ALIKE = 0.65
# Letters from which the beginning of a word identifies it.
LEAST_PREFIX = 3
MOST_WORD = 120
# Unknown keys of one table for which a suggestion is searched: 1 ms each.
MOST_UNKNOWN = 20


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the valid choice closest to a misspelt word, or an empty text.

    Equal file endings do not count as similar.

    >>> nearest("tensr", ["tensor", "data"]), nearest("seq", ["sequence", "seed"]), nearest("colour", ["cluster"])
    ('tensor', 'sequence', '')
    """
    # No name is that long, and the comparison takes quadratic time.
    if len(word) > MOST_WORD:
        return ""
    candidates = [choice for choice in choices if len(choice) <= 2 * MOST_WORD]
    likeness = [(_alike(word.lower(), choice.lower()), choice) for choice in candidates]
    best, closest = max(likeness, key=lambda scored: scored[0], default=(0.0, ""))
    if best >= ALIKE:
        return closest
    begins = [choice for choice in candidates if len(word) >= LEAST_PREFIX and choice.lower().startswith(word.lower())]
    return begins[0] if len(begins) == 1 else ""


def _alike(word: str, choice: str) -> float:
    stem, _, ending = word.rpartition(".")
    if stem and ending.isalpha() and choice.endswith(f".{ending}"):
        word, choice = stem, choice.removesuffix(f".{ending}")
    return difflib.SequenceMatcher(None, choice, word).ratio()


WorldError = SystemFailure  # its name until 0.6
