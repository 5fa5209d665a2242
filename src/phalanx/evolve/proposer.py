"""Candidates from a language model: a command that reads a prompt on stdin and writes a change as JSON on stdout."""

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

MOST_ANSWER = 256 << 10  # bytes
LIMIT_S = 120.0
# Opening braces that are tried as the start of the object: each trial may read to the end of the answer.
MOST_BRACES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeProposer:
    """A user-supplied command, started once per proposal."""

    command: tuple[str, ...]
    limit_s: float = LIMIT_S

    def propose(self, problem: SearchProblem, parent: ArchiveEntry) -> Genome:
        """Return the parent with the change that the command answers; raise ValueError if it is not a candidate."""
        answer = self._ask(problem.prompt(parent.genome, parent.outcome))
        change = find_object(answer)
        return problem.read_genome({**parent.genome, **change})

    def _ask(self, prompt: str) -> str:
        # A new session, so that the time limit also ends processes that the command started. The answer goes to a file,
        # because communicate() would read a pipe without bound.
        """Run the command and return its stdout; raise ValueError if it fails, times out or answers over 256 KiB."""
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
    """Kill the command with every process in its session, and reap it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_proposer(command: str) -> ChangeProposer:
    """Parse a command line, which is run without a shell; raise UserError if it cannot be split or is empty."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise mistake("--proposer", f"is not a command line: {error}") from error
    if not words:
        raise mistake("--proposer", "names no command", fix='such as --proposer "my-model --json"')
    return ChangeProposer(command=words)


def find_object(answer: str) -> dict[str, object]:
    """Return the first non-empty JSON object of an answer, which may be surrounded by prose or a code fence.

    >>> find_object('Try this: ```json {"tp": 4}```')
    {'tp': 4}
    """
    decoder = json.JSONDecoder()
    start = answer.find("{")
    for _ in range(MOST_BRACES):
        if start < 0:
            break
        try:
            candidate, _ = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            candidate = None
        if isinstance(candidate, dict) and candidate:
            return candidate
        start = answer.find("{", start + 1)
    raise ValueError("no JSON object in the answer")
