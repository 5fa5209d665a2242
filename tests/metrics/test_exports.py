"""Exports through other people's libraries, read back with their own readers; and the rows all of them get."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from synthetic import write_run

from phalanx.errors import SystemFailure, UserError
from phalanx.metrics.readings import Readings
from phalanx.metrics.step_export import StepExporter, StepRow, require_library
from phalanx.record.events import read_events
from phalanx.record.run import Run


def steps_of(run: Run) -> list[dict[str, Any]]:
    """The steps that stayed."""
    kept: dict[int, dict[str, Any]] = {}
    for event in read_events(run.events(0))[0]:
        if event["event"] == "step":
            kept = {step: one for step, one in kept.items() if step < event["step"]} | {event["step"]: event}
    return list(kept.values())


class Memory:
    """A sink that remembers."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.rows: dict[int, StepRow] = {}
        self.evaluated: list[int] = []
        self.went_back: list[int] = []
        self.writes = 0

    def go_back(self, step: int) -> None:
        self.went_back.append(step)
        self.rows = {done: row for done, row in self.rows.items() if done <= step}

    def write(self, rows: Sequence[StepRow]) -> None:
        assert rows
        self.writes += 1
        for row in rows:
            if "train.loss" in row.values:
                assert row.step not in self.rows, f"step {row.step} twice"
                self.rows[row.step] = row
            else:
                self.evaluated.append(row.step)

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_the_steps_that_stayed(finished: Run, tmp_path: Path) -> None:
    sink = Memory(tmp_path)
    StepExporter(finished, sink).export()
    assert [row.step for row in sink.rows.values()] == list(range(1, 121))
    for event in steps_of(finished):
        row = sink.rows[event["step"] + 1]
        assert (row.t, row.values["train.loss"]) == (event["t"], event["loss"])
    assert sink.evaluated == [40, 80]
    assert sink.went_back == []


def test_an_export_goes_on_where_it_ended(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=1, hosts=1, steps=90, incidents=0)
    whole = run.events(0).read_text().splitlines(keepends=True)
    sink = Memory(tmp_path)
    for share in (3, 2, 1, 1):
        run.events(0).write_text("".join(whole[: len(whole) // share]))
        exporter = StepExporter(run, sink)  # a new one: what it knows is in the file
        exporter.export()
    assert len(sink.rows) == 90
    assert sorted(set(sink.evaluated)) == sorted(sink.evaluated) == [40, 80]
    assert exporter.written == 0
    assert sink.writes == 3


def test_undone_steps_are_taken_back(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=1, hosts=1, steps=30, incidents=0, finished=False)
    sink = Memory(tmp_path)
    StepExporter(run, sink).export()
    last = steps_of(run)[-1]
    again = [{**last, "step": 20 + number, "t": last["t"] + 10 + number, "loss": 0.5} for number in range(15)]
    with run.events(0).open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in again))
    StepExporter(run, sink).export()
    assert sink.went_back == [20]
    assert list(sink.rows) == list(range(1, 36))
    assert [row.values["train.loss"] for step, row in sink.rows.items() if step > 20] == [0.5] * 15


def test_every_nth_step(finished: Run, tmp_path: Path) -> None:
    sink = Memory(tmp_path)
    StepExporter(finished, sink, every=50).export()
    assert list(sink.rows) == [50, 100]


def test_a_damaged_run_and_a_damaged_cursor(damaged: Run, tmp_path: Path) -> None:
    (tmp_path / f".phalanx-{damaged.name}.json").write_text('{"step": "many", "t": null}')
    sink = Memory(tmp_path)
    StepExporter(damaged, sink).export()
    assert list(sink.rows) == [*range(1, 22), 901]


def test_a_missing_library_names_the_command() -> None:
    with pytest.raises(UserError) as caught:
        require_library("no_such_library_of_ours", extra="otlp", what="--otlp")
    assert str(caught.value) == (
        '--otlp: needs the Python package "no_such_library_of_ours", which is not installed\n'
        "  pip install 'phalanx[otlp]'"
    )


# ---- the libraries, most in a process of their own: they warn when imported, and warnings are failures here ----------


def export(run: Run, *options: str, times: int = 1) -> str:
    """What the verb prints, called `times` times in one process."""
    code = f"import sys; from phalanx.cli.main import main; sys.exit(max(main(sys.argv[1:]) for _ in range({times})))"
    command = [sys.executable, "-c", code, "metrics", str(run.path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path: Path) -> None:
    run = write_run(tmp_path, ranks=1, hosts=1, steps=60, incidents=0)
    out = str(tmp_path / "tb")
    last = steps_of(run)[-1]
    assert export(run, "--tensorboard", out) == f"steps: 60, where: {out}\n"
    with run.events(0).open("a") as file:
        file.write(json.dumps({**last, "step": 50, "t": last["t"] + 9, "loss": 0.25}) + "\n")
    assert export(run, "--tensorboard", out) == f"steps: 1, where: {out}\n"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tb" / "run"))
    reader.Reload()
    found = [(one.step, one.value, one.wall_time) for one in reader.Scalars("train/loss")]
    wanted = [(one["step"] + 1, pytest.approx(one["loss"]), one["t"]) for one in steps_of(run)]
    assert found == wanted  # the undone steps 51 to 60 are purged
    assert len(found) == 51
    assert [one.step for one in reader.Scalars("train/evaluation.loss")] == [40]


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow(finished: Run, tmp_path: Path) -> None:
    assert export(finished, "--mlflow", str(tmp_path), times=2) == (
        f"steps: 120, where: {tmp_path}\nsteps: 0, where: {tmp_path}\n"
    )
    (losses,) = tmp_path.glob("*/*/metrics/train.loss")  # one MLflow run, also after the second export
    rows = [line.split() for line in losses.read_text().splitlines()]
    found = [(int(step), float(value), int(t)) for t, value, step, *_ in rows]
    assert found == [(one["step"] + 1, one["loss"], int(one["t"] * 1000)) for one in steps_of(finished)]
    assert (losses.parents[1] / "params" / "model.name").read_text() == "llama-3-8b"


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(finished: Run, tmp_path: Path) -> None:
    assert export(finished, "--wandb", str(tmp_path)) == f"steps: 120, where: {tmp_path}\n"
    (file,) = tmp_path.glob("wandb/offline-run-*-first/run-first.wandb")
    reader = [sys.executable, str(Path(__file__).with_name("wandb_reader.py")), str(file)]
    rows = json.loads(subprocess.run(reader, capture_output=True, text=True, timeout=600, check=True).stdout)
    found = [(row["train/step"], row["train/loss"], row["_timestamp"]) for row in rows if "train/loss" in row]
    assert found == [(one["step"] + 1, one["loss"], one["t"]) for one in steps_of(finished)]
    assert not list(tmp_path.rglob("requirements.txt"))
    assert not list(tmp_path.rglob("wandb-metadata.json"))  # it would hold the host's name and the command line


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An OTLP collector in a few lines: its address, and the (path, body) of what came in."""
    came: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append((self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()
        thread.join()


@pytest.mark.skipif(find_spec("opentelemetry.exporter") is None, reason="opentelemetry is not installed")
def test_otlp(finished: Run) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from phalanx.metrics.otlp import OtlpPusher

    with collector() as (url, came), OtlpPusher(Readings(finished), url) as pusher:
        pusher.push()
    ((path, body),) = came
    assert path == "/v1/metrics"
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert attributes == {"service.name": "phalanx", "phalanx.run": "first"}
    found = {}
    for metric in resource.scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        for one in getattr(metric, kind).data_points:
            labels = {item.key: item.value.string_value for item in one.attributes}
            found[metric.name, tuple(sorted(labels.items()))] = (one.as_double, metric.unit, kind)
    for one in Readings(finished).points():
        labels = {"run": "first", **dict(zip(one.metric.labels, one.labels, strict=True))}
        kind = "sum" if one.metric.kind == "counter" else "gauge"
        wanted = (pytest.approx(one.value), one.metric.unit, kind)
        assert found.pop((one.metric.name, tuple(sorted(labels.items())))) == wanted
    assert found == {}


@pytest.mark.skipif(find_spec("opentelemetry.exporter") is None, reason="opentelemetry is not installed")
def test_a_collector_that_refuses(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.metrics.otlp import OtlpPusher

    with (
        collector(status=400) as (url, _),
        OtlpPusher(Readings(finished), url) as pusher,
        pytest.raises(SystemFailure) as caught,
    ):
        pusher.push()
    assert str(caught.value) == (
        "--otlp 127.0.0.1: the collector did not take the metrics within 10 s\n  start it, or correct the address"
    )
    assert capsys.readouterr() == ("", "")
