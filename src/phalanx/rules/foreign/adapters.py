"""Whether a configuration trains all weights of its model: a plan is of all of them, and says nothing of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from phalanx.rules.evidence import NO_WORD
from phalanx.rules.foreign.conversion import Conversion, Leaf
from phalanx.rules.foreign.mcore import TOWERS
from phalanx.rules.foreign.megatron import canonical_key

OFF = ("", "none", "null", "false", "0", "no", "off", "full")
# Switches of programs around Hugging Face's Trainer (LLaVA, FastChat, TRL, Qwen and their like).
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
# Programs around Hugging Face's Trainer that put pictures before a language model, of which a plan would be.
PICTURES = ("vision_tower", "mm_projector_type", "pretrain_mm_mlp_adapter", "tune_mm_mlp_adapter")
# LLaMA-Factory's ways of training that keep other states than Adam's, or leave layers out of a step.
OTHER_WAYS = ("use_badam", "use_galore", "use_apollo", "mixture_of_depths", "use_llama_pro")
# Of an argument that Megatron has not: words by which it changes how a step is computed, so that no plan is of it.
CHANGES_STEPS = re.compile(
    r"pipe|bubble|schedul|hetero|offload|grad_comp|compress|prun|spars|mask_only|hessian|quant|distill|teacher"
    r"|freeze|lora|peft|async|experts?$|^moe_model|_config$|^config_|swap|unaligned|noop_layers|zero_memory|moe_model_type|reuse_fp32|layerzero"
)
# Variables of other makers' devices, whose Megatron computes and stores otherwise: Ascend, Gaudi, Moore Threads.
OTHER_DEVICES = re.compile(r"env\.(HCCL_|ASCEND_|PYTORCH_NPU_|HABANA_|PT_HPU_|MUSA_|MCCL_)")
# Arguments of Megatron's that have such a word and change no step.
CHANGES_NONE = re.compile(
    r"lr_scheduler|opt_param_scheduler|pipeline_model_parallel|virtual_pipeline|pipeline_rank|pipeline_parallel$"
    r"|pipeline_manual_split|pp_partition|async_tensor_model_parallel|async_save|async_strategy|data_|dataset|tokeniz|log_"
    r"|deepspeed_config|prompt|energon"
)
MEGATRON_VERB = "verb.megatron"  # as trainer_scripts marks ms-swift's `megatron` commands


def partial_training(config: Conversion, trainer: str) -> str:
    """Which setting makes it train an adapter, or a part of the model; empty where all weights are trained.

    A default counts: LLaMA-Factory and `swift sft` train LoRA unless told otherwise.
    """
    said = {canonical_key(key): leaf for key, leaf in config.leaves.items()}
    found = {
        "axolotl": _by_keys(said, "adapter", default=""),
        "llama-factory": _by_keys(said, "finetuning_type", default="lora") or next(_by_words(said, OTHER_WAYS), ""),
        "ms-swift": _by_keys(
            said, "tuner_type", "train_type", "sft_type", default="" if MEGATRON_VERB in said else "lora"
        ),
        "transformers": next(iter((*_by_switches(said), *_by_words(said, PICTURES))), ""),
        "nemo": next(_by_section(said), ""),
        "megatron": next((said[name].key for name in TOWERS if name in said), ""),
    }
    return found.get(trainer, "")


def changed_steps(config: Conversion, trainer: str) -> str:
    """An argument of a fork's own, or a variable of other devices, that changes how a step is computed; or nothing."""
    if trainer != "megatron":
        return ""
    devices = next((key for key in config.leaves if OTHER_DEVICES.match(key)), "")
    if devices:
        return devices
    experts = config.find_leaf("num_experts") if config.read_flag("deepspeed") else None
    if experts is not None and (experts.unknown or (config.read_whole("num_experts") or 0) > 1):
        return experts.key  # DeepSpeed's experts: in every second layer, and split in a way of their own
    own = (key for key, one in config.settled.items() if one.text == NO_WORD and key.startswith("--"))
    found = (
        key for key in own if CHANGES_STEPS.search(canonical_key(key)) and not CHANGES_NONE.search(canonical_key(key))
    )
    return next((key for key in found if config.leaves[key].value is not False), "")


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
    if not switches:  # a program that always trains one takes its rank without a switch
        yield from (leaf.key for name, leaf in said.items() if name.startswith("lora_"))


def _by_section(said: Mapping[str, Leaf]) -> Iterator[str]:
    """`model.peft.peft_scheme` of NeMo 1, `peft` of Megatron-Bridge and NeMo 2."""
    sections = ("peft.", "model.peft.peft_scheme", "model.peft._target_")
    named = [leaf for name, leaf in said.items() if name == "peft" or name.startswith(sections)]
    yield from (one.key for one in named if one.value is not None and str(one.value).strip().lower() not in OFF)
