"""`phalanx metrics`: a run's numbers for Prometheus, OTLP, TensorBoard, MLflow or W&B."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import SystemFailure, mistake

if TYPE_CHECKING:
    from phalanx.metrics.readings import Readings
    from phalanx.metrics.step_export import TrackerSink
    from phalanx.record.run import Run

TARGETS = ("listen", "otlp", "tensorboard", "mlflow", "wandb")
INTERVAL_S = 15.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx metrics`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve /metrics for Prometheus, as 127.0.0.1:9400")
    parser.add_argument("--token", metavar="FILE", help="ask for the token in this file; auto makes and prints one")
    parser.add_argument("--otlp", metavar="URL", help="push to an OpenTelemetry collector, as http://127.0.0.1:4318")
    parser.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard event files")
    parser.add_argument("--mlflow", metavar="DIR", help="write an MLflow file store")
    parser.add_argument("--wandb", metavar="DIR", help="write a W&B offline run; wandb sync uploads it")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="export every Nth step (1)")
    parser.add_argument("--interval", metavar="S", type=float, default=INTERVAL_S, help="seconds between looks (15)")
    parser.add_argument("--ranks", metavar="N", type=int, default=64, help="series per rank up to N ranks (64)")
    parser.add_argument("--grafana", action="store_true", help="print the Grafana dashboard for these series")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print, serve, push or write the numbers."""
    from phalanx.record.run import open_run

    if args.grafana:
        from phalanx.metrics.names import grafana_dashboard

        print(grafana_dashboard(), end="")
        return 0
    target = _target(args)
    found = open_run(args.run)
    if target in ("", "listen", "otlp"):
        from phalanx.metrics.readings import Readings

        readings = Readings(found, most_ranks=args.ranks)
        act = {"": _print, "listen": _serve, "otlp": _push}[target]
        return act(readings, args)
    return _write(found, target, args)


def _target(args: argparse.Namespace) -> str:
    if args.run is None:
        raise mistake("phalanx metrics", "no run is named", fix="phalanx metrics runs/NAME; --grafana needs none")
    named = [name for name in TARGETS if getattr(args, name) is not None]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        raise mistake("phalanx metrics", f"{flags} exclude each other", fix="give one of them; start it twice for two")
    if args.every < 1 or args.ranks < 0 or not 0.1 <= args.interval <= 86400:
        what = f"--every {args.every} --ranks {args.ranks} --interval {args.interval:g} cannot be"
        raise mistake("phalanx metrics", what, fix="use --every 1, --ranks 0 and --interval 0.1 or more")
    if args.token is not None and args.listen is None:
        raise mistake("phalanx metrics", "--token guards --listen, which is not there", fix="add --listen, or drop it")
    return named[0] if named else ""


def _print(readings: Readings, args: argparse.Namespace) -> int:
    """What a scrape would see now."""
    if args.json:
        rows = [
            {"name": one.metric.name, "unit": one.metric.unit, "value": one.value}
            | {"labels": dict(zip(one.metric.labels, one.labels, strict=True))}
            for one in readings.points()
        ]
        print_json({"run": readings.run.name, "metrics": rows})
    else:
        from phalanx.metrics.prometheus import exposition

        print(exposition(readings), end="")
    return 0


def _serve(readings: Readings, args: argparse.Namespace) -> int:
    from phalanx.io.listen import parse_address, read_token
    from phalanx.metrics.prometheus import MetricsServer
    from phalanx.record.run import is_run_over

    token = None if args.token is None else read_token(args.token)
    with MetricsServer(readings, parse_address(args.listen), token=token) as server:
        shown = {"url": server.url} | ({"token": token} if token and args.token == "auto" else {})
        if args.json:
            print_json(shown)
        else:
            say("\n".join(shown.values()), flush=True)
        note("Ctrl-C ends it")
        while not (args.follow and is_run_over(readings.run)):
            time.sleep(1.0)
    return 0


def _push(readings: Readings, args: argparse.Namespace) -> int:
    from phalanx.metrics.otlp import OtlpPusher

    with OtlpPusher(readings, args.otlp) as pusher:

        def push() -> None:
            try:
                pusher.push()
            except SystemFailure as error:  # a collector that is restarted must not end hours of following
                if not args.follow:
                    raise
                note(str(error))

        count = _repeat(push, readings.run, args)
    return _said(args, pushes=count)


def _write(found: Run, target: str, args: argparse.Namespace) -> int:
    from phalanx.metrics.step_export import StepExporter

    with _sink(found, target, getattr(args, target)) as sink:
        exporter = StepExporter(found, sink, every=args.every)
        _repeat(exporter.export, found, args)
    return _said(args, steps=exporter.written, where=str(sink.where))


def _sink(found: Run, target: str, folder: str) -> TrackerSink:
    from phalanx.metrics.trackers import OPENERS

    return OPENERS[target](found, folder)


def _repeat(act: Callable[[], object], found: Run, args: argparse.Namespace) -> int:
    """Once; with --follow, until the run is over and everything was seen."""
    from phalanx.record.run import is_run_over

    count = 0
    while True:
        over = not args.follow or is_run_over(found)  # asked before the last look, so that nothing falls between
        act()
        count += 1
        if over:
            return count
        time.sleep(args.interval)


def _said(args: argparse.Namespace, **values: object) -> int:
    if args.json:
        print_json(values)
    else:
        say(", ".join(f"{name}: {value}" for name, value in values.items()))
    return 0
