"""Collectives: the algorithm and protocol that NCCL picks, and the duration of the collective."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.api.results import PublicResult
from phalanx.errors import mistake, nearest
from phalanx.io.codec import json_values
from phalanx.io.files import read_bounded
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.hardware.types import Cluster
    from phalanx.network.collective_answer import CollectiveAnswer, PickRange
    from phalanx.network.collective_fit import AlphaBeta, Measured, Operation, Point
    from phalanx.network.nccl_system import NcclSystem

KINDS: tuple[Operation, ...] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all")
SIZES = "64KiB..16GiB"
MOST_FILE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CollectiveTimes(PublicResult):
    """The algorithm and protocol that NCCL picks for each message size, and the durations of the collective."""

    kind: Operation
    cluster: Cluster
    sizes: tuple[CollectiveAnswer, ...]
    ruled: tuple[PickRange, ...]
    has_model: bool  # of NCCL's choice; otherwise only measurements are available
    fit: AlphaBeta | None
    measured: Measured | None

    def __str__(self) -> str:
        from phalanx.network import collective_answer as text

        parts = [f"{self.kind}, {_cluster_name(self.cluster)}\n"]
        if len(self.sizes) == 1:
            pairs = text.show_pairs(self.sizes[0]) + "\n\n" if self.has_model else ""
            parts.append(pairs + text.show_expected(self.sizes[0]))
        else:
            parts.append(text.show_sizes(self.sizes))
        if self.ruled and len(self.sizes) > 1:
            parts.append("\n" + text.show_pick_ranges(self.ruled))
        if self.fit is not None and self.measured is not None:
            parts.append(_basis_text(self.fit, self.measured, self.kind))
        else:
            parts.append(text.MODEL_NOTE)
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer for every size."""
        assumed = self.measured is not None and not self.measured.named
        group = {"cluster": self.cluster.name, "ranks": self.cluster.devices, "kind": self.kind, "fit": self.fit}
        values = {**group, "fit_kind_assumed": assumed, "sizes": self.sizes, "reigns": self.ruled}
        return dict(json_values(values))


def collective(
    cluster: str | Path | Cluster,
    kind: str = KINDS[0],
    nbytes: str | int = SIZES,
    *,
    nic_gbps: float | None = None,
    cpu: Literal["intel", "amd", "arm"] | None = None,
    nvls: bool = True,
    sharp: bool = False,
    fit: str | Path | None = None,
) -> CollectiveTimes:
    """Return the algorithm and protocol that NCCL picks for a collective, and its duration.

    `nbytes` is a size or a range, as "1MiB..16GiB"; `fit` is a file of nccl-tests or a CSV with your own measurements.

    >>> len(collective("8xH100:16", "all-reduce", "64MiB").sizes)
    1
    """
    from phalanx.hardware.cluster import resolve_cluster
    from phalanx.hardware.types import Cluster
    from phalanx.network.collective_answer import collective_answers, pick_ranges
    from phalanx.network.sizes import parse_sizes

    operation, sizes = _operation_of(kind), parse_sizes(str(nbytes), "--bytes")
    resolved_cluster = _with_nic(cluster if isinstance(cluster, Cluster) else resolve_cluster(cluster), nic_gbps)
    if resolved_cluster.devices < 2:
        raise mistake(
            f"cluster {resolved_cluster.name}", "one rank needs no collective", fix="use 8xH100, or 8xH100:16"
        )
    measured = _read_measurements(str(fit), operation, resolved_cluster) if fit else None
    comm = _nccl_model(resolved_cluster, operation, nvls=nvls, cpu=cpu, sharp=sharp, has_fit=bool(fit))
    line = _fit_points(measured.points, resolved_cluster, operation) if measured else None
    return CollectiveTimes(
        kind=operation,
        cluster=resolved_cluster,
        sizes=tuple(collective_answers(comm, None if operation == "all-to-all" else operation, sizes, line)),
        ruled=tuple(pick_ranges(comm, operation, sizes[0], sizes[-1]) if comm and operation != "all-to-all" else ()),
        has_model=comm is not None,
        fit=line,
        measured=measured,
    )


def _cluster_name(cluster: Cluster) -> str:
    device = cluster.accelerator.name
    if cluster.domains == 1:
        return f"{plural(cluster.devices, 'rank')}: one node of {device}"
    nic_gbps = cluster.nic_bytes_per_s * 8e-9
    nodes = f"{plural(cluster.domains, 'node')} of {cluster.domain_devices} {device}"
    return f"{plural(cluster.devices, 'rank')}: {nodes}, {nic_gbps:g} Gb/s per GPU"


def _operation_of(text: str) -> Operation:
    word = text.strip().lower().replace("_", "").replace("-", "")
    operation = next((kind for kind in KINDS if kind.replace("-", "") == word), None)
    if operation is None:
        close = nearest(text, KINDS)
        raise mistake("--kind", f'there is no collective "{text[:40]}"', fix=f"use {close or ', '.join(KINDS)}")
    return operation


def _with_nic(cluster: Cluster, nic_gbps: float | None) -> Cluster:
    from dataclasses import replace

    if nic_gbps is None:
        return cluster
    if not 0 < nic_gbps < 1e6:
        raise mistake("--nic-gbps", f"a NIC of {nic_gbps:g} Gb/s", fix="use 100, 200, 400 or 800")
    return replace(cluster, nic_bytes_per_s=nic_gbps * 1e9 / 8)


def _nccl_model(
    cluster: Cluster,
    kind: Operation,
    *,
    nvls: bool,
    cpu: Literal["intel", "amd", "arm"] | None,
    sharp: bool,
    has_fit: bool,
) -> NcclSystem | None:
    """Return NCCL's model of a cluster; None if only measurements can answer."""
    from phalanx.errors import UserError
    from phalanx.network.nccl_cluster import nccl_system

    if kind == "all-to-all":
        if not has_fit:
            raise mistake(
                "--kind all-to-all",
                "NCCL has no algorithms for it: it is sends and receives",
                fix="give two measurements with --fit, or use phalanx fabric simulate FABRIC --traffic all-to-all",
            )
        return None
    try:
        return nccl_system(cluster, nvls=nvls, cpu=cpu, sharp=sharp)
    except UserError:
        if has_fit:
            return None
        raise


def _read_measurements(name: str, kind: Operation, cluster: Cluster) -> Measured:
    from phalanx.network.collective_fit import read_points

    path = Path(name)
    try:
        text = read_bounded(path, MOST_FILE_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise mistake(f"--fit {name}", message, fix="name a text file") from None
    return read_points(text, where=f"--fit {name}", operation=kind, ranks=cluster.devices)


def _fit_points(points: tuple[Point, ...], cluster: Cluster, kind: Operation) -> AlphaBeta:
    from phalanx.network.collective_fit import LEAST_BYTES, fit_points

    usable = [point for point in points if point.nbytes >= LEAST_BYTES]
    if len({point.nbytes for point in usable}) < 2:
        raise mistake(
            "--fit",
            f"{plural(len(points), 'measurement')}, {len(usable)} of them from 16 MiB on",
            why="below 16 MiB launches and protocols decide, and tell nothing about the rest",
            fix="measure two sizes, as 16 MiB and 4 GiB",
        )
    return fit_points(usable, ranks=cluster.devices, nodes=cluster.domains, operation=kind)


def _basis_text(fit: AlphaBeta, measured: Measured, kind: Operation) -> str:
    from phalanx.network.collective_answer import show_fit
    from phalanx.network.collective_fit import LEAST_BYTES, worst_error

    usable = [point for point in measured.points if point.nbytes >= LEAST_BYTES]
    error, at = worst_error(usable, [fit.seconds(point.nbytes) for point in usable])
    fit_text = show_fit(fit, len(usable), error, at.nbytes)
    return fit_text if measured.named else f"{fit_text}\nthe file names no collective: taken for {kind}"
