"""The metrics of a run while `phalanx train` has it: served as its job's [telemetry] says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.io.listen import is_loopback, kept_token, parse_address
from phalanx.job.schema import Telemetry
from phalanx.metrics.need import need
from phalanx.record.run import Run

TOKEN_FILE = "metrics-token"  # in a run folder
WHERE = "telemetry.listen"


def check_served(telemetry: Telemetry) -> None:
    """Before a run folder is made: the library that `telemetry.prometheus` takes."""
    if telemetry.prometheus:
        need("prometheus_client", extra="metrics", what="telemetry.prometheus")


@contextmanager
def serving(run: Run, telemetry: Telemetry, *, tell: Callable[[str], None]) -> Iterator[None]:
    """With `telemetry.prometheus`, serve /metrics of a run as long as the context is open; `tell` is told where.

    Where others reach the address, a token is asked for: it is kept in the run folder, readable by its owner alone.
    """
    if not telemetry.prometheus:
        yield
        return
    from phalanx.metrics.prometheus import MetricsServer  # takes prometheus_client
    from phalanx.metrics.readings import Readings

    address = parse_address(telemetry.listen, where=WHERE)
    path = None if is_loopback(address, where=WHERE) else run.path / TOKEN_FILE
    token = None if path is None else kept_token(path)
    with MetricsServer(Readings(run), address, token=token, where=WHERE) as server:
        tell(f"  metrics: {server.url}" + (f" (bearer token in {path})" if path else ""))
        yield
