"""OTLP over HTTP, with OpenTelemetry's own SDK: every push carries every series of the table with its labels."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.metrics.names import METRICS, Metric
from phalanx.metrics.readings import MetricPoint, Readings
from phalanx.metrics.step_export import require_library

OTLP_PATH = "/v1/metrics"
TIMEOUT_S = 10.0


class OtlpPusher:
    """Pushes the newest numbers at every call of `push`."""

    def __init__(self, readings: Readings, url: str) -> None:
        require_library("opentelemetry.exporter.otlp.proto.http.metric_exporter", extra="otlp", what="--otlp")
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        # Its exporter logs every attempt with a traceback's worth of detail; what came of it is ours to tell.
        logger = logging.getLogger("opentelemetry.exporter")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
        self._readings = readings
        self._url = _metrics_endpoint(url)
        self._points: dict[str, list[MetricPoint]] = {}
        self._exporter = OTLPMetricExporter(endpoint=self._url, timeout=TIMEOUT_S)
        self._reader = InMemoryMetricReader()  # asked by us: the SDK's own thread would push when it likes
        # No detectors: they read the environment and the command line.
        resource = Resource({"service.name": "phalanx", "phalanx.run": readings.run.name})
        self._provider = MeterProvider(metric_readers=[self._reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("phalanx")
        for metric in METRICS:
            make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            make(metric.name, callbacks=[self._metric_callback(metric)], unit=metric.unit, description=metric.help)

    def _metric_callback(self, metric: Metric) -> Any:
        from opentelemetry.metrics import Observation

        def observed(_: object) -> Iterable[Any]:
            run = {"run": self._readings.run.name}
            for one in self._points.get(metric.name, ()):
                yield Observation(one.value, run | dict(zip(metric.labels, one.labels, strict=True)))

        return observed

    def push(self) -> None:
        """Send everything; raises SystemFailure when nobody takes it."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._points = {}
        for one in self._readings.points():
            self._points.setdefault(one.metric.name, []).append(one)
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            where = f"--otlp {urlsplit(self._url).hostname}"  # not the whole: an address may hold a password
            what = f"the collector did not take the metrics within {TIMEOUT_S:g} s"
            raise SystemFailure(Problem(where=where, what=what, fix="start it, or correct the address"))

    def __enter__(self) -> OtlpPusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()


def _metrics_endpoint(url: str) -> str:
    """The address of the metrics; a collector's base URL is enough."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise mistake("--otlp", f"{url[:80]!r} is not a URL", fix="write it as http://127.0.0.1:4318")
    return url if parts.path.endswith(OTLP_PATH) else url.rstrip("/") + OTLP_PATH
