"""The folder of a sweep: results of runs under the digest of their settings, and the table for `scale fit`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.io.files import FileTooLargeError, read_bounded, replace_text
from phalanx.io.path_probes import is_folder
from phalanx.io.write_errors import write_failure
from phalanx.scale.run_points import parametrization_text
from phalanx.scale.sweep_grid import SweepRun

TABLE = "points.csv"  # the name that `scale fit FOLDER` looks for
COLUMNS = (
    *("run", "params", "tokens", "flops", "loss", "tokenizer", "data", "seed", "lr", "batch_tokens"),
    *("parametrization", "unique_tokens", "budget", "status"),
)
MOST_BYTES = 1 << 20
DONE, DIVERGED = "done", "diverged"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOutcome:
    """The outcome of one run; `state` is done, diverged, failed, stopped or waiting."""

    run: SweepRun
    digest: str
    state: str = "waiting"
    loss: float | None = None
    folder: str = ""  # of the run, below the sweep's folder
    seconds: float = 0.0
    message: str = ""
    cached: bool = False  # True if it was read from the folder instead of trained

    @property
    def is_final(self) -> bool:
        """True if training the run again would give nothing new."""
        return self.state in (DONE, DIVERGED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFolder:
    """The files of a sweep, all below `path`."""

    path: Path

    @property
    def runs(self) -> Path:
        """The folder of the run folders."""
        return self.path / "runs"

    @property
    def table(self) -> Path:
        """The path of the table that `phalanx scale fit` reads."""
        return self.path / TABLE

    def prepare(self) -> None:
        """Create the folders; raises SystemFailure."""
        try:
            (self.path / "results").mkdir(parents=True, exist_ok=True)
            self.runs.mkdir(exist_ok=True)
        except OSError as error:
            raise write_failure(self.path, error, fix="name another folder with --out") from error

    def outcome(self, run: SweepRun, digest: str) -> SweepOutcome:
        """Return the result of an earlier call for a run; "waiting" where none can be trusted."""
        empty = SweepOutcome(run=run, digest=digest)
        try:
            values = json.loads(read_bounded(self._result(digest), MOST_BYTES))
            state, loss, folder = str(values["state"]), values["loss"], str(values["folder"])
            seconds, message = float(values["seconds"]), str(values["message"])
        except (OSError, FileTooLargeError, ValueError, KeyError, TypeError):
            return empty
        is_name = folder not in ("", ".", "..") and Path(folder).name == folder
        if not is_name or not is_folder(self.runs / folder) or (state == DONE and not isinstance(loss, int | float)):
            return empty
        return SweepOutcome(
            run=run,
            digest=digest,
            state=state if state in (DONE, DIVERGED) else "stopped",
            loss=float(loss) if state == DONE else None,
            folder=folder,
            seconds=seconds,
            message=message,
            cached=True,
        )

    def keep(self, outcome: SweepOutcome) -> None:
        """Write an outcome to its file atomically."""
        values = {
            "state": outcome.state,
            "loss": outcome.loss,
            "folder": outcome.folder,
            "seconds": round(outcome.seconds, 3),
            "message": outcome.message,
            "name": outcome.run.name,
        }
        replace_text(self._result(outcome.digest), json.dumps(values, indent=1) + "\n")

    def _result(self, digest: str) -> Path:
        return self.path / "results" / f"{digest}.json"

    def write_table(self, outcomes: Sequence[SweepOutcome], *, identity: Mapping[str, Any]) -> None:
        """Write the table of all runs of the grid; unfinished runs have no loss, and their state as status."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for outcome in outcomes:
            job = outcome.run.job
            writer.writerow(
                {
                    "run": outcome.run.name,
                    "params": outcome.run.params,
                    "tokens": outcome.run.tokens,
                    "flops": f"{outcome.run.flops:.6g}",
                    "loss": "" if outcome.loss is None else f"{outcome.loss:.6f}",
                    "seed": job.data.seed,
                    "lr": f"{job.optim.lr:.6g}",
                    "batch_tokens": job.batch.global_tokens,
                    "parametrization": parametrization_text(job.scale),
                    "budget": f"{outcome.run.budget:.6g}",
                    "status": outcome.state,
                    **identity,
                }
            )
        replace_text(self.table, text.getvalue())
