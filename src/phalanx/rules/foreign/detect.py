"""Detection of the trainer that a configuration file belongs to, by keys that only its files have."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.io.files import read_head
from phalanx.rules.foreign.named_files import find_named_file

TREES = (".json", ".yaml", ".yml")
SWIFT_BATCHES = ("per_device_train_batch_size", "micro_batch_size", "global_batch_size")
# A file belongs to a trainer if it has all keys of one of its groups; a key that ends in a dot is a section.
SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchtitan": (
        ("model.flavor",),
        ("training.seq_len", "training.local_batch_size"),
        ("training.seq_len", "training.batch_size"),
        ("training.seq_len", "training.steps"),
        ("job.dump_folder", "training."),
        ("job.config_file", "training."),
        ("parallelism.tensor_parallel_degree",),
        ("parallelism.data_parallel_shard_degree",),
        ("training.tensor_parallel_degree",),
        ("training.data_parallel_shard_degree",),
        ("experimental.pipeline_parallel_degree",),
        ("activation_checkpoint.mode", "training."),
    ),
    "deepspeed": (
        ("zero_optimization.",),
        ("zero_optimization",),
        ("train_micro_batch_size_per_gpu",),
        ("train_batch_size", "gradient_accumulation_steps"),
        ("train_batch_size", "optimizer.type"),
        ("train_batch_size", "fp16.enabled"),
        ("train_batch_size", "bf16.enabled"),
        ("train_batch_size", "steps_per_print"),
        ("bf16.enabled", "gradient_clipping"),
        ("fp16.enabled", "gradient_clipping"),
        ("fp16.enabled", "fp16.loss_scale"),
        ("bf16.enabled", "steps_per_print"),
    ),
    "gpt-neox": (
        ("pipe_parallel_size", "model_parallel_size"),
        ("train_micro_batch_size_per_gpu", "num_layers"),
        ("pipe_parallel_size", "num_layers"),
        ("checkpoint_factor", "train_iters"),
    ),
    "nanotron": (
        ("tokens.micro_batch_size", "parallelism.tp"),
        ("tokens.micro_batch_size", "tokens.sequence_length"),
        ("parallelism.dp", "parallelism.tp", "model.model_config."),
        ("parallelism.dp", "parallelism.tp", "parallelism.pp"),
    ),
    "axolotl": (
        ("base_model", "micro_batch_size"),
        ("base_model", "sequence_len"),
        ("base_model", "datasets.", "output_dir"),
    ),
    "llama-factory": (
        ("model_name_or_path", "finetuning_type"),
        ("model_name_or_path", "template", "cutoff_len"),
        ("model_name_or_path", "stage", "cutoff_len"),
    ),
    "ms-swift": tuple(("model", tuner, batch) for tuner in ("tuner_type", "train_type") for batch in SWIFT_BATCHES),
    "accelerate": (
        ("distributed_type", "compute_environment"),
        ("distributed_type", "num_processes"),
        ("distributed_type", "num_machines"),
        ("distributed_type", "mixed_precision"),
        ("fsdp_config.", "mixed_precision"),
        ("parallelism_config.", "mixed_precision"),
        ("compute_environment", "num_machines"),
        ("distributed_type", "fsdp_config."),
        ("distributed_type", "deepspeed_config."),
        ("distributed_type", "megatron_lm_config."),
        ("distributed_type", "parallelism_config."),
    ),
    "nemo": (
        ("trainer.", "model.micro_batch_size"),
        ("trainer.", "model.tensor_model_parallel_size"),
        ("trainer.", "model.encoder_seq_length"),
        ("trainer.strategy.tensor_model_parallel_size",),
        ("trainer.strategy.", "model.config."),
        ("trainer.plugins.", "model.config."),
        ("model.tensor_model_parallel_size",),
        ("model.pipeline_model_parallel_size",),
        ("model.recompute_granularity",),
        # One of them alone is a common word
        ("train.micro_batch_size", "train.global_batch_size"),
        ("train.train_iters",),
        ("ddp.use_distributed_optimizer",),
        ("ddp.overlap_grad_reduce",),
        ("ddp.use_megatron_fsdp",),
        ("dist.distributed_timeout_minutes",),
    ),
}
# Files of other tools that are similar to one of them; a sign that begins with ! must be absent.
OTHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "a compose file": (("services.",),),
    "a Kubernetes manifest": (("apiVersion", "kind"),),
    "a GitHub workflow": (("jobs.", "on."), ("jobs.", "on")),
    "llm-foundry": (
        ("device_train_microbatch_size",),
        ("max_duration", "train_loader."),
        ("fsdp_config.", "train_loader."),
    ),
    "OLMo": (("device_train_microbatch_size", "fsdp."),),
    "a NeMo configuration of speech, audio or vision": (
        ("trainer.", "model.preprocessor."),
        ("trainer.", "model.train_ds.", "model.encoder."),
        ("trainer.", "model.sample_rate"),
        ("trainer.", "model.unet."),
        ("trainer.", "model.unet_config."),
        ("trainer.", "model.first_stage_config."),
        ("trainer.", "model.vision."),
        ("trainer.", "model.vision_pretraining_type"),
        ("trainer.", "model.img_h"),
        ("trainer.", "model.noise_cond_aug"),
        ("trainer.", "model.conditioner_config."),
    ),
    "Neuron's NxD Training": (("trainer.", "distributed_strategy."),),
    "NeMo-Framework-Launcher's conversion, export or evaluation": (
        # Its training has an optimizer, or steps; the other programs it starts have neither.
        ("run.results_dir", "!model.optim.", "!optim.", "!trainer.max_steps", "!trainer.max_epochs"),
        ("run.convert_name", "!trainer."),
        ("run.eval_name", "!trainer."),
        ("model.checkpoint_folder", "model.hparams_file", "!trainer."),
    ),
    "ms-swift without a batch size": (
        ("model", "tuner_type", *(f"!{key}" for key in SWIFT_BATCHES)),
        ("model", "train_type", "dataset", *(f"!{key}" for key in SWIFT_BATCHES)),
    ),
    "verl": (("actor_rollout_ref.",), ("_target_", "strategy"), ("trainer.", "algorithm.adv_estimator")),
    "Primus": (("work_group", "modules."), ("modules.pre_trainer.",)),
    "FlagScale": (("experiment.", "experiment.task.type"), ("system.", "model.", "data.")),
    "torchtune": (("tokenizer._component_",), ("model._component_",)),
    "LLM evaluation harness": (("task", "dataset_path", "doc_to_text"),),
}
FITS = {
    ".toml": ("torchtitan",),
    ".json": ("deepspeed",),
    ".yaml": ("nanotron", "gpt-neox", "axolotl", "llama-factory", "ms-swift", "accelerate", "nemo"),
    ".yml": ("nanotron", "gpt-neox", "axolotl", "llama-factory", "ms-swift", "accelerate", "nemo"),
}
# Sections that only Phalanx's job file has
OURS = frozenset({"spec", "batch", "parallel", "precision", "cluster"})
FLAGS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers",
    "--micro-batch-size",
    "--hidden-size",
    "--global-batch-size",
    "--seq-length",
    "--train-iters",
)
MOST_LOOKED = 1 << 20


def trainer_of_file(path: Path) -> str:
    """Return the trainer's name, or an empty text for a file that may be a job file.

    Raises UserError for a file that is neither; .json, .yaml and .yml are never job files.
    """
    if path.suffix == ".toml":
        return _match_keys(_toml_keys(path), ".toml")
    if path.suffix in TREES:
        from phalanx.rules.foreign.config_files import read_tree

        leaves = read_tree(path)
        keys = {key.replace("-", "_") if path.suffix != ".json" else key for key in leaves}
        if any(key.startswith("MODEL_ARGS.") for key in keys):
            flags = {key.removeprefix("MODEL_ARGS.") for key in keys}
            return refuse_inference(path) if _only_generates(flags) else "megatron"
        name = _match_keys(keys, path.suffix) or _refuse_unknown(path, keys)
        set_keys = {key for key, leaf in leaves.items() if leaf.value is not None}
        return refuse_inference(path) if _trains_nothing(name, set_keys) else name
    if path.suffix == ".py":
        from phalanx.rules.foreign.python_config.recipes import family_of_python

        family = family_of_python(path)
        return {"megatron-bridge": "nemo"}.get(family, family) or _refuse_python(path)
    head = read_head(path, MOST_LOOKED)
    # Two of Megatron's arguments; a job file with such a line would not be TOML.
    text = head.decode("utf-8", errors="replace").replace("_", "-")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if path.suffix in SCRIPTS and (family := family_of_script(lines)):
        return family
    has_flags = sum(flag in text for flag in FLAGS) >= 2
    if path.suffix in SCRIPTS and (other_tool := _script_of_others(lines)):
        return _refuse_script(path, other_tool)
    if has_flags and (_only_generates(text) or _only_other_programs(lines)):
        return refuse_inference(path)
    if not has_flags and path.suffix in SCRIPTS:
        is_near = sum(flag in lines.replace("_", "-") for flag in _TRAINER_WORDS) >= 2
        reason = FEW if _TRAINER[0] in lines else NO_BATCH
        return _refuse_script(path, reason if is_near else "")
    return "megatron" if has_flags else ""


SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
_SWIFT = re.compile(r"(?<![\w./-])(?:\S*/)?(?:swift|megatron)[ \t\\\n]+(?:sft|pt|rlhf)\b(?![\w./-])")
# Arguments of Hugging Face's Trainer; underscores in the text have been replaced by dashes.
_TRAINER = ("--per-device-train-batch", "--gradient-accumulation-steps", "--num-train-epochs", "--output-dir")
_TRAINER_WORDS = (*_TRAINER, "--learning-rate", "--save-steps", "--logging-steps", "--save-strategy")
NO_BATCH = "it has arguments of the Trainer, but no --per_device_train_batch_size by which its command is known"
FEW = (
    "it has --per_device_train_batch_size, and beside it none of --gradient_accumulation_steps, --num_train_epochs and "
    "--output_dir by which a command of the Trainer is known"
)
_OTHERS_SCRIPTS = {
    "verl": re.compile(r"\bverl\.trainer\b|\brecipe\.\w+\.main|actor-rollout-ref\."),
    "OpenRLHF": re.compile(r"\bopenrlhf\.(cli|train)"),
    "NeMo's tests of Python recipes": re.compile(r"tests/collections/\w+/\S*\.py"),
}
# Programs that launch scripts also start, and that train nothing.
_OTHER_PROGRAM = re.compile(
    r"infer|generat|evaluat|(^|[-])eval|convert|(^|[-])server|export|quantiz|(^|[-])ptq|preprocess|(^|[-])merge|chat"
)
_PROGRAM = re.compile(r"([\w-]+)\.py\b")


def family_of_script(lines: str) -> str:
    """Return "ms-swift" by its verbs, "transformers" by the Trainer's arguments, or ""; underscores are dashes here."""
    if _SWIFT.search(lines):
        return "ms-swift"
    has_flags = sum(flag in lines for flag in FLAGS) >= 2
    trains = sum(flag in lines for flag in _TRAINER) >= 2 and _TRAINER[0] in lines
    return "transformers" if trains and not has_flags and not _script_of_others(lines) else ""


def _script_of_others(lines: str) -> str:
    return next((name for name, sign in _OTHERS_SCRIPTS.items() if sign.search(lines)), "")


def is_other_program(name: str) -> bool:
    """Return whether a program trains nothing, judging by its name.

    >>> [is_other_program(one) for one in ("hf_weight_converter.py", "finetune_chat.py", "main.py")]
    [True, False, False]
    """
    stem = name.removesuffix(".py").replace("_", "-")
    if re.match(r"(get|show|print|dump|count|estimate|check|verify|inspect|report)-", stem) or stem.endswith("-info"):
        return True
    return bool(_OTHER_PROGRAM.search(stem)) and not re.search(r"train|tune|sft", stem)


def _only_other_programs(lines: str) -> bool:
    """Return whether every Python program in a script trains nothing, judging by its name."""
    programs = {name for name in _PROGRAM.findall(lines) if not re.fullmatch(r"setup|--init--", name)}
    trains = [name for name in programs if re.search(r"train|tune|sft", name) or not _OTHER_PROGRAM.search(name)]
    return bool(programs) and not trains


def _toml_keys(path: Path) -> set[str]:
    from phalanx.io.toml import read_toml

    table = read_toml(path, noun="job file").table
    if set(table) & OURS:
        return set()
    from phalanx.rules.foreign.conversion import leaves_of

    return set(leaves_of(table, file=str(path), line=lambda steps: 0))


def _has_key(keys: Collection[str], sign: str) -> bool:
    if sign.startswith("!"):
        return not _has_key(keys, sign[1:])
    return any(key.startswith(sign) for key in keys) if sign.endswith(".") else sign in keys


def _fits_signs(keys: Collection[str], groups: Iterable[tuple[str, ...]]) -> bool:
    return any(all(_has_key(keys, sign) for sign in group) for group in groups)


def _match_keys(keys: Collection[str], ending: str) -> str:
    if any(_fits_signs(keys, groups) for groups in OTHERS.values()):
        return ""
    return next((name for name in FITS[ending] if _fits_signs(keys, SIGNS[name])), "")


def _refuse_unknown(path: Path, keys: Collection[str]) -> str:
    other_tool = next((name for name, groups in OTHERS.items() if _fits_signs(keys, groups)), "")
    problem = "is not a configuration that Phalanx recognises" + (f": it looks like {other_tool}" if other_tool else "")
    nearest_name = _nearest_trainer(keys) if not other_tool else ""
    raise mistake(
        str(path),
        problem,
        why="none of "
        + ", ".join(("megatron", *SIGNS, "olmo-core"))
        + (f" (nearest: {nearest_name})" if nearest_name else ""),
        fix="say whose it is: phalanx import FILE --from torchtitan, megatron, deepspeed, accelerate, nemo or another",
    )


# Arguments that only text generation has, and those of which every training has at least one.
GENERATES = (
    "--num-tokens-to-generate",
    "--out-seq-length",
    "--inference-max-",
    "--inference-dynamic",
    "--max-tokens-to-oom",
    "--task-list",
    "--max-new-tokens",
)
TRAINS = ("--train-iters", "--train-samples", "--train-data", "--lr-decay", "--lr-warmup", "--save-interval")


def _only_generates(flags: Collection[str]) -> bool:
    """Return whether arguments, in a text or a collection, generate text or convert a checkpoint, and train nothing."""
    words = flags if isinstance(flags, str) else " ".join(argument.replace("_", "-") for argument in flags)
    # Converts a checkpoint to another format
    if "--load-dir" in words and "--save-dir" in words:
        return True
    return any(argument in words for argument in GENERATES) and not any(argument in words for argument in TRAINS)


# Keys of which a training file of these trainers has at least one; other files merge weights, generate text or
# prepare data.
TRAINING_WORDS = {
    "axolotl": ("learning_rate", "micro_batch_size", "num_epochs", "max_steps", "gradient_accumulation_steps"),
    "llama-factory": (
        *("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_steps", "do_train"),
        "gradient_accumulation_steps",
    ),
}


def _trains_nothing(name: str, said: set[str]) -> bool:
    """Return whether a configuration, of which only keys with a value are given, has no setting of training.

    Megatron-Bridge writes a full ConfigContainer next to a converted checkpoint, with only its model filled in.
    """
    if name == "nemo" and "model._target_" in said:
        container = any(key.startswith("checkpoint.") for key in said)
        return container and not any(key.startswith(("train.", "trainer.", "dataset.", "data.")) for key in said)
    if name == "llama-factory" and "cutoff_len" in said and not said & {"export_dir", "infer_backend", "do_predict"}:
        # A sequence length belongs to training, and the other settings may have defaults
        return False
    return name in TRAINING_WORDS and not any(word in said for word in TRAINING_WORDS[name])


class TrainsNothingError(UserError):
    """A file of a trainer that is not for training; a search for configurations skips it."""


def refuse_inference(path: Path) -> str:
    """Raise the error for a file that trains nothing."""
    error = mistake(
        str(path),
        "trains nothing that could be read: there is nothing to check",
        why="what could be read of it generates text, converts or evaluates a checkpoint, and has no word that we know "
        "for a length or a learning rate",
        fix="check the configuration that the model was trained with",
    )
    raise TrainsNothingError(error.problems)


def _refuse_script(path: Path, other: str) -> str:
    likeness = (
        other
        if other in (NO_BATCH, FEW)
        else f"it looks like {other}"
        if other
        else "no command that could be read has two arguments of Megatron or of the Trainer"
    )
    raise mistake(
        str(path),
        f"is not a configuration that Phalanx recognises: {likeness}",
        why="of shell scripts, those are read that start Megatron-LM, Megatron-DeepSpeed, ms-swift or transformers' "
        "Trainer",
        fix=_named_configurations(path) or "check the configuration file that the script names",
    )


_NAMED = re.compile(r"[\w./-]+\.(?:toml|ya?ml|json)\b")
MOST_NAMED = 20  # of which are opened


def _named_configurations(script: Path) -> str:
    """Return suggestions to check the configurations of a trainer that the script names."""
    text = read_head(script, MOST_LOOKED).decode("utf-8", errors="replace")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    suggestions: list[str] = []
    for name in list(dict.fromkeys(_NAMED.findall(lines)))[:MOST_NAMED]:
        named_path = find_named_file(script.parent, name)
        if named_path is None:
            continue
        with suppress(UserError):
            if trainer := trainer_of_file(named_path):
                relative_path = os.path.relpath(named_path)
                suggestions.append(f"phalanx check {relative_path}: {trainer}'s configuration, which the script names")
    return "\n".join(suggestions[:3])


def _refuse_python(path: Path) -> str:
    raise mistake(
        str(path),
        "is a Python program without a recipe that Phalanx recognises",
        why="of Python files, functions are read that return torchtitan's Trainer.Config, Megatron-Bridge's "
        "ConfigContainer, NeMo's run.Partial or OLMo-core's ExperimentConfig",
        fix="check the file that defines the recipe, or the YAML, TOML or arguments that the program prints",
    )


def _nearest_trainer(keys: Collection[str]) -> str:
    """Return the trainer with the most signs in the keys; empty if there is none."""
    counts = {
        name: len({sign for group in groups for sign in group if _has_key(keys, sign)})
        for name, groups in SIGNS.items()
    }
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""
