"""Checkpoints of a run and exported weights: list them, compare every byte with its digest, export weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.api.runs import AnyRun, run
from phalanx.errors import mistake
from phalanx.io.checksums import CHECKSUMS, read_checksums, verify_checksums
from phalanx.io.path_probes import is_file, is_folder, path_exists
from phalanx.record.run import Run
from phalanx.units import format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.train.state.listing import CheckpointEntry

COPY_AGAIN = "copy the folder again from where it is whole, or export the weights again"
HEAD = ("step", "age", "size", "ranks", "tokens", "layout", "state")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ListedCheckpoint:
    """One checkpoint of a run."""

    entry: CheckpointEntry
    age_s: float | None  # since it was committed; None if unknown
    is_foreign: bool  # True if another run wrote it

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        entry = self.entry
        return {
            "step": entry.step,
            "path": str(entry.path),
            "age_s": self.age_s,
            "bytes": entry.size_bytes,
            "world": entry.world,
            "layout": entry.layout,
            "tokens": entry.tokens,
            "run_id": entry.run_id,
            "is_foreign": self.is_foreign,
            "code": entry.code,
            "damage": list(entry.damage),
        }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckpointTable(PublicResult):
    """The checkpoints of a run, newest first."""

    run: Run
    root: str
    checkpoints: tuple[ListedCheckpoint, ...]
    lost_step: int | None  # the newest step that was saved, if its checkpoint is gone
    verified: bool  # True if every byte was read

    @property
    def damaged(self) -> tuple[ListedCheckpoint, ...]:
        """The damaged checkpoints."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.entry.damage)

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint is damaged or gone."""
        return 1 if self.damaged or self.lost_step is not None else 0

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        total_bytes = sum(checkpoint.entry.size_bytes or 0 for checkpoint in self.checkpoints)
        lines = [f"{self.root}: {plural(len(self.checkpoints), 'checkpoint')}, {format_bytes(total_bytes)}"]
        if self.checkpoints:
            lines += text_table(
                [HEAD, *(_checkpoint_cells(checkpoint, self.verified) for checkpoint in self.checkpoints)],
                right=(0, 1, 2, 3, 4),
            )
        for checkpoint in self.checkpoints:
            lines += [f"damaged: {text}" for text in checkpoint.entry.damage]
        if self.lost_step is not None:
            lines.append(f"missing: step {self.lost_step:,} was saved, and is gone")
        if self.checkpoints and not self.verified:
            lines.append("only file sizes and manifests were checked; --checksum also reads and checks every byte")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the run, and a row per checkpoint."""
        return {
            "run": str(self.run.path),
            "root": self.root,
            "verified": self.verified,
            "lost_step": self.lost_step,
            "checkpoints": [checkpoint.to_dict() for checkpoint in self.checkpoints],
        }


def _checkpoint_cells(one: ListedCheckpoint, verified: bool) -> tuple[str, ...]:
    entry = one.entry
    state = "damaged" if entry.damage else "intact, all bytes checked" if verified else "intact"
    return (
        f"{entry.step:,}",
        "-" if one.age_s is None else format_seconds(one.age_s),
        "-" if entry.size_bytes is None else format_bytes(entry.size_bytes),
        "-" if entry.world is None else f"{entry.world:,}",
        "-" if entry.tokens is None else format_count(entry.tokens),
        entry.layout or "-",
        f"{state}, of another run" if one.is_foreign else state,
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class WeightFolder(PublicResult):
    """A folder of exported weights, compared with its SHA256SUMS."""

    path: Path
    files: int
    damage: tuple[str, ...]
    verified: bool

    @property
    def exit_code(self) -> int:
        """1 if a file has changed or is missing."""
        return 1 if self.damage else 0

    def __str__(self) -> str:
        if not self.verified:
            return f"{self.path}: exported weights, {plural(self.files, 'file')}; --checksum checks every byte"
        if self.damage:
            return "\n".join([f"{self.path}: damaged", *self.damage])
        return f"{self.path}: {CHECKSUMS} matches {plural(self.files, 'file')}, all bytes checked"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        damage = [text.splitlines()[0] for text in self.damage]
        return {"path": str(self.path), "files": self.files, "verified": self.verified, "damage": damage}


def checkpoints(
    path: AnyRun, *, checksum: bool = False, progress: bool | Tell = False
) -> CheckpointTable | WeightFolder:
    """List the checkpoints of a run: steps, total sizes, layouts, age and damage.

    With `checksum` every byte is read and compared with its digest. `path` may also be a folder that `phalanx export`
    wrote.

    >>> print(checkpoints("runs/first-run", checksum=True))  # doctest: +SKIP
    """
    tell = teller(progress)
    folder = path.path if isinstance(path, Run) else Path(path)
    if not is_file(folder / "plan.json") and is_file(folder / CHECKSUMS):
        if not checksum:
            return WeightFolder(path=folder, files=len(read_checksums(folder)), damage=(), verified=False)
        files, problems = verify_checksums(folder, fix=COPY_AGAIN)
        return WeightFolder(
            path=folder, files=files, damage=tuple(problem.render() for problem in problems), verified=True
        )
    checked_run = run(path)
    from phalanx.train.prepare import need_torch

    need_torch()
    from phalanx.train.state.listing import list_checkpoints

    now_s, run_id = time.time(), checked_run.run_id
    entries = list_checkpoints(
        checked_run.checkpoints, verify=checksum, begin=lambda place: tell(f"reading {place}") if checksum else None
    )
    rows = []
    for entry in entries:
        saved_s = checked_run.saved_at(entry.step)
        age_s = max(0.0, now_s - saved_s) if saved_s else None
        is_foreign = bool(run_id and entry.run_id and entry.run_id != run_id)
        rows.append(ListedCheckpoint(entry=entry, age_s=age_s, is_foreign=is_foreign))
    newest = checked_run.committed_step()
    lost_step = newest if newest is not None and newest not in {entry.step for entry in entries} else None
    return CheckpointTable(
        run=checked_run,
        root=str(checked_run.checkpoints),
        checkpoints=tuple(rows),
        lost_step=lost_step,
        verified=checksum,
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedWeights(PublicResult):
    """The weights of a checkpoint, written as a Hugging Face folder."""

    out: Path
    step: int
    files: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...] = ()  # newer checkpoints that are gone or damaged

    def __str__(self) -> str:
        return f"wrote {self.out}: {', '.join(self.files)}"


def export(
    path: AnyRun, out: str | Path, *, step: int | None = None, dtype: str = "bf16", progress: bool | Tell = False
) -> ExportedWeights:
    """Write the weights of a run (safetensors, config.json, tokenizer.json) for transformers and other libraries.

    `step` defaults to the newest checkpoint; `dtype` is fp32, bf16 or fp16. SHA256SUMS has a digest of every file:
    `phalanx.checkpoints(out, checksum=True)` compares them.

    >>> export("runs/first-run", "weights")  # doctest: +SKIP
    """
    from phalanx.train.prepare import need_torch

    tell = teller(progress)
    need_torch()
    from phalanx.train.export import export_weights

    folder = Path(out)
    if path_exists(folder) and any(folder.iterdir() if is_folder(folder) else [folder]):
        raise mistake(str(out), "exists already and is not empty", fix="name a folder that does not exist yet")
    exported = export_weights(str(path.path if isinstance(path, Run) else path), folder, step=step, dtype=dtype)
    for text in exported.warnings:
        tell(f"warning: {text}")
    return ExportedWeights(
        out=folder, step=exported.step, files=tuple(exported.files), bytes=exported.bytes, warnings=exported.warnings
    )
