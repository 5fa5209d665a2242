"""Settings that a launch script leaves to its launcher, to files, or to a program's unknown defaults.

A program's defaults are known only for transformers' own examples, identified by name and arguments. Two arguments
that only Hugging Face's TrainingArguments has identify its parser, and then no layer is split and there are no
stages; the program may still set sharding, accumulation, format and recomputation itself.
"""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx.rules.foreign.accelerate import HYBRID, STRATEGIES
from phalanx.rules.foreign.contradictions import settle_contradictions
from phalanx.rules.foreign.conversion import Conversion, Leaf
from phalanx.rules.foreign.shell.named_settings import FSDP_FILE, LAUNCH_FILE, LAUNCH_JSON, UNREAD
from phalanx.rules.foreign.shell.training_command import ACCELERATE

# Leaves added by the script reader: the file that is started, and what starts it
PROGRAM = "verb.program"
LAUNCHER = "verb.launcher"
# Prefix for the file that a program's --config names, if it cannot be read
PROGRAM_FILE = "program_file."
# Arguments that only TrainingArguments has. Custom training loops have its other names too: save_steps,
# warmup_ratio.
ONLY_TRAINER = frozenset(
    [
        *("save_strategy", "evaluation_strategy", "eval_strategy", "logging_strategy", "ddp_timeout", "tf32"),
        *("remove_unused_columns", "ddp_find_unused_parameters", "load_best_model_at_end", "metric_for_best_model"),
        *("group_by_length", "logging_first_step", "save_only_model", "save_safetensors", "include_inputs_for_metrics"),
        *(
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_config",
            "gradient_checkpointing_kwargs",
            "predict_with_generate",
        ),
        *(
            "fp16_full_eval",
            "bf16_full_eval",
            "label_smoothing_factor",
            "neftune_noise_alpha",
            "eval_accumulation_steps",
        ),
        *(
            "include_num_input_tokens_seen",
            "half_precision_backend",
            "dataloader_persistent_workers",
            "save_on_each_node",
        ),
    ]
)
LEAST_ONLY = 2
# If the program's name is known, arguments that other programs have too are sufficient.
ALSO_TRAINER = ONLY_TRAINER | frozenset(
    [
        *("save_total_limit", "eval_steps", "logging_steps", "overwrite_output_dir", "dataloader_num_workers", "optim"),
        *("report_to", "warmup_ratio", "do_train", "do_eval", "lr_scheduler_type", "save_steps", "adam_beta2"),
        *("warmup_steps", "max_steps", "gradient_checkpointing"),
    ]
)
LEAST = 2
# Of FastChat, LLaVA and similar ones: TrainingArguments with more fields
PROGRAMS = frozenset({"train_mem.py"})
EXAMPLES = re.compile(
    r"run_(clm|mlm|plm|fim|glue|xnli|qa|qa_beam_search|seq2seq_qa|summarization|translation|ner|swag|mae|mim"
    r"|image_classification|audio_classification|speech_recognition_ctc|speech_recognition_seq2seq|classification)\.py"
)
# Arguments, and their names in DeepSpeed's JSON; the Trainer refuses two that differ (integrations/deepspeed.py).
PAIRS = (
    ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "batch.micro"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps", "batch.per_replica"),
    ("bf16", "bf16.enabled", "precision.compute"),
    ("fp16", "fp16.enabled", "precision.compute"),
)
# Arguments that the Trainer does not have, and that set how a program shards, in which format, or with which file.
_SHARDS = re.compile(r"deepspeed|(^|_)zero(_|\d|$)|fsdp|(^|_)shard")
_TRAINERS_OWN = re.compile(r"deepspeed|fsdp|fsdp_config|fsdp_min_num_params|fsdp_transformer_layer_cls_to_wrap")
_FORMATS = ("precision", "mixed_precision")
_LOADS = ("torch_dtype", "dtype", "model_dtype")
_ON = ("true", "yes", "1", "on")


def why_open(config: Conversion) -> str:
    """Return why settings that the script leaves out may have any value; empty if the Trainer's defaults apply."""
    if (leaf := config.leaves.get(PROGRAM_FILE + UNREAD)) is not None:
        return f"its program reads {leaf.value}, and {leaf.unknown}"
    launcher = config.leaves.get(LAUNCHER)
    if launcher is not None and launcher.unknown:
        return launcher.unknown
    if launcher is not None and launcher.value == "accelerate":
        if (leaf := config.leaves.get(LAUNCH_FILE + UNREAD)) is not None:
            return f"accelerate launch reads {leaf.value}, and {leaf.unknown}"
        if not any(key.startswith(LAUNCH_FILE) for key in config.leaves):
            return "accelerate launch without --config_file reads the user's own default_config.yaml, if there is one"
        if _kind(config) not in ("deepspeed", "fsdp", "ddp"):
            return "accelerate launch is given a distributed_type that says more than who shards"
        if any(key.startswith(f"{LAUNCH_FILE}parallelism_config") for key in config.leaves):
            return "accelerate launch is given a parallelism_config"
    if not _is_trainer(config):
        name = config.leaves[PROGRAM].value if PROGRAM in config.leaves else "the program"
        return f"{str(name)[:60]} is not known to have the Trainer's defaults"
    return ""


def _is_trainer(config: Conversion) -> bool:
    """Return whether the program has the parser of transformers' TrainingArguments: no split layers, no stages."""
    leaf = config.leaves.get(PROGRAM)
    is_named = leaf is not None and (leaf.value in PROGRAMS or EXAMPLES.fullmatch(str(leaf.value)) is not None)
    if is_named and len(ALSO_TRAINER & config.names.keys()) >= LEAST:
        return True
    return len(ONLY_TRAINER & config.names.keys()) >= LEAST_ONLY


def _is_example(config: Conversion) -> bool:
    """Return whether it is one of transformers' own programs, which have no other defaults than its."""
    leaf = config.leaves.get(PROGRAM)
    return leaf is not None and EXAMPLES.fullmatch(str(leaf.value)) is not None and _is_trainer(config)


def _own_default(config: Conversion) -> str:
    """Return why the program may have another default than the Trainer's, although it has its parser."""
    leaf = config.leaves.get(PROGRAM)
    name = str(leaf.value)[:60] if leaf is not None else "the program"
    return "" if _is_example(config) else f"{name} may have a default of its own"


def settle_names(config: Conversion) -> None:
    """Read a fork's `--deepspeed_config` as the Trainer's `--deepspeed`; a switch of that name gives no file."""
    deepspeed_leaf = config.find_leaf("deepspeed")
    if deepspeed_leaf is not None and deepspeed_leaf.value is True:
        config.read_as["deepspeed"] = replace(deepspeed_leaf, value=None)
    if deepspeed_leaf is None or deepspeed_leaf.value is True:
        for name in ("deepspeed_config", "deepspeed_config_file", "ds_config"):
            leaf = config.find_leaf(name)
            if leaf is not None and leaf.value is not True:
                config.read_as["deepspeed"] = leaf
                return


def settle_launched(config: Conversion) -> None:
    """Apply the launcher, its files and a fork's arguments after the Trainer's, and mark what stays unknown."""
    _settle_machines(config)
    words = str(leaf.value) if (leaf := config.find_leaf("fsdp")) is not None else ""
    _set_hybrid(config, "hybrid_shard" in words, "fsdp")
    _settle_sharding(config)
    _settle_precision(config)
    _settle_recompute(config)
    _settle_batch(config)
    settle_contradictions(config, PAIRS)


# ---- the launcher's settings -----------------------------------------------------------------------------------------


def _said(config: Conversion, name: str, *sections: str) -> Leaf | None:
    """Return an argument of accelerate launch, or else the setting of its file."""
    keys = (f"{ACCELERATE}{name}", *(f"{LAUNCH_FILE}{section}{name}" for section in ("", *sections)))
    return next((leaf for key in keys if (leaf := config.leaves.get(key)) is not None and leaf.value is not None), None)


def _by_accelerate(config: Conversion) -> bool:
    leaf = config.leaves.get(LAUNCHER)
    return leaf is not None and leaf.value == "accelerate"


def _kind(config: Conversion) -> str:
    """Return who shards according to the launcher: "deepspeed", "fsdp", "ddp", another word, or nothing."""
    for flag, kind in (("use_deepspeed", "deepspeed"), ("use_fsdp", "fsdp"), ("use_megatron_lm", "megatron_lm")):
        if f"{ACCELERATE}{flag}" in config.leaves:
            return kind
    if f"{ACCELERATE}multi_gpu" in config.leaves:
        return "ddp"
    leaf = config.leaves.get(f"{LAUNCH_FILE}distributed_type")
    word = str(leaf.value).lower() if leaf is not None else ""
    if leaf is None and any(key.startswith(LAUNCH_FILE) and not key.endswith(UNREAD) for key in config.leaves):
        return "ddp"
    return "ddp" if word in ("no", "multi_gpu", "false") else word


def _settle_machines(config: Conversion) -> None:
    if not _by_accelerate(config):
        return
    world, hosts = _said(config, "num_processes"), _said(config, "num_machines")
    has_file = any(key.startswith(LAUNCH_FILE) and not key.endswith(UNREAD) for key in config.leaves)
    count = _whole(world)
    num_hosts = _whole(hosts) if hosts is not None else 1 if has_file else 0
    config.machines = (num_hosts, count // num_hosts) if count and num_hosts and count % num_hosts == 0 else (0, 0)
    for leaf in (world, hosts):
        if leaf is not None:
            config.mark_used(leaf.key, by="cluster: hosts × devices")


def _whole(leaf: Leaf | None) -> int:
    text = str(leaf.value) if leaf is not None and not leaf.unknown else ""
    return int(text) if re.fullmatch(r"\d{1,6}", text) else 0


# ---- sharding --------------------------------------------------------------------------------------------------------


def _settle_sharding(config: Conversion) -> None:
    words = config.find_leaf("fsdp")
    if words is not None and "no_shard" in str(words.value):
        config.set_value("parallel.zero", 0, "fsdp", note="no_shard")
    reshard = config.leaves.get(f"{FSDP_FILE}reshard_after_forward")
    if (
        words is not None and reshard is not None and str(reshard.value).lower() == "false"
    ):  # FSDP 2: weights stay gathered
        config.set_value("parallel.zero", 2, reshard.key, note="FSDP")
    if _program_shards(config):
        return
    if config.has_leaf("zero_stage") and not _by_accelerate(config):
        stage = config.read_whole("zero_stage")
        config.unknown.pop("parallel.zero", None)
        config.set_value("parallel.zero", stage if stage in range(4) else 0, "zero_stage")
        if stage not in range(4):
            config.unknown.setdefault("parallel.zero", "zero_stage is not one of ZeRO's")
        return
    if _by_accelerate(config):
        _settle_launched_sharding(config)
        return
    own_key = next((k for n, k in config.names.items() if _SHARDS.search(n) and not _TRAINERS_OWN.fullmatch(n)), "")
    if own_key:
        config.unknown["parallel.zero"] = f"{own_key} is an argument of the program's own"
    elif (leaf := config.leaves.get(LAUNCHER)) is not None and leaf.value == "deepspeed":
        config.unknown["parallel.zero"] = "deepspeed starts it, and the script names no configuration of DeepSpeed's"
    elif (name := _switched_on(config, "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")) and not own_key:
        config.unknown["parallel.zero"] = f"{name} of the environment turns it on"
    elif (words is None or not str(words.value)) and (why := config.open_why or _own_default(config)):
        config.unknown.setdefault("parallel.zero", why)


def _switched_on(config: Conversion, *names: str) -> str:
    """Return the environment variable that configures Accelerate in place of its launcher; empty if none is on."""
    variables = ((name, config.leaves.get(f"env.{name}")) for name in names)
    return next(
        (name for name, leaf in variables if leaf is not None and (leaf.unknown or str(leaf.value).lower() in _ON)), ""
    )


def _program_shards(config: Conversion) -> bool:
    """Return whether the program itself gets DeepSpeed's file, or FSDP's settings."""
    for name in ("deepspeed", "fsdp"):
        leaf = config.find_leaf(name)
        if leaf is not None and (leaf.unknown or str(leaf.value) not in ("", "False", "false")):
            return True
    return False


def _settle_launched_sharding(config: Conversion) -> None:
    kind, stage, leaf = _kind(config), -1, None
    has_json = any(key.startswith(LAUNCH_JSON) for key in config.leaves)
    if kind == "deepspeed" and has_json:
        leaf = config.leaves.get(f"{LAUNCH_JSON}zero_optimization.stage")
        is_absent = leaf is None and LAUNCH_JSON + UNREAD not in config.leaves
        stage = 0 if is_absent else _stage(leaf)
    elif kind == "deepspeed":
        leaf = _said(config, "zero_stage", "deepspeed_config.")
        stage = _stage(leaf)
    elif kind == "fsdp":
        leaf = _said(config, "fsdp_sharding_strategy", "fsdp_config.")
        reshard = _said(config, "fsdp_reshard_after_forward", "fsdp_config.")
        leaf = leaf or reshard
        word = str(leaf.value).lower() if leaf is not None else ""
        _set_hybrid(config, word in HYBRID, *((leaf.key,) if leaf is not None else ()))
        stages = {**STRATEGIES, **HYBRID, "true": 3, "false": 2}
        stage = stages.get(word, 3 if not word and not config.open_why else -1)
    elif kind == "ddp":
        stage = 0
    kinds = (f"{ACCELERATE}multi_gpu", f"{ACCELERATE}use_fsdp", f"{LAUNCH_FILE}distributed_type")
    leaf = leaf or next((config.leaves[key] for key in kinds if key in config.leaves), None)
    config.unknown.pop("parallel.zero", None)
    names = (leaf.key,) if leaf is not None else ()
    config.set_value("parallel.zero", max(0, stage), *names, note="" if names else "accelerate launch")
    if stage < 0 or (leaf is not None and leaf.unknown):
        unread = config.leaves.get(LAUNCH_JSON + UNREAD)
        reason = unread.unknown if unread is not None else config.open_why
        config.unknown["parallel.zero"] = reason or "accelerate launch is not told how far it shards"
    _settle_offload(config)


def _set_hybrid(config: Conversion, hybrid: bool, *names: str) -> None:
    """Set shards within a host and copies between hosts: the shard group has as many ranks as a host has devices."""
    if not hybrid:
        return
    devices_each = config.machines[1]
    config.set_value("parallel.shard", devices_each or "auto", *names, note="hybrid: within a host")
    if not devices_each:
        config.unknown["parallel.shard"] = "hybrid: within a host, whose devices are not said"


def _stage(leaf: Leaf | None) -> int:
    text = str(leaf.value) if leaf is not None and not leaf.unknown else ""
    return int(text) if text in ("0", "1", "2", "3") else -1


def _settle_offload(config: Conversion) -> None:
    for state_kind, offloaded in (("optimizer", "optimizer"), ("param", "parameters")):
        leaf = _said(config, f"offload_{state_kind}_device", "deepspeed_config.")
        leaf = config.leaves.get(f"{LAUNCH_JSON}zero_optimization.offload_{state_kind}.device") or leaf
        if leaf is not None and str(leaf.value).lower() in ("cpu", "nvme"):
            config.set_value("parallel.offload", offloaded, leaf.key)
    leaf = _said(config, "fsdp_offload_params", "fsdp_config.")
    if _kind(config) == "fsdp" and leaf is not None and str(leaf.value).lower() in _ON:
        config.set_value("parallel.offload", "parameters", leaf.key)


# ---- format ---------------------------------------------------------------------------------------------------------


def _settle_precision(config: Conversion) -> None:
    if any(config.read_word(name) in _ON for name in ("bf16", "fp16", "pure_bf16", "bfloat16")):
        return
    if any((leaf := config.find_leaf(name)) is not None and leaf.unknown for name in ("bf16", "fp16")):
        return
    format_leaves = [_said(config, "mixed_precision")] if _by_accelerate(config) else []
    format_leaves += [config.find_leaf(name) for name in _FORMATS]
    for leaf in format_leaves:
        format_word = str(leaf.value).lower() if leaf is not None and not leaf.unknown else ""
        if leaf is not None and format_word in ("bf16", "fp16", "fp8"):
            config.unknown.pop("precision.compute", None)
            config.set_value("precision.compute", format_word, leaf.key)
            return
    for prefix in ("ds.", LAUNCH_JSON):
        for name, compute in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
            leaf = config.leaves.get(f"{prefix}{name}.enabled")
            if leaf is not None and leaf.value is True and not leaf.unknown:
                config.unknown.pop("precision.compute", None)
                config.set_value("precision.compute", compute, leaf.key)
                return
    if config.has_leaf("env.ACCELERATE_MIXED_PRECISION"):
        config.unknown.setdefault("precision.compute", "ACCELERATE_MIXED_PRECISION of the environment says it")
    # Such as --bf16 False
    is_stated = any(config.has_leaf(name) for name in ("bf16", "fp16"))
    has_other = any(leaf is not None for leaf in format_leaves) or any(config.has_leaf(name) for name in _LOADS)
    if has_other or not _is_example(config) or (config.open_why and not is_stated):
        config.unknown.setdefault(
            "precision.compute", config.open_why or "the program loads its model in a format of its choice"
        )


# ---- recomputation --------------------------------------------------------------------------------------------------


def _settle_recompute(config: Conversion) -> None:
    if config.job_value("parallel.recompute") == "full":
        return
    fsdp_leaf = config.find_leaf("fsdp")
    checkpointing, reason_unread = None, ""
    if fsdp_leaf is not None and str(fsdp_leaf.value) not in ("", "False"):
        keys = (f"{FSDP_FILE}{name}activation_checkpointing" for name in ("", "fsdp_"))
        checkpointing = next((leaf for key in keys if (leaf := config.leaves.get(key)) is not None), None)
        reason_unread = config.leaves[FSDP_FILE + UNREAD].unknown if FSDP_FILE + UNREAD in config.leaves else ""
    elif _by_accelerate(config) and not _program_shards(config) and _kind(config) in ("fsdp", ""):
        checkpointing = _said(config, "fsdp_activation_checkpointing", "fsdp_config.")
        reason_unread = config.open_why if checkpointing is None else ""
    if checkpointing is not None and not checkpointing.unknown and str(checkpointing.value).lower() in _ON:
        config.unknown.pop("parallel.recompute", None)
        config.set_value("parallel.recompute", "full", checkpointing.key, note="FSDP")
    elif reason_unread or (checkpointing is not None and checkpointing.unknown):
        config.unknown.setdefault(
            "parallel.recompute", reason_unread or "activation_checkpointing of FSDP is not known"
        )
    elif not config.has_leaf("gradient_checkpointing") and not _is_example(config):
        config.unknown.setdefault("parallel.recompute", config.open_why or "the program may turn it on by itself")


# ---- batch ----------------------------------------------------------------------------------------------------------


def _settle_batch(config: Conversion) -> None:
    """Read the accumulation per step if no argument gives it: the program's default, or the launcher's."""
    if config.read_flag("auto_find_batch_size"):
        reason = "auto_find_batch_size halves the batch until it fits"
        config.unknown |= dict.fromkeys(("batch.micro", "batch.per_replica"), reason)
    if config.has_leaf("gradient_accumulation_steps"):
        return
    leaf = _said(config, "gradient_accumulation_steps", "deepspeed_config.") if _by_accelerate(config) else None
    is_launched = leaf is not None and str(leaf.value) not in ("1", "auto")
    reason = config.open_why or _own_default(config)
    if reason or is_launched:
        config.values.pop("batch.per_replica", None)
        config.unknown["batch.per_replica"] = reason or "accelerate launch accumulates, and its program may not"
