"""Megatron Core's settings, shared by Megatron-LM, NeMo and Megatron-Bridge: model, parallelism and training.

Names are Megatron-LM's arguments with underscores (megatron/training/arguments.py); readers map their spelling to
them.
"""

from __future__ import annotations

from phalanx.rules.facts.trainers import MEGATRON
from phalanx.rules.foreign.conversion import NEVER, SEEDS, UNSET, Conversion
from phalanx.rules.foreign.mcore_model import translate_shape
from phalanx.rules.foreign.mcore_telemetry import read_telemetry

DTYPES = {"bf16": 2, "fp32": 4, "fp16": 2}


def translate_config(config: Conversion, *, whole: bool = True) -> None:
    """Translate all settings of Megatron Core; a file that is not `whole` may leave settings to code."""
    translate_shape(config)
    _read_degrees(config)
    _read_sharding(config)
    _read_recompute(config)
    _read_batch(config)
    _read_precision(config)
    _read_optimizer(config)
    _learning_rate(config)
    _read_checkpoint(config, whole)
    _read_resume(config)
    _read_timeouts(config)
    read_telemetry(config)


def _read_degrees(config: Conversion) -> None:
    config.set_value("parallel.mode", "fixed", note=f"{config.title} searches nothing")
    for name, axis in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
    ):
        if (degree := config.read_whole(name)) is not None and degree > 0:
            config.set_value(f"parallel.{axis}", degree, name)
    if (is_split := config.read_flag("sequence_parallel")) is not None:
        config.set_value("parallel.sequence_parallel", is_split, "sequence_parallel")
    kinds = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "ring"}
    if (kind := config.read_word("cp_comm_type")) in kinds:
        config.set_value("parallel.context_kind", kinds[kind], "cp_comm_type")
    if (expert_tensor := config.read_whole("expert_tensor_parallel_size")) is not None:
        is_covered = expert_tensor == config.int_of("parallel.tensor") or not config.int_of("model.experts", 0)
        reason = "experts split over tensor ranks as the rest" if is_covered else "the planner splits experts whole"
        config.skip_leaf("expert_tensor_parallel_size", reason) if is_covered else config.leave_unmapped(
            "expert_tensor_parallel_size", reason
        )
    _read_virtual(config)


def _read_virtual(config: Conversion) -> None:
    layers, stages = config.int_of("model.layers", 0), config.int_of("parallel.pipeline")
    chunks, name = 1, ""
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if (stages_per_rank := config.read_whole(name)) is not None:
            chunks = stages_per_rank
            break
    else:
        name = "num_layers_per_virtual_pipeline_stage"
        layers_each = config.read_whole(name)
        chunks = max(1, layers // stages // layers_each) if layers_each and layers else 1
    if stages > 1 and chunks > 1:
        config.set_value("parallel.virtual_pipeline", chunks, name)
        config.set_value("parallel.schedule", "interleaved", name)
    elif config.has_leaf(name):
        config.skip_leaf(name, "one chunk per stage, or one stage")


STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _read_sharding(config: Conversion) -> None:
    is_megatron_fsdp, is_torch_fsdp = (
        bool(config.read_flag("use_megatron_fsdp") or config.read_flag("use_custom_fsdp")),
        config.read_flag("use_torch_fsdp2"),
    )
    flags = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    strategy = config.read_word("data_parallel_sharding_strategy")
    if is_megatron_fsdp or is_torch_fsdp:
        stage = STRATEGIES.get(strategy, 3) if is_megatron_fsdp and strategy else 3
        if is_torch_fsdp and config.read_flag("torch_fsdp2_no_reshard_after_forward"):
            # weights stay gathered between forward and backward
            stage = 2
            config.mark_used("torch_fsdp2_no_reshard_after_forward", by="parallel.zero")
        config.set_value("parallel.zero", stage, "data_parallel_sharding_strategy", *flags, note="FSDP")
        config.mark_used("use_distributed_optimizer", by="parallel.zero")
    else:
        on = bool(config.read_flag("use_distributed_optimizer"))
        note = "distributed optimizer" if on else "no distributed optimizer"
        config.set_value("parallel.zero", int(on), "use_distributed_optimizer", note=note)
        config.skip_leaf("data_parallel_sharding_strategy", "no effect without Megatron-FSDP")
        for name in flags:
            config.mark_used(name, by="parallel.zero")
    if config.read_flag("optimizer_cpu_offload"):
        config.set_value("parallel.offload", "optimizer", "optimizer_cpu_offload")
    elif config.has_leaf("optimizer_cpu_offload"):
        config.mark_used("optimizer_cpu_offload", by="parallel.offload")
    if (copies := config.read_whole("num_distributed_optimizer_instances")) is not None:
        if copies == 1:
            config.mark_used("num_distributed_optimizer_instances", by="parallel.shard = auto: all data ranks")
        else:
            config.set_value("parallel.shard_copies", copies, "num_distributed_optimizer_instances")


def _read_recompute(config: Conversion) -> None:
    kind = config.read_word("recompute_granularity")
    if not kind and (config.read_flag("recompute_activations") or config.read_flag("checkpoint_activations")):
        kind = "selective" if config.read_flag("recompute_activations") else "full"
    if not kind and config.read_word("activations_checkpoint_method"):
        kind = "full"
    names = (
        "recompute_granularity",
        "recompute_activations",
        "checkpoint_activations",
        "activations_checkpoint_method",
    )
    if kind in ("selective", "full"):
        config.set_value("parallel.recompute", kind, *names)
    else:
        config.set_value("parallel.recompute", "none", *names)
    count = config.read_whole("recompute_num_layers")
    if kind == "full" and config.read_word("recompute_method") == "block" and count:
        config.set_value("parallel.recompute_layers", count, "recompute_num_layers", "recompute_method")
    else:
        for name in ("recompute_num_layers", "recompute_method"):
            config.skip_leaf(name, "uniform recomputation covers every layer; only its chunks differ")


def _read_batch(config: Conversion) -> None:
    sequence = config.read_whole("seq_length")
    if sequence:
        config.set_value("data.sequence", sequence, "seq_length")
    config.set_value("batch.micro", config.read_whole("micro_batch_size") or 1, "micro_batch_size")
    if not config.has_leaf("micro_batch_size") and config.title != "ms-swift":
        config.unknown.setdefault("batch.micro", f"{config.title} has no micro-batch unless it is told one")
    if (total := config.read_whole("global_batch_size")) is not None and total > 0:
        config.set_value("batch.global_sequences", total, "global_batch_size")
    else:
        config.set_value(
            "batch.per_replica", config.int_of("batch.micro"), "micro_batch_size", note="one micro-batch each"
        )
        if (reason := config.unknown.get("batch.micro")) is not None:
            config.unknown.setdefault("batch.per_replica", reason)
    if samples := config.read_whole("train_samples"):
        config.set_value("data.samples", samples, "train_samples")
    elif steps := config.read_whole("train_iters"):
        config.set_value("data.steps", steps, "train_iters")
    if (seed := config.read_whole("seed")) is not None:
        config.set_value("data.seed", abs(seed) % SEEDS, "seed")
    config.set_value("batch.ramp_of", _read_ramp(config), "rampup_batch_size") if config.has_leaf(
        "rampup_batch_size"
    ) else None
    if (per_token := config.read_flag("calculate_per_token_loss")) is not None:
        config.practice["token_weighted_loss"] = per_token
        config.mark_used("calculate_per_token_loss", by="practice: token_weighted_loss")


def _read_ramp(config: Conversion) -> list[int]:
    """Return [first batch, increment, sequences over which it grows], or an empty list if unusable."""
    leaf = config.find_leaf("rampup_batch_size")
    items = leaf.value if leaf is not None and isinstance(leaf.value, list) else []
    # Python and argparse accept 9_765_625
    words = [str(item).replace("_", "") for item in items]
    numbers = [int(item) for item in words if item.isdigit() and len(item) < 16]
    return numbers if len(numbers) == 3 else []


def _read_precision(config: Conversion) -> None:
    base = "bf16" if config.read_flag("bf16") else "fp16" if config.read_flag("fp16") else "fp32"
    flags = [name for name in ("bf16", "fp16") if config.has_leaf(name)]
    fp8_keys = ("fp8_format", "fp8", "fp8_hybrid", "fp8_e4m3")
    fp8_key = next((name for name in fp8_keys if config.read_word(name) not in ("", "none", "false")), "")
    fp4_key = next((name for name in ("fp4_format", "fp4") if config.read_word(name) not in ("", "none", "false")), "")
    if fp4_key or fp8_key:
        config.set_value("precision.compute", "fp4" if fp4_key else "fp8", fp4_key or fp8_key)
        config.mark_used(*flags, by="precision.compute: what is not in few bits")
    else:
        config.set_value("precision.compute", base, *flags, note="" if flags else "neither --bf16 nor --fp16")
    sums_in_fp32 = config.read_flag("accumulate_allreduce_grads_in_fp32")
    sums_in_fp32 = config.read_flag("grad_reduce_in_fp32") if sums_in_fp32 is None else sums_in_fp32
    if sums_in_fp32 is None:
        sums_in_fp32 = base != "fp16" and not config.read_flag("grad_reduce_in_bf16")
    names = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32", "grad_reduce_in_bf16")
    note = "" if any(config.has_leaf(name) for name in names) else "bf16 sums in fp32"
    if base == "fp16" and not sums_in_fp32:
        config.practice["sums_in"] = "fp16"
        note = "summed in fp16: the nearest word is bf16"
    config.set_value("precision.grad_reduce", "fp32" if sums_in_fp32 else "bf16", *names, note=note)
    if (scale := config.read_number("loss_scale")) is not None and base == "fp16" and scale > 0:
        config.set_value("precision.loss_scale", scale, "loss_scale", note="static")
    elif base == "fp16":
        config.assume_default("precision.loss_scale", "auto", "dynamic for fp16")
    _read_state(config)


def _read_state(config: Conversion) -> None:
    """Read the formats of the optimizer's state; those other than fp32 need its precision-aware optimizer."""
    master_dtype = config.read_word("main_params_dtype")
    if master_dtype:
        config.set_value("precision.master_weights", "32" in master_dtype, "main_params_dtype")
    config.assume_default("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
    moments = next(
        (config.read_word(name) for name in ("exp_avg_dtype", "exp_avg_dtype._target_") if config.has_leaf(name)), ""
    )
    if "bfloat16" in moments or moments == "bf16":
        config.set_value("precision.optimizer_state", "bf16", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif "float32" in moments or moments == "fp32":
        config.set_value("precision.optimizer_state", "fp32", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif not moments:
        config.assume_default("precision.optimizer_state", "fp32")


def _read_optimizer(config: Conversion) -> None:
    name = config.read_word("optimizer") or "adam"
    if "adam" in name:
        config.set_value("optim.name", "adamw", "optimizer", note="decoupled weight decay")
    elif "muon" in name:
        config.set_value("optim.name", "muon", "optimizer")
    else:
        config.leave_unmapped("optimizer", "not an optimizer of the job schema")
    config.copy_keys(
        {
            "lr": ("optim.lr", Conversion.read_number),
            "weight_decay": ("optim.weight_decay", Conversion.read_number),
            "clip_grad": ("optim.clip", Conversion.read_number),
            "adam_eps": ("optim.eps", Conversion.read_number),
        }
    )
    config.assume_default("optim.weight_decay", 0.01)
    first, second = config.read_number("adam_beta1"), config.read_number("adam_beta2")
    betas = [0.9 if first is None else first, 0.999 if second is None else second]
    config.set_value("optim.betas", betas, "adam_beta1", "adam_beta2")


def _learning_rate(config: Conversion) -> None:
    style = config.read_word("lr_decay_style") or "linear"
    if style == "cosine":
        config.set_value("optim.schedule", "cosine", "lr_decay_style")
    else:
        config.set_value("optim.schedule", "wsd", "lr_decay_style", note=style)
        decay_steps, final_steps = config.read_number("lr_decay_iters"), config.read_number("lr_wsd_decay_iters")
        decay_share = (
            final_steps / decay_steps
            if style == "wsd" and final_steps and decay_steps
            else {"constant": 0.0}.get(style, 1.0)
        )
        config.set_value("optim.decay", min(1.0, max(0.0, decay_share)), "lr_wsd_decay_iters", "lr_decay_style")
    min_lr, peak = config.read_number("min_lr"), config.read_number("lr")
    if min_lr is not None and peak:
        config.set_value("optim.final_lr", min(1.0, min_lr / peak), "min_lr", note=f"{min_lr:g} / {peak:g}")
    config.assume_default("optim.final_lr", 0.0)
    if (steps := config.read_whole("lr_warmup_iters")) is not None:
        config.set_value("optim.warmup_steps", steps, "lr_warmup_iters")
    elif samples := config.read_whole("lr_warmup_samples"):
        config.set_value("optim.warmup_samples", samples, "lr_warmup_samples")
    elif (share := config.read_number("lr_warmup_fraction")) is not None and (
        steps := config.read_whole("lr_decay_iters")
    ):
        config.set_value(
            "optim.warmup_steps", round(share * steps), "lr_warmup_fraction", note=f"{share:g} of {steps:,} steps"
        )
    for name in ("lr_decay_iters", "lr_decay_samples"):
        config.skip_leaf(name, "the job decays over all its tokens")


def _read_checkpoint(config: Conversion, whole: bool) -> None:
    save, save_interval = config.find_leaf("save"), config.read_whole("save_interval")
    if save is not None and save_interval:
        config.set_value("checkpoint.steps", save_interval, "save_interval")
    # Null has the same meaning
    elif save is None and (whole or "checkpoint.save" in config.leaves):
        config.set_value("checkpoint.steps", NEVER, "save_interval", note="nothing is saved")
        config.theirs["checkpoint.steps"] = "save"
        config.practice["saves"] = False
    if save is not None:
        text = str(save.value)
        is_valid = text.isprintable() and 0 < len(text) < 1000 and "$" not in text
        config.set_value("checkpoint.path", text, "save") if is_valid else config.leave_unmapped("save", UNSET)
    keep = config.read_whole("most_recent_k")
    config.set_value(
        "checkpoint.keep", keep if keep and keep > 0 else 10**6, "most_recent_k", note="" if keep else "keeps all"
    )
    config.set_value("checkpoint.async", bool(config.read_flag("async_save")), "async_save")
    kinds = {"torch_dist": "dcp", "torch_dcp": "dcp", "fsdp_dtensor": "dcp", "torch": "torch-pickle", "zarr": "zarr"}
    if (kind := config.read_word("ckpt_format")) == "torch" and any(config.has_leaf(tower) for tower in TOWERS):
        config.skip_leaf("ckpt_format", "the converters that put towers together write torch files and no others")
    elif kind in kinds:
        config.practice["checkpoint_format"] = kinds[kind]
        config.mark_used("ckpt_format", by="practice: checkpoint_format")
    if config.read_flag("replication") and config.read_word("non_persistent_ckpt_type") == "local":
        config.practice["memory_copies"] = "other host"
        config.mark_used("replication", "non_persistent_ckpt_type", by="practice: memory_copies")
        if local_interval := config.read_whole("non_persistent_save_interval"):
            config.set_value("checkpoint.memory_every", local_interval, "non_persistent_save_interval")


# Arguments of Megatron's multimodal models, which combine a language model with other towers, some of them frozen.
TOWERS = (
    "freeze_lm",
    "freeze_vit",
    "freeze_vision_model",
    "vision_model_type",
    "language_model_type",
    "language_model_checkpoint",
    "model_provider",
)
# Megatron's checkpointing.py: parts left out of a file, or of a resume. The loss scale is part of the optimizer.
LEFT_OUT = {"optim": ("moments", "scheduler", "scaler"), "rng": ("rng",)}


def _read_resume(config: Conversion) -> None:
    """Read which states a resume loses: `--no-load-optim` as argument, `load_optim: false` in Megatron-Bridge."""
    lost_states: set[str] = set()
    save_leaf, load_leaf = config.find_leaf("save"), config.find_leaf("load")
    saves = config.practice.get("saves") is not False
    # It starts from other weights, or never from this run's: this run is not resumed.
    is_other_run = (
        save_leaf and load_leaf and (load_leaf.unknown or save_leaf.unknown or load_leaf.value != save_leaf.value)
    )
    # Arguments without --load: nothing is resumed
    never_resumes = load_leaf is None and config.title == "Megatron-LM"
    starts_anew = config.read_flag("finetune") or is_other_run or never_resumes or config.open_why
    for key_part, states in LEFT_OUT.items():
        for verb in ("load", "save"):
            off, on = f"no_{verb}_{key_part}", f"{verb}_{key_part}"
            if (
                (config.read_flag(off) or config.read_flag(on) is False)
                and saves
                and not (starts_anew and verb == "load")
            ):
                lost_states |= {*states}
                config.mark_used(off, on, by="practice: resumes_exactly")
            else:
                for name in (off, on):
                    config.skip_leaf(name, "how the run starts, or what none of its files holds")
    if lost_states:
        config.practice["resumes_exactly"] = tuple(
            state for state in MEGATRON.resumes_exactly or () if state not in lost_states
        )


def _read_timeouts(config: Conversion) -> None:
    minutes = config.read_number("distributed_timeout_minutes")
    limit = 600.0 if minutes is None else 60 * minutes
    note = f"{minutes:g} minutes" if minutes is not None else f"default of {config.title}: 10 minutes"
    config.set_value("comm.init_timeout_s", limit, "distributed_timeout_minutes", note=note)
    if (limit_after_init := config.read_number("distributed_timeout_seconds_after_init")) is not None:
        config.set_value("train.timeout_s", limit_after_init, "distributed_timeout_seconds_after_init")
    else:
        config.set_value("train.timeout_s", limit, "distributed_timeout_minutes", note=note)
        config.theirs["train.timeout_s"] = "distributed_timeout_seconds_after_init"
    _read_buckets(config)
    if interval := config.read_whole("check_weight_hash_across_dp_replicas_interval"):
        config.set_value("fault.digest_every", interval, "check_weight_hash_across_dp_replicas_interval")
    elif config.has_leaf("check_weight_hash_across_dp_replicas_interval"):
        config.mark_used("check_weight_hash_across_dp_replicas_interval", by="fault.digest_every")


def _read_buckets(config: Conversion) -> None:
    width = DTYPES[str(config.job_value("precision.grad_reduce") or "fp32")]
    overlap = config.read_flag("overlap_grad_reduce")
    config.theirs["comm.bucket_mib"] = "ddp_bucket_size" if overlap else "overlap_grad_reduce"
    size = config.read_whole("bucket_size")
    if size is not None and size > 0:
        mib = size * width / 2**20
        config.set_value(
            "comm.bucket_mib", min(65_536.0, mib), "bucket_size", note=f"{size:,} parameters × {width} bytes"
        )
    elif overlap:
        # The size follows from the number of data ranks
        config.set_value("comm.bucket_width", width)
    else:
        config.assume_default(
            "comm.bucket_mib", 65_536.0, "without overlap of the reduction all gradients are one bucket"
        )
    config.mark_used("overlap_grad_reduce", by="comm.bucket_mib")
