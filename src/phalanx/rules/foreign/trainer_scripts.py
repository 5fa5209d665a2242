"""Scripts that start Hugging Face's Trainer or ms-swift, as job settings: a model by name, and who shards it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.errors import mistake
from phalanx.rules.evidence import NO_WORD
from phalanx.rules.foreign import accelerate, mcore
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.conversion import Conversion, Leaf, ReadConfig
from phalanx.rules.foreign.detect import TrainsNothingError
from phalanx.rules.foreign.finetuning import ADAPTER, IRRELEVANT, UNMAPPED, translate_trainer
from phalanx.rules.foreign.known_models import read_named_model
from phalanx.rules.foreign.launched_programs import (
    LAUNCHER,
    PROGRAM,
    PROGRAM_FILE,
    settle_launched,
    settle_names,
    why_open,
)
from phalanx.rules.foreign.megatron import IRRELEVANT as MEGATRON_IRRELEVANT
from phalanx.rules.foreign.megatron import UNMAPPED as MEGATRON_UNMAPPED
from phalanx.rules.foreign.megatron import canonical_key, read_machines
from phalanx.rules.foreign.own_arguments import leave_open
from phalanx.rules.foreign.shell.launcher_arguments import accelerate_at, starts_deepspeed
from phalanx.rules.foreign.shell.named_settings import (
    FSDP_FILE,
    LAUNCH_FILE,
    LAUNCH_JSON,
    UNREAD,
    launch_leaves,
    program_leaves,
)
from phalanx.rules.foreign.shell.training_command import (
    ACCELERATE,
    CommandSigns,
    ScriptReading,
    canonical_flag,
    leaves_of_script,
    notes_of_script,
    program_at,
    read_script,
    verb_of,
)
from phalanx.rules.foreign.shell.written_json import named_json

# argparse accepts a unique prefix for an argument; from these prefixes on the arguments are unique.
BEGINNINGS = {
    "per_device_train_batch_size": "per_device_t",
    "gradient_accumulation_steps": "gradient_a",
    "num_train_epochs": "num_train_",
}
NO_SWITCHES: frozenset[str] = frozenset()  # a flag may be followed by True or False


def beginnings(name: str) -> frozenset[str]:
    """Return an argument's name and its prefixes that argparse accepts."""
    return frozenset(name[:end] for end in range(len(BEGINNINGS[name]), len(name) + 1))


TRAINER_SIGNS = CommandSigns(
    names=frozenset({"output_dir"}).union(*(beginnings(name) for name in BEGINNINGS)),
    asked=beginnings("per_device_train_batch_size"),
    switches=NO_SWITCHES,
)
MEGATRON_VERBS = frozenset(("megatron", verb) for verb in ("sft", "pt", "rlhf"))
SWIFT_SIGNS = CommandSigns(
    names=frozenset(),
    verbs=MEGATRON_VERBS | frozenset(("swift", verb) for verb in ("sft", "pt", "rlhf")),
    switches=NO_SWITCHES,
)
TREES = (".yaml", ".yml")
# Arguments that name files with further arguments; only that of --config is read.
OTHER_FILE = re.compile(
    r"(train(ing)?_|args_|run_)?(args|arguments|config|cfg|recipe|yaml|params|hparams)_(file|path|yaml)|cfg|recipe"
)
MEGATRON_WORDS = ("micro_batch_size", "global_batch_size")
# A leaf added here: ms-swift's Megatron commands have other keys and defaults
MEGATRON_VERB = "verb.megatron"
NO_PROGRAM = "has no command that could be read and starts a program with arguments of Hugging Face's Trainer"
DTYPE = "that of the model's config.json (torch_dtype)"


def read_trainer_script(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """Read the arguments of the command that starts a program with the Trainer's arguments."""
    return _read_command(path, variables, TRAINER_SIGNS, NO_PROGRAM)


def read_swift_config(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """Read the arguments of `swift sft`, `megatron sft` and similar commands, from a script or from their YAML.

    A script with both kinds cannot be read as one.
    """
    if path.suffix in TREES:
        leaves = read_tree(path)
        # The other keys are those of `megatron sft`
        if "per_device_train_batch_size" not in leaves:
            line = next((leaves[name].line for name in MEGATRON_WORDS if name in leaves), 0)
            leaves[MEGATRON_VERB] = Leaf(key=MEGATRON_VERB, value=True, line=line)
        return ReadConfig(leaves=leaves)
    return _read_command(
        path, variables, SWIFT_SIGNS, "has no command that could be read and starts a training of ms-swift"
    )


def _read_command(path: Path, variables: Mapping[str, str], signs: CommandSigns, nothing: str) -> ReadConfig:
    reading = read_script(path, variables, signs=signs)
    verbs = {verb_of(command.command.argv, MEGATRON_VERBS) is not None for command in reading.commands}
    if not reading.commands or len(verbs) > 1:
        problem = nothing if not reading.commands else "starts both swift and megatron"
        error = mistake(str(path), problem, fix="check the script that starts the training")
        raise error if reading.commands else TrainsNothingError(error.problems)
    leaves = leaves_of_script(reading)
    json_leaves = named_json(reading, leaves)
    if signs.verbs and verbs.pop():
        leaves[MEGATRON_VERB] = Leaf(key=MEGATRON_VERB, value=True, line=reading.commands[0].command.line)
    open_why = next((command.open_why for command in reading.commands if command.open_why), "")
    leaves |= json_leaves | launch_leaves(reading, leaves) | program_leaves(reading, leaves, "fsdp_config", FSDP_FILE)
    if signs.verbs:
        leaves, reason_unread = _with_file(reading, leaves)
        return ReadConfig(leaves=leaves, open_why=open_why or reason_unread, notes=notes_of_script(reading))
    leaves, _ = _with_file(reading, leaves)
    open_why = open_why or _file_behind_program(reading)
    return ReadConfig(leaves=leaves | _own_leaves(reading), open_why=open_why, notes=notes_of_script(reading))


def _with_file(reading: ScriptReading, leaves: dict[str, Leaf]) -> tuple[dict[str, Leaf], str]:
    """Add the settings of the file that --config names, which arguments override; return why it cannot be read."""
    program_settings = program_leaves(reading, leaves, "config", PROGRAM_FILE)
    if (unread := program_settings.get(PROGRAM_FILE + UNREAD)) is not None:
        return leaves | program_settings, f"it reads {unread.value}, and {unread.unknown}"
    argument_keys = {canonical_key(key) for key in leaves}
    file_leaves = {key.removeprefix(PROGRAM_FILE): leaf for key, leaf in program_settings.items()}
    return {
        key_in_file: replace(leaf, key=key_in_file)
        for key_in_file, leaf in file_leaves.items()
        if canonical_key(key_in_file) not in argument_keys
    } | leaves, ""


def _file_behind_program(reading: ScriptReading) -> str:
    """Return why settings may be in a file of the program's own, as in `train.py recipe.yaml --lr 1e-4`; or ""."""
    for command in reading.commands:
        positionals = itertools.takewhile(
            lambda positional: not positional.startswith("-"), command.command.argv[program_at(command.command.argv) :]
        )
        for positional in positionals:
            if positional.endswith((".yaml", ".yml", ".json", ".toml")):
                return f"its program reads {reading.unknowns.shown(positional)[:80]}"
    for command in reading.commands:
        for flag in (flag for arguments in command.program for flag in arguments):
            if OTHER_FILE.fullmatch(canonical_flag(flag)):
                return f"its program reads the file of {flag[:40]}"
    return ""


def _own_leaves(reading: ScriptReading) -> dict[str, Leaf]:
    """Return leaves for the program that is started, and its launcher."""
    launchers, programs = set(), set()
    for command in reading.commands:
        argv, program_index = command.command.argv, program_at(command.command.argv)
        by_deepspeed = starts_deepspeed(argv, program_index)
        launchers.add("accelerate" if accelerate_at(argv) >= 0 else "deepspeed" if by_deepspeed else "")
        programs.add(argv[program_index - 1].rpartition("/")[2] if program_index else argv[0])
    line = reading.commands[0].command.line
    reason = "several launchers may start it" if len(launchers) > 1 else ""
    leaves = {LAUNCHER: Leaf(key=LAUNCHER, value=launchers.pop(), line=line, unknown=reason)}
    if len(programs) == 1:
        name = reading.unknowns.shown(programs.pop())
        leaves[PROGRAM] = Leaf(key=PROGRAM, value=name, line=line)
    return leaves


def translate_transformers(config: Conversion) -> None:
    """Translate transformers.TrainingArguments into job settings."""
    _name_leaves(config)
    for name in BEGINNINGS:
        if not config.has_leaf(name):
            short_name = next((prefix for prefix in beginnings(name) if prefix in config.names), "")
            config.names |= {name: config.names[short_name]} if short_name else {}
    settle_names(config)
    config.open_why = config.open_why or why_open(config)
    read_named_model(config, "model_name_or_path")
    translate_trainer(
        config,
        micro=("per_device_train_batch_size", 8),
        length=next(
            (name for name in ("model_max_length", "max_seq_length", "max_length") if config.has_leaf(name)), ""
        ),
        recomputes=False,
    )
    settle_launched(config)
    _settle_rest(config)
    leave_open(config)


def translate_swift(config: Conversion) -> None:
    """Translate ms-swift: Megatron's settings with other defaults, or the Trainer's."""
    _name_leaves(config)
    read_named_model(config, "model")
    if MEGATRON_VERB in config.leaves:
        _translate_megatron(config)
    else:
        translate_trainer(config, micro=("per_device_train_batch_size", 1), length="max_length", recomputes=True)
        _read_dtype(config)
        # Its default accumulates until a step has 16 sequences
        if not config.has_leaf("gradient_accumulation_steps"):
            config.values.pop("batch.per_replica", None)
    if (degree := config.read_whole("sequence_parallel_size")) is not None and degree > 0:
        config.set_value("parallel.context", degree, "sequence_parallel_size")
        config.set_value("parallel.context_kind", "ulysses", "sequence_parallel_size")
    _settle_rest(config)
    leave_open(config)


def _name_leaves(config: Conversion) -> None:
    config.names |= {canonical_key(key): key for key in config.leaves if key.startswith("--") and " " not in key}
    for variable, name in (("env.NPROC_PER_NODE", "nproc_per_node"), ("env.NNODES", "nnodes")):
        config.rename_leaf(name, variable)
    read_machines(config)


# Defaults of docs/source_en/Megatron-SWIFT/Command-line-parameters.md, where they differ from Megatron's.
SWIFT_DEFAULTS: Mapping[str, tuple[str, object]] = {
    "use_distributed_optimizer": ("parallel.zero", 1),
    "recompute_granularity": ("parallel.recompute", "selective"),
    "global_batch_size": ("batch.global_sequences", 16),
    "save_interval": ("checkpoint.steps", 500),
    "weight_decay": ("optim.weight_decay", 0.1),
    "lr_decay_style": ("optim.schedule", "cosine"),
    "adam_beta2": ("optim.betas", [0.9, 0.95]),
}


def _translate_megatron(config: Conversion) -> None:
    config.rename_leaf("save_interval", config.names.get("save_steps", ""))
    config.rename_leaf("save", config.names.get("output_dir", ""))
    config.rename_leaf("seq_length", config.names.get("max_length", ""))
    absent = [name for name in SWIFT_DEFAULTS if not config.has_leaf(name) and not config.open_why]
    mcore.translate_config(config, whole=False)
    is_fsdp = any(config.read_flag(name) for name in ("use_megatron_fsdp", "use_custom_fsdp"))
    for name in absent:
        key, value = SWIFT_DEFAULTS[name]
        if not (is_fsdp and key == "parallel.zero"):
            config.set_value(key, value, name, note="default of ms-swift")
    # The schema's longest
    wait_s = min(config.read_number("ddp_timeout") or 18e6, 1e7)
    for key in ("comm.init_timeout_s", "train.timeout_s"):
        config.set_value(
            key, wait_s, "ddp_timeout", note="" if config.has_leaf("ddp_timeout") else "default of ms-swift"
        )
    if "global_batch_size" in absent:
        config.values.pop("batch.per_replica", None)
    _read_dtype(config)


def _read_dtype(config: Conversion) -> None:
    """Read bf16 or fp16: the model's format, unless the command sets it."""
    formats = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32"}
    model_format = formats.get(config.read_word("torch_dtype"))
    is_fp8 = config.has_leaf("fp8_format")
    is_format_set = is_fp8 or config.read_flag("bf16") or config.read_flag("fp16")
    if model_format and not is_format_set:
        config.set_value("precision.compute", model_format, "torch_dtype")
    elif not is_format_set:
        config.set_value("precision.compute", "bf16", "torch_dtype")
        config.unknown["precision.compute"] = DTYPE


_LAUNCHED = {
    **accelerate.IRRELEVANT,
    "fsdp_config.": "a detail of FSDP",
    "deepspeed_config.": "a detail of DeepSpeed",
    "distributed_type": "who shards",
}
LAUNCH_IRRELEVANT = {
    **{f"{LAUNCH_FILE}{key}": reason for key, reason in _LAUNCHED.items()},
    **{f"{ACCELERATE}{key.rpartition('.')[2]}": reason for key, reason in _LAUNCHED.items() if not key.endswith(".")},
    LAUNCH_JSON: "as the file says, or a detail of DeepSpeed",
    FSDP_FILE: "a detail of FSDP",
}
LAUNCH_UNMAPPED = {LAUNCH_FILE: NO_WORD, ACCELERATE: NO_WORD, PROGRAM_FILE: NO_WORD}


def _settle_rest(config: Conversion) -> None:
    config.leave_unmapped("tuner_type", ADAPTER)
    config.leave_unmapped("train_type", ADAPTER)
    config.settle_rest(
        irrelevant={**MEGATRON_IRRELEVANT, **IRRELEVANT, **LAUNCH_IRRELEVANT, "verb.": "which command it is"},
        unmapped={**MEGATRON_UNMAPPED, **UNMAPPED, **LAUNCH_UNMAPPED},
        seen=lambda key: canonical_key(key) if key.startswith("--") else key,
    )
