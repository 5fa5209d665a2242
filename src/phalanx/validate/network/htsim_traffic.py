"""Who sends what in the connection files of uet-htsim, from the names of the files.

The files are not in a table, but public: Broadcom/csg-htsim and forks of uet-htsim have them, with the scripts that
wrote them. Permutations are Python's own shuffle: the files of 16 and of 1,024 nodes there are its seed 13, each pair.
Files whose names say nothing are spelled out here, and the small permutation, of which three public copies differ: this
one is of tommasobo/REPS_EuroSys_Artifact. The others have pairs under one T0, which take 167 µs; the fastest that
uet-htsim printed is 188, so they are not its file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from phalanx.sim.matrices import Flows
from phalanx.sim.packets.schedule import Schedule, at_once

Pattern = Literal["permutation", "incast", "listed"]
# From, to, bytes, and the start in microseconds.
Listed = tuple[tuple[int, int, int, float], ...]

NBYTES = 2_000_000  # per connection, where a name gives none
SEED = 13
UNITS = {"b": 1, "kb": 1000, "k": 1000, "mb": 1_000_000, "m": 1_000_000}
_SIZE = r"(\d+)(b|kb|mb|k|m)"
_PERMUTATION = re.compile(
    rf"^(?:gen_)?perm(?:utation)?_(\d+)n_(\d+)c(?:_\d+us?)?(?:_{_SIZE})?(?:_seed(\d+))?\.[ct]m$", re.IGNORECASE
)
_INCAST = re.compile(rf"^incast_(\d+)(?:n)?(?:_{_SIZE})?\.[ct]m$", re.IGNORECASE)
_FILE = re.compile(r"([\w.+-]+\.[ct]m)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The connections of a file."""

    pattern: Pattern
    hosts: int
    connections: int
    nbytes: int
    seed: int = SEED
    listed: Listed = ()


def _to_one_with_others(into: int, out: int, nbytes: int) -> Listed:
    """Hosts 1 to `into` send to 0; all but the first of them to `out` - 1 others each, too."""
    found = []
    other = into + 1
    for host in range(1, into + 1):
        found.append((host, 0, nbytes, 0.0))
        if host > 1:
            found += [(host, other + place, nbytes, 0.0) for place in range(out - 1)]
            other += out - 1
    return tuple(found)


# Which of the public copies it is was told by its fastest flow: for that one, agreement is no evidence.
CHOSEN = "perm_16n_16c_2MB.cm"
_SMALL = "13>6 1>4 6>0 2>13 10>5 15>1 8>14 14>2 5>15 4>12 12>11 0>8 9>7 7>9 3>10 11>3"
LISTED: Mapping[str, tuple[int, Listed]] = {
    "one.cm": (16, ((0, 13, NBYTES, 0.0),)),
    "bidir.cm": (16, ((0, 13, NBYTES, 0.0), (13, 0, NBYTES, 0.0))),
    "incast_3-1_overlapped.tm": (
        128,
        ((127, 0, NBYTES, 0.0), (95, 0, 250_000, 40.0), (61, 0, 250_000, 40.0)),
    ),
    CHOSEN: (16, tuple((int(a), int(b), NBYTES, 0.0) for a, b in re.findall(r"(\d+)>(\d+)", _SMALL))),
    "outcast_incast.cm": (128, _to_one_with_others(3, 10, NBYTES)),
}


def read_sent(command: str) -> Sent | str:
    """The connections of the file that a command line names, or the reason why they are not known."""
    name = _FILE.search(command)
    if name is None:
        return "it names no connection file (.cm)"
    file = name[1]
    if file in LISTED:
        hosts, listed = LISTED[file]
        return Sent(pattern="listed", hosts=hosts, connections=len(listed), nbytes=listed[0][2], listed=listed)
    if file == "incast.cm":
        return Sent(pattern="incast", hosts=16, connections=15, nbytes=NBYTES)
    if found := _PERMUTATION.match(file):
        return _permutation(file, found)
    if found := _INCAST.match(file):
        hosts = int(found[1][:9])
        return Sent(pattern="incast", hosts=hosts, connections=hosts - 1, nbytes=_nbytes(found[2], found[3]))
    return f"who sends what is in {file[:60]}, which is not in the table"


def _permutation(file: str, found: re.Match[str]) -> Sent | str:
    hosts, connections = int(found[1][:9]), int(found[2][:9])
    if not 0 < connections <= hosts:
        return f"{file[:60]}: {connections:,} connections of {hosts:,} hosts are no permutation"
    return Sent(
        pattern="permutation",
        hosts=hosts,
        connections=connections,
        nbytes=_nbytes(found[3], found[4]),
        seed=int(found[5][:9]) if found[5] else SEED,
    )


def _nbytes(digits: str | None, unit: str | None) -> int:
    return int(digits[:12]) * UNITS[(unit or "b").lower()] if digits else NBYTES


def rows_of(sent: Sent) -> Listed:
    """The connections one by one."""
    if sent.pattern == "permutation":
        return tuple((a, b, sent.nbytes, 0.0) for a, b in shuffled(sent.hosts, sent.connections, sent.seed))
    if sent.pattern == "incast":
        last = sent.hosts - 1
        return tuple((host, last, sent.nbytes, 0.0) for host in range(last))
    return sent.listed


def flows_of(sent: Sent) -> Flows:
    """The connections as flows."""
    rows = rows_of(sent)
    return Flows(
        source=np.array([row[0] for row in rows], dtype=np.int64),
        target=np.array([row[1] for row in rows], dtype=np.int64),
        nbytes=np.array([row[2] for row in rows], dtype=np.float64),
    )


def schedule_of(sent: Sent) -> Schedule:
    """When they start."""
    rows = rows_of(sent)
    return replace(at_once(len(rows)), start_s=np.array([1e-6 * row[3] for row in rows]))


def shuffled(hosts: int, connections: int, seed: int) -> list[tuple[int, int]]:
    """Sources and targets shuffled one after the other; who would send to itself swaps targets with the next.

    >>> shuffled(16, 3, 13)
    [(7, 5), (15, 1), (0, 13)]
    """
    draw = random.Random(seed)
    source, target = list(range(hosts)), list(range(hosts))
    draw.shuffle(source)
    draw.shuffle(target)
    for at in range(hosts):
        if source[at] == target[at]:
            after = (at + 1) % hosts
            target[at], target[after] = target[after], target[at]
    return list(zip(source, target, strict=True))[:connections]
