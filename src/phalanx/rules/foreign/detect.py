"""Which trainer a configuration file is of: by keys that only its files have, not by its name."""

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
# A file is of a trainer if it has all keys of one of its groups; a key that ends in a dot is a section.
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
        ("train.micro_batch_size", "train.global_batch_size"),  # one of them alone is anybody's word
        ("train.train_iters",),
        ("ddp.use_distributed_optimizer",),
        ("ddp.overlap_grad_reduce",),
        ("ddp.use_megatron_fsdp",),
        ("dist.distributed_timeout_minutes",),
    ),
}
# What is near to one of them, and is another tool's; a sign that begins with ! must not be there.
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
        # Its training has an optimizer, or steps; what else it starts has neither.
        ("run.results_dir", "!model.optim.", "!optim.", "!trainer.max_steps", "!trainer.max_epochs"),
        ("run.convert_name", "!trainer."),
        ("run.eval_name", "!trainer."),
        ("model.checkpoint_folder", "model.hparams_file", "!trainer."),
    ),
    "ms-swift without a batch size": (
        ("model", "tuner_type", *(f"!{one}" for one in SWIFT_BATCHES)),
        ("model", "train_type", "dataset", *(f"!{one}" for one in SWIFT_BATCHES)),
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
OURS = frozenset({"spec", "batch", "parallel", "precision", "cluster"})  # sections only our job file has
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
    """The trainer's name, or an empty text for what may be a job file.

    Raises UserError for a file that is neither: what ends in .json, .yaml or .yml is never a job file.
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
        said = {key for key, leaf in leaves.items() if leaf.value is not None}
        return refuse_inference(path) if _trains_nothing(name, said) else name
    if path.suffix == ".py":
        from phalanx.rules.foreign.python_config.recipes import family_of_python

        family = family_of_python(path)
        return {"megatron-bridge": "nemo"}.get(family, family) or _refuse_python(path)
    head = read_head(path, MOST_LOOKED)
    # Two of Megatron's flags; a job file with such a line would not be TOML.
    text = head.decode("utf-8", errors="replace").replace("_", "-")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if path.suffix in SCRIPTS and (family := family_of_script(lines)):
        return family
    has_flags = sum(flag in text for flag in FLAGS) >= 2
    if path.suffix in SCRIPTS and (other := _script_of_others(lines)):
        return _refuse_script(path, other)
    if has_flags and (_only_generates(text) or _only_other_programs(lines)):
        return refuse_inference(path)
    if not has_flags and path.suffix in SCRIPTS:
        near = sum(flag in lines.replace("_", "-") for flag in _TRAINER_WORDS) >= 2
        beside = FEW if _TRAINER[0] in lines else NO_BATCH
        return _refuse_script(path, beside if near else "")
    return "megatron" if has_flags else ""


SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
_SWIFT = re.compile(r"(?<![\w./-])(?:\S*/)?(?:swift|megatron)[ \t\\\n]+(?:sft|pt|rlhf)\b(?![\w./-])")
# Arguments of Hugging Face's Trainer; the text has dashes for underscores.
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
# Programs that a launch script also starts, and that train nothing.
_OTHER_PROGRAM = re.compile(
    r"infer|generat|evaluat|(^|[-])eval|convert|(^|[-])server|export|quantiz|(^|[-])ptq|preprocess|(^|[-])merge|chat"
)
_PROGRAM = re.compile(r"([\w-]+)\.py\b")


def family_of_script(lines: str) -> str:
    """ms-swift by its verbs, Hugging Face's Trainer by its arguments; underscores are dashes here."""
    if _SWIFT.search(lines):
        return "ms-swift"
    has_flags = sum(flag in lines for flag in FLAGS) >= 2
    trains = sum(flag in lines for flag in _TRAINER) >= 2 and _TRAINER[0] in lines
    return "transformers" if trains and not has_flags and not _script_of_others(lines) else ""


def _script_of_others(lines: str) -> str:
    return next((name for name, sign in _OTHERS_SCRIPTS.items() if sign.search(lines)), "")


def is_other_program(name: str) -> bool:
    """Whether a program trains nothing, by its name.

    >>> [is_other_program(one) for one in ("hf_weight_converter.py", "finetune_chat.py", "main.py")]
    [True, False, False]
    """
    stem = name.removesuffix(".py").replace("_", "-")
    if re.match(r"(get|show|print|dump|count|estimate|check|verify|inspect|report)-", stem) or stem.endswith("-info"):
        return True
    return bool(_OTHER_PROGRAM.search(stem)) and not re.search(r"train|tune|sft", stem)


def _only_other_programs(lines: str) -> bool:
    """Whether every Python program that a script names is one that trains nothing, by its name."""
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
    other = next((name for name, groups in OTHERS.items() if _fits_signs(keys, groups)), "")
    what = "is not a configuration that Phalanx recognises" + (f": it looks like {other}" if other else "")
    near = _nearest_trainer(keys) if not other else ""
    raise mistake(
        str(path),
        what,
        why="none of " + ", ".join(("megatron", *SIGNS, "olmo-core")) + (f" (nearest: {near})" if near else ""),
        fix="say whose it is: phalanx import FILE --from torchtitan, megatron, deepspeed, accelerate, nemo or another",
    )


# Arguments that only text generation has, and those that every training has one of.
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
    """Whether arguments, in a text or one by one, generate text or convert a checkpoint, and train nothing."""
    words = flags if isinstance(flags, str) else " ".join(one.replace("_", "-") for one in flags)
    if "--load-dir" in words and "--save-dir" in words:  # a checkpoint into another format
        return True
    return any(one in words for one in GENERATES) and not any(one in words for one in TRAINS)


# What a file of these trainers has at least one of where it trains; others merge weights, generate text, prepare data.
TRAINING_WORDS = {
    "axolotl": ("learning_rate", "micro_batch_size", "num_epochs", "max_steps", "gradient_accumulation_steps"),
    "llama-factory": (
        *("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_steps", "do_train"),
        "gradient_accumulation_steps",
    ),
}


def _trains_nothing(name: str, said: set[str]) -> bool:
    """Whether a tree leaves out all that training takes; `said` are the keys that have a value.

    Megatron-Bridge writes a whole ConfigContainer beside a converted checkpoint, with nothing but its model filled in.
    """
    if name == "nemo" and "model._target_" in said:
        container = any(key.startswith("checkpoint.") for key in said)
        return container and not any(key.startswith(("train.", "trainer.", "dataset.", "data.")) for key in said)
    if name == "llama-factory" and "cutoff_len" in said and not said & {"export_dir", "infer_backend", "do_predict"}:
        return False  # a length of sequences is training's, and its defaults may serve for the rest
    return name in TRAINING_WORDS and not any(word in said for word in TRAINING_WORDS[name])


class TrainsNothingError(UserError):
    """A file of a trainer that is for something else than training: a search for files passes it over."""


def refuse_inference(path: Path) -> str:
    """Raises the error for a file that trains nothing."""
    told = mistake(
        str(path),
        "trains nothing that could be read: there is nothing to check",
        why="what could be read of it generates text, converts or evaluates a checkpoint, and has no word that we know "
        "for a length or a learning rate",
        fix="check the configuration that the model was trained with",
    )
    raise TrainsNothingError(told.problems)


def _refuse_script(path: Path, other: str) -> str:
    looks = (
        other
        if other in (NO_BATCH, FEW)
        else f"it looks like {other}"
        if other
        else "no command that could be read has two arguments of Megatron or of the Trainer"
    )
    raise mistake(
        str(path),
        f"is not a configuration that Phalanx recognises: {looks}",
        why="of shell scripts, those are read that start Megatron-LM, Megatron-DeepSpeed, ms-swift or transformers' "
        "Trainer",
        fix=_named_configurations(path) or "check the configuration file that the script names",
    )


_NAMED = re.compile(r"[\w./-]+\.(?:toml|ya?ml|json)\b")
MOST_NAMED = 20  # that are opened


def _named_configurations(script: Path) -> str:
    """Which files to check instead: those that the script names and that are configurations of a trainer."""
    text = read_head(script, MOST_LOOKED).decode("utf-8", errors="replace")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[str] = []
    for name in list(dict.fromkeys(_NAMED.findall(lines)))[:MOST_NAMED]:
        named = find_named_file(script.parent, name)
        if named is None:
            continue
        with suppress(UserError):
            if trainer := trainer_of_file(named):
                shown = os.path.relpath(named)
                found.append(f"phalanx check {shown}: {trainer}'s configuration, which the script names")
    return "\n".join(found[:3])


def _refuse_python(path: Path) -> str:
    raise mistake(
        str(path),
        "is a Python program without a recipe that Phalanx recognises",
        why="of Python files, functions are read that return torchtitan's Trainer.Config, Megatron-Bridge's "
        "ConfigContainer, NeMo's run.Partial or OLMo-core's ExperimentConfig",
        fix="check the file that defines the recipe, or the YAML, TOML or arguments that the program prints",
    )


def _nearest_trainer(keys: Collection[str]) -> str:
    """The trainer of which most signs are there, if any is."""
    counts = {
        name: len({sign for group in groups for sign in group if _has_key(keys, sign)})
        for name, groups in SIGNS.items()
    }
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""
