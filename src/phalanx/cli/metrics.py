"""`phalanx metrics`: a run's numbers for Prometheus, OTLP, TensorBoard, MLflow or W&B."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, print_json, say, show
from phalanx.cli.parser import add_json
from phalanx.errors import mistake

INTERVAL_S = 15.0


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx metrics`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve /metrics for Prometheus, e.g. on 127.0.0.1:9400")
    parser.add_argument("--token", metavar="FILE", help="require the token in this file; auto creates and prints one")
    parser.add_argument("--otlp", metavar="URL", help="push to an OpenTelemetry collector, e.g. http://127.0.0.1:4318")
    parser.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard event files")
    parser.add_argument("--mlflow", metavar="DIR", help="write an MLflow file store")
    parser.add_argument("--wandb", metavar="DIR", help="write an offline W&B run; wandb sync uploads it")
    parser.add_argument("--follow", action="store_true", help="continue until the run ends")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="export every Nth step (default: 1)")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=INTERVAL_S, help="seconds between updates (default: 15)"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, default=64, help="separate series per rank, up to N ranks (default: 64)"
    )
    parser.add_argument("--grafana", action="store_true", help="print the Grafana dashboard for these series")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print, serve, push or write the metrics of a run."""
    if args.grafana:
        print(phalanx.grafana(), end="")
        return 0
    if args.run is None:
        raise mistake("phalanx metrics", "no run is named", fix="phalanx metrics runs/NAME; --grafana needs none")

    def serving(url: str, token: str | None) -> None:
        shown = {"url": url} | ({"token": token} if token else {})
        if args.json:
            print_json(shown)
        else:
            say("\n".join(shown.values()), flush=True)
        note("Ctrl-C ends it")

    targets = ("listen", "token", "otlp", "tensorboard", "mlflow", "wandb")
    options = {name: getattr(args, name) for name in (*targets, "follow", "every", "interval", "ranks")}
    metrics = phalanx.metrics(args.run, serving=serving, progress=note, **options)
    return show(metrics, as_json=args.json) if args.listen is None else 0
