"""Export over OTLP/HTTP with OpenTelemetry's SDK: every push sends every series of the table with its labels."""

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
    """Sends the newest values at every call of `push`."""

    def __init__(self, readings: Readings, url: str) -> None:
        require_library("opentelemetry.exporter.otlp.proto.http.metric_exporter", extra="otlp", what="--otlp")
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        # The exporter logs every failed attempt at length; `push` reports the result instead.
        logger = logging.getLogger("opentelemetry.exporter")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
        self._readings = readings
        self._url = _metrics_endpoint(url)
        self._points: dict[str, list[MetricPoint]] = {}
        self._exporter = OTLPMetricExporter(endpoint=self._url, timeout=TIMEOUT_S)
        # Read by `push` only: the SDK's periodic reader would push from a thread at its own times.
        self._reader = InMemoryMetricReader()
        # No resource detectors: they read the environment and the command line.
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
            for point in self._points.get(metric.name, ()):
                yield Observation(point.value, run | dict(zip(metric.labels, point.labels, strict=True)))

        return observed

    def push(self) -> None:
        """Send all series; raise SystemFailure if the collector does not accept them."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        self._points = {}
        for point in self._readings.points():
            self._points.setdefault(point.metric.name, []).append(point)
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            # Only the host name: the URL may contain a password.
            where = f"--otlp {urlsplit(self._url).hostname}"
            message = f"the collector did not take the metrics within {TIMEOUT_S:g} s"
            raise SystemFailure(Problem(where=where, what=message, fix="start it, or correct the address"))

    def __enter__(self) -> OtlpPusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()


def _metrics_endpoint(url: str) -> str:
    """Return the URL of the metrics endpoint; the base URL of a collector is completed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise mistake("--otlp", f"{url[:80]!r} is not a URL", fix="write it as http://127.0.0.1:4318")
    return url if parts.path.endswith(OTLP_PATH) else url.rstrip("/") + OTLP_PATH
