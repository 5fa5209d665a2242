"""Accelerate's YAML: FSDP 1 and 2, the DeepSpeed plugin, Megatron-LM's, and ND parallelism.

Keys: docs/source/usage_guides/{fsdp,deepspeed,megatron_lm}.md, utils/dataclasses.py,
examples/torch_native_parallelism. The training script, not the file, sets model and batch: --set model.preset=… and
--set batch.… add them.
"""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

# torch's default for NCCL, pytorch/pytorch#110947; DeepSpeed has its own
TIMEOUT_S = 600

IRRELEVANT = {
    "compute_environment": "where the launcher runs",
    "debug": "debugging",
    "machine_rank": "the launcher's own business",
    "main_process_": "the launcher's own business: addresses and ports",
    "main_training_function": "the launcher's own business",
    "rdzv_backend": "the launcher's own business",
    "same_network": "the launcher's own business",
    "deepspeed_config.deepspeed_hostfile": "the launcher's own business",
    "deepspeed_config.deepspeed_multinode_launcher": "the launcher's own business",
    "deepspeed_config.zero3_init_flag": "how the weights are first loaded",
    "deepspeed_config.zero3_save_16bit_model": "the exported weights",
    "enable_cpu_affinity": "which cores serve which device",
    "gpu_ids": "the launcher's own business",
    "tpu_": "TPU pods",
    "downcast_bf16": "TPU pods",
    "ipex_config.": "Intel's extension",
    "mpirun_config.": "the launcher's own business",
    "fsdp_config.fsdp_auto_wrap_policy": "which modules are gathered together; the planner assumes one block each",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "which modules are gathered together",
    "fsdp_config.fsdp_min_num_params": "which modules are gathered together",
    "fsdp_config.fsdp_backward_prefetch": "overlap, which the efficiency profile holds",
    "fsdp_config.fsdp_backward_prefetch_policy": "overlap, which the efficiency profile holds",
    "fsdp_config.fsdp_forward_prefetch": "overlap, which the efficiency profile holds",
    "fsdp_config.fsdp_sync_module_states": "how the weights are first loaded",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "how the weights are first loaded",
    "fsdp_config.fsdp_use_orig_params": "how parameters are flattened",
    "fp8_config.": "how fp8 is scaled",
    "dynamo_config.": "how the compiler works",
}
UNMAPPED = {
    "deepspeed_config.deepspeed_config_file": "another file: check it with phalanx check as well",
    "megatron_lm_config.": "Megatron-LM's plugin: import the script's own arguments for the rest",
    "parallelism_config.": "a dimension that the job schema has no word for",
    "fsdp_config.": "the job schema has no word for it",
}


def translate_config(config: Conversion) -> None:
    """Translate an Accelerate configuration into job settings."""
    config.set_value("parallel.mode", "fixed", note="Accelerate searches nothing")
    kind = config.read_word("distributed_type") or "no"
    config.mark_used("distributed_type", by="parallel.zero")
    config.names |= {key.rpartition(".")[2]: key for key in config.leaves if key.count(".") == 1}
    _read_machines(config)
    _read_precision(config, kind)
    if kind == "fsdp":
        _read_fsdp(config)
    elif kind == "deepspeed":
        _read_deepspeed(config)
    elif kind == "megatron_lm":
        _read_megatron(config)
    else:
        config.set_value("parallel.zero", 0, "distributed_type", note="DDP")
        config.assume_default("comm.bucket_mib", 25, "DDP's bucket_cap_mb")
        config.set_value("parallel.recompute", "auto", note="not said: the model's own code recomputes or not")
    if passes := config.read_whole("gradient_accumulation_steps"):
        config.set_value("batch.accumulation", passes, "gradient_accumulation_steps")
    _read_dimensions(config)
    backend = config.read_word("dynamo_backend")
    if backend:
        config.set_value("train.compile", backend not in ("no", "none"), "dynamo_backend")
    # DeepSpeed has its own default (DEEPSPEED_TIMEOUT), all others use torch's.
    limit = 1_800 if kind == "deepspeed" else TIMEOUT_S
    note = "DEEPSPEED_TIMEOUT, 30 minutes" if kind == "deepspeed" else "torch's for NCCL, 10 minutes"
    config.assume_default("comm.init_timeout_s", limit, note)
    config.assume_default("train.timeout_s", limit, note)
    config.set_value("checkpoint.async", False, note="default of Accelerate: save_state stands still")
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _read_machines(config: Conversion) -> None:
    hosts, world = config.read_whole("num_machines"), config.read_whole("num_processes")
    if hosts and world and hosts > 0 and world % hosts == 0:
        config.machines = (hosts, world // hosts)
    config.mark_used("num_machines", "num_processes", by="cluster: hosts × devices")
    if config.read_flag("use_cpu"):
        config.leave_unmapped("use_cpu", "give --cluster local or a cluster file")
    else:
        config.mark_used("use_cpu", "tpu_use_cluster", by="cluster")


def _read_precision(config: Conversion, kind: str) -> None:
    word = config.read_word("mixed_precision")
    compute = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}.get(word, "fp32")
    config.set_value(
        "precision.compute", compute, "mixed_precision", note="" if compute == word else "no mixed precision"
    )
    # FSDP's policy casts parameters and reductions alike (utils/dataclasses.py); DDP keeps fp32 gradients.
    is_16_bit = kind in ("fsdp", "deepspeed") and compute != "fp32"
    note = f"its {kind.upper()} plugin reduces in the format it computes in" if is_16_bit else ""
    if is_16_bit and compute == "fp16":
        config.practice["sums_in"] = "fp16"
        note += ": the nearest word to fp16 is bf16"
    config.set_value(
        "precision.grad_reduce", "bf16" if is_16_bit else "fp32", note=note and f"default of Accelerate: {note}"
    )
    # With FSDP and DDP the training script decides how weights are loaded
    if kind in ("deepspeed", "megatron_lm"):
        config.assume_default("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
        config.assume_default(
            "precision.optimizer_state", "fp32", "moments in the format of the weights that are updated"
        )


STRATEGIES = {"full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0}
HYBRID = {"hybrid_shard": 3, "4": 3, "hybrid_shard_zero2": 2, "5": 2}


def _read_fsdp(config: Conversion) -> None:
    strategy, reshard = config.read_word("fsdp_sharding_strategy"), config.read_word("fsdp_reshard_after_forward")
    names = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    word = strategy if strategy else reshard
    if word in HYBRID:
        config.set_value("parallel.zero", HYBRID[word], *names)
        if config.machines[1]:
            config.set_value("parallel.shard", config.machines[1], names[0], note="hybrid: within a host")
    elif word in STRATEGIES:
        config.set_value("parallel.zero", STRATEGIES[word], *names)
    else:
        config.set_value("parallel.zero", 2 if reshard in ("false", "no") else 3, *names, note="FSDP")
    config.mark_used("fsdp_version", by="parallel.zero")
    if config.read_flag("fsdp_offload_params"):
        config.set_value("parallel.offload", "parameters", "fsdp_offload_params")
    else:
        config.mark_used("fsdp_offload_params", by="parallel.offload")
    on = config.read_flag("fsdp_activation_checkpointing")
    config.set_value("parallel.recompute", "full" if on else "none", "fsdp_activation_checkpointing")
    sharded = "sharded" in (config.read_word("fsdp_state_dict_type") or "sharded")
    if sharded:
        config.practice["checkpoint_format"] = "dcp"
        config.mark_used("fsdp_state_dict_type", by="practice: checkpoint_format")
    # No line may be cited for it: the trainer, not this key, makes such files pickles
    else:
        config.skip_leaf("fsdp_state_dict_type", "a torch file, loaded with weights_only: what Accelerate always does")


def _read_deepspeed(config: Conversion) -> None:
    config.set_value("parallel.zero", config.read_whole("zero_stage") or 0, "zero_stage")
    for key, offloaded in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "parameters")):
        if config.read_word(key) in ("cpu", "nvme"):
            config.set_value("parallel.offload", offloaded, key)
        else:
            config.mark_used(key, by="parallel.offload")
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        config.skip_leaf(key, "a detail of offloading")
    if (clip := config.read_number("gradient_clipping")) is not None:
        config.set_value("optim.clip", clip, "gradient_clipping")
    width = 2 if config.job_value("precision.grad_reduce") == "bf16" else 4
    if not config.has_leaf("deepspeed_config_file"):
        config.assume_default(
            "comm.bucket_mib", round(5e8 * width / 2**20, 1), f"DeepSpeed's 5e8 elements × {width} bytes"
        )
    config.practice["checkpoint_format"] = "torch-pickle"
    config.set_value("parallel.recompute", "auto", note="not said: the model's own code recomputes or not")


def _read_megatron(config: Conversion) -> None:
    m = "megatron_lm_"
    for key, axis in (("tp_degree", "tensor"), ("pp_degree", "pipeline")):
        if (degree := config.read_whole(f"{m}{key}")) is not None and degree > 0:
            config.set_value(f"parallel.{axis}", degree, f"{m}{key}")
    if (split := config.read_flag(f"{m}sequence_parallelism")) is not None:
        config.set_value("parallel.sequence_parallel", split, f"{m}sequence_parallelism")
    config.set_value(
        "parallel.zero", int(bool(config.read_flag(f"{m}use_distributed_optimizer"))), f"{m}use_distributed_optimizer"
    )
    on = config.read_flag(f"{m}recompute_activations")
    config.set_value("parallel.recompute", "selective" if on else "none", f"{m}recompute_activations")
    if (clip := config.read_number(f"{m}gradient_clipping")) is not None:
        config.set_value("optim.clip", clip, f"{m}gradient_clipping")
    if passes := config.read_whole(f"{m}num_micro_batches"):
        config.set_value("batch.accumulation", passes, f"{m}num_micro_batches")


def _read_dimensions(config: Conversion) -> None:
    """Read ND parallelism: replicate × shard × tensor × context."""
    p = "parallelism_config_"
    for key, axis in (("tp_size", "tensor"), ("cp_size", "context")):
        if (degree := config.read_whole(f"{p}{key}")) is not None and degree > 0:
            config.set_value(f"parallel.{axis}", degree, f"{p}{key}")
    copies, shard_size = config.read_whole(f"{p}dp_replicate_size"), config.read_whole(f"{p}dp_shard_size")
    if shard_size or copies:
        names = (f"{p}dp_shard_size", f"{p}dp_replicate_size")
        config.set_value(
            "parallel.data", max(1, copies or 1) * max(1, shard_size or 1), *names, note="replicate × shard"
        )
        config.set_value("parallel.shard", max(1, shard_size or 1), names[0])
    kinds = {"allgather": "allgather", "alltoall": "ring"}
    if config.int_of("parallel.context") > 1:
        kind = kinds.get(config.read_word(f"{p}cp_comm_strategy"), "allgather")
        config.set_value("parallel.context_kind", kind, f"{p}cp_comm_strategy")
