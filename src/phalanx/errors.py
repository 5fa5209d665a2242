"""What can go wrong, as one tree.

PhalanxError
├── RuleError      the training specification speaks against it  exit 1
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

MAX_WHERE = 1000  # characters of a place: a hostile path is longer than any that a file can have
MOST_SHOWN = 100  # problems that one message tells of: nobody reads more, and a hostile file has a million
_FURTHER = re.compile(r"\n(?!  )")  # a line break before what is not indented; a part may be rendered already


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One mistake in four parts: where it is, what is wrong with which values, why it matters, what to do."""

    where: str
    what: str
    why: str = ""
    fix: str = ""

    def render(self) -> str:
        """The text a person reads, most important line first, without control characters of the file or call."""
        place = one_line(self.where)
        if len(place) > MAX_WHERE:
            place = f"{place[: MAX_WHERE // 2]}…{place[-MAX_WHERE // 2 :]}"
        head = f"{place}: {self.what}" if self.where else self.what
        parts = [head, *(f"  {line}" for line in (self.why, self.fix) if line)]
        # Further lines of a part are indented, once: none can pose as a message of its own.
        return "\n".join(_FURTHER.sub("\n  ", visible(part)) for part in parts)


class PhalanxError(Exception):
    """Base of everything Phalanx raises on purpose; carries all problems found, not only the first."""

    exit_code = 3

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        lines = [problem.render() for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"and {len(self.problems) - MOST_SHOWN:,} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[PhalanxError], tuple[tuple[Problem, ...]]]:
        """From a worker process to the one that prints it: an exception is made again from what this returns."""
        return type(self), (self.problems,)


class RuleError(PhalanxError):
    """The training specification speaks against what was asked for; the findings were told before."""

    exit_code = 1


class UserError(PhalanxError):
    """The job, the file or the call is wrong; the message says what to change.

    >>> import phalanx
    >>> try:
    ...     phalanx.load("none.toml")
    ... except phalanx.UserError as error:
    ...     print(error.problems[0].what)
    there is no such job file
    """

    exit_code = 2


class SystemFailure(PhalanxError):
    """The machine, the disk or the network failed; the request itself was fine."""

    exit_code = 3


class TrainingFailure(SystemFailure):
    """A run failed. `run` is what there is of it: it can be read, checked and resumed.

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
    """A UserError with a single problem."""
    return UserError(Problem(where=where, what=what, why=why, fix=fix))


# Share of letters in common below which a suggestion is noise: "colour" and "cluster" have 0.62, "seqlen" and
# "sequence" 0.71.
ALIKE = 0.65
LEAST_PREFIX = 3  # letters from which the beginning of a word names it
MOST_WORD = 120
MOST_UNKNOWN = 20  # keys that mean nothing, of one table, each of which gets a near miss: 1 ms each


def nearest(word: str, choices: Iterable[str]) -> str:
    """The valid choice closest to a misspelt word, or an empty string. A shared file ending is no likeness.

    >>> nearest("tensr", ["tensor", "data"]), nearest("seq", ["sequence", "seed"]), nearest("colour", ["cluster"])
    ('tensor', 'sequence', '')
    """
    if len(word) > MOST_WORD:  # no name is that long, and comparing takes its length squared
        return ""
    known = [choice for choice in choices if len(choice) <= 2 * MOST_WORD]
    likeness = [(_alike(word.lower(), choice.lower()), choice) for choice in known]
    best, found = max(likeness, key=lambda one: one[0], default=(0.0, ""))
    if best >= ALIKE:
        return found
    begins = [choice for choice in known if len(word) >= LEAST_PREFIX and choice.lower().startswith(word.lower())]
    return begins[0] if len(begins) == 1 else ""


def _alike(word: str, choice: str) -> float:
    stem, _, ending = word.rpartition(".")
    if stem and ending.isalpha() and choice.endswith(f".{ending}"):
        word, choice = stem, choice.removesuffix(f".{ending}")
    return difflib.SequenceMatcher(None, choice, word).ratio()


WorldError = SystemFailure  # its name until 0.6
