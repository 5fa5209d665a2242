"""/metrics: a run's metrics for a Prometheus server, from a separate process or thread; the ranks are not slowed down.

Without a token it listens on this machine only, and accepts only loopback names in the Host header, because a web page
could otherwise reach it under a name that resolves to 127.0.0.1. It answers GET and HEAD of one path.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from phalanx.io.listen import Address, bound_address, is_loopback, is_own_name, kept_token, open_socket, parse_address
from phalanx.io.values import printable
from phalanx.job.run_sections import Telemetry
from phalanx.metrics.names import METRICS
from phalanx.metrics.readings import MetricPoint, Readings
from phalanx.metrics.step_export import require_library
from phalanx.record.run import Run

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


PATH = "/metrics"
# Simultaneous requests; a Prometheus server sends one at a time.
MOST_REQUESTS = 16
# A client that sends or reads more slowly is disconnected.
REQUEST_S = 10.0
NEED = "Prometheus metrics"


class RunCollector:
    """The custom collector for prometheus_client; computes the metrics at every scrape, one scrape at a time."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Any]:
        """Return no descriptions: at registration, values would need a read of the complete run."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield every metric that has a value."""
        with self._lock:
            points = self._readings.points()
        yield from metric_families(points, run=printable(self._readings.run.name))


def metric_families(points: Iterable[MetricPoint], *, run: str) -> Iterator[Any]:
    """Convert points to prometheus_client's metric families, in the order of the table."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    by_name: dict[str, list[MetricPoint]] = {}
    for point in points:
        by_name.setdefault(point.metric.name, []).append(point)
    for metric in METRICS:
        if metric.name in by_name:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.prometheus, metric.help, labels=("run", *metric.labels))
            for point in by_name[metric.name]:
                family.add_metric((run, *point.labels), point.value)
            yield family


def make_registry(readings: Readings) -> CollectorRegistry:
    """Return a new registry with only the run's metrics, without those of this process or of other libraries."""
    require_library("prometheus_client", extra="metrics", what=NEED)
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(readings))
    return registry


def exposition_text(readings: Readings) -> str:
    """Return the text that a Prometheus server would receive now."""
    registry = make_registry(readings)
    from prometheus_client import generate_latest

    return str(generate_latest(registry), "utf-8")


class MetricsServer:
    """Serves /metrics from a daemon thread between `start` and `stop`; never keeps a process alive."""

    def __init__(
        self, readings: Readings, listen: Address, *, token: str | None = None, where: str = "--listen"
    ) -> None:
        registry = make_registry(readings)
        listener = open_socket(listen, guarded=token is not None, where=where)
        self.address = bound_address(listener)
        self._server = _Server(self.address, registry, token)
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        """The address for a browser or a scrape configuration."""
        return f"http://{self.address}{PATH}"

    def start(self) -> None:
        """Start the server thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server immediately."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A client that hangs must not delay the end of a run.
    block_on_close = False

    def __init__(self, address: Address, made: CollectorRegistry, token: str | None) -> None:
        super().__init__((address.host, 0), _Handler, bind_and_activate=False)
        self.registry = made
        self.token = None if token is None else token.encode()
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread if fewer than MOST_REQUESTS are running; otherwise close the connection."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer as the base class does, and release the slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client may disconnect, and a traceback would disturb the training's terminal."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer with the metrics, or with the reason of a refusal."""
        refused = self._refusal_of()
        if refused is not None:
            self._send_answer(*refused)
            return
        try:
            from prometheus_client.exposition import choose_encoder

            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.registry)
        # A damaged run must neither end the thread nor print into the training's terminal.
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self._send_answer(500, f"the run cannot be read: {type(error).__name__}: {first}")
            return
        self._send_answer(200, body, kind)

    do_HEAD = do_GET

    def _refusal_of(self) -> tuple[int, str] | None:
        token = self.server.token
        # A token is stronger than a host name, and a server that other machines reach may have many names.
        if token is None and not is_own_name(self.headers.get("Host", "")):
            return 421, "this server does not go by that name; use the address it printed"
        if token is not None and not self._has_token(token):
            return 401, "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
        if urlsplit(self.path).path != PATH:
            return 404, f"there is only {PATH}"
        return None

    def _has_token(self, token: bytes) -> bool:
        kind, _, credential = self.headers.get("Authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(credential.strip().encode(), token)

    def _send_answer(self, status: int, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> None:
        data = body if isinstance(body, bytes) else body.encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        """Return a name without versions, which would help an attacker."""
        return "phalanx"

    def log_message(self, *_: object) -> None:
        """Log nothing: a scrape every 15 s is normal."""


# ---- during `phalanx train`, as the job's [telemetry] configures it --------------------------------------------------


TOKEN_FILE = "metrics-token"  # in the run folder
WHERE = "telemetry.listen"


def check_served(telemetry: Telemetry) -> None:
    """Check, before the run folder is created, that the library for `telemetry.prometheus` is installed."""
    if telemetry.prometheus:
        require_library("prometheus_client", extra="metrics", what="telemetry.prometheus")


@contextmanager
def serve_metrics(run: Run, telemetry: Telemetry, *, tell: Callable[[str], None]) -> Iterator[None]:
    """Serve /metrics of a run inside the context if `telemetry.prometheus` is set; `tell` prints the address.

    If other machines can reach the address, a token is required; it is stored in the run folder, readable only by its
    owner.
    """
    if not telemetry.prometheus:
        yield
        return
    from phalanx.metrics.readings import Readings

    address = parse_address(telemetry.listen, where=WHERE)
    path = None if is_loopback(address, where=WHERE) else run.path / TOKEN_FILE
    token = None if path is None else kept_token(path)
    with MetricsServer(Readings(run), address, token=token, where=WHERE) as server:
        tell(f"  metrics: {server.url}" + (f" (bearer token in {path})" if path else ""))
        yield
