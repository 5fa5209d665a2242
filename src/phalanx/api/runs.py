"""Runs: open and list them, report on one, compare two, follow one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, own_version, teller, warn
from phalanx.errors import SystemFailure, UserError, mistake
from phalanx.io.codec import json_values
from phalanx.io.path_probes import is_file, is_folder
from phalanx.io.visible import one_line
from phalanx.job.load import ResolvedJob
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, list_runs, open_run
from phalanx.units import format_count, plural

if TYPE_CHECKING:
    from phalanx.api.jobs import AnyJob
    from phalanx.api.watching import RunLook
    from phalanx.record.account.summary import Summary
    from phalanx.record.report.diff import Difference, Side
    from phalanx.record.report.run_report import RunReport

AnyRun = str | Path | Run


def run(path: AnyRun) -> Run:
    """Return the run in a folder: `print(run)` is its report, `run.frame("loss")` its numbers by step.

    Raises UserError if the folder is not a run, with the name of a similar folder that is.

    >>> first_run = run("runs/first-run")  # doctest: +SKIP
    >>> first_run.frame("loss", "tokens_per_s")  # doctest: +SKIP
    """
    return path if isinstance(path, Run) else open_run(path)


class RunList(Sequence[Run]):
    """The runs of a folder, newest first; shown as a table."""

    def __init__(self, found: Sequence[Run]) -> None:
        self._runs = tuple(found)

    def __getitem__(self, index: Any) -> Any:
        return RunList(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def rows(self) -> list[dict[str, Any]]:
        """Return name, state, steps and the last loss of every run."""
        return [_run_row(run_) for run_ in self._runs]

    def frame(self) -> Any:
        """Return one row per run: a pandas DataFrame, or a dict of numpy columns if pandas is not installed."""
        from phalanx.io.notebook import as_frame

        rows = self.rows()
        return as_frame({name: [row[name] for row in rows] for name in COLUMNS})

    def __repr__(self) -> str:
        return f"<RunList: {plural(len(self), 'run')}>"

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        if not self._runs:
            return "no runs"
        rows = self.rows()
        cells = [tuple(_cell_text(value) for value in row.values()) for row in rows]
        lines = [line.rstrip() for line in text_table([COLUMNS, *cells], right=(3, 4, 5, 6))]
        if any(row["state"] == "interrupted" for row in rows):
            lines.append(
                "interrupted: its processes ended without an error message; phalanx train --resume RUN continues it"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from phalanx.io.tables import html_table

        return html_table([[_cell_text(value) for value in row.values()] for row in self.rows()], head=COLUMNS)


COLUMNS = ("name", "state", "model", "ranks", "step", "loss", "tokens_per_s")


def _run_row(found: Run) -> dict[str, Any]:
    """Return a run as one row, from its index alone; for a damaged run, what can still be read."""
    from phalanx.record.account.summary import summarize_briefly
    from phalanx.record.archive.history import RunHistory
    from phalanx.record.report.run_report import with_lost_processes

    try:
        s = with_lost_processes(found, summarize_briefly(found, RunHistory.open(found)))
    except (UserError, SystemFailure):
        return {**dict.fromkeys(COLUMNS), "name": found.name, "state": "damaged", "model": ""}
    return {
        "name": found.name,
        "state": s.state,
        "model": s.model,
        "ranks": s.world,
        "step": s.steps,
        "loss": s.last_loss,
        "tokens_per_s": s.tokens_per_s.measured,
    }


def _cell_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if value < 100 else format_count(value)
    return str(value)


def runs(folder: str | Path = "runs") -> RunList:
    """Return the runs of a folder, newest first.

    >>> for run in runs("runs"):  # doctest: +SKIP
    ...     print(run.name, run.status()["state"])
    """
    root = Path(folder)
    if not is_folder(root):
        raise mistake(str(root), "there is no such folder", fix="name the folder that phalanx train --runs named")
    return RunList(list_runs(root))


# ---- report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ReportPage(PublicResult):
    """The results of a run with its curves, checkpoints and incidents; `str()` is the Markdown page."""

    run: Run
    report: RunReport

    @property
    def summary(self) -> Summary:
        """The numbers of the run: measured and predicted."""
        return self.report.summary

    def __str__(self) -> str:
        return self.to_markdown().removesuffix("\n")

    def __repr__(self) -> str:
        s = self.summary
        return f"<ReportPage: {self.run.name}, {s.state}, {plural(s.steps, 'step')}>"

    def to_markdown(self) -> str:
        """Return one page of Markdown."""
        from phalanx.record.report.render import render_markdown

        return render_markdown(self.report)

    def to_html(self) -> str:
        """Return one HTML file with figures, without scripts, that loads no other file."""
        from phalanx.record.report.html import render_html

        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return render_html(self.report, made=f"phalanx {own_version()}, report of {now}")

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html

        return document_as_html(self.to_html())

    def to_dict(self) -> dict[str, Any]:
        """Return summary, ledger, effective training time, straggler scores and curves."""
        ledger = self.summary.ledger
        parts = {
            "summary": self.summary,
            "ledger": ledger.to_json() if ledger is not None else None,
            "effective": self.report.effective,
            "scores": self.report.scores.score,
            "curves": self.report.curves,
        }
        return dict(json_values(parts))

    def write(self, *, html: str | Path | None = None, markdown: str | Path | None = None) -> list[Path]:
        """Write the named files, or report.html and report.md in the run folder; return their paths."""
        from phalanx.io.files import write_text

        if html is None and markdown is None:
            html, markdown = self.run.path / "report.html", self.run.path / "report.md"
        outputs = [("html", html, self.to_html), ("markdown", markdown, self.to_markdown)]
        for kind, name, make in outputs:
            if name is not None:
                write_text(Path(name), make(), fix=f"name another file with --{kind}, or - for stdout")
        return [Path(name) for _, name, _ in outputs if name is not None]


def report(path: AnyRun) -> ReportPage:
    """Read the report of a run, in whatever state the run is.

    >>> page = report("runs/first-run")  # doctest: +SKIP
    >>> page.summary.steps  # doctest: +SKIP
    100
    """
    from phalanx.record.report.run_report import read_run_report

    reported_run = run(path)
    return ReportPage(run=reported_run, report=read_run_report(reported_run))


# ---- diff ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunComparison(PublicResult):
    """The differences between two runs, plans or jobs."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        from phalanx.record.report.diff import render_difference

        return render_difference(self.a, self.b, list(self.differences))

    def __repr__(self) -> str:
        count = plural(len(self.differences), "difference") if self.differences else "no difference"
        return f"<RunComparison: {one_line(self.a.name)} and {one_line(self.b.name)}, {count}>"

    def to_dict(self) -> dict[str, Any]:
        """Return every difference with both values."""
        sides = {
            "a": {"name": self.a.name, "kind": self.a.kind},
            "b": {"name": self.b.name, "kind": self.b.kind},
        }
        return {**sides, "same": not self.differences, "differences": json_values(self.differences)}

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, 1 if something does."""
        return 1 if self.differences else 0


def diff(
    a: AnyRun | Plan | AnyJob, b: AnyRun | Plan | AnyJob, *, within: float = 0.0, progress: bool | Tell = False
) -> RunComparison:
    """Compare two runs, plans or jobs: run folders, plan or job files, or Run, Plan and Job objects.

    Measured numbers that differ by less than the share `within` count as equal.

    >>> difference = diff("examples/drill.toml", "examples/first-run.toml")
    >>> difference.exit_code
    1
    """
    from phalanx.record.report.diff import compare_sides, of_runs

    tell = teller(progress)
    if not 0.0 <= within < 1.0:
        raise mistake("phalanx diff", f"--within {within} is not a share", fix="use a number from 0 to 1, as 0.05")
    opened = [open_run(side) if isinstance(side, str | Path) and is_folder(side) else side for side in (a, b)]
    if isinstance(opened[0], Run) and isinstance(opened[1], Run):
        side_a, side_b = of_runs(opened[0], opened[1])
    else:
        side_a, side_b = (_diff_side(side, tell) for side in opened)
    return RunComparison(a=side_a, b=side_b, differences=tuple(compare_sides(side_a, side_b, within=within)))


def _diff_side(given: AnyRun | Plan | AnyJob, tell: Tell) -> Side:
    from phalanx.job.load import job_to_dict, load
    from phalanx.record.report.diff import of_job, of_plan, of_run

    if isinstance(given, Run):
        return of_run(given)
    if isinstance(given, Plan):
        return of_plan(given.job.name, given.to_dict())
    if isinstance(given, ResolvedJob | Job):
        job = given if isinstance(given, Job) else given.job
        return of_job(job.name if isinstance(given, Job) else str(given.path), job_to_dict(job))
    if not isinstance(given, str | Path):
        raise mistake(
            "phalanx.diff",
            f"{str(given)[:60]!r} is of type {type(given).__name__}",
            fix="give a path, or what phalanx.load, plan, train or run returned",
        )
    name, path = str(given), Path(given)
    if path.suffix == ".toml":
        resolved = load(name)
        warn(resolved.warnings, tell)
        return of_job(name, job_to_dict(resolved.job))
    if not is_file(path):
        raise mistake(name, "there is no such run, plan or job", fix="name a run folder, a plan.json or a job.toml")
    from phalanx.record.run_files import read_json

    fix = "phalanx plan job.toml --out plan.json writes a plan; a job file ends in .toml"
    try:
        data = read_json(path)
    except UserError as error:
        raise mistake(str(path), "is no plan: it is not a JSON object", fix=fix) from error
    if not str(data.get("schema", "")).startswith("phalanx.plan/"):
        raise mistake(str(path), 'is no plan: it has no "schema": "phalanx.plan/…"', fix=fix)
    return of_plan(name, data)


# ---- watch -----------------------------------------------------------------------------------------------------------


def watch(path: AnyRun, *, every_s: float = 0.5) -> Iterator[RunLook]:
    """Follow a run: yield a look at it every half second until it ends, the last one with the final verdicts.

    Each look has `view` (state, progress, summary, curves), new `remarks`, and `check`, the findings so far.

    >>> for look in watch("runs/first-run"):         # doctest: +SKIP
    ...     print(look.view.state, look.view.progress)
    """
    from phalanx.api.watching import run_looks

    return run_looks(run(path), every_s=every_s)
