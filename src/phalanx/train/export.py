"""Exports a run's weights: Hugging Face safetensors, config and tokenizer, from a checkpoint of any layout.

A network of the user's own is written under the names of its state_dict(), buffers included.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import Problem, mistake
from phalanx.io.checksums import CHECKSUMS, file_sha256, write_checksums
from phalanx.io.files import replace_text
from phalanx.io.write_errors import write_failure
from phalanx.job.model import ModelShape
from phalanx.plan.plan import Plan
from phalanx.record.run import open_run
from phalanx.train.data.token_samples import TokenDataset
from phalanx.train.models.hf_weights import save_hf, save_named
from phalanx.train.models.own_model import PREFIX
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.reader import CommittedCheckpoint, own_first, sound_checkpoints
from phalanx.train.state.whole_tensors import read_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenWeights:
    """The exported step and the files written."""

    step: int
    files: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...] = ()  # about newer checkpoints that are missing or damaged


def export_weights(run: str, out: Path, *, step: int | None, dtype: str) -> WrittenWeights:
    """Write the weights of one checkpoint to `out`; of the newest intact one if no step is given."""
    folder = open_run(run)
    plan = Plan.from_json(folder.plan_text(), where=str(folder.plan_json))
    damaged: list[str] = []
    checkpoints = [
        checkpoint
        for checkpoint in sound_checkpoints(folder.checkpoints, damaged)
        if step is None or checkpoint.step == step
    ]
    checkpoints, foreign = own_first(checkpoints, folder.run_id)
    if not checkpoints:
        steps = ", ".join(f"{checkpoint:,}" for checkpoint in folder.saved_steps()) or "none"
        why = "; ".join(text.splitlines()[0] for text in damaged)
        raise mistake(
            run,
            f"has no checkpoint{f' of step {step:,}' if step is not None else ''}{' that is whole' if damaged else ''}",
            why=why,
            fix=f"saved steps: {steps}",
        )
    try:
        if plan.job.model.module:
            _save_own(checkpoints[0], plan.job.model, out, DTYPES[dtype])
        else:
            state = {
                name: _cast_floats(tensor, DTYPES[dtype]) for name, tensor in read_state(checkpoints[0].path).items()
            }
            save_hf(state, plan.job.model, out, positions=plan.job.data.sequence)
    except DamagedCheckpoint as error:
        raise _with_older_step(error, run, out, folder.saved_steps(), checkpoints[0].step) from error
    _add_tokenizer(out, TokenDataset.open([Path(path) for path in plan.job.data.paths], "train"))
    _add_checksums(out)
    files = tuple(sorted(path.name for path in out.iterdir()))
    warnings = [
        text
        for checkpoint, text in foreign.items()
        if checkpoint is checkpoints[0] or checkpoint.step > checkpoints[0].step
    ]
    if step is None:
        newest, saved_steps = folder.committed_step(), folder.saved_steps()
        if newest is not None and newest > checkpoints[0].step and newest not in saved_steps:
            what = f"the checkpoint of step {newest:,} was saved, and is gone: step {checkpoints[0].step:,} is exported"
            warnings.append(Problem(where=str(folder.checkpoints), what=what).render())
        if damaged and saved_steps and max(saved_steps) > checkpoints[0].step:
            warnings += [f"{text}\n  step {checkpoints[0].step:,} is exported instead" for text in damaged]
    return WrittenWeights(
        step=checkpoints[0].step,
        files=files,
        bytes=sum((out / name).stat().st_size for name in files),
        warnings=tuple(warnings),
    )


def _with_older_step(
    error: DamagedCheckpoint, run: str, out: Path, steps: Sequence[int], step: int
) -> DamagedCheckpoint:
    """Return the error with the command that exports the checkpoint before as its fix."""
    older = max((saved_step for saved_step in steps if saved_step < step), default=None)
    fix = "the run has no older checkpoint: restore this one from a copy"
    if older is not None:
        fix = f"export the one before it: phalanx export {run} {out} --step {older}"
    return DamagedCheckpoint([replace(problem, fix=fix) for problem in error.problems])


def _add_checksums(out: Path) -> None:
    """Write SHA256SUMS over all files.

    `sha256sum -c SHA256SUMS`, or `phalanx checkpoints OUT --checksum`, verifies a copy.
    """
    try:
        names = sorted(path.name for path in out.iterdir() if path.is_file() and path.name != CHECKSUMS)
        write_checksums(out, {name: file_sha256(out / name) for name in names if not name.startswith(".")})
    except OSError as error:
        raise write_failure(out, error) from error


def _save_own(checkpoint: CommittedCheckpoint, shape: ModelShape, out: Path, dtype: torch.dtype) -> None:
    """Write the user's own network: weights in `dtype`, buffers unchanged, since fewer bits ruin running statistics."""
    names: Any = checkpoint.meta.get("own") or {}  # checkpoints before 0.7 have none
    tied = {str(alias): str(first) for alias, first in names.get("tied", {}).items()}
    buffers = {str(name) for name in names.get("buffers", ())}
    state = {}
    for stored_name, tensor in read_state(checkpoint.path).items():
        name = stored_name.removeprefix(PREFIX)
        state[name] = tensor if name in buffers else _cast_floats(tensor, dtype)
    save_named(state, out, tied=tied)
    reported = {
        "module": shape.module,
        "arguments": json.loads(shape.arguments) if shape.arguments else {},
        "step": checkpoint.step,
        "tied": tied,
    }
    replace_text(out / "model.json", json.dumps(reported, indent=2) + "\n")


def _add_tokenizer(out: Path, dataset: TokenDataset) -> None:
    """Write the tokenizer, and the end-of-text token into both configs, so that `generate` stops."""
    shutil.copyfile(dataset.tokenizer_path, out / "tokenizer.json")
    added = json.loads(dataset.tokenizer_path.read_text(encoding="utf-8")).get("added_tokens", [])
    end = next((str(token["content"]) for token in added if token["id"] == dataset.end_of_text), None)
    if (out / "config.json").is_file():  # a network of the user's own has none
        config = json.loads((out / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": dataset.end_of_text}
        replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    replace_text(out / "tokenizer_config.json", json.dumps(kind, indent=2) + "\n")


def _cast_floats(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
