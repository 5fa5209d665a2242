"""Export of a run's metrics to other tools, and the dashboard over a folder of runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.api.runs import AnyRun, run
from phalanx.errors import SystemFailure, mistake
from phalanx.io.codec import json_values
from phalanx.record.run import Run

if TYPE_CHECKING:
    from phalanx.metrics.readings import Readings
    from phalanx.metrics.step_export import TrackerSink

INTERVAL_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MetricsSnapshot(PublicResult):
    """The series that a Prometheus scrape would return now."""

    readings: Readings

    def __str__(self) -> str:
        from phalanx.metrics.prometheus import exposition_text

        return exposition_text(self.readings).removesuffix("\n")

    def __repr__(self) -> str:
        return f"<MetricsSnapshot: {self.readings.run.name}>"

    def to_dict(self) -> dict[str, Any]:
        """Return every series with its labels."""
        rows = [
            {"name": point.metric.name, "unit": point.metric.unit, "value": json_values(point.value)}
            | {"labels": dict(zip(point.metric.labels, point.labels, strict=True))}
            for point in self.readings.points()
        ]
        return {"run": self.readings.run.name, "metrics": rows}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedMetrics(PublicResult):
    """The counts and targets of an export."""

    values: dict[str, object]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.values.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the target."""
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
    progress: bool | Tell = False,
) -> MetricsSnapshot | ExportedMetrics:
    """Export a run's metrics to Prometheus (`listen`), OTLP, TensorBoard, MLflow or W&B; by default return them.

    `follow` continues until the run ends. While it serves, `serving` is called with the address and the token.

    >>> phalanx.metrics("runs/first-run", tensorboard="tb", follow=True)  # doctest: +SKIP
    """
    tell = teller(progress)
    targets = {"listen": listen, "otlp": otlp, "tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    targets_given = [name for name, value in targets.items() if value is not None]
    if len(targets_given) > 1:
        flags = " and ".join(f"--{name}" for name in targets_given)
        raise mistake("phalanx metrics", f"{flags} exclude each other", fix="give one of them; start it twice for two")
    for option, is_wrong, right in (
        (f"--every {every}", every < 1, "1 or more"),
        (f"--ranks {ranks}", ranks < 0, "0 or more"),
        (f"--interval {interval:g}", not 0.1 <= interval <= 86400, "0.1 to 86,400 seconds"),
    ):
        if is_wrong:
            raise mistake("phalanx metrics", f"{option} is out of range", fix=f"use {right}")
    if token is not None and listen is None:
        message = "--token guards --listen, which is not given"
        raise mistake("phalanx metrics", message, fix="add --listen, or leave --token out")
    exported_run = run(path)
    if targets_given and targets_given[0] not in ("listen", "otlp"):
        from phalanx.metrics.step_export import StepExporter
        from phalanx.metrics.trackers import OPENERS

        opened: TrackerSink = OPENERS[targets_given[0]](exported_run, str(targets[targets_given[0]]))
        with opened as sink:
            exporter = StepExporter(exported_run, sink, every=every)
            _repeat(exporter.export, exported_run, follow=follow, interval_s=interval)
        return ExportedMetrics(values={"steps": exporter.written, "where": str(sink.where)})
    from phalanx.metrics.readings import Readings

    readings = Readings(exported_run, most_ranks=ranks)
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
    from phalanx.record.run_lock import is_run_over

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
            except SystemFailure as error:
                # A collector that restarts must not end hours of following.
                if not follow:
                    raise
                tell(str(error))

        count = _repeat(push, readings.run, follow=follow, interval_s=interval_s)
    return ExportedMetrics(values={"pushes": count})


def _repeat(act: Callable[[], object], found: Run, *, follow: bool, interval_s: float) -> int:
    """Call `act` once; with `follow`, until the run is over and all of it was exported."""
    from phalanx.record.run_lock import is_run_over

    count = 0
    while True:
        # Checked before the last call, so that nothing in between is missed.
        over = not follow or is_run_over(found)
        act()
        count += 1
        if over:
            return count
        time.sleep(interval_s)


def grafana() -> str:
    """Return the Grafana dashboard for the exported series, as JSON.

    >>> import json
    >>> json.loads(grafana())["title"]
    'Phalanx run'
    """
    from phalanx.metrics.names import grafana_dashboard

    return grafana_dashboard()


# ---- web -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WebAddress:
    """The address of the dashboard."""

    url: str
    token: str | None
    open: str  # the address with the token
    runs: int


def web(
    folder: str | Path,
    *,
    listen: str = "127.0.0.1:8337",
    token: str | None = None,
    serving: Callable[[WebAddress], None] = lambda address: None,
    progress: bool | Tell = False,
) -> None:
    """Serve the dashboard over a folder of runs, or one run, until Ctrl-C; read-only, by default on this machine only.

    `token` is a file with the secret that visitors must know, or "auto" for a new one; an address beyond loopback
    needs one. `serving` is called with the address once the page is up.

    >>> phalanx.web("runs", serving=lambda address: print(address.open))  # doctest: +SKIP
    """
    tell = teller(progress)
    _require_web()
    import socket
    from urllib.parse import quote

    from phalanx.io.listen import bound_address, open_socket, parse_address
    from phalanx.web.app import AccessPolicy
    from phalanx.web.request_guard import AccessKey
    from phalanx.web.run_store import open_run_store
    from phalanx.web.serve import allowed_hosts, is_any, serve_dashboard

    store, address, secret = open_run_store(str(folder)), parse_address(listen), web_token(token, tell)
    with open_socket(address, guarded=secret is not None) as listener:
        bound = bound_address(listener)
        url = f"http://{bound if not is_any(bound) else f'{socket.gethostname()}:{bound.port}'}/"
        visit = f"{url}?token={quote(secret, safe='')}" if secret else url
        serving(WebAddress(url=url, token=secret, open=visit, runs=len(store.runs())))
        key = AccessKey(secret, port=bound.port) if secret else None
        door = AccessPolicy(hosts=allowed_hosts(bound, asked=address.host), literals=is_any(bound), key=key)
        serve_dashboard(listener, store, door=door, complain=tell)


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
    """Return the secret in a file, a new one for "auto", or None."""
    import os
    import stat

    from phalanx.io.listen import read_token

    if choice is None:
        return None
    token = read_token(choice)
    if choice != "auto" and os.stat(choice).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        tell(f"warning: {choice}: others on this machine can read the token; chmod 600 keeps it yours")
    return token
