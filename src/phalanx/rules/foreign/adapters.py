"""Detection of configurations that train only adapters or parts of a model, to which a plan does not apply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from phalanx.rules.evidence import NO_WORD
from phalanx.rules.foreign.conversion import Conversion, Leaf
from phalanx.rules.foreign.mcore import TOWERS
from phalanx.rules.foreign.megatron import canonical_key

OFF = ("", "none", "null", "false", "0", "no", "off", "full")
# Switches of programs around Hugging Face's Trainer (LLaVA, FastChat, TRL, Qwen and similar ones).
SWITCHES = (
    "lora_enable",
    "use_lora",
    "enable_lora",
    "use_peft",
    "lora",
    "use_qlora",
    "q_lora",
    "tune_mm_mlp_adapter",
)
# Settings of programs around Hugging Face's Trainer that add an image encoder to the language model that is
# planned.
PICTURES = ("vision_tower", "mm_projector_type", "pretrain_mm_mlp_adapter", "tune_mm_mlp_adapter")
# LLaMA-Factory's training methods that keep other optimizer states than Adam's, or skip layers in a step.
OTHER_WAYS = ("use_badam", "use_galore", "use_apollo", "mixture_of_depths", "use_llama_pro")
# Words in arguments of forks of Megatron that change how a step is computed, so that no plan applies.
CHANGES_STEPS = re.compile(
    r"pipe|bubble|schedul|hetero|offload|grad_comp|compress|prun|spars|mask_only|hessian|quant|distill|teacher"
    r"|freeze|lora|peft|async|experts?$|^moe_model|_config$|^config_|swap|unaligned|noop_layers|zero_memory|moe_model_type|reuse_fp32|layerzero"
)
# Variables of other vendors' devices, whose Megatron computes and stores differently: Ascend, Gaudi, Moore Threads.
OTHER_DEVICES = re.compile(r"env\.(HCCL_|ASCEND_|PYTORCH_NPU_|HABANA_|PT_HPU_|MUSA_|MCCL_)")
# Megatron's own arguments that contain such a word and change no step.
CHANGES_NONE = re.compile(
    r"lr_scheduler|opt_param_scheduler|pipeline_model_parallel|virtual_pipeline|pipeline_rank|pipeline_parallel$"
    r"|pipeline_manual_split|pp_partition|async_tensor_model_parallel|async_save|async_strategy|data_|dataset|tokeniz|log_"
    r"|deepspeed_config|prompt|energon"
)
# Set by trainer_scripts for ms-swift's `megatron` commands
MEGATRON_VERB = "verb.megatron"


def partial_training(config: Conversion, trainer: str) -> str:
    """Return the setting that restricts training to an adapter or a part of the model.

    Returns an empty string if all weights are trained.

    A default counts: LLaMA-Factory and `swift sft` train LoRA by default.
    """
    leaves = {canonical_key(key): leaf for key, leaf in config.leaves.items()}
    by_trainer = {
        "axolotl": _by_keys(leaves, "adapter", default=""),
        "llama-factory": _by_keys(leaves, "finetuning_type", default="lora") or next(_by_words(leaves, OTHER_WAYS), ""),
        "ms-swift": _by_keys(
            leaves, "tuner_type", "train_type", "sft_type", default="" if MEGATRON_VERB in leaves else "lora"
        ),
        "transformers": next(iter((*_by_switches(leaves), *_by_words(leaves, PICTURES))), ""),
        "nemo": next(_by_section(leaves), ""),
        "megatron": next((leaves[name].key for name in TOWERS if name in leaves), ""),
    }
    return by_trainer.get(trainer, "")


def changed_steps(config: Conversion, trainer: str) -> str:
    """Return a fork's argument, or a variable of other devices, that changes how a step is computed.

    Returns an empty string if there is none.
    """
    if trainer != "megatron":
        return ""
    devices = next((key for key in config.leaves if OTHER_DEVICES.match(key)), "")
    if devices:
        return devices
    experts = config.find_leaf("num_experts") if config.read_flag("deepspeed") else None
    if experts is not None and (experts.unknown or (config.read_whole("num_experts") or 0) > 1):
        # DeepSpeed's experts: in every second layer, and split differently
        return experts.key
    unmapped_keys = (key for key, settled in config.settled.items() if settled.text == NO_WORD and key.startswith("--"))
    changing_keys = (
        key
        for key in unmapped_keys
        if CHANGES_STEPS.search(canonical_key(key)) and not CHANGES_NONE.search(canonical_key(key))
    )
    return next((key for key in changing_keys if config.leaves[key].value is not False), "")


def _by_keys(said: Mapping[str, Leaf], *names: str, default: str) -> str:
    leaf = next((said[name] for name in names if name in said), None)
    if leaf is None and default and "program_file.unread" in said:
        return f"{names[0]}: {said['program_file.unread'].unknown}"
    if leaf is None:
        return f"{names[0]} is {default} unless given" if default else ""
    if leaf.unknown:
        return f"{leaf.key} {leaf.unknown}"
    return "" if str(leaf.value).strip().lower() in OFF else f"{leaf.key} = {str(leaf.value)[:40]}"


def _by_words(said: Mapping[str, Leaf], names: tuple[str, ...]) -> Iterator[str]:
    yield from (said[name].key for name in names if name in said and str(said[name].value).strip().lower() not in OFF)


def _by_switches(said: Mapping[str, Leaf]) -> Iterator[str]:
    switches = [said[name] for name in SWITCHES if name in said]
    for leaf in switches:
        if leaf.value is True or str(leaf.value).strip().lower() not in OFF:
            yield leaf.key
    # A program that always trains adapters takes their rank without a switch
    if not switches:
        yield from (leaf.key for name, leaf in said.items() if name.startswith("lora_"))


def _by_section(said: Mapping[str, Leaf]) -> Iterator[str]:
    """Yield settings that choose adapters: `model.peft.peft_scheme` of NeMo 1, `peft` of Megatron-Bridge and NeMo 2."""
    sections = ("peft.", "model.peft.peft_scheme", "model.peft._target_")
    leaves = [leaf for name, leaf in said.items() if name == "peft" or name.startswith(sections)]
    yield from (leaf.key for leaf in leaves if leaf.value is not None and str(leaf.value).strip().lower() not in OFF)
