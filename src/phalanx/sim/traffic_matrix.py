"""Traffic matrices: arrays of flows between NICs, by pattern or from a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.files import FileTooLargeError, read_bounded
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Floats, Ints, links_of
from phalanx.units import parse_count, plural

# 131,072 hosts to 256 each are 33 million flows: about 2 GB with their paths.
MOST_FLOWS = 33_600_000
# Size of one transfer: three hours at 800 Gb/s; more is taken for a typing error.
MOST_BYTES = 1e15
SENDERS = 7  # of an incast: arXiv:2605.04333 section 5.2.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Flows:
    """Transfers that start together: `nbytes` of payload from NIC `source` to NIC `target`."""

    source: Ints
    target: Ints
    nbytes: Floats

    def __len__(self) -> int:
        return len(self.source)

    def __post_init__(self) -> None:
        if not len(self.source) == len(self.target) == len(self.nbytes):
            raise mistake("flows", f"{len(self.source)} sources, {len(self.target)} targets, {len(self.nbytes)} sizes")
        if len(self.source) == 0:
            raise mistake("flows", "there is no flow to simulate", fix="give at least two hosts")
        if not (self.nbytes > 0).all():
            raise mistake("flows", f"a transfer of {float(self.nbytes.min()):g} bytes", fix="sizes are above zero")
        if not (self.nbytes <= MOST_BYTES).all():
            problem = f"a transfer of {float(self.nbytes.max()):g} bytes is hours long at any speed"
            raise mistake("flows", problem, fix=f"sizes are at most {MOST_BYTES:.0e} bytes")
        if (self.source == self.target).any():
            host = int(self.source[self.source == self.target][0])
            raise mistake("flows", f"host {host} sends to itself", fix="leave it out: it does not touch the network")


def make_flows(source: Any, target: Any, nbytes: Any) -> Flows:
    """Return flows from lists or arrays; a single size applies to all."""
    src, dst = np.asarray(source, dtype=np.int64), np.asarray(target, dtype=np.int64)
    return Flows(source=src, target=dst, nbytes=np.broadcast_to(np.asarray(nbytes, dtype=np.float64), src.shape))


def permutation(hosts: int, nbytes: float, *, seed: int = 0) -> Flows:
    """Return a random permutation: each host sends to one other host and receives from one other."""
    _require_hosts(hosts, 2)
    order = np.random.default_rng(seed).permutation(hosts).astype(np.int64)
    # A cycle through all hosts in random order: no host sends to itself.
    return make_flows(order, np.roll(order, -1), nbytes)


def shift(hosts: int, nbytes: float, *, seed: int = 0, step: int | None = None) -> Flows:
    """Return flows from each host to the host `step` further, by default half of all hosts.

    With the default all traffic crosses the top of the fabric.
    """
    _require_hosts(hosts, 2)
    source = np.arange(hosts)
    return make_flows(source, (source + (step or hosts // 2)) % hosts, nbytes)


def ring(hosts: int, nbytes: float, *, seed: int = 0) -> Flows:
    """Return flows from each host to the next: one step of a ring collective."""
    return shift(hosts, nbytes, seed=seed, step=1)


def tree(hosts: int, nbytes: float, *, seed: int = 0) -> Flows:
    """Return both directions of a binary tree in heap order: the simultaneous flows of a pipelined tree all-reduce."""
    _require_hosts(hosts, 2)
    child = np.arange(1, hosts)
    parent = (child - 1) // 2
    return make_flows(np.concatenate([child, parent]), np.concatenate([parent, child]), nbytes)


def all_to_all(hosts: int, nbytes: float, *, seed: int = 0) -> Flows:
    """Return flows of an equal part of `nbytes` from each host to every other."""
    _require_hosts(hosts, 2)
    if hosts * (hosts - 1) > MOST_FLOWS:
        raise mistake(
            "all-to-all",
            f"{hosts:,} hosts make {hosts * (hosts - 1):,} flows, more than {MOST_FLOWS:,}",
            why="each needs its own path in memory",
            fix=f"use at most {int(MOST_FLOWS**0.5):,} hosts, or the permutation a step of it is",
        )
    source = np.repeat(np.arange(hosts), hosts - 1)
    offset = np.tile(np.arange(1, hosts), hosts)
    return make_flows(source, (source + offset) % hosts, nbytes / (hosts - 1))


def hierarchical(hosts: int, nbytes: float, *, seed: int = 0, server: int = 8) -> Flows:
    """Return a ring among NICs at the same position in each server: the network part of a hierarchical all-reduce."""
    _require_hosts(hosts, 2 * server)
    full_hosts = hosts // server * server
    source = np.arange(full_hosts)
    return make_flows(source, (source + server) % full_hosts, nbytes)


def pipeline(hosts: int, nbytes: float, *, seed: int = 0, stages: int = 8) -> Flows:
    """Return activations between neighbouring stages, forward and back, when stages are the slowest axis."""
    _require_hosts(hosts, max(stages, 2))
    width = hosts // stages
    first = np.arange(width * (stages - 1))
    return make_flows(np.concatenate([first, first + width]), np.concatenate([first + width, first]), nbytes)


TRAFFIC: dict[str, Callable[..., Flows]] = {
    "permutation": permutation,
    "shift": shift,
    "all-to-all": all_to_all,
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "pipeline": pipeline,
}


INCAST = "incast"  # the only pattern that depends on which hosts share a T0


def incast(fabric: Fabric, nbytes: float, *, senders: int = SENDERS) -> Flows:
    """Return flows from hosts under one T0 to one host under another, and a victim as the last flow.

    The victim goes from another host of the first T0 to a neighbour of the crowded host: it shares switches with the
    crowd, but neither its sender nor its receiver.
    """
    if fabric.hosts < senders + 3:
        problem = f"{fabric.hosts} hosts are too few for {senders} senders, their receiver and a victim"
        raise mistake("incast", problem, fix=f"use a fabric of at least {senders + 3} hosts")
    home = links_of(fabric).host_t0(np.arange(fabric.hosts))
    near = np.argsort(home, kind="stable")  # hosts by their T0
    source = near[: senders + 1]
    target = np.append(np.full(senders, near[-1]), near[-2])
    return make_flows(source, target, nbytes)


def named_traffic(name: str, fabric: Fabric, nbytes: float, *, seed: int = 0) -> Flows:
    """Return the flows of a named pattern; raises UserError for an unknown name or size."""
    names = (*TRAFFIC, INCAST)
    if name not in names:
        guess = nearest(name, names)
        raise mistake("traffic", f"there is no {name!r}", fix=f"use {guess}" if guess else f"use {', '.join(names)}")
    if not 1 <= nbytes <= MOST_BYTES:
        fix = f"send at least one byte, at most {MOST_BYTES:.0e}: for instance 2M"
        raise mistake("traffic", f"a transfer of {nbytes:g} bytes", fix=fix)
    return incast(fabric, nbytes) if name == INCAST else TRAFFIC[name](fabric.hosts, nbytes, seed=seed)


def _require_hosts(hosts: int, least: int) -> None:
    if hosts < least:
        raise mistake("traffic", f"{plural(hosts, 'host')}: too few", fix=f"this traffic needs at least {least}")


# Traffic from a CSV file with sender, receiver and bytes of each transfer. The file is untrusted input.


COLUMNS = ("src", "dst", "bytes")
MOST_FILE_BYTES = 256 << 20  # ten million lines
MOST_PROBLEMS = 5  # listed in one message


def read_matrix(path: Path, hosts: int) -> Flows:
    """Read flows from a file with the columns src, dst and bytes, in any order; others are ignored.

    `#` begins a comment. Raises UserError with the first mistakes.
    """
    rows = _csv_rows(path)
    header = next(rows, (0, []))[1]
    names = [name.strip().lower() for name in header]
    if not set(COLUMNS) <= set(names):
        problem = f"the first line is {','.join(header)[:60]!r}" if header else "is empty"
        raise mistake(
            f"{path}:1", problem, fix=f"begin with {','.join(COLUMNS)}, then one transfer a line: 0,5,2000000"
        )
    column_indices = [names.index(column) for column in COLUMNS]
    transfers, problems = _read_transfers(path, rows, column_indices, hosts)
    if problems:
        raise UserError(problems)
    if not transfers:
        raise mistake(str(path), "there is no flow to simulate", fix="add lines such as 0,5,2000000")
    table = np.array(transfers, dtype=np.float64)
    return make_flows(table[:, 0], table[:, 1], table[:, 2])


def _read_transfers(
    path: Path, rows: Iterable[tuple[int, list[str]]], places: list[int], hosts: int
) -> tuple[list[tuple[float, float, float]], list[Problem]]:
    """Return the transfers, and the first mistakes."""
    transfers: list[tuple[float, float, float]] = []
    problems: list[Problem] = []
    for line, cells in rows:
        if len(transfers) >= MOST_FLOWS:
            raise mistake(str(path), f"has more than {MOST_FLOWS:,} transfers", fix="simulate a part of them")
        transfer = _read_transfer(f"{path}:{line}", cells, places, hosts)
        if isinstance(transfer, Problem):
            problems.append(transfer)
            if len(problems) >= MOST_PROBLEMS:
                break
        else:
            transfers.append(transfer)
    return transfers, problems


def _read_transfer(where: str, cells: list[str], places: list[int], hosts: int) -> tuple[float, float, float] | Problem:
    """Return the transfer of one line, or its problem."""
    if len(cells) <= max(places):
        return Problem(
            where=where, what=f"{len(cells)} columns, as {','.join(cells)[:60]!r}", fix="write src,dst,bytes"
        )
    src, dst, size = (cells[index].strip() for index in places)
    for host in (src, dst):
        if not (host.isascii() and host.isdecimal() and len(host) <= 9 and int(host) < hosts):
            return Problem(where=where, what=f"there is no host {host[:20]!r}", fix=f"hosts are 0 to {hosts - 1:,}")
    if int(src) == int(dst):
        return Problem(
            where=where, what=f"host {src} sends to itself", fix="leave it out: it does not touch the network"
        )
    try:
        nbytes = float(parse_count(size))
    except ValueError:
        return Problem(where=where, what=f"bytes {size[:40]!r} is no size", fix="write 2000000 or 2M")
    if not 0 < nbytes <= MOST_BYTES:
        fix = f"at most {MOST_BYTES:.0e}" if nbytes > 0 else "sizes are above zero: leave it out"
        return Problem(where=where, what=f"a transfer of {size[:20]} bytes", fix=fix)
    return float(src), float(dst), nbytes


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty lines as cells, with their numbers."""
    try:
        file_text = read_bounded(path, MOST_FILE_BYTES).decode("utf-8-sig")
        for number, text in enumerate(io.StringIO(file_text, newline=""), start=1):
            cells = next(csv.reader([text.split("#", 1)[0].rstrip("\r\n")]), [])
            if any(cell.strip() for cell in cells):
                yield number, cells
    except FileTooLargeError as error:
        raise mistake(str(path), str(error), fix="check the path") from None
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise mistake(str(path), f"cannot be read: {reason[:120]}", fix="name a CSV file: src,dst,bytes") from None
