"""The archive of a search: a JSONL file with every evaluation, and in memory the best candidate of each cell.

The first line describes the problem, every other line is one evaluation. Lines are only ever appended. A process that
is killed leaves at most one torn line at the end, which is dropped when the search resumes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import mistake
from phalanx.evolve.problem import (
    Cell,
    Genome,
    SearchAxis,
    SearchOutcome,
    SearchProblem,
    cell_of,
    genome_key,
    problem_digest,
)
from phalanx.io.files import FileTooLargeError, open_regular, read_bounded
from phalanx.io.path_probes import path_exists
from phalanx.io.values import finite
from phalanx.io.write_errors import write_failure

FORMAT = "phalanx-evolve/1"
MOST_BYTES = 256 << 20  # 2,000 plans take 1 MB
MOST_LINE = 1 << 20
ORIGINS = ("seed", "random", "mutation", "crossover", "proposer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveEntry:
    """One evaluation: a candidate, its outcome, and how it was made."""

    genome: Genome
    outcome: SearchOutcome
    origin: str
    parent: int | None = None  # index into the archive's entries

    @property
    def fitness(self) -> float:
        """The fitness of an entry that has one."""
        assert self.outcome.fitness is not None
        return self.outcome.fitness


@dataclass(kw_only=True, slots=True)
class Archive:
    """All evaluations, in order, and the best of each cell."""

    axes: tuple[SearchAxis, SearchAxis]
    header: Mapping[str, Any]
    entries: list[ArchiveEntry] = field(default_factory=list)
    elites: dict[Cell, int] = field(default_factory=dict)  # cell -> index into `entries`
    known: dict[str, int] = field(default_factory=dict)  # candidate's key -> index into `entries`

    def add(self, entry: ArchiveEntry) -> bool:
        """Append an evaluation; return whether it is now the best of its cell."""
        place, number = entry.outcome.place, len(self.entries)
        self.entries.append(entry)
        self.known.setdefault(genome_key(entry.genome), number)
        if entry.outcome.fitness is None or place is None:
            return False
        cell = cell_of(self.axes, place)
        elite = self.elites.get(cell)
        if elite is not None and self.entries[elite].fitness >= entry.outcome.fitness:
            return False
        self.elites[cell] = number
        return True

    def best(self) -> ArchiveEntry | None:
        """Return the fittest entry; among equals the one with the smallest values on the axes."""

        def rank(entry: ArchiveEntry) -> tuple[float, float, float]:
            assert entry.outcome.place is not None
            return round(entry.fitness, 12), -entry.outcome.place[0], -entry.outcome.place[1]

        return max((self.entries[number] for number in self.elites.values()), key=rank, default=None)

    @property
    def quality_diversity(self) -> float:
        """The sum of the fitness of all cells (QD score)."""
        return sum(self.entries[number].fitness for number in self.elites.values())


def _header(problem: SearchProblem) -> dict[str, Any]:
    """Return the first line of a problem's archive."""
    return {
        "format": FORMAT,
        "problem": problem.name,
        "digest": problem_digest(problem),
        "axes": [
            {"name": a.name, "edges": a.edges, "labels": a.labels, "logarithmic": a.logarithmic} for a in problem.axes
        ],
        "about": problem.describe(),
    }


def entry_line(entry: ArchiveEntry) -> str:
    """Return an entry as one JSON line, without the newline."""
    outcome = entry.outcome
    values: dict[str, Any] = {"genome": entry.genome, "fitness": outcome.fitness, "place": outcome.place}
    if outcome.why:
        values["why"] = outcome.why
    if outcome.details:
        values["details"] = outcome.details
    values["origin"] = entry.origin
    if entry.parent is not None:
        values["parent"] = entry.parent
    return json.dumps(values, allow_nan=False)


def read_entry(data: object) -> ArchiveEntry:
    """Parse a line's JSON value; raise ValueError if it is not an entry."""
    if not isinstance(data, dict) or not isinstance(data.get("genome"), dict):
        raise ValueError("no candidate in it")
    fitness, place, parent = finite(data.get("fitness")), data.get("place"), data.get("parent")
    if place is not None:
        numbers = [finite(value) for value in place] if isinstance(place, list) and len(place) == 2 else [None]
        if any(value is None for value in numbers):
            raise ValueError("its place is not two numbers")
        place = (float(place[0]), float(place[1]))
    details = data.get("details")
    return ArchiveEntry(
        genome=data["genome"],
        outcome=SearchOutcome(
            fitness=fitness,
            place=place,
            why=str(data.get("why") or "")[:2000],
            details=details if isinstance(details, dict) else {},
        ),
        origin=data["origin"] if data.get("origin") in ORIGINS else "random",
        parent=parent if isinstance(parent, int) and not isinstance(parent, bool) and parent >= 0 else None,
    )


def read_archive(path: Path, problem: SearchProblem | None = None) -> tuple[Archive, int]:
    """Read an archive; return it and the number of bytes up to the end of its last complete line.

    Raises UserError for a file that is not an archive, and for the archive of another problem than `problem`.
    """
    try:
        data = read_bounded(path, MOST_BYTES)
    except FileNotFoundError as error:
        raise mistake(str(path), "there is no such archive", fix="phalanx evolve plans makes one") from error
    except FileTooLargeError as error:
        raise mistake(str(path), str(error), fix="begin another with --archive") from error
    except OSError as error:
        raise mistake(str(path), f"cannot be read: {error.strerror or error}", fix="name a regular file") from error
    intact_bytes = data.rfind(b"\n") + 1
    lines = data[:intact_bytes].split(b"\n")[:-1]
    header = _read_header(path, lines[0] if lines else data[:MOST_LINE], problem)
    archive = Archive(axes=header.pop("axes"), header=header)
    if not lines:
        return archive, 0
    for number, line in enumerate(lines[1:], start=2):
        try:
            if len(line) > MOST_LINE:
                raise ValueError("it is longer than 1 MiB")
            archive.add(read_entry(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise mistake(
                f"{path}:{number}", f"is not a line of an archive: {error}", fix="remove the line, or begin another"
            ) from error
    return archive, intact_bytes


def _read_header(path: Path, line: bytes, problem: SearchProblem | None) -> dict[str, Any]:
    """Parse the first line and build its axes.

    A torn first line that is the beginning of `problem`'s header counts as that header.
    """
    expected = json.loads(json.dumps(_header(problem))) if problem else None
    try:
        header = json.loads(line) if len(line) <= MOST_LINE else None
    except (ValueError, RecursionError):
        header = None
    if header is None and expected is not None and json.dumps(expected).encode().startswith(line):
        header = expected
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise mistake(str(path), f"is not an archive of phalanx evolve ({FORMAT})", fix="name another with --archive")
    if expected is not None and header.get("digest") != expected["digest"]:
        raise mistake(
            str(path),
            "is the archive of another problem: its measurements would mean nothing here"
            + _what_differs(header, expected),
            fix="name another file with --archive",
        )
    try:
        axes = tuple(
            SearchAxis(
                name=str(axis["name"]),
                edges=tuple(float(edge) for edge in axis["edges"]),
                labels=tuple(str(label) for label in axis["labels"]),
                logarithmic=bool(axis["logarithmic"]),
            )
            for axis in header["axes"]
        )
        if len(axes) != 2 or any(len(axis.labels) != axis.size or axis.size > 1000 for axis in axes):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise mistake(str(path), "its first line describes no grid", fix="name another with --archive") from error
    return {**header, "axes": axes}


def _what_differs(found: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return a parenthesis for the error message that names the facts in which two problems differ."""
    if found.get("problem") != own["problem"]:
        return f" (it is of {str(found.get('problem'))[:20]}, not of {own['problem']})"
    found_facts, own_facts = found.get("about"), own["about"]
    if not isinstance(found_facts, dict):
        return ""
    names = [name for name in own_facts if found_facts.get(name) != own_facts[name]]
    return f" (different: {', '.join(names[:5])})" if names else ""


@dataclass(kw_only=True, slots=True)
class ArchiveWriter:
    """The archive of a running search, and its open file (None: not stored)."""

    archive: Archive
    file: BinaryIO | None

    def add(self, entries: Sequence[ArchiveEntry]) -> list[bool]:
        """Write evaluations to the file, then add them to the archive; return which are now the best of their cells."""
        if self.file is not None:
            self.file.write("".join(entry_line(entry) + "\n" for entry in entries).encode())
            self.file.flush()
        return [self.archive.add(entry) for entry in entries]


@contextmanager
def open_archive(path: Path | None, problem: SearchProblem) -> Iterator[ArchiveWriter]:
    """Open an archive to continue it, or create it; without a path nothing is stored.

    A file lock ensures that only one search writes an archive at a time; raises UserError otherwise.
    """
    header = _header(problem)
    empty = Archive(axes=problem.axes, header=header)
    if path is None:
        yield ArchiveWriter(archive=empty, file=None)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path_exists(path):
            # Rejects a named pipe, which a plain open() would wait on for ever.
            open_regular(path, follow_links=True).close()
        file = open(path, "ab")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise write_failure(path, error, fix="name another --archive") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise mistake(
                str(path), "another search writes this archive", fix="wait for it, or name another --archive"
            ) from error
        if os.fstat(file.fileno()).st_size:
            archive, intact_bytes = read_archive(path, problem)
            file.truncate(intact_bytes)
        else:
            archive, intact_bytes = empty, 0
        if not intact_bytes:
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
        yield ArchiveWriter(archive=archive, file=file)
        os.fsync(file.fileno())
