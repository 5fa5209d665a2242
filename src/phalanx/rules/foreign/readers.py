"""The trainers whose configurations can be read: readers, translations, and the planner's name of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import mistake, nearest
from phalanx.rules.foreign import (
    accelerate,
    deepspeed,
    finetuning,
    gpt_neox,
    megatron,
    nanotron,
    nemo,
    olmo_core,
    torchtitan,
    trainer_scripts,
)
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.conversion import Conversion, ReadConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A trainer: the reader of its files, the translation of its settings, and its framework in the planner."""

    name: str
    title: str
    framework: str
    # Gets the variables that the caller sets for a script
    read: Callable[[Path, Mapping[str, str]], ReadConfig]
    translate: Callable[[Conversion], None]
    example: str  # description of its files


def _read_file(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    if path.suffix == ".py":
        # Imported only if needed
        from phalanx.rules.foreign.python_config.recipes import read_recipe

        return read_recipe(path, variables)
    return ReadConfig(leaves=read_tree(path))


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer(
            name="torchtitan",
            title="torchtitan",
            framework="torchtitan",
            read=_read_file,
            translate=torchtitan.translate_config,
            example="a TOML with [training] and [parallelism], as llama3_8b.toml",
        ),
        Trainer(
            name="megatron",
            title="Megatron-LM",
            framework="megatron-core",
            read=megatron.read_config,
            translate=megatron.translate_config,
            example="arguments such as --tensor-model-parallel-size 8, alone or in a shell script",
        ),
        Trainer(
            name="deepspeed",
            title="DeepSpeed",
            framework="deepspeed",
            read=_read_file,
            translate=deepspeed.translate_config,
            example='a JSON with "zero_optimization" and "train_batch_size", as ds_config.json',
        ),
        Trainer(
            name="accelerate",
            title="Accelerate",
            framework="accelerate",
            read=_read_file,
            translate=accelerate.translate_config,
            example="a YAML with distributed_type, as accelerate config writes it",
        ),
        Trainer(
            name="nemo",
            title="NeMo",
            framework="nemo",
            read=_read_file,
            translate=nemo.translate_config,
            example="a YAML with trainer: and model:, or Megatron-Bridge's model: and train:",
        ),
        Trainer(
            name="olmo-core",
            title="OLMo-core",
            # Both wrap blocks with FSDP2
            framework="torchtitan",
            read=_read_file,
            translate=olmo_core.translate_config,
            example="a script whose build_config returns an ExperimentConfig",
        ),
        Trainer(
            name="gpt-neox",
            title="GPT-NeoX",
            framework="megatron-deepspeed",
            read=_read_file,
            translate=gpt_neox.translate_config,
            example="a YAML with pipe_parallel_size and model_parallel_size",
        ),
        Trainer(
            name="nanotron",
            title="nanotron",
            framework="nanotron",
            read=_read_file,
            translate=nanotron.translate_config,
            example="a YAML with parallelism: and tokens:",
        ),
        Trainer(
            name="axolotl",
            title="Axolotl",
            framework="accelerate",
            read=_read_file,
            translate=finetuning.translate_axolotl,
            example="a YAML with base_model and micro_batch_size",
        ),
        Trainer(
            name="llama-factory",
            title="LLaMA-Factory",
            framework="accelerate",
            read=_read_file,
            translate=finetuning.translate_llama_factory,
            example="a YAML with model_name_or_path and finetuning_type",
        ),
        Trainer(
            name="transformers",
            title="transformers' Trainer",
            framework="accelerate",
            read=trainer_scripts.read_trainer_script,
            translate=trainer_scripts.translate_transformers,
            example="a script with --per_device_train_batch_size and --deepspeed ds_config.json",
        ),
        Trainer(
            name="ms-swift",
            title="ms-swift",
            framework="megatron-core",
            read=trainer_scripts.read_swift_config,
            translate=trainer_scripts.translate_swift,
            example="a script that starts swift sft or megatron sft, or the YAML for it",
        ),
    )
}


def find_trainer(kind: str) -> Trainer:
    """Return the trainer of a name; raise UserError with the choices."""
    if kind in TRAINERS:
        return TRAINERS[kind]
    suggestion = nearest(kind, TRAINERS)
    choices = ", ".join(TRAINERS)
    raise mistake(
        f"--from {kind[:60]}",
        "is not a trainer whose configurations are read",
        fix=f"did you mean {suggestion}? they are {choices}" if suggestion else f"they are {choices}",
    )
