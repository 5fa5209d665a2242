"""The trainers whose configurations are read: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.rules.foreign import accelerate, deepspeed, megatron, nemo, torchtitan
from phalanx.rules.foreign.book import Book
from phalanx.rules.foreign.leaf import Leaf
from phalanx.rules.foreign.shell import read_arguments
from phalanx.rules.foreign.trees import read_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer: how its files are read, what their words mean, and as whom the planner knows it."""

    name: str
    title: str
    framework: str
    read: Callable[[Path], dict[str, Leaf]]
    translate: Callable[[Book], None]
    example: str  # of its files


def _arguments(path: Path) -> dict[str, Leaf]:
    """A script or a text; or Megatron's own test recipes, YAML with MODEL_ARGS and ENV_VARS."""
    if path.suffix not in (".yaml", ".yml"):
        return read_arguments(path)
    short = {
        key.removeprefix("MODEL_ARGS.").replace("ENV_VARS.", "env."): leaf for key, leaf in read_tree(path).items()
    }
    return {key: replace(leaf, key=key) for key, leaf in short.items()}


TRAINERS = {
    one.name: one
    for one in (
        Trainer(
            name="torchtitan",
            title="torchtitan",
            framework="torchtitan",
            read=read_tree,
            translate=torchtitan.translate,
            example="a TOML with [training] and [parallelism], as llama3_8b.toml",
        ),
        Trainer(
            name="megatron",
            title="Megatron-LM",
            framework="megatron-core",
            read=_arguments,
            translate=megatron.translate,
            example="arguments such as --tensor-model-parallel-size 8, alone or in a shell script",
        ),
        Trainer(
            name="deepspeed",
            title="DeepSpeed",
            framework="deepspeed",
            read=read_tree,
            translate=deepspeed.translate,
            example='a JSON with "zero_optimization" and "train_batch_size", as ds_config.json',
        ),
        Trainer(
            name="accelerate",
            title="Accelerate",
            framework="accelerate",
            read=read_tree,
            translate=accelerate.translate,
            example="a YAML with distributed_type, as accelerate config writes it",
        ),
        Trainer(
            name="nemo",
            title="NeMo",
            framework="nemo",
            read=read_tree,
            translate=nemo.translate,
            example="a YAML with trainer: and model:, or Megatron-Bridge's model: and train:",
        ),
    )
}
