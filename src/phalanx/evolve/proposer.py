"""A language model as a source of candidates: a command that reads a prompt and writes a change as JSON."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from phalanx.errors import mistake
from phalanx.evolve.archive import ArchiveEntry

if TYPE_CHECKING:
    from phalanx.evolve.problem import Genome, SearchProblem

MOST_ANSWER = 256 << 10
LIMIT_S = 120.0
MOST_BRACES = 200  # places where the object may begin: each is read up to the end of the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeProposer:
    """A command of the user's own; it is started once per proposal."""

    command: tuple[str, ...]
    limit_s: float = LIMIT_S

    def propose(self, problem: SearchProblem, parent: ArchiveEntry) -> Genome:
        """The parent with the change that the command answers; raises ValueError where the answer is none."""
        answer = self._ask(problem.prompt(parent.genome, parent.outcome))
        change = find_object(answer)
        return problem.read_genome({**parent.genome, **change})

    def _ask(self, prompt: str) -> str:
        # A session of its own, so that Ctrl-C and the time limit end what the command started too. The answer goes to
        # a file: a pipe would be read without bound.
        with TemporaryFile() as out:
            try:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise ValueError(f"the command cannot be started: {error.strerror or error}") from error
            try:
                process.communicate(prompt.encode(), timeout=self.limit_s)
            except subprocess.TimeoutExpired as error:
                raise ValueError(f"no answer within {self.limit_s:g} s") from error
            finally:
                _end_session(process)
            if process.returncode:
                raise ValueError(f"the command ended with exit code {process.returncode}")
            out.seek(0)
            raw = out.read(MOST_ANSWER + 1)
        if len(raw) > MOST_ANSWER:
            raise ValueError("the answer is longer than 256 KiB")
        return raw.decode(errors="replace")


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_proposer(command: str) -> ChangeProposer:
    """The proposer of a command line, which no shell sees; raises UserError for one that cannot be split."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise mistake("--proposer", f"is not a command line: {error}") from error
    if not words:
        raise mistake("--proposer", "names no command", fix='such as --proposer "my-model --json"')
    return ChangeProposer(command=words)


def find_object(answer: str) -> dict[str, object]:
    """The first JSON object of an answer, which may stand between other words or in a code fence.

    >>> find_object('Try this: ```json {"tp": 4}```')
    {'tp': 4}
    """
    decoder = json.JSONDecoder()
    start = answer.find("{")
    for _ in range(MOST_BRACES):
        if start < 0:
            break
        try:
            found, _ = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and found:
            return found
        start = answer.find("{", start + 1)
    raise ValueError("no JSON object in the answer")
