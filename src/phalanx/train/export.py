"""A run's weights for others: Hugging Face safetensors, config and tokenizer, from a checkpoint of any layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.errors import mistake
from phalanx.files import replace_text
from phalanx.plan.plan import Plan
from phalanx.record.run import open_run
from phalanx.train.checkpoint.export import read_state
from phalanx.train.checkpoint.find import candidates
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.models.hf_weights import save_hf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    step: int
    files: tuple[str, ...]
    bytes: int


def export(run: str, out: Path, *, step: int | None, dtype: str) -> Exported:
    """Write the weights of one checkpoint; the newest when no step is named."""
    folder = open_run(run)
    plan = Plan.from_json(folder.plan_json.read_text(encoding="utf-8"), where=str(folder.plan_json))
    found = [one for one in candidates(folder.checkpoints) if step is None or one.step == step]
    if not found:
        steps = ", ".join(f"{one:,}" for one in folder.saved_steps()) or "none"
        raise mistake(
            run, f"has no checkpoint{f' of step {step:,}' if step is not None else ''}", fix=f"saved steps: {steps}"
        )
    state = {name: _cast(tensor, DTYPES[dtype]) for name, tensor in read_state(found[0].path).items()}
    save_hf(state, plan.job.model, out, positions=plan.job.data.sequence)
    _add_tokenizer(out, TokenDataset.open([Path(path) for path in plan.job.data.paths], "train"))
    files = tuple(sorted(path.name for path in out.iterdir()))
    return Exported(step=found[0].step, files=files, bytes=sum((out / name).stat().st_size for name in files))


def _add_tokenizer(out: Path, dataset: TokenDataset) -> None:
    """The tokenizer, and in both configs which token ends a text, so that `generate` stops."""
    shutil.copyfile(dataset.tokenizer_path, out / "tokenizer.json")
    added = json.loads(dataset.tokenizer_path.read_text(encoding="utf-8")).get("added_tokens", [])
    end = next((str(token["content"]) for token in added if token["id"] == dataset.end_of_text), None)
    config = json.loads((out / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": dataset.end_of_text}
    replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    replace_text(out / "tokenizer_config.json", json.dumps(kind, indent=2) + "\n")


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
