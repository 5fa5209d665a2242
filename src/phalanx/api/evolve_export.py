"""`phalanx.evolve.export`: an archive as training examples, a JSON line for each attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.api.results import PublicResult
from phalanx.errors import mistake
from phalanx.io.files import write_text
from phalanx.io.path_probes import path_exists
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedExamples(PublicResult):
    """The files and counts of an export."""

    archive: str
    path: str
    problem: str
    examples: int
    elites: int

    def __str__(self) -> str:
        return (
            f"{plural(self.examples, 'example')} of {self.problem} ({self.elites} of them the best of their cell) "
            f"from {self.archive} to {self.path}"
        )


def export(archive: str | Path, out: str | Path) -> ExportedExamples:
    """Write every evaluation of an archive as an example: problem, attempt and its parent, measurement.

    >>> phalanx.evolve.export("runs/evolve-plans.jsonl", "examples.jsonl").examples  # doctest: +SKIP
    2000
    """
    from phalanx.evolve.archive import read_archive
    from phalanx.evolve.examples import example_lines

    source, target = Path(archive), Path(out)
    if path_exists(target) and path_exists(source) and target.samefile(source):
        raise mistake("--out", "is the archive itself", why="it would be overwritten", fix="name another file")
    archive_content, _ = read_archive(source)
    write_text(target, "".join(f"{line}\n" for line in example_lines(archive_content)), fix="name another --out")
    return ExportedExamples(
        archive=str(source),
        path=str(target),
        problem=str(archive_content.header.get("problem"))[:40],
        examples=len(archive_content.entries),
        elites=len(archive_content.elites),
    )
