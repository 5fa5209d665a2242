"""DeepSpeed's JSON. It configures training but not the model, which --set model.preset=… adds.

Keys and defaults: deepspeed/runtime/constants.py, runtime/zero/config.py, docs/_pages/config-json.md. "auto" is
filled in by Hugging Face's Trainer from its own arguments.
"""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

BYTES = {"fp32": 4, "bf16": 2}
ELEMENTS = 500_000_000  # reduce_bucket_size by default
TIMEOUT_S = 1_800  # DEEPSPEED_TIMEOUT, 30 minutes: deepspeed/constants.py

IRRELEVANT = {
    "_": "a comment",
    "comment": "a comment",
    "steps_per_print": "logging",
    "wall_clock_breakdown": "logging",
    "memory_breakdown": "logging",
    "dump_state": "logging",
    "log_level": "logging",
    "comms_logger.": "logging",
    "tensorboard.": "logging",
    "wandb.": "logging",
    "comet.": "logging",
    "csv_monitor.": "logging",
    "monitor_config.": "logging",
    "flops_profiler.": "profiler traces",
    "autotuning.": "a search before the run",
    "zero_allow_untested_optimizer": "a permission",
    "zero_force_ds_cpu_optimizer": "a permission",
    "dataloader_drop_last": "data loading",
    "fp16.initial_scale_power": "where dynamic loss scaling starts",
    "fp16.loss_scale_window": "how dynamic loss scaling moves",
    "fp16.hysteresis": "how dynamic loss scaling moves",
    "fp16.consecutive_hysteresis": "how dynamic loss scaling moves",
    "fp16.min_loss_scale": "how low dynamic loss scaling goes",
    "fp16.auto_cast": "inputs are cast",
    "fp16.fused_mode": "which kernels",
    "fp16.": "fp16 is off, or a detail of it",
    "bf16.": "a detail of bf16",
    "amp.": "Apex AMP",
    "zero_optimization.contiguous_gradients": "memory layout",
    "zero_optimization.round_robin_gradients": "memory layout",
    "zero_optimization.ignore_unused_parameters": "a permission",
    "zero_optimization.allgather_partitions": "which collective gathers the weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the exported weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the exported weights",
    "zero_optimization.load_from_fp32_weights": "where a run starts",
    "zero_optimization.offload_optimizer.pin_memory": "a detail of offloading",
    "zero_optimization.offload_param.pin_memory": "a detail of offloading",
    "zero_optimization.offload_optimizer.": "a detail of offloading",
    "zero_optimization.offload_param.": "a detail of offloading",
    "zero_optimization.log_trace_cache_warnings": "logging",
    "activation_checkpointing.cpu_checkpointing": "off, or said by parallel.offload",
    "activation_checkpointing.profile": "logging",
    "aio.": "NVMe offloading's disk settings",
    "checkpoint.tag_validation": "checkpoint names",
    "optimizer.params.torch_adam": "which kernels",
    "optimizer.legacy_fusion": "which kernels",
    "scheduler.params.warmup_type": "the shape of the warm-up",
    "scheduler.params.warmup_min_lr": "where the warm-up starts",
    "prescale_gradients": "the same sum, scaled before",
    "gradient_predivide_factor": "the same sum, scaled before",
}
UNMAPPED = {
    "zero_optimization.allgather_bucket_size": "the job schema has one bucket size, that of the gradients",
    "zero_optimization.stage3_": "how far ZeRO-3 gathers ahead is the memory profile's matter",
    "zero_optimization.sub_group_size": "how far ZeRO-3 gathers ahead is the memory profile's matter",
    "zero_optimization.reduce_scatter": "which collective sums the gradients is the planner's choice",
    "zero_optimization.overlap_comm": "overlap is part of the efficiency profile, not of the job",
    "zero_optimization.zero_quantized_weights": "weights travel in int8; the job schema has a word for gradients only",
    "activation_checkpointing.": "how recomputed activations are stored; --set parallel.recompute says whether",
    "sparse_attention.": "the planner knows dense attention only",
    "moe": "experts are part of the model",
    "curriculum_learning.": "the sequence length changes during the run",
    "data_efficiency.": "the sequence length changes during the run",
    "elasticity.": "the batch follows the number of devices",
    "compression_training.": "the model is compressed while it is trained",
    "progressive_layer_drop.": "the model changes during the run",
    "tensor_parallel.": "AutoTP; --set parallel.tensor says how far",
    "pipeline.": "the stages are set where the model is built: --set parallel.pipeline says how many",
}


def translate_config(config: Conversion) -> None:
    """Translate a DeepSpeed configuration into job settings."""
    for key, leaf in config.leaves.items():
        if leaf.value == "auto":
            config.leave_unmapped(key, "auto: Hugging Face's Trainer fills it in from its own arguments")
            config.read_as[key] = type(leaf)(key=key, value=None, line=leaf.line)
    _read_zero(config)
    _read_precision(config)
    _read_buckets(config)
    _read_batch(config)
    _read_optimizer(config)
    _read_pipeline(config)
    config.set_value("checkpoint.async", False, note="default of DeepSpeed: save_checkpoint stands still")
    config.theirs |= dict.fromkeys(("comm.init_timeout_s", "train.timeout_s"), "DEEPSPEED_TIMEOUT of the environment")
    config.assume_default("comm.init_timeout_s", TIMEOUT_S, "DEEPSPEED_TIMEOUT, 30 minutes")
    config.assume_default("train.timeout_s", TIMEOUT_S, "DEEPSPEED_TIMEOUT, 30 minutes")
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _is_auto(config: Conversion, key: str) -> bool:
    """Return whether a key is left to the Trainer."""
    return key in config.leaves and config.leaves[key].value == "auto"


def _read_zero(config: Conversion) -> None:
    z = "zero_optimization."
    config.set_value("parallel.mode", "fixed", note="DeepSpeed searches nothing")
    # An old spelling: true is stage 1
    if (is_enabled := config.read_flag("zero_optimization")) is not None:
        config.set_value("parallel.zero", int(is_enabled), "zero_optimization")
    else:
        config.set_value("parallel.zero", config.read_whole(f"{z}stage") or 0, f"{z}stage")
    if (shard_size := config.read_whole(f"{z}mics_shard_size")) is not None and shard_size > 0:
        config.set_value("parallel.shard", shard_size, f"{z}mics_shard_size", note="MiCS")
    elif config.has_leaf(f"{z}mics_shard_size"):
        config.mark_used(f"{z}mics_shard_size", by="parallel.shard = auto: all data ranks")
    if (shard_size := config.read_whole(f"{z}zero_hpz_partition_size")) is not None and shard_size > 1:
        config.leave_unmapped(
            f"{z}zero_hpz_partition_size", "a second copy of the weights per host has no word in the job schema"
        )
    elif config.has_leaf(f"{z}zero_hpz_partition_size"):
        config.mark_used(f"{z}zero_hpz_partition_size", by="parallel.shard")
    for state_kind, offloaded, old_key in (
        ("optimizer", "optimizer", "cpu_offload"),
        ("param", "parameters", "cpu_offload_param"),
    ):
        device = config.read_word(f"{z}offload_{state_kind}.device")
        if device in ("cpu", "nvme") or config.read_flag(f"{z}{old_key}"):
            note = "on NVMe: the planner counts host memory" if device == "nvme" else ""
            config.set_value(
                "parallel.offload", offloaded, f"{z}offload_{state_kind}.device", f"{z}{old_key}", note=note
            )
        else:
            config.mark_used(f"{z}offload_{state_kind}.device", f"{z}{old_key}", by="parallel.offload")


def _read_precision(config: Conversion) -> None:
    is_bf16 = config.read_flag("bf16.enabled") or config.read_flag("bfloat16.enabled")
    is_fp16 = config.read_flag("fp16.enabled")
    names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    compute = "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32"
    if compute == "fp32" and any(_is_auto(config, name) for name in names):
        # Not known yet: `finish` reports it as missing
        compute = "what it computes in"
    else:
        config.set_value("precision.compute", compute, *sorted(names, key=lambda name: not config.read_flag(name)))
    scale = config.read_number("fp16.loss_scale")
    if compute == "fp16" and scale:
        config.set_value("precision.loss_scale", scale, "fp16.loss_scale", note="static")
    elif compute == "fp16":
        config.set_value("precision.loss_scale", "auto", "fp16.loss_scale", note="0 is dynamic")
    wire_format = config.read_word("communication_data_type") or config.read_word("data_types.grad_accum_dtype")
    is_fp32 = wire_format == "fp32" if wire_format else compute == "fp32"
    note = "" if wire_format else f"default of DeepSpeed: gradients travel as {compute}"
    if not is_fp32 and (wire_format == "fp16" or (not wire_format and compute == "fp16")):
        config.practice["sums_in"] = "fp16"
        note = f"{note or 'fp16'}: the nearest word is bf16"
    config.set_value("precision.grad_reduce", "fp32" if is_fp32 else "bf16", "communication_data_type", note=note)
    if (accumulate := config.read_word("data_types.grad_accum_dtype")) and config.has_leaf("communication_data_type"):
        config.leave_unmapped("data_types.grad_accum_dtype", f"{accumulate[:8]}: the job has one format for summing")
    elif accumulate:
        config.mark_used("data_types.grad_accum_dtype", by="precision.grad_reduce")
    for key in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if (is_16_bit := config.read_flag(key)) is not None:
            config.set_value("precision.master_weights", not is_16_bit, key)
    if config.read_flag("bf16.bf16_optimizer_states"):
        config.set_value("precision.optimizer_state", "bf16", "bf16.bf16_optimizer_states")
    elif config.has_leaf("bf16.bf16_optimizer_states"):
        config.mark_used("bf16.bf16_optimizer_states", by="precision.optimizer_state")
    config.assume_default("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
    if config.job_value("precision.master_weights") is True:
        config.assume_default(
            "precision.optimizer_state", "fp32", "moments in the format of the weights that are updated"
        )
    if config.read_flag("zero_optimization.zero_quantized_gradients"):
        config.set_value(
            "parallel.compression", "int8", "zero_optimization.zero_quantized_gradients", note="ZeRO++ qgZ"
        )
    elif config.has_leaf("zero_optimization.zero_quantized_gradients"):
        config.mark_used("zero_optimization.zero_quantized_gradients", by="parallel.compression")


def _read_buckets(config: Conversion) -> None:
    width = BYTES[str(config.job_value("precision.grad_reduce"))]
    key = "zero_optimization.reduce_bucket_size"
    size = config.read_number(key)
    if size:
        mib = min(65_536.0, size * width / 2**20)
        config.set_value(
            "comm.bucket_mib",
            max(0.001, round(mib, 3 if mib < 1 else 1)),
            key,
            note=f"{size:,.0f} elements × {width} bytes",
        )
    elif not _is_auto(config, key):
        config.assume_default("comm.bucket_mib", round(ELEMENTS * width / 2**20, 1), f"5e8 elements × {width} bytes")


def _read_batch(config: Conversion) -> None:
    micro = config.read_whole("train_micro_batch_size_per_gpu")
    if micro:
        config.set_value("batch.micro", micro, "train_micro_batch_size_per_gpu")
    passes = config.read_whole("gradient_accumulation_steps") or 1
    if total := config.read_whole("train_batch_size"):
        config.set_value("batch.global_sequences", total, "train_batch_size")
        config.mark_used("gradient_accumulation_steps", by="batch.global_sequences / (micro × data)")
        if not micro and config.has_leaf("gradient_accumulation_steps"):
            config.set_value("batch.accumulation", passes, "gradient_accumulation_steps")
    elif micro:
        note = f"{micro} × {passes} passes per data rank"
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        config.set_value("batch.per_replica", micro * passes, *names, note=note)


def _read_optimizer(config: Conversion) -> None:
    name = config.read_word("optimizer.type")
    if name in ("adam", "adamw"):
        config.set_value("optim.name", "adamw", "optimizer.type")
    elif name == "muon":
        config.set_value("optim.name", "muon", "optimizer.type")
    elif name:
        reason = (
            "compressed updates with error feedback" if "onebit" in name or "zeroone" in name else "another optimizer"
        )
        config.leave_unmapped("optimizer.type", f"{reason}: not one of the job schema's")
    config.copy_keys(
        {
            "optimizer.params.lr": ("optim.lr", Conversion.read_number),
            "optimizer.params.eps": ("optim.eps", Conversion.read_number),
            "optimizer.params.weight_decay": ("optim.weight_decay", Conversion.read_number),
            "gradient_clipping": ("optim.clip", Conversion.read_number),
        }
    )
    if _is_auto(config, "gradient_clipping"):
        config.set_value(
            "optim.clip", 1.0, note="auto: max_grad_norm of Hugging Face's Trainer, 1.0 unless it is told otherwise"
        )
    # Otherwise the script's optimizer may clip by itself
    if any(key.startswith("optimizer.") for key in config.leaves):
        config.assume_default("optim.clip", 0.0, "no clipping")
    betas = config.find_leaf("optimizer.params.betas")
    if betas is not None and isinstance(betas.value, list) and len(betas.value) == 2:
        config.set_value("optim.betas", betas.value, "optimizer.params.betas")
    config.mark_used("optimizer.params.adam_w_mode", by="optim.name")
    _read_scheduler(config)


def _read_scheduler(config: Conversion) -> None:
    kind = config.read_word("scheduler.type")
    if not kind:
        return
    if "cosine" in kind:
        config.set_value("optim.schedule", "cosine", "scheduler.type")
    elif kind in ("warmuplr", "warmupdecaylr"):
        config.set_value("optim.schedule", "wsd", "scheduler.type", note=kind)
        # WarmupDecayLR decays from the end of the warm-up to the last step; WarmupLR stays at the peak.
        config.set_value("optim.decay", 1.0 if kind == "warmupdecaylr" else 0.0, "scheduler.type", note=kind)
    else:
        config.leave_unmapped("scheduler.type", "the job schema knows wsd and cosine")
    if (steps := config.read_whole("scheduler.params.warmup_num_steps")) is not None:
        config.set_value("optim.warmup_steps", steps, "scheduler.params.warmup_num_steps")
    if steps := config.read_whole("scheduler.params.total_num_steps"):
        config.set_value("data.steps", steps, "scheduler.params.total_num_steps")
    if (peak := config.read_number("scheduler.params.warmup_max_lr")) is not None and peak > 0:
        config.set_value("optim.lr", peak, "scheduler.params.warmup_max_lr")


def _read_pipeline(config: Conversion) -> None:
    if (degree := config.read_whole("tensor_parallel.autotp_size")) is not None and degree > 0:
        config.set_value("parallel.tensor", degree, "tensor_parallel.autotp_size")
    for key in ("sequence_parallel_size", "sequence_parallelism.size"):
        if degree := config.read_whole(key):
            config.set_value("parallel.context", degree, key)
            config.set_value("parallel.context_kind", "ulysses", key)
    interval = config.read_whole("pipeline.activation_checkpoint_interval")
    if interval is not None:
        config.set_value(
            "parallel.recompute", "full" if interval else "none", "pipeline.activation_checkpoint_interval"
        )
    else:
        config.set_value("parallel.recompute", "auto", note="not said: the model's own code recomputes or not")
