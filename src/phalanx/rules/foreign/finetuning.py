"""Axolotl's and LLaMA-Factory's YAML, and the arguments of Hugging Face's Trainer, as job settings."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.errors import UserError
from phalanx.rules.foreign.config_files import read_tree
from phalanx.rules.foreign.conversion import SEEDS, Conversion, Leaf
from phalanx.rules.foreign.known_models import read_named_model
from phalanx.rules.foreign.named_files import find_named_file

ADAPTER = "only an adapter is trained; the plan prices all weights: an upper bound"
DATA = "which text is read does not change the work of a step"
IRRELEVANT = {
    "datasets": DATA,
    "datasets.": DATA,
    "dataset": DATA,
    "dataset_": DATA,
    "test_datasets.": DATA,
    "eval_dataset": DATA,
    "val_set_size": DATA,
    "val_size": DATA,
    "template": DATA,
    "max_samples": DATA,
    "chat_template": DATA,
    "preprocessing_": DATA,
    "overwrite_": "names and folders",
    "output_dir": "names and folders",
    "hub_": "names and folders",
    "wandb_": "logging",
    "mlflow_": "logging",
    "comet_": "logging",
    "report_to": "logging",
    "logging_": "logging",
    "plot_loss": "logging",
    "use_tensorboard": "logging",
    "eval": "evaluation",
    "eval_": "evaluation",
    "evals_per_epoch": "evaluation",
    "per_device_eval_batch_size": "evaluation",
    "do_": "evaluation",
    "dataloader_": "data loading",
    "sample_packing": "how samples are laid out; a full sequence is assumed",
    "packing": "how samples are laid out",
    "pad_to_sequence_len": "how samples are laid out",
    "flash_attention": "which kernels",
    "flash_attn": "which kernels",
    "attn_implementation": "which kernels",
    "flash_": "which kernels",
    "sdp_attention": "which kernels",
    "xformers_attention": "which kernels",
    "tf32": "which kernels",
    "liger_": "which kernels",
    "plugins": "which kernels",
    "special_tokens": "the tokenizer",
    "special_tokens.": "the tokenizer",
    "tokenizer_": "the tokenizer",
    "tokens": "the tokenizer",
    "model_type": "which class is loaded",
    "trust_remote_code": "which class is loaded",
    "is_llama_derived_model": "which class is loaded",
    "gradient_checkpointing_kwargs": "how it recomputes",
    "gradient_checkpointing_kwargs.": "how it recomputes",
    "resume_from_checkpoint": "where a run goes on",
    "auto_resume_from_checkpoints": "where a run goes on",
    "seed": "",
    "strict": "a permission",
    "save_": "checkpoints",
    "saves_per_epoch": "checkpoints",
    "fsdp_config.": "a detail of FSDP",
    "fsdp.": "a detail of FSDP",
    "train_on_inputs": "masks within a sequence",
    "group_by_length": "data loading",
    "ds.": "as the file says, or a detail of DeepSpeed",
}
UNMAPPED = {
    "adapter": ADAPTER,
    "lora_": ADAPTER,
    "peft_": ADAPTER,
    "finetuning_type": ADAPTER,
    "load_in_": "weights in few bits; the plan keeps them in 16",
    "quantization_": "weights in few bits; the plan keeps them in 16",
    "num_epochs": "in epochs: --set data.tokens says how many tokens there are",
    "num_train_epochs": "in epochs: --set data.tokens says how many tokens there are",
    "warmup_ratio": "a share of a run whose length is not said",
}


def translate_axolotl(config: Conversion) -> None:
    """Translate an Axolotl configuration (docs/config-reference) into job settings."""
    read_named_model(config, "base_model")
    config.set_value("parallel.mode", "fixed", note="Axolotl searches nothing")
    for foreign_key, axis in (
        ("tensor_parallel_size", "tensor"),
        ("context_parallel_size", "context"),
        ("sequence_parallel_degree", "context"),
        ("expert_parallel_size", "expert"),
    ):
        if (degree := config.read_whole(foreign_key)) is not None and degree > 0:
            config.set_value(f"parallel.{axis}", degree, foreign_key)
    _read_sharding(config)
    copies, shard = config.read_whole("dp_replicate_size"), config.read_whole("dp_shard_size")
    if shard and shard > 0:
        config.set_value("parallel.data", (copies or 1) * shard, "dp_shard_size", "dp_replicate_size")
        config.set_value("parallel.shard", shard, "dp_shard_size")
        config.set_value("parallel.zero", 3, "dp_shard_size", note="FSDP")
    _read_batch(config, "micro_batch_size", "sequence_len")
    recompute = config.read_word("gradient_checkpointing")
    on = recompute not in ("", "false", "none")
    config.set_value("parallel.recompute", "full" if on else "none", "gradient_checkpointing")
    _read_precision(config)
    if not (config.has_leaf("bf16") or config.has_leaf("bfloat16") or config.has_leaf("fp16")):
        config.unknown["precision.compute"] = "neither bf16 nor fp16 is said: Axolotl's default changed to bf16: auto"
    _read_optimizer(config)
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def translate_llama_factory(config: Conversion) -> None:
    """Translate a LLaMA-Factory configuration (src/llamafactory/hparams) into job settings."""
    read_named_model(config, "model_name_or_path")
    config.set_value("parallel.mode", "fixed", note="LLaMA-Factory searches nothing")
    _read_sharding(config)
    _read_batch(config, "per_device_train_batch_size", "cutoff_len")
    off = config.read_flag("disable_gradient_checkpointing")
    config.set_value(
        "parallel.recompute", "none" if off else "full", "disable_gradient_checkpointing", "gradient_checkpointing"
    )
    if config.read_word("finetuning_type") == "full":
        config.skip_leaf("finetuning_type", "all weights are trained, as the plan assumes")
    _read_precision(config)
    own_optimizer, is_pure_bf16 = _own_optimizer(config), config.read_flag("pure_bf16")
    if (
        is_pure_bf16
        and not own_optimizer
        and not config.has_leaf("deepspeed")
        and config.read_word("finetuning_type") == "full"
    ):
        # Weights, their gradients and Adam's states have the format of the model; DeepSpeed uses its own formats.
        config.set_value("precision.master_weights", False, "pure_bf16")
        # 8-bit optimizers have 8-bit moments
        if "8bit" not in config.read_word("optim"):
            config.set_value("precision.optimizer_state", "bf16", "pure_bf16")
        config.set_value("precision.grad_reduce", "bf16", "pure_bf16")
    config.assume_default("precision.master_weights", not is_pure_bf16, "fp32 unless pure_bf16")
    _read_optimizer(config)
    if own_optimizer:
        # The state it stores in addition to the weights is not known
        config.values.pop("precision.master_weights", None)
        if (rate := config.values.get("optim.lr")) is not None and rate.value == 0:
            del config.values["optim.lr"]
            config.leave_unmapped("learning_rate", f"{own_optimizer} is on, which has rates of its own")
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


# Switches of LLaMA-Factory (src/llamafactory/hparams) that leave Adam's states unchanged; its own optimizers
# (use_galore, use_apollo, use_badam, use_adam_mini, use_muon) and a fork's switches do not match.
_HARMLESS = re.compile(
    r"use_(unsloth\w*|llama_pro|dora|rslora|swanlab|reentrant_gc|fast_tokenizer|cache|cpu|\w*loss|liger\w*|audio_in_video"
    r"|v2_kernels|legacy_\w*|ray|wandb|flash\w*|kt|mca|tts|ref_model|kv_cache|auth_token|\w*tokenizer\w*|nested_quant)"
)


def _own_optimizer(config: Conversion) -> str:
    """Return the switch that chooses an optimizer other than the Trainer's; empty if none is on."""
    switches = (key for key in config.leaves if key.startswith("use_") and not _HARMLESS.fullmatch(key))
    return next((key for key in switches if config.leaves[key].value is True), "")


def translate_trainer(config: Conversion, *, micro: tuple[str, int], length: str, recomputes: bool) -> None:
    """Translate Hugging Face's TrainingArguments; `recomputes` is the program's default."""
    config.set_value("parallel.mode", "fixed", note=f"{config.title} searches nothing")
    _read_sharding(config)
    _read_batch(config, micro[0], length, default=micro[1])
    on = config.read_flag("gradient_checkpointing")
    kind = "full" if (recomputes if on is None else on) else "none"
    config.set_value("parallel.recompute", kind, "gradient_checkpointing")
    _read_precision(config)
    _read_optimizer(config)


JSON = "ds."  # prefix of leaves of the DeepSpeed JSON that a script names
STAGE = "zero_optimization.stage"


def _named_json(config: Conversion, name: str) -> dict[str, Leaf] | None:
    """Return the leaves of DeepSpeed's JSON: read with the script, next to the file, or ms-swift's own of that name."""
    leaves = {key.removeprefix(JSON): leaf for key, leaf in config.leaves.items() if key.startswith(JSON)}
    if leaves and not ((leaf := leaves.get(STAGE)) is not None and leaf.unknown):
        return leaves
    if config.title == "ms-swift" and (own_name := re.fullmatch(r"zero([0-3])(_offload)?", name)):
        settings: dict[str, object] = {STAGE: int(own_name.group(1))}
        if own_name.group(2):
            settings["zero_optimization.offload_optimizer.device"] = "cpu"
        if own_name.group(2) and own_name.group(1) == "3":
            settings["zero_optimization.offload_param.device"] = "cpu"
        return {key: Leaf(key=key, value=value, line=0) for key, value in settings.items()}
    return _json_beside(Path(config.file).parent, name)


def _read_sharding(config: Conversion) -> None:
    """Read who shards: DeepSpeed's JSON if it is next to the file, FSDP's settings, or plain data parallelism."""
    deepspeed_leaf = config.find_leaf("deepspeed")
    if deepspeed_leaf is not None and deepspeed_leaf.unknown:
        config.read_word("deepspeed")
        config.set_value("parallel.zero", 0, "deepspeed")
        config.unknown["parallel.offload"] = f"{deepspeed_leaf.key} {deepspeed_leaf.unknown}"
        return
    if deepspeed_leaf is not None and str(deepspeed_leaf.value) not in ("", "False"):
        json_leaves = _named_json(config, str(deepspeed_leaf.value))
        if json_leaves is not None:
            _read_json(config, json_leaves)
            return
        reason = f"{str(deepspeed_leaf.value)[:80]} is not in this folder"
        config.read_as["deepspeed"] = Leaf(
            key=deepspeed_leaf.key, value=deepspeed_leaf.value, line=deepspeed_leaf.line, unknown=reason
        )
        config.read_whole("deepspeed")
        config.unknown |= dict.fromkeys(("parallel.zero", "parallel.offload"), f"deepspeed: {reason}")
        config.add_missing(
            f"names {str(deepspeed_leaf.value)[:80]}, which is not in this folder", "give --set parallel.zero=3"
        )
        config.set_value("parallel.zero", 0, "deepspeed")
        return
    # Arguments, if it is a script; `fsdp:` without a value is off.
    given_keys = {
        key.removeprefix("--"): key for key, leaf in config.leaves.items() if leaf.value not in (None, "", [], {})
    }
    fsdp_words = " ".join(config.read_word(key) for key in given_keys if key == "fsdp" or key.startswith("fsdp."))
    sections = any(key == "fsdp" or key.startswith(("fsdp_config.", "fsdp_version")) for key in given_keys)
    if fsdp_words or sections:
        kind = config.read_word("fsdp_config.fsdp_sharding_strategy") or config.read_word(
            "fsdp_config.sharding_strategy"
        )
        keeps_gathered = (
            "shard_grad_op" in fsdp_words + kind
            or "zero2" in fsdp_words + kind
            or config.read_flag("fsdp_config.reshard_after_forward") is False
        )
        names = tuple(key for key in given_keys if key == "fsdp" or key.startswith("fsdp"))
        config.set_value("parallel.zero", 2 if keeps_gathered else 3, *names, note="FSDP")
        if "offload" in fsdp_words.split() or config.read_flag("fsdp_config.fsdp_offload_params"):
            config.set_value("parallel.offload", "parameters", *names, note="FSDP")
        return
    config.set_value("parallel.zero", 0, "deepspeed", note="neither DeepSpeed nor FSDP: plain data parallelism")


def _read_json(config: Conversion, found: dict[str, Leaf]) -> None:
    """Read the ZeRO stage, the offload of states, and the degree of tensor parallelism."""
    leaf = found.get(STAGE)
    stage = 0 if leaf is None else leaf.value
    if leaf is not None and (leaf.unknown or stage not in range(4)):
        config.unknown["parallel.zero"] = f"{STAGE} {leaf.unknown or 'is not one of its stages'}"
        stage = 0
    config.set_value("parallel.zero", stage, "deepspeed", note=f"stage {stage} of that file")
    for state_kind, offloaded in (("optimizer", "optimizer"), ("param", "parameters")):
        device = found.get(f"zero_optimization.offload_{state_kind}.device")
        if device is not None and device.unknown:
            config.unknown["parallel.offload"] = f"{device.key} {device.unknown}"
        elif device is not None and str(device.value).lower() in ("cpu", "nvme"):
            config.set_value("parallel.offload", offloaded, "deepspeed", note="of that file")
    group = found.get("zero_optimization.mics_shard_size")
    if group is not None and isinstance(group.value, int) and group.value > 0:
        config.set_value("parallel.shard", group.value, "deepspeed", note="MiCS, of that file")
    tensor_degree = found.get("tensor_parallel.autotp_size")
    if tensor_degree is not None and isinstance(tensor_degree.value, int) and tensor_degree.value > 0:
        config.set_value("parallel.tensor", tensor_degree.value, "deepspeed", note="autotp_size of that file")


def _json_beside(folder: Path, name: str) -> dict[str, Leaf] | None:
    try:
        path = find_named_file(folder, name)
        return read_tree(path) if path is not None and path.suffix == ".json" else None
    except (UserError, OSError, ValueError):
        return None


def _read_batch(config: Conversion, micro_key: str, length_key: str, *, default: int = 1) -> None:
    micro = config.read_whole(micro_key) or default
    passes = config.read_whole("gradient_accumulation_steps") or 1
    config.set_value("batch.micro", micro, micro_key)
    note = f"{micro} × {passes} passes"
    config.set_value("batch.per_replica", micro * passes, micro_key, "gradient_accumulation_steps", note=note)
    if length_key and (length := config.read_whole(length_key)):
        config.set_value("data.sequence", length, length_key)
    if (steps := config.read_whole("max_steps")) and steps > 0:
        config.set_value("data.steps", steps, "max_steps")
    strategy = config.read_word("save_strategy") or "steps"
    # trainer.py, _save_checkpoint: without the optimizer's state
    if config.read_flag("save_only_model") and strategy != "no":
        config.practice["resumes_exactly"] = ("weights", "sampler", "tokens", "layout")
        config.mark_used("save_only_model", by="practice: resumes_exactly")
    if strategy != "steps":
        config.skip_leaf("save_steps", f"save_strategy is {strategy}")
    elif (save_steps := config.read_whole("save_steps")) and save_steps > 0:
        config.set_value("checkpoint.steps", save_steps, "save_steps")
        _note_never_saved(config, save_steps)
    if (seed := config.read_whole("seed")) is not None:
        config.set_value("data.seed", abs(seed) % SEEDS, "seed")


# Steps, if the file gives no length: longer than any fine-tuning
NEVER_REACHED = 100_000


def _note_never_saved(config: Conversion, every: int) -> None:
    """Note a run that never saves: `save_steps: 999999` is a common way to turn checkpoints off."""
    length = config.int_of("data.steps", 0)
    if every > (length or NEVER_REACHED - 1):
        reach = f"the run has {length:,} steps" if length else "the run is told in epochs"
        config.notes.append(f"save_steps is {every:,}, and {reach}: a failure may cost all of its work")


def _read_precision(config: Conversion) -> None:
    fp16, bf16 = config.read_word("fp16"), config.read_word("bf16") or config.read_word("bfloat16")
    if config.read_flag("pure_bf16"):
        config.set_value("precision.compute", "bf16", "pure_bf16")
    elif bf16 in ("true", "full", "auto", "1") and not (bf16 == "auto" and fp16 in ("true", "1")):
        # Axolotl: bf16 "auto" together with fp16 is off (utils/config).
        note = "auto: where the device has it" if bf16 == "auto" else ""
        config.set_value("precision.compute", "bf16", "bf16", "bfloat16", note=note)
        config.skip_leaf("fp16", "bf16 goes first")
    elif fp16 in ("true", "1"):
        config.set_value("precision.compute", "fp16", "fp16")
    else:
        config.set_value("precision.compute", "fp32", "bf16", "fp16", note="neither bf16 nor fp16")
    if config.read_word("deepspeed") not in ("", "false"):
        config.assume_default("precision.master_weights", True, "DeepSpeed keeps fp32 weights")
    config.assume_default("comm.init_timeout_s", 1_800, "ddp_timeout of the Trainer")
    timeout = config.read_number("ddp_timeout")
    if timeout is not None and timeout > 0:
        config.set_value("train.timeout_s", min(timeout, 1e7), "ddp_timeout")
    config.assume_default("train.timeout_s", 1_800, "ddp_timeout of the Trainer")


def _read_optimizer(config: Conversion) -> None:
    name = config.read_word("optimizer") or config.read_word("optim") or "adamw_torch"
    if "adamw" in name or name == "adam":
        config.set_value("optim.name", "adamw", "optimizer", "optim")
    config.copy_keys(
        {
            "learning_rate": ("optim.lr", Conversion.read_number),
            "weight_decay": ("optim.weight_decay", Conversion.read_number),
            "max_grad_norm": ("optim.clip", Conversion.read_number),
        }
    )
    if (steps := config.read_whole("warmup_steps")) is not None:
        config.set_value("optim.warmup_steps", steps, "warmup_steps")
    for key in ("lr_scheduler", "lr_scheduler_type"):
        if config.read_word(key) == "cosine":
            config.set_value("optim.schedule", "cosine", key)
        elif config.has_leaf(key):
            config.leave_unmapped(key, "the job schema decays by cosine, or at the end")
