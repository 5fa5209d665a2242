"""Sources of kernels: a command on this machine, an endpoint with OpenAI's chat protocol, or a recorded transcript.

A proposer gets a prompt and returns a text. The text is judged, never trusted.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from phalanx.elastic.json_http import HttpProblem, ask_json
from phalanx.errors import mistake
from phalanx.io.files import read_text
from phalanx.io.values import printable
from phalanx.units import MIB

MOST_ANSWER_BYTES = 1 * MIB
KEY_VARIABLES = ("PHALANX_PROPOSER_KEY", "OPENAI_API_KEY")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)\r?\n?```", re.DOTALL | re.IGNORECASE)


class NoAnswerError(Exception):
    """Raised if the proposer gave no answer; the message is the reason."""


class Proposer(Protocol):
    """Anything that answers a prompt."""

    def propose(self, prompt: str) -> str:
        """Return the answer; raise NoAnswerError if there is none."""


class CommandProposer:
    """A local command: reads the prompt on stdin and writes the answer to stdout."""

    def __init__(self, command: str, *, timeout_s: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise mistake("--proposer", f"{command[:80]!r} is no command: {error}") from None
        if not self._words:
            raise mistake("--proposer", "names no command")
        self._timeout_s = timeout_s

    def propose(self, prompt: str) -> str:
        """Run the command once and return its stdout, at most 1 MiB."""
        try:
            process = subprocess.run(
                self._words, input=prompt.encode(), capture_output=True, timeout=self._timeout_s, check=False
            )
        except FileNotFoundError:
            raise mistake("--proposer", f"there is no program {self._words[0]}") from None
        except PermissionError:
            raise mistake("--proposer", f"{self._words[0]} cannot be run") from None
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"the command gave no answer in {self._timeout_s:g} s") from None
        if process.returncode != 0:
            last_line = printable(
                process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or "nothing", most=200
            )
            raise NoAnswerError(f"the command ended with {process.returncode} and said {last_line}")
        return process.stdout[:MOST_ANSWER_BYTES].decode("utf-8", "replace")


class EndpointProposer:
    """An endpoint with OpenAI's `/chat/completions`; its key is taken from the environment."""

    def __init__(self, url: str, model: str, *, environment: Mapping[str, str], timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise mistake("--endpoint", f'"{url[:80]}" is no http:// or https:// address')
        if not model:
            raise mistake("--endpoint", "needs the name of a model", fix="give --model")
        self._url, self._model, self._timeout_s = url.rstrip("/"), model, timeout_s
        self._key = next((environment[name] for name in KEY_VARIABLES if environment.get(name)), "")

    def propose(self, prompt: str) -> str:
        """Send one request and return the message of the first choice."""
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            status, reply = ask_json(
                self._url, "/chat/completions", body=body, headers=headers, timeout_s=self._timeout_s
            )
        except HttpProblem as error:
            raise NoAnswerError(printable(str(error), most=200)) from None
        if status != 200:
            raise NoAnswerError(f"the endpoint answered with status {status}")
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            raise NoAnswerError("the endpoint answered without a message")
        return content


class ReplayProposer:
    """Recorded answers, one JSON object per line with "prompt" and "answer"; each is returned once, in order."""

    def __init__(self, path: Path) -> None:
        self._path, self._answers = path, dict[str, list[str]]()
        for number, line in enumerate(read_text(path, noun="transcript", most_bytes=64 * MIB).splitlines(), start=1):
            try:
                entry = json.loads(line)
                self._answers.setdefault(entry["prompt"], []).append(str(entry["answer"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise mistake(
                    f"{path}:{number}", "is no line of a transcript", fix="record one with --record"
                ) from None

    def propose(self, prompt: str) -> str:
        """Return the next answer to this prompt."""
        answers = self._answers.get(prompt)
        if not answers:
            raise NoAnswerError(f"{self._path} has no answer to this prompt")
        return answers.pop(0)


def kernel_of_answer(answer: str) -> str:
    """Return the Python code in an answer: the longest fenced block that defines a kernel, or the answer itself.

    Empty if the answer defines none.

    >>> kernel_of_answer("Here:\\n```python\\ndef kernel(x):\\n    return x\\n```")
    'def kernel(x):\\n    return x'
    >>> kernel_of_answer("I cannot do that.")
    ''
    """
    blocks = [block for block in _FENCE.findall(answer) if "def kernel" in block]
    if blocks:
        return max(blocks, key=len)
    return answer if "def kernel" in answer and "```" not in answer else ""
