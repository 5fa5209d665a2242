"""Runs: open and list them, report on one, compare two, follow one, and take its numbers and weights elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, own_version, plain, silent, warn
from phalanx.errors import SystemFailure, UserError, mistake
from phalanx.record.run import Run, list_runs, open_run
from phalanx.units import format_count, plural

if TYPE_CHECKING:
    from phalanx.api.watching import RunLook
    from phalanx.metrics.readings import Readings
    from phalanx.metrics.step_export import TrackerSink
    from phalanx.record.account.summary import Summary
    from phalanx.record.report.diff import Difference, Side
    from phalanx.record.report.run_report import RunReport

AnyRun = str | Path | Run


def run(path: AnyRun) -> Run:
    """The run in a folder: `print(run)` is its report, `run.frame("loss")` its numbers by step.

    Raises UserError when the folder is no run, naming the nearest that is.
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
        """Name, state, steps and the last loss of every run."""
        return [_run_row(one) for one in self._runs]

    def frame(self) -> Any:
        """One row per run: a pandas DataFrame, or a dict of numpy columns where pandas is not installed."""
        from phalanx.io.notebook import as_frame

        rows = self.rows()
        return as_frame({name: [row[name] for row in rows] for name in COLUMNS})

    def __repr__(self) -> str:
        return f"<RunList: {plural(len(self), 'run')}>"

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        if not self._runs:
            return "no runs"
        cells = [tuple(_cell_text(value) for value in row.values()) for row in self.rows()]
        return "\n".join(line.rstrip() for line in text_table([COLUMNS, *cells], right=(3, 4, 5, 6)))

    def _repr_html_(self) -> str:
        from html import escape

        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line("td", [_cell_text(value) for value in row.values()]) for row in self.rows())
        return f"<table><thead>{line('th', COLUMNS)}</thead><tbody>{body}</tbody></table>"


COLUMNS = ("name", "state", "model", "ranks", "step", "loss", "tokens_per_s")


def _run_row(found: Run) -> dict[str, Any]:
    """A run in a line, from its index alone; of one that is damaged, what can still be read."""
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
    """The runs of a folder, newest first."""
    root = Path(folder)
    if not root.is_dir():
        raise mistake(str(root), "there is no such folder", fix="name the folder that phalanx train --runs named")
    return RunList(list_runs(root))


# ---- report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ReportPage(PublicResult):
    """What a run came to, with its curves, checkpoints and incidents; `str()` is the Markdown page."""

    run: Run
    report: RunReport

    @property
    def summary(self) -> Summary:
        """The numbers: measured beside predicted."""
        return self.report.summary

    def __str__(self) -> str:
        return self.to_markdown().removesuffix("\n")

    def __repr__(self) -> str:
        s = self.summary
        return f"<ReportPage: {self.run.name}, {s.state}, {plural(s.steps, 'step')}>"

    def to_markdown(self) -> str:
        """One page of Markdown."""
        from phalanx.record.report.render import render_markdown

        return render_markdown(self.report)

    def to_html(self) -> str:
        """One HTML file with figures, without scripts, that needs nothing else."""
        from phalanx.record.report.html import render_html

        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return render_html(self.report, made=f"phalanx {own_version()}, report of {now}")

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html

        return document_as_html(self.to_html())

    def to_dict(self) -> dict[str, Any]:
        """Summary, ledger, effective training time, straggler scores and curves."""
        s = self.summary
        return {
            "summary": plain(s),
            "ledger": plain(s.ledger.to_json()) if s.ledger is not None else None,
            "effective": plain(self.report.effective),
            "scores": {str(rank): plain(score) for rank, score in self.report.scores.score.items()},
            "curves": plain(self.report.curves),
        }

    def write(self, *, html: str | Path | None = None, markdown: str | Path | None = None) -> list[Path]:
        """Write the files that are named, or report.html and report.md in the run folder; returns their paths."""
        from phalanx.io.files import write_text

        if html is None and markdown is None:
            html, markdown = self.run.path / "report.html", self.run.path / "report.md"
        wanted = [("html", html, self.to_html), ("markdown", markdown, self.to_markdown)]
        for kind, name, make in wanted:
            if name is not None:
                write_text(Path(name), make(), fix=f"name another file with --{kind}, or - for stdout")
        return [Path(name) for _, name, _ in wanted if name is not None]


def report(path: AnyRun) -> ReportPage:
    """Everything a report shows of a run, read once, in whatever state the run is."""
    from phalanx.record.report.run_report import read_run_report

    found = run(path)
    return ReportPage(run=found, report=read_run_report(found))


# ---- diff ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunComparison(PublicResult):
    """What differs between two runs, plans or jobs."""

    a: Side
    b: Side
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        from phalanx.record.report.diff import render_difference

        return render_difference(self.a, self.b, list(self.differences))

    def to_dict(self) -> dict[str, Any]:
        """Every difference with both values."""
        sides = {
            "a": {"name": self.a.name, "kind": self.a.kind},
            "b": {"name": self.b.name, "kind": self.b.kind},
        }
        listed = [
            {item.name: plain(getattr(one, item.name)) for item in fields(one)} | {"change": plain(one.change)}
            for one in self.differences
        ]
        return {**sides, "same": not self.differences, "differences": listed}

    @property
    def exit_code(self) -> int:
        """0 when nothing differs, 1 when something does."""
        return 1 if self.differences else 0


def diff(a: AnyRun, b: AnyRun, *, within: float = 0.0, tell: Tell = silent) -> RunComparison:
    """What differs between two runs, plans (JSON) or jobs (TOML).

    Measured numbers that are closer than the share `within` count as equal.
    """
    from phalanx.record.report.diff import compare_sides, of_runs

    if not 0.0 <= within < 1.0:
        raise mistake("phalanx diff", f"--within {within} is not a share", fix="use a number from 0 to 1, as 0.05")
    names = [str(one.path) if isinstance(one, Run) else str(one) for one in (a, b)]
    if all(Path(name).is_dir() for name in names):
        left, right = of_runs(open_run(names[0]), open_run(names[1]))
    else:
        left, right = (_diff_side(name, tell) for name in names)
    return RunComparison(a=left, b=right, differences=tuple(compare_sides(left, right, within=within)))


def _diff_side(name: str, tell: Tell) -> Side:
    from phalanx.record.report.diff import of_job, of_plan, of_run

    path = Path(name)
    if path.is_dir():
        return of_run(open_run(path))
    if path.suffix == ".toml":
        from phalanx.job.load import job_to_dict, load

        resolved = load(name)
        warn(resolved.warnings, tell)
        return of_job(name, job_to_dict(resolved.job))
    if not path.is_file():
        raise mistake(name, "there is no such run, plan or job", fix="name a run folder, a plan.json or a job.toml")
    from phalanx.record.run import read_json

    fix = "phalanx plan job.toml --out plan.json writes a plan; a job file ends in .toml"
    try:
        data = read_json(path)
    except UserError as error:
        raise mistake(str(path), "is no plan: it is not a JSON object", fix=fix) from error
    if not str(data.get("schema", "")).startswith("phalanx.plan/"):
        raise mistake(str(path), 'is no plan: it has no "schema": "phalanx.plan/…"', fix=fix)
    return of_plan(name, data)


# ---- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedWeights(PublicResult):
    """Weights of a checkpoint, written as a Hugging Face folder."""

    out: Path
    step: int
    files: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...] = ()  # newer checkpoints that are gone or damaged

    def __str__(self) -> str:
        return f"wrote {self.out}: {', '.join(self.files)}"


def export(
    path: AnyRun, out: str | Path, *, step: int | None = None, dtype: str = "bf16", tell: Tell = silent
) -> ExportedWeights:
    """Write the weights of a run (safetensors, config.json, tokenizer.json) for transformers and others.

    `step` is the newest checkpoint unless given; `dtype` is fp32, bf16 or fp16. SHA256SUMS has a digest of every file:
    `phalanx.checkpoints(out, checksum=True)` compares them.
    """
    from phalanx.train.prepare import need_torch

    need_torch()
    from phalanx.train.export import export_weights as export_weights

    folder = Path(out)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise mistake(str(out), "exists already and is not empty", fix="name a folder that does not exist yet")
    made = export_weights(str(path.path if isinstance(path, Run) else path), folder, step=step, dtype=dtype)
    for text in made.warnings:
        tell(f"warning: {text}")
    return ExportedWeights(
        out=folder, step=made.step, files=tuple(made.files), bytes=made.bytes, warnings=made.warnings
    )


# ---- metrics ---------------------------------------------------------------------------------------------------------

TARGETS = ("listen", "otlp", "tensorboard", "mlflow", "wandb")
INTERVAL_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MetricsSnapshot(PublicResult):
    """What a scrape of Prometheus would see now."""

    readings: Readings

    def __str__(self) -> str:
        from phalanx.metrics.prometheus import exposition

        return exposition(self.readings).removesuffix("\n")

    def __repr__(self) -> str:
        return f"<MetricsSnapshot: {self.readings.run.name}>"

    def to_dict(self) -> dict[str, Any]:
        """Every series with its labels."""
        rows = [
            {"name": one.metric.name, "unit": one.metric.unit, "value": plain(one.value)}
            | {"labels": dict(zip(one.metric.labels, one.labels, strict=True))}
            for one in self.readings.points()
        ]
        return {"run": self.readings.run.name, "metrics": rows}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedMetrics(PublicResult):
    """What was sent or written."""

    values: dict[str, object]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.values.items())

    def to_dict(self) -> dict[str, Any]:
        """Counts and the place."""
        return dict(self.values)


def metrics(
    path: AnyRun,
    *,
    listen: str | None = None,
    token: str | None = None,
    otlp: str | None = None,
    tensorboard: str | Path | None = None,
    mlflow: str | Path | None = None,
    wandb: str | Path | None = None,
    follow: bool = False,
    every: int = 1,
    interval: float = INTERVAL_S,
    ranks: int = 64,
    serving: Callable[[str, str | None], None] = lambda url, token: None,
    tell: Tell = silent,
) -> MetricsSnapshot | ExportedMetrics:
    """A run's numbers for Prometheus (`listen`), OTLP, TensorBoard, MLflow or W&B; without a target, as they are now.

    `follow` goes on until the run ends. While it serves, `serving` is called with the address and the token.
    """
    targets = {"listen": listen, "otlp": otlp, "tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    named = [name for name, value in targets.items() if value is not None]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        raise mistake("phalanx metrics", f"{flags} exclude each other", fix="give one of them; start it twice for two")
    if every < 1 or ranks < 0 or not 0.1 <= interval <= 86400:
        what = f"--every {every} --ranks {ranks} --interval {interval:g} cannot be"
        raise mistake("phalanx metrics", what, fix="use --every 1, --ranks 0 and --interval 0.1 or more")
    if token is not None and listen is None:
        what = "--token guards --listen, which is not given"
        raise mistake("phalanx metrics", what, fix="add --listen, or leave --token out")
    found = run(path)
    if named and named[0] not in ("listen", "otlp"):
        from phalanx.metrics.step_export import StepExporter

        with _metrics_sink(found, named[0], str(targets[named[0]])) as sink:
            exporter = StepExporter(found, sink, every=every)
            _repeat(exporter.export, found, follow=follow, interval_s=interval)
        return ExportedMetrics(values={"steps": exporter.written, "where": str(sink.where)})
    from phalanx.metrics.readings import Readings

    readings = Readings(found, most_ranks=ranks)
    if listen is not None:
        _serve_metrics(readings, listen, token, follow=follow, serving=serving)
    elif otlp is not None:
        return _push_metrics(readings, otlp, follow=follow, interval_s=interval, tell=tell)
    return MetricsSnapshot(readings=readings)


def _serve_metrics(
    readings: Readings, listen: str, token: str | None, *, follow: bool, serving: Callable[[str, str | None], None]
) -> None:
    from phalanx.io.listen import parse_address, read_token
    from phalanx.metrics.prometheus import MetricsServer
    from phalanx.record.run import is_run_over

    secret = None if token is None else read_token(token)
    with MetricsServer(readings, parse_address(listen), token=secret) as server:
        serving(server.url, secret if token == "auto" else None)
        while not (follow and is_run_over(readings.run)):
            time.sleep(1.0)


def _push_metrics(readings: Readings, url: str, *, follow: bool, interval_s: float, tell: Tell) -> ExportedMetrics:
    from phalanx.metrics.otlp import OtlpPusher

    with OtlpPusher(readings, url) as pusher:

        def push() -> None:
            try:
                pusher.push()
            except SystemFailure as error:  # a collector that is restarted must not end hours of following
                if not follow:
                    raise
                tell(str(error))

        count = _repeat(push, readings.run, follow=follow, interval_s=interval_s)
    return ExportedMetrics(values={"pushes": count})


def _metrics_sink(found: Run, target: str, folder: str) -> TrackerSink:
    from phalanx.metrics.trackers import OPENERS

    opened: TrackerSink = OPENERS[target](found, folder)
    return opened


def _repeat(act: Callable[[], object], found: Run, *, follow: bool, interval_s: float) -> int:
    """Once; with `follow`, until the run is over and everything was seen."""
    from phalanx.record.run import is_run_over

    count = 0
    while True:
        over = not follow or is_run_over(found)  # asked before the last look, so that nothing falls between
        act()
        count += 1
        if over:
            return count
        time.sleep(interval_s)


def grafana() -> str:
    """The Grafana dashboard for the exported series, as JSON."""
    from phalanx.metrics.names import grafana_dashboard

    return grafana_dashboard()


# ---- web -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WebAddress:
    """Where the dashboard listens."""

    url: str
    token: str | None
    open: str  # the address with the token in it
    runs: int


def web(
    folder: str | Path,
    *,
    listen: str = "127.0.0.1:8337",
    token: str | None = None,
    serving: Callable[[WebAddress], None] = lambda address: None,
    tell: Tell = silent,
) -> None:
    """Serve the dashboard over a folder of runs, or one run, until Ctrl-C; read-only, on this machine unless told.

    `token` is a file with the secret that visitors must know, or "auto" for a new one; an address beyond loopback
    needs one. `serving` is called with the address once the page is up.
    """
    _require_web()
    from urllib.parse import quote

    from phalanx.io.listen import bound_address, open_socket, parse_address
    from phalanx.web.app import AccessPolicy
    from phalanx.web.guard import AccessKey
    from phalanx.web.run_store import open_run_store
    from phalanx.web.serve import allowed_hosts, is_any, serve

    store, address, secret = open_run_store(str(folder)), parse_address(listen), web_token(token, tell)
    with open_socket(address, guarded=secret is not None) as listener:
        bound = bound_address(listener)
        url = f"http://{bound if not is_any(bound) else f'{_own_name()}:{bound.port}'}/"
        visit = f"{url}?token={quote(secret, safe='')}" if secret else url
        serving(WebAddress(url=url, token=secret, open=visit, runs=len(store.runs())))
        key = AccessKey(secret, port=bound.port) if secret else None
        door = AccessPolicy(hosts=allowed_hosts(bound, asked=address.host), literals=is_any(bound), key=key)
        serve(listener, store, door=door, complain=tell)


def _require_web() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise mistake(
            "phalanx web",
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            why="it serves the page; training needs nothing of it",
            fix="pip install 'phalanx[web]'",
        )


def web_token(choice: str | None, tell: Tell) -> str | None:
    """The secret in a file, a new one for "auto", or none."""
    import os
    import stat

    from phalanx.io.listen import read_token

    if choice is None:
        return None
    token = read_token(choice)
    if choice != "auto" and os.stat(choice).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        tell(f"warning: {choice}: others on this machine can read the token; chmod 600 keeps it yours")
    return token


def _own_name() -> str:
    import socket

    return socket.gethostname()


# ---- watch -----------------------------------------------------------------------------------------------------------


def watch(path: AnyRun, *, every_s: float = 0.5) -> Iterator[RunLook]:
    """Follow a run: yields a look at it every half second until it ends, the last one with the final verdicts.

    Each look has `view` (state, progress, summary, curves), `remarks` that are new, and `check`, the findings so far.

    >>> for look in watch("runs/first-run"):         # doctest: +SKIP
    ...     print(look.view.state, look.view.progress)
    """
    from phalanx.api.watching import run_looks

    return run_looks(run(path), every_s=every_s)
