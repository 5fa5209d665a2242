"""Checkpoints of a run and exported weights: list them, compare every byte with what was written, export one."""

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
    age_s: float | None  # since it was committed; None where nothing tells
    is_foreign: bool  # another run wrote it

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        one = self.entry
        return {
            "step": one.step,
            "path": str(one.path),
            "age_s": self.age_s,
            "bytes": one.size_bytes,
            "world": one.world,
            "layout": one.layout,
            "tokens": one.tokens,
            "run_id": one.run_id,
            "is_foreign": self.is_foreign,
            "code": one.code,
            "damage": list(one.damage),
        }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckpointTable(PublicResult):
    """The checkpoints of a run, newest first."""

    run: Run
    root: str
    checkpoints: tuple[ListedCheckpoint, ...]
    lost_step: int | None  # the newest step that was saved, where it is gone
    verified: bool  # whether every byte was read

    @property
    def damaged(self) -> tuple[ListedCheckpoint, ...]:
        """Those with something wrong."""
        return tuple(one for one in self.checkpoints if one.entry.damage)

    @property
    def exit_code(self) -> int:
        """1 where one is damaged or gone."""
        return 1 if self.damaged or self.lost_step is not None else 0

    def __str__(self) -> str:
        from phalanx.io.tables import text_table

        whole = sum(one.entry.size_bytes or 0 for one in self.checkpoints)
        lines = [f"{self.root}: {plural(len(self.checkpoints), 'checkpoint')}, {format_bytes(whole)}"]
        if self.checkpoints:
            lines += text_table(
                [HEAD, *(_checkpoint_cells(one, self.verified) for one in self.checkpoints)], right=(0, 1, 2, 3, 4)
            )
        for one in self.checkpoints:
            lines += [f"damaged: {text}" for text in one.entry.damage]
        if self.lost_step is not None:
            lines.append(f"missing: step {self.lost_step:,} was saved, and is gone")
        if self.checkpoints and not self.verified:
            lines.append("only file sizes and manifests were checked; --checksum also reads and checks every byte")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The run, and a row per checkpoint."""
        return {
            "run": str(self.run.path),
            "root": self.root,
            "verified": self.verified,
            "lost_step": self.lost_step,
            "checkpoints": [one.to_dict() for one in self.checkpoints],
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
    """A folder of exported weights, and what its SHA256SUMS says of it."""

    path: Path
    files: int
    damage: tuple[str, ...]
    verified: bool

    @property
    def exit_code(self) -> int:
        """1 where a file has changed or is missing."""
        return 1 if self.damage else 0

    def __str__(self) -> str:
        if not self.verified:
            return f"{self.path}: exported weights, {plural(self.files, 'file')}; --checksum checks every byte"
        if self.damage:
            return "\n".join([f"{self.path}: damaged", *self.damage])
        return f"{self.path}: {CHECKSUMS} matches {plural(self.files, 'file')}, all bytes checked"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        damage = [text.splitlines()[0] for text in self.damage]
        return {"path": str(self.path), "files": self.files, "verified": self.verified, "damage": damage}


def checkpoints(
    path: AnyRun, *, checksum: bool = False, progress: bool | Tell = False
) -> CheckpointTable | WeightFolder:
    """The checkpoints of a run: steps, sizes of the whole, layouts, age and damage.

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
        return WeightFolder(path=folder, files=files, damage=tuple(one.render() for one in problems), verified=True)
    found = run(path)
    from phalanx.train.prepare import need_torch

    need_torch()
    from phalanx.train.state.listing import list_checkpoints

    now_s, run_id = time.time(), found.run_id
    entries = list_checkpoints(
        found.checkpoints, verify=checksum, begin=lambda place: tell(f"reading {place}") if checksum else None
    )
    rows = []
    for one in entries:
        saved_s = found.saved_at(one.step)
        age_s = max(0.0, now_s - saved_s) if saved_s else None
        is_foreign = bool(run_id and one.run_id and one.run_id != run_id)
        rows.append(ListedCheckpoint(entry=one, age_s=age_s, is_foreign=is_foreign))
    newest = found.committed_step()
    lost = newest if newest is not None and newest not in {one.step for one in entries} else None
    return CheckpointTable(
        run=found, root=str(found.checkpoints), checkpoints=tuple(rows), lost_step=lost, verified=checksum
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ExportedWeights(PublicResult):
    """Weights of a checkpoint, written as a Hugging Face folder."""

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
    """Write the weights of a run (safetensors, config.json, tokenizer.json) for transformers and others.

    `step` is the newest checkpoint unless given; `dtype` is fp32, bf16 or fp16. SHA256SUMS has a digest of every file:
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
    made = export_weights(str(path.path if isinstance(path, Run) else path), folder, step=step, dtype=dtype)
    for text in made.warnings:
        tell(f"warning: {text}")
    return ExportedWeights(
        out=folder, step=made.step, files=tuple(made.files), bytes=made.bytes, warnings=made.warnings
    )
