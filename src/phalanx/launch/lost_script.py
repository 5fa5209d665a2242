"""Complete the batch script's work on another node of the job, if the script's node is lost.

Slurm does not kill such a job (`--no-kill`), and starts no other script: the agents would train to the end, and the
job would hold its nodes until the time limit. So another node stops the run before that limit, and when the run is
over it ends the job or puts it back into the queue.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.io.files import replace_text
from phalanx.launch.system import CONCLUDED, REQUEUE, WANTS_TO_GO_ON
from phalanx.record.run import Run

# Nodes that watch, of which the first remaining one acts; only this many query Slurm, however large the job is.
SUCCESSORS = 3
# In logs/: the launch whose end the agent on the script's node saw.
LEFT = "script-node-left"
COMMAND_S = 60.0  # for one of Slurm's commands
LIMIT_S = 300.0  # between queries of the time limit, which operators may change
ASK_S = 5.0  # between queries, while the script's node is silent at the end of a run
LOOK_S = 0.1  # between checks for the file
SLURMD_TIMEOUT_S = 300.0  # after which Slurm gives up a silent node; its own default
# Beyond twice that time, a node that Slurm still lists is considered alive.
MARGIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job as Slurm reports it: its state, the nodes it still has, the seconds to its limit."""

    state: str
    nodes: tuple[str, ...]
    left_s: float


class ScriptSuccessor:
    """The successor of the batch script on one node; on most nodes it does nothing."""

    def __init__(
        self,
        run: Run,
        hosts: Sequence[str],
        environ: Mapping[str, str],
        *,
        own: str,
        script_node: str,
        save_s: float,
        conclude: Callable[[], tuple[int, str]],
    ) -> None:
        """Create the successor; `hosts` are in order, `conclude` returns the run's exit code and a sentence."""
        self._run, self._environ, self._own, self._script_node = run, dict(environ), own, script_node
        self._save_s, self._conclude = save_s, conclude
        self._job = environ.get("SLURM_JOB_ID", "")
        self._successors = [name for name in hosts if name != script_node][:SUCCESSORS]
        has_slurm = bool(self._job) and shutil.which("squeue", path=environ.get("PATH")) is not None
        self._watches = bool(script_node) and own in self._successors and has_slurm
        self._over = threading.Event()
        self._launched = str(run.launch().get("launched"))

    def begin(self) -> None:
        """Start watching the time limit."""
        if self._watches:
            threading.Thread(target=self._watch_limit, daemon=True).start()

    def end(self) -> None:
        """Complete the work of a lost script, when the run is over on this node."""
        self._over.set()
        if self._own == self._script_node:
            with contextlib.suppress(OSError):
                replace_text(self._left_file, self._launched)
        elif self._watches:
            self._end_job_without_script()

    def _watch_limit(self) -> None:
        """Ask the run to save before the time limit, as the script, which alone gets the signal, does if it lives."""
        pause_s = 0.0
        while not self._over.wait(pause_s):
            view = self._view()
            pause_s = LIMIT_S
            if view is not None and view.state == "RUNNING":
                if view.left_s <= self._save_s and not self._over.is_set():
                    replace_text(self._run.stop_file, WANTS_TO_GO_ON + "\n")
                    return
                pause_s = min(LIMIT_S, max(1.0, view.left_s - self._save_s))

    def _end_job_without_script(self) -> None:
        deadline: float | None = None
        while True:
            view = self._view()
            if view is not None and view.state != "RUNNING":
                return  # cancelled, or returning to the queue
            if view is not None and self._script_node not in view.nodes:
                remaining = [name for name in self._successors if name in view.nodes]
                if remaining[:1] == [self._own]:
                    self._end_job()
                return
            # Until Slurm has noticed the loss, it lists the lost node as one of the job's.
            deadline = deadline or time.monotonic() + 2 * self._slurmd_timeout_s() + MARGIN_S
            next_query_s = time.monotonic() + ASK_S
            while time.monotonic() < next_query_s:
                if self._is_script_node_there():
                    return
                time.sleep(LOOK_S)
            if time.monotonic() > deadline:
                return

    def _end_job(self) -> None:
        code, sentence = self._conclude()
        loss_text = f"node {self._script_node} of the batch script was lost; {self._own} did the rest"
        self._log(f"{loss_text}\n{CONCLUDED}{sentence}\n")
        if code != REQUEUE or self._ask("scontrol", "requeue", self._job) is None:
            # Slurm has no other way to end a job without its script.
            self._ask("scancel", self._job)

    def _log(self, text: str) -> None:
        """Append to the script's log, because our own output went to its node."""
        array, task = (self._environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
        name = f"slurm-{array}_{task}.log" if array else f"slurm-{self._job}.log"
        with contextlib.suppress(OSError), open(self._run.path / "logs" / name, "a", encoding="utf-8") as file:
            file.write(text)

    @property
    def _left_file(self) -> Path:
        return self._run.path / "logs" / LEFT

    def _is_script_node_there(self) -> bool:
        """Return whether the script's agent saw the end of this launch, so that the script does, too."""
        try:
            with open(self._left_file, encoding="utf-8") as file:
                return file.read(100).strip() == self._launched
        except (OSError, UnicodeDecodeError):
            return False

    def _view(self) -> JobView | None:
        """Query the job; None if Slurm does not answer."""
        answer = self._ask("squeue", "-h", "-j", self._job, "-o", "%T|%N|%L")
        state, _, names_and_limit = (answer or "").strip().partition("|")
        names, _, time_left = names_and_limit.partition("|")
        nodes = self._ask("scontrol", "show", "hostnames", names) if names else ""
        if answer is None or nodes is None:
            return None
        return JobView(state=state, nodes=tuple(nodes.split()), left_s=slurm_seconds(time_left))

    def _slurmd_timeout_s(self) -> float:
        match = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", self._ask("scontrol", "show", "config") or "", re.MULTILINE)
        return float(match[1]) if match else SLURMD_TIMEOUT_S

    def _ask(self, *command: str) -> str | None:
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_S,
                # Slurm's times are parsed, so they must not be translated.
                env={**self._environ, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{command[0]}: {error}", file=sys.stderr)
            return None
        if result.returncode:
            print(f"{' '.join(command)}: {result.stderr.strip()[:300]}", file=sys.stderr)
            return None
        return result.stdout


def slurm_seconds(word: str) -> float:
    """Parse a time as Slurm prints it.

    >>> [slurm_seconds(word) for word in ("6:56", "1:00:00", "2-01:00:00", "UNLIMITED")]
    [416.0, 3600.0, 176400.0, inf]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", word.strip())
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
