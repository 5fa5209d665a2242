"""Traffic from a CSV file: who sends how many bytes to whom. Read as untrusted."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from phalanx.errors import Problem, UserError, mistake
from phalanx.sim.matrices import MOST_BYTES, MOST_FLOWS, Flows, flows
from phalanx.units import parse_count

COLUMNS = ("src", "dst", "bytes")
MOST_FILE_BYTES = 256 << 20  # ten million lines
MOST_PROBLEMS = 5  # that one message lists


def read_matrix(path: Path, hosts: int) -> Flows:
    """Flows of a file with the columns src, dst and bytes, in any order; others are left out. `#` begins a comment."""
    rows = _rows(path)
    header = next(rows, (0, []))[1]
    names = [name.strip().lower() for name in header]
    if not set(COLUMNS) <= set(names):
        what = f"the first line is {','.join(header)[:60]!r}" if header else "is empty"
        raise mistake(f"{path}:1", what, fix=f"begin with {','.join(COLUMNS)}, then one transfer a line: 0,5,2000000")
    places = [names.index(column) for column in COLUMNS]
    found, problems = _transfers(path, rows, places, hosts)
    if problems:
        raise UserError(problems)
    if not found:
        raise mistake(str(path), "there is no flow to simulate", fix="add lines such as 0,5,2000000")
    table = np.array(found, dtype=np.float64)
    return flows(table[:, 0], table[:, 1], table[:, 2])


def _transfers(
    path: Path, rows: Iterable[tuple[int, list[str]]], places: list[int], hosts: int
) -> tuple[list[tuple[float, float, float]], list[Problem]]:
    """Transfers, and the first mistakes."""
    found: list[tuple[float, float, float]] = []
    problems: list[Problem] = []
    for line, cells in rows:
        if len(found) >= MOST_FLOWS:
            raise mistake(str(path), f"has more than {MOST_FLOWS:,} transfers", fix="simulate a part of them")
        made = _transfer(f"{path}:{line}", cells, places, hosts)
        if isinstance(made, Problem):
            problems.append(made)
            if len(problems) >= MOST_PROBLEMS:
                break
        else:
            found.append(made)
    return found, problems


def _transfer(where: str, cells: list[str], places: list[int], hosts: int) -> tuple[float, float, float] | Problem:
    if len(cells) <= max(places):
        return Problem(
            where=where, what=f"{len(cells)} columns, as {','.join(cells)[:60]!r}", fix="write src,dst,bytes"
        )
    src, dst, size = (cells[place].strip() for place in places)
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


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Lines with something in them, by number."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise mistake(str(path), f"is larger than {MOST_FILE_BYTES >> 20} MiB", fix="check the path")
        with path.open(encoding="utf-8-sig", newline="") as stream:
            for number, text in enumerate(stream, start=1):
                cells = next(csv.reader([text.split("#", 1)[0].rstrip("\r\n")]), [])
                if any(cell.strip() for cell in cells):
                    yield number, cells
    except (OSError, ValueError, csv.Error) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise mistake(str(path), f"cannot be read: {what[:120]}", fix="name a CSV file: src,dst,bytes") from None
