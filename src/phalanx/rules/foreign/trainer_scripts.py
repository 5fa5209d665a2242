"""Scripts that start Hugging Face's Trainer, and those of ms-swift: a model by name, and who shards it."""

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

# argparse takes the beginning of an argument for it where no other one begins so; these are unique from here on.
BEGINNINGS = {
    "per_device_train_batch_size": "per_device_t",
    "gradient_accumulation_steps": "gradient_a",
    "num_train_epochs": "num_train_",
}
NO_SWITCHES: frozenset[str] = frozenset()  # a flag may be followed by True or False


def beginnings(name: str) -> frozenset[str]:
    """An argument in full, and as argparse takes it shortened."""
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
# Files with further arguments; that of --config is read.
OTHER_FILE = re.compile(
    r"(train(ing)?_|args_|run_)?(args|arguments|config|cfg|recipe|yaml|params|hparams)_(file|path|yaml)|cfg|recipe"
)
MEGATRON_WORDS = ("micro_batch_size", "global_batch_size")
MEGATRON_VERB = "verb.megatron"  # a leaf of our own: ms-swift's Megatron commands have other words and defaults
NO_PROGRAM = "has no command that could be read and starts a program with arguments of Hugging Face's Trainer"
DTYPE = "that of the model's config.json (torch_dtype)"


def read_trainer_script(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """The arguments of the command that starts a program with the Trainer's arguments."""
    return _read_command(path, variables, TRAINER_SIGNS, NO_PROGRAM)


def read_swift_config(path: Path, variables: Mapping[str, str]) -> ReadConfig:
    """The arguments of `swift sft`, `megatron sft` and their like, of a script or of the YAML that they are given.

    Both kinds in one script cannot be read as one.
    """
    if path.suffix in TREES:
        leaves = read_tree(path)
        if "per_device_train_batch_size" not in leaves:  # the other words are those of `megatron sft`
            line = next((leaves[name].line for name in MEGATRON_WORDS if name in leaves), 0)
            leaves[MEGATRON_VERB] = Leaf(key=MEGATRON_VERB, value=True, line=line)
        return ReadConfig(leaves=leaves)
    return _read_command(
        path, variables, SWIFT_SIGNS, "has no command that could be read and starts a training of ms-swift"
    )


def _read_command(path: Path, variables: Mapping[str, str], signs: CommandSigns, nothing: str) -> ReadConfig:
    reading = read_script(path, variables, signs=signs)
    verbs = {verb_of(one.command.argv, MEGATRON_VERBS) is not None for one in reading.commands}
    if not reading.commands or len(verbs) > 1:
        what = nothing if not reading.commands else "starts both swift and megatron"
        told = mistake(str(path), what, fix="check the script that starts the training")
        raise told if reading.commands else TrainsNothingError(told.problems)
    leaves = leaves_of_script(reading)
    named = named_json(reading, leaves)
    if signs.verbs and verbs.pop():
        leaves[MEGATRON_VERB] = Leaf(key=MEGATRON_VERB, value=True, line=reading.commands[0].command.line)
    open_why = next((one.open_why for one in reading.commands if one.open_why), "")
    leaves |= named | launch_leaves(reading, leaves) | program_leaves(reading, leaves, "fsdp_config", FSDP_FILE)
    if signs.verbs:
        leaves, unread = _with_file(reading, leaves)
        return ReadConfig(leaves=leaves, open_why=open_why or unread, notes=notes_of_script(reading))
    leaves, _ = _with_file(reading, leaves)
    open_why = open_why or _file_behind_program(reading)
    return ReadConfig(leaves=leaves | _own_leaves(reading), open_why=open_why, notes=notes_of_script(reading))


def _with_file(reading: ScriptReading, leaves: dict[str, Leaf]) -> tuple[dict[str, Leaf], str]:
    """With the settings of the file that --config names, before which arguments go; why it cannot be read."""
    inner = program_leaves(reading, leaves, "config", PROGRAM_FILE)
    if (unread := inner.get(PROGRAM_FILE + UNREAD)) is not None:
        return leaves | inner, f"it reads {unread.value}, and {unread.unknown}"
    given = {canonical_key(key) for key in leaves}
    plain = {key.removeprefix(PROGRAM_FILE): one for key, one in inner.items()}
    return {k: replace(one, key=k) for k, one in plain.items() if canonical_key(k) not in given} | leaves, ""


def _file_behind_program(reading: ScriptReading) -> str:
    """`train.py recipe.yaml --lr 1e-4`: settings in a file, in words that are the program's own."""
    for one in reading.commands:
        behind = itertools.takewhile(
            lambda word: not word.startswith("-"), one.command.argv[program_at(one.command.argv) :]
        )
        for word in behind:
            if word.endswith((".yaml", ".yml", ".json", ".toml")):
                return f"its program reads {reading.unknowns.shown(word)[:80]}"
    for one in reading.commands:
        for flag in (flag for arguments in one.program for flag in arguments):
            if OTHER_FILE.fullmatch(canonical_flag(flag)):
                return f"its program reads the file of {flag[:40]}"
    return ""


def _own_leaves(reading: ScriptReading) -> dict[str, Leaf]:
    """Which program is started, and by what."""
    launchers, programs = set(), set()
    for one in reading.commands:
        argv, at = one.command.argv, program_at(one.command.argv)
        by_deepspeed = starts_deepspeed(argv, at)
        launchers.add("accelerate" if accelerate_at(argv) >= 0 else "deepspeed" if by_deepspeed else "")
        programs.add(argv[at - 1].rpartition("/")[2] if at else argv[0])
    line = reading.commands[0].command.line
    why = "several launchers may start it" if len(launchers) > 1 else ""
    found = {LAUNCHER: Leaf(key=LAUNCHER, value=launchers.pop(), line=line, unknown=why)}
    if len(programs) == 1:
        name = reading.unknowns.shown(programs.pop())
        found[PROGRAM] = Leaf(key=PROGRAM, value=name, line=line)
    return found


def translate_transformers(config: Conversion) -> None:
    """Fill the conversion from the words of transformers.TrainingArguments."""
    _name_leaves(config)
    for name in BEGINNINGS:
        if not config.has_leaf(name):
            short = next((one for one in beginnings(name) if one in config.names), "")
            config.names |= {name: config.names[short]} if short else {}
    settle_names(config)
    config.open_why = config.open_why or why_open(config)
    read_named_model(config, "model_name_or_path")
    translate_trainer(
        config,
        micro=("per_device_train_batch_size", 8),
        length=next((n for n in ("model_max_length", "max_seq_length", "max_length") if config.has_leaf(n)), ""),
        recomputes=False,
    )
    settle_launched(config)
    _settle_rest(config)
    leave_open(config)


def translate_swift(config: Conversion) -> None:
    """ms-swift: Megatron's words with other defaults, or the Trainer's."""
    _name_leaves(config)
    read_named_model(config, "model")
    if MEGATRON_VERB in config.leaves:
        _translate_megatron(config)
    else:
        translate_trainer(config, micro=("per_device_train_batch_size", 1), length="max_length", recomputes=True)
        _read_dtype(config)
        if not config.has_leaf("gradient_accumulation_steps"):  # so many that a step has 16 sequences
            config.values.pop("batch.per_replica", None)
    if (parts := config.read_whole("sequence_parallel_size")) is not None and parts > 0:
        config.set_value("parallel.context", parts, "sequence_parallel_size")
        config.set_value("parallel.context_kind", "ulysses", "sequence_parallel_size")
    _settle_rest(config)
    leave_open(config)


def _name_leaves(config: Conversion) -> None:
    config.names |= {canonical_key(key): key for key in config.leaves if key.startswith("--") and " " not in key}
    for theirs, ours in (("env.NPROC_PER_NODE", "nproc_per_node"), ("env.NNODES", "nnodes")):
        config.rename_leaf(ours, theirs)
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
    sharded = any(config.read_flag(name) for name in ("use_megatron_fsdp", "use_custom_fsdp"))
    for name in absent:
        key, value = SWIFT_DEFAULTS[name]
        if not (sharded and key == "parallel.zero"):
            config.set_value(key, value, name, note="default of ms-swift")
    wait_s = min(config.read_number("ddp_timeout") or 18e6, 1e7)  # the schema's longest
    for key in ("comm.init_timeout_s", "train.timeout_s"):
        config.set_value(
            key, wait_s, "ddp_timeout", note="" if config.has_leaf("ddp_timeout") else "default of ms-swift"
        )
    if "global_batch_size" in absent:
        config.values.pop("batch.per_replica", None)
    _read_dtype(config)


def _read_dtype(config: Conversion) -> None:
    """bf16 or fp16 as the model has it, unless the command says."""
    words = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32"}
    said = words.get(config.read_word("torch_dtype"))
    eight = config.has_leaf("fp8_format")
    told = eight or config.read_flag("bf16") or config.read_flag("fp16")
    if said and not told:
        config.set_value("precision.compute", said, "torch_dtype")
    elif not told:
        config.set_value("precision.compute", "bf16", "torch_dtype")
        config.unknown["precision.compute"] = DTYPE


_LAUNCHED = {
    **accelerate.IRRELEVANT,
    "fsdp_config.": "a detail of FSDP",
    "deepspeed_config.": "a detail of DeepSpeed",
    "distributed_type": "who shards",
}
LAUNCH_IRRELEVANT = {
    **{f"{LAUNCH_FILE}{key}": why for key, why in _LAUNCHED.items()},
    **{f"{ACCELERATE}{key.rpartition('.')[2]}": why for key, why in _LAUNCHED.items() if not key.endswith(".")},
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
