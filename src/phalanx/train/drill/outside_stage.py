"""The folder in which the drills of the suite `outside` run, with its own data, job and runs.

No file of the user is touched: files are damaged only in this folder. Runs that are compared have the same steps and
layout, so one run without a fault serves all of them, and one stopped run is copied for every drill that changes files
between a stop and the next start.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.elastic.local_launch import rank_environ
from phalanx.errors import Problem, SystemFailure
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.run import Run
from phalanx.train import prepare
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress
from phalanx.train.drill.faults import parse_faults
from phalanx.train.drill.perform import DrillResult, DrillSettings, perform_drill
from phalanx.train.drill.step_history import DrillHistory, read_history

# Of the job and of drills, so that all compare with one run.
STEPS = 30
# Of the run that is copied: it is stopped after about STOPPED_STEPS; its copies resume to RESUMED_STEPS with the
# same schedule.
STOPPED_STEPS, RESUMED_STEPS = 12, 40
# For a command that trains a few steps, on a machine that is busy with other things.
COMMAND_S = 600.0
TWO_RANKS = ("--cluster", "local-cpu:2", "--set", "parallel.shard=2")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """The result of one command `phalanx WORDS`."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    cpu_s: float  # of the command and its children

    @property
    def last(self) -> str:
        """The last line of stderr that is not blank."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class OutsideStage:
    """The folder of the drills and its runs. `tell` receives lines of progress."""

    def __init__(self, folder: Path, *, tell: Callable[[str], None] = lambda text: None) -> None:
        self.folder = folder.resolve()
        self.tell = tell
        self.job = self.folder / "job.toml"
        self.data = self.folder / "data"
        self._reference: DrillHistory | None = None
        self._ended: Run | None = None

    def prepare(self) -> None:
        """Write the job and build its dataset."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).with_name("outside_job.toml"), self.job)
        text = self.folder / "text.txt"
        words = "\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(900))
        text.write_text(words, encoding="utf-8")
        recipe = Recipe(origins=(TextOrigin(path=text),), vocab=300, heldout=0.1, reading=Reading(split_on="blank"))
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            build_dataset(recipe, self.data, lambda size: BuildProgress(nowhere, size))

    # ---- runs with faults ------------------------------------------------------------------------------------------

    def plan(self, overrides: Sequence[str] = (), *, steps: int = STEPS) -> Plan:
        """Return the plan of the job with these settings."""
        settings = ["fault.digest_every=1", *overrides]
        resolved = prepare.load_job(str(self.job), overrides=settings, cluster=None, steps=steps)
        plan = prepare.plan_for_run(resolved)
        prepare.check_here(plan)
        return prepare.with_data(plan, self.folder)

    def drill(
        self,
        faults: Sequence[str],
        *,
        overrides: Sequence[str] = (),
        steps: int = STEPS,
        hosts: int = 1,
        spares: int = 0,
        compared: bool = True,
    ) -> tuple[DrillResult, DrillHistory]:
        """Train with the faults and judge the run.

        `compared`: with the run without faults, or with a replay where the number of steps or the layout differs.
        """
        plan = self.plan(overrides, steps=steps)
        scene = DrillSettings(
            plan=plan,
            runs=self.folder / "runs",
            hosts=hosts,
            spares=spares,
            environ=rank_environ(os.environ, plan),
            replay=compared,
            tell=self.tell,
        )
        reference = self.reference() if compared and steps == STEPS else None
        result = perform_drill(scene, parse_faults(faults), reference=reference)
        return result, read_history(result.run)

    def reference(self) -> DrillHistory:
        """Return the history of the job without a fault; trained once."""
        if self._reference is None:
            self.tell("  the run without a fault")
            plan = self.plan()
            scene = DrillSettings(
                plan=plan,
                runs=self.folder / "runs",
                hosts=1,
                spares=0,
                environ=rank_environ(os.environ, plan),
                replay=False,
                tell=lambda text: None,
            )
            done = perform_drill(scene, ())
            if done.state != "done":
                raise _no_start(f"the run without a fault is {done.state}: {done.message}")
            self._reference = read_history(done.run)
        return self._reference

    # ---- commands --------------------------------------------------------------------------------------------------

    def command(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        most_bytes: int | None = None,
        until: Callable[[], bool] | None = None,
        signals: Sequence[int] = (),
    ) -> CommandResult:
        """Run `phalanx WORDS` and wait for its end.

        `most_bytes` limits its address space, `signals` are sent in turn while `until` holds.
        """

        def limit() -> None:
            if most_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

        before_s = _children_s()
        with open(self.folder / "out.txt", "w+b") as out, open(self.folder / "err.txt", "w+b") as err:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx", *words],
                cwd=self.folder,
                env={**os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # Ctrl-C in the terminal must reach the drill, not this process.
                start_new_session=True,
                preexec_fn=limit if most_bytes is not None else None,
            )
            try:
                _wait_process(process, until, signals)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            out.seek(0)
            err.seek(0)
            return CommandResult(
                words=words,
                code=process.returncode,
                out=out.read().decode(errors="replace"),
                err=err.read().decode(errors="replace"),
                cpu_s=_children_s() - before_s,
            )

    def ended_run(self) -> Run:
        """Return a run of two ranks that was stopped after a few steps, with several checkpoints; trained once."""
        if self._ended is None:
            self.tell(f"  a run that is stopped after {STOPPED_STEPS} steps, to be copied")
            words = ("train", str(self.job), *TWO_RANKS, "--set", "checkpoint.interval_s=0.05", "--no-probe")
            more = ("--steps", str(RESUMED_STEPS), "--name", "ended", "--runs", "runs")

            def is_far() -> bool:
                runs = sorted((self.folder / "runs").glob("ended-*/events-00000.jsonl"))
                return bool(runs) and len(self.losses(Run(path=runs[-1].parent))) >= STOPPED_STEPS

            done = self.command(*words, *more, until=is_far, signals=[signal.SIGINT])
            run_folders = sorted((self.folder / "runs").glob("ended-*"))
            if done.code not in (0, 130) or not run_folders or not Run(path=run_folders[-1]).saved_steps():
                raise _no_start(f"the run to be copied ended with exit code {done.code}: {done.last}")
            self._ended = Run(path=run_folders[-1])
        return self._ended

    def copy(self, name: str) -> Run:
        """Return a copy of the stopped run."""
        target = self.folder / "runs" / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.ended_run().path, target)
        return Run(path=target)

    def resume(self, run: Run) -> CommandResult:
        """Resume a run to its last step, as a user does."""
        return self.command("train", "--resume", str(run.path), "--no-probe")

    def losses(self, run: Run) -> dict[int, float]:
        """Return the loss of every step, as it was computed the last time."""
        events, _ = read_events(run.events(0))
        return {int(event["step"]): float(event["loss"]) for event in events if event["event"] == "step"}


def _wait_process(process: subprocess.Popen[bytes], until: Callable[[], bool] | None, signals: Sequence[int]) -> None:
    end_s = time.monotonic() + COMMAND_S
    pending = list(signals)
    while process.poll() is None and time.monotonic() < end_s:
        if pending and (until is None or until()):
            process.send_signal(pending.pop(0))
        time.sleep(0.02)


def _no_start(what: str) -> SystemFailure:
    why = "every drill is compared with it"
    return SystemFailure(Problem(where="phalanx drill --suite outside", what=what, why=why))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
