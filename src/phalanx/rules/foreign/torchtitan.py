"""torchtitan's TOML job configuration as job settings.

Keys and defaults: torchtitan/config/job_config.py, from v0.1 (`training.batch_size`) to the last TOML editions
(`training.local_batch_size`, `compile.enable`). Newer editions are configured in Python (torchtitan_python.py); of
these, a TOML or the arguments on the command line can be read here.
"""

from __future__ import annotations

from phalanx.job.model import known_presets
from phalanx.rules.foreign.conversion import NEVER, SEEDS, Conversion
from phalanx.rules.foreign.known_models import model_of_flavour, set_known_model
from phalanx.rules.foreign.torchtitan_old import FLOAT8, rename_old_keys
from phalanx.rules.foreign.torchtitan_python import rename_python_keys

DEBUG = {"layers": 6, "hidden": 256, "heads": 16, "kv_heads": 16, "ffn": 768, "vocab": 2048, "rope_theta": 500_000.0}

LATER_FLAVOURS = (("llama3", "1b"), ("llama3", "3b"))
IRRELEVANT = {
    "job.": "names and folders",
    "metrics.": "which logger writes the metrics; telemetry rules look at the run itself",
    "profiling.": "profiler traces",
    "model.tokenizer_path": "the tokenizer does not change the work of a step",
    "model.hf_assets_path": "the tokenizer does not change the work of a step",
    "model.tokenizer_": "the tokenizer does not change the work of a step",
    "model.print_after_conversion": "printing",
    "training.dataset": "which text is read does not change the work of a step",
    "training.dataset_path": "which text is read does not change the work of a step",
    "training.gc_freq": "Python's garbage collection",
    "training.gc_debug": "Python's garbage collection",
    "optimizer.implementation": "the same update, another kernel",
    "checkpoint.export_dtype": "format of the exported weights",
    "checkpoint.last_save_model_only": "the last save only",
    "checkpoint.last_save_in_hf": "the last save only",
    "checkpoint.model_weights_only": "the last save only",
    "checkpoint.load_step": "where a run goes on",
    "checkpoint.initial_load_": "where a run starts",
    "checkpoint.exclude_from_loading": "where a run starts",
    "checkpoint.enable_first_step_checkpoint": "one extra save",
    "checkpoint.create_seed_checkpoint": "where a run starts",
    "comm.trace_buf_size": "flight recorder",
    "comm.save_traces_": "flight recorder",
    "memory_estimation.": "an estimate before the run; the plan makes one",
    "validation.": "evaluation",
    "debug.": "debugging",
    "compile.components": "what is compiled",
    "activation_checkpoint.per_op_sac_": "a detail of selective recomputation",
    "float8.force_recompute_fp8_weight_in_bwd": "memory against time within fp8",
    "float8.emulate": "for tests without the hardware",
}
CONVERTERS = ("float8.", "quantize.", "mx.")
UNMAPPED = {
    "float8.enable_fsdp_float8_all_gather": "weights travel in fp8; the job schema has a word for gradients only",
    "float8.precompute_": "weights travel in fp8; the job schema has a word for gradients only",
    "parallelism.enable_async_tensor_parallel": "overlap within the tensor group is the efficiency profile's matter",
    "parallelism.enable_compiled_autograd": "the planner knows no compiled autograd",
    "parallelism.pipeline_parallel_split_points": "the planner splits layers evenly",
    "parallelism.pipeline_parallel_layers_per_stage": "the planner splits layers evenly",
    "fault_tolerance.": "torchft has no word in the job schema",
    "parallelism.expert_tensor_parallel_degree": "the planner splits experts whole",
    "experimental.": "code of your own is not read",
}


def translate_config(config: Conversion) -> None:
    """Translate a torchtitan configuration into job settings."""
    rename_old_keys(config)
    rename_python_keys(config)
    _read_model(config)
    _read_degrees(config)
    _read_batch(config)
    _read_precision(config)
    _read_optimizer(config)
    _read_checkpoint(config)
    _read_faults(config)
    _read_converters(config)
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _read_converters(config: Conversion) -> None:
    """Settle the settings of number-format converters, which have no effect unless a converter is named."""
    is_fp8 = config.job_value("precision.compute") == "fp8"
    for key in (key for key in config.leaves if key not in config.settled):
        if not is_fp8 and key.startswith(CONVERTERS):
            config.skip_leaf(key, "no converter of model.converters reads it")
        elif key.startswith(("quantize.", "mx.")) or key == "float8.recipe_name":
            config.skip_leaf(key, "how fp8 is scaled: precision.compute is fp8 either way")


# Keys of torchtitan's [model] in any edition; a section with other keys and neither name nor flavour belongs to a
# fork.
MODEL_KEYS = frozenset(
    {
        "model.name",
        "model.flavor",
        "model.norm_type",
        "model.tokenizer_path",
        "model.hf_assets_path",
        "model.converters",
        "model.print_after_conversion",
        "model.use_flex_attn",
        "model.attn_mask_type",
        "model.attn_type",
        "model.vocab_size",
        "model.max_seq_len",
    }
)


def _read_model(config: Conversion) -> None:
    name_and_flavor = [config.find_leaf("model.name"), config.find_leaf("model.flavor")]
    is_recipe = any(key.endswith("_target_") for key in config.leaves)
    if any(leaf is not None and leaf.unknown for leaf in name_and_flavor) or (is_recipe and name_and_flavor[1] is None):
        config.read_word("model.flavor")
        return
    fork_key = next((key for key in config.leaves if key.startswith("model.") and key not in MODEL_KEYS), "")
    if fork_key and name_and_flavor == [None, None]:
        config.leave_unmapped(fork_key, "a fork's own model, whose shape is code that is not read")
        return
    name, flavor = config.read_word("model.name") or "llama3", config.read_word("model.flavor") or "debugmodel"
    # The TOML editions had neither of these two: there they belong to a fork.
    model = model_of_flavour(name, flavor) if is_recipe or (name, flavor) not in LATER_FLAVOURS else None
    if model is not None:
        set_known_model(config, model, "model.flavor", "model.name", note=f"{name} {flavor}")
    elif (name, flavor) == ("llama3", "debugmodel"):
        for key, value in DEBUG.items():
            config.set_value(f"model.{key}", value, "model.flavor", "model.name", note="llama3 debugmodel")
        config.set_value("model.name", "llama3-debugmodel", "model.flavor", "model.name")
    else:
        for key in ("model.name", "model.flavor"):
            config.leave_unmapped(key, "the shape of this flavour is code of torchtitan's, which is not read")


def _read_degrees(config: Conversion) -> None:
    p = "parallelism."
    config.set_value("parallel.mode", "fixed", note="torchtitan searches nothing")
    for axis, job_axis in (
        ("tensor", "tensor"),
        ("pipeline", "pipeline"),
        ("context", "context"),
        ("expert", "expert"),
    ):
        if (degree := config.read_whole(f"{p}{axis}_parallel_degree")) is not None:
            config.set_value(f"parallel.{job_axis}", max(1, degree), f"{p}{axis}_parallel_degree")
    _read_sharding(config, p)
    tensor, pipeline = config.int_of("parallel.tensor"), config.int_of("parallel.pipeline")
    config.assume_default("parallel.sequence_parallel", tensor > 1, "its tensor parallelism always splits norms too")
    if (is_off := config.read_flag(f"{p}disable_loss_parallel")) is not None:
        config.set_value("parallel.loss_parallel", not is_off, f"{p}disable_loss_parallel")
    rotate = config.read_word(f"{p}context_parallel_rotate_method") or "allgather"
    kinds = {"allgather": "allgather", "alltoall": "ring"}
    config.set_value("parallel.context_kind", kinds.get(rotate, "allgather"), f"{p}context_parallel_rotate_method")
    _read_schedule(config, p, pipeline)
    _read_recompute(config)


def _read_sharding(config: Conversion, p: str) -> None:
    replicas, shard = (
        config.read_whole(f"{p}data_parallel_replicate_degree"),
        config.read_whole(f"{p}data_parallel_shard_degree"),
    )
    replicas, shard = 1 if replicas is None else replicas, -1 if shard is None else shard
    policy = config.read_word(f"{p}fsdp_reshard_after_forward") or "default"
    keeps_gathered = policy == "never" or (
        policy == "default" and (config.read_whole(f"{p}pipeline_parallel_degree") or 1) > 1
    )
    names = (f"{p}data_parallel_shard_degree", f"{p}fsdp_reshard_after_forward")
    if shard == 1:
        config.set_value("parallel.zero", 0, *names, note="no sharding: DDP")
    else:
        config.set_value(
            "parallel.zero",
            2 if keeps_gathered else 3,
            *names,
            note="FSDP" + (" that keeps the weights" if keeps_gathered else ""),
        )
    if shard > 0:
        config.set_value(
            "parallel.data", replicas * shard, f"{p}data_parallel_replicate_degree", names[0], note="both degrees"
        )
        config.set_value("parallel.shard", shard, names[0])
    elif replicas > 1:
        config.set_value("parallel.shard_copies", replicas, f"{p}data_parallel_replicate_degree")
        config.mark_used(names[0], by="parallel.shard: the devices that are left")
    else:
        config.mark_used(
            f"{p}data_parallel_replicate_degree", names[0], by="parallel.data = auto: the devices that are left"
        )
    if shard == 1:
        config.assume_default("comm.bucket_mib", 100, "bucket_cap_mb of its replicate()")


def _read_schedule(config: Conversion, p: str, pipeline: int) -> None:
    name = config.read_word(f"{p}pipeline_parallel_schedule") or "1f1b"
    schedules = {
        "1f1b": "1f1b",
        "gpipe": "gpipe",
        "interleaved1f1b": "interleaved",
        "interleavedzerobubble": "zero-bubble",
    }
    if name not in schedules:
        config.leave_unmapped(
            f"{p}pipeline_parallel_schedule", "the planner knows 1F1B, GPipe, Interleaved1F1B, zero bubble"
        )
    if pipeline == 1:
        config.skip_leaf(f"{p}pipeline_parallel_schedule", "no effect with one stage")
        return
    config.set_value("parallel.schedule", schedules.get(name, "1f1b"), f"{p}pipeline_parallel_schedule")
    if schedules.get(name) == "interleaved":
        config.assume_default("parallel.virtual_pipeline", 2, "two stages per rank for looped schedules")


def _read_recompute(config: Conversion) -> None:
    mode = config.read_word("activation_checkpoint.mode") or "selective"
    option = config.read_word("activation_checkpoint.selective_ac_option")
    if mode == "selective" and option.isdigit() and int(option) >= 1:
        _recompute_every(config, int(option))
    else:
        words = {"full": "full", "none": "none", "selective": "selective", "memory_budget": "selective"}
        config.set_value("parallel.recompute", words.get(mode, "selective"), "activation_checkpoint.mode")
        config.mark_used("activation_checkpoint.selective_ac_option", by="parallel.recompute")


def _recompute_every(config: Conversion, every: int) -> None:
    """Read recomputation of every n-th layer, as a number of layers per stage if the model's layers are known."""
    names = ("activation_checkpoint.selective_ac_option", "activation_checkpoint.mode")
    preset = known_presets().get(str(config.job_value("model.preset") or ""))
    layers = config.int_of("model.layers", int(preset.shape["layers"]) if preset is not None else 0)
    layers_each = layers // config.int_of("parallel.pipeline") // every
    note = "every layer, whole" if every == 1 else f"every {every}th layer, whole"
    if every > 1 and not layers_each:
        config.unknown["parallel.recompute"] = f"every {every}th layer of a model whose layers are not known"
    config.set_value("parallel.recompute", "full", *names, note=note)
    if every > 1 and layers_each:
        config.set_value("parallel.recompute_layers", layers_each, *names, note=note)


def _read_batch(config: Conversion) -> None:
    sequence = config.read_whole("training.seq_len") or 2048
    config.set_value("data.sequence", sequence, "training.seq_len")
    local = "training.local_batch_size" if config.has_leaf("training.local_batch_size") else "training.batch_size"
    size = config.read_whole(local) or 8
    pipeline = config.int_of("parallel.pipeline")
    micro = (config.read_whole("parallelism.pipeline_parallel_microbatch_size") or 1) if pipeline > 1 else size
    name = "parallelism.pipeline_parallel_microbatch_size" if pipeline > 1 else local
    config.set_value("batch.micro", micro, name)
    if pipeline == 1:
        config.skip_leaf("parallelism.pipeline_parallel_microbatch_size", "no effect with one stage")
    total = config.read_whole("training.global_batch_size")
    if total is not None and total > 0:
        config.set_value("batch.global_sequences", total, "training.global_batch_size")
        config.mark_used(local, by="batch.micro")
        if (
            pipeline > 1
            # distributed/pipeline_parallel.py: a schedule runs over the local batch, once for each of them
        ):
            config.set_value("batch.fill", max(1, size // max(1, micro)), local)
    else:
        config.set_value("batch.per_replica", size, local, "training.global_batch_size", note=f"{size} per data rank")
    steps = config.read_whole("training.steps")
    config.set_value("data.steps", steps or 10_000, "training.steps")
    if (seed := config.read_whole("training.seed")) is not None or (
        seed := config.read_whole("debug.seed")
    ) is not None:
        config.set_value(
            "data.seed", abs(seed) % SEEDS, "training.seed" if config.has_leaf("training.seed") else "debug.seed"
        )
    for key in ("training.deterministic", "debug.deterministic"):
        config.leave_unmapped(
            key, "the same bits on the same ranks; numerics.reproducible means on any number of ranks"
        )


def _read_precision(config: Conversion) -> None:
    formats = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    compute = formats.get(config.read_word("training.mixed_precision_param") or "bfloat16", "bf16")
    converters = config.read_word("model.converters")
    if any(word in converters for word in ("float8", "mx", "quantize", "nvfp4")):
        narrow_format = "fp4" if "nvfp4" in converters else "fp8"
        config.set_value("precision.compute", narrow_format, "model.converters", note=converters[:60])
        _read_exclusions(config)
        config.mark_used("training.mixed_precision_param", by="precision.compute: what is not fp8")
    else:
        config.set_value("precision.compute", compute, "training.mixed_precision_param")
        if config.has_leaf("model.converters"):
            config.skip_leaf("model.converters", "no converter that changes the number format")
    reduce = formats.get(config.read_word("training.mixed_precision_reduce") or "float32", "fp32")
    config.set_value("precision.grad_reduce", "bf16" if reduce != "fp32" else "fp32", "training.mixed_precision_reduce")
    if config.read_word("training.dtype") == "bfloat16":
        config.set_value("precision.master_weights", False, "training.dtype")
        config.set_value("precision.optimizer_state", "bf16", "training.dtype")
    else:
        config.set_value("precision.master_weights", True, "training.dtype", note="weights are fp32, cast for each use")
        config.set_value(
            "precision.optimizer_state", "fp32", "training.dtype", note="moments in the format of the weights"
        )
    for key in ("training.compile", "compile.enable"):
        if (compiled := config.read_flag(key)) is not None:
            config.set_value("train.compile", compiled, key)
    if offload := config.read_flag("training.enable_cpu_offload"):
        config.set_value("parallel.offload", "parameters", "training.enable_cpu_offload")
    elif offload is not None:
        config.mark_used("training.enable_cpu_offload", by="parallel.offload")


def _read_exclusions(config: Conversion) -> None:
    """Read whether the head, which is a linear layer, is excluded from fp8 by name (mx excludes it by default)."""
    filters = [key for key in config.leaves if key.endswith(("float8.filter_fqns", ".filter_fqns", ".fqns"))]
    is_head_named = any(word in config.read_word(key) for key in filters for word in ("output", "lm_head"))
    # Editions that enable fp8 by a separate key exclude the head: float8_linear.py, "output".
    leaf = config.find_leaf("model.converters")
    excludes_head = leaf is not None and leaf.key in FLOAT8
    converted = "float8" in config.read_word("model.converters")
    is_head_spared = is_head_named or excludes_head or not converted
    is_old_edition = config.has_leaf(
        "training.batch_size"
    )  # some of them did so too; from local_batch_size on none does
    config.practice["fp8_spares_sensitive"] = None if is_old_edition and not is_head_spared else is_head_spared
    config.mark_used(*filters, by="practice: fp8_spares_sensitive")


def _read_optimizer(config: Conversion) -> None:
    name = config.read_word("optimizer.name") or "adamw"
    if name in ("adamw", "adam"):
        config.set_value("optim.name", "adamw", "optimizer.name")
    elif name == "muon":
        config.set_value("optim.name", "muon", "optimizer.name")
    else:
        config.leave_unmapped("optimizer.name", "not an optimizer of the job schema")
    config.set_value("optim.lr", config.read_number("optimizer.lr") or 8e-4, "optimizer.lr")
    betas = [config.read_number("optimizer.beta1"), config.read_number("optimizer.beta2")]
    if any(beta is not None for beta in betas):
        values = [0.9 if betas[0] is None else betas[0], 0.95 if betas[1] is None else betas[1]]
        config.set_value("optim.betas", values, "optimizer.beta1", "optimizer.beta2")
    config.copy_keys(
        {
            "optimizer.eps": ("optim.eps", Conversion.read_number),
            "optimizer.weight_decay": ("optim.weight_decay", Conversion.read_number),
            "training.max_norm": ("optim.clip", Conversion.read_number),
        }
    )
    if config.has_leaf("optimizer.early_step_in_backward"):
        config.leave_unmapped("optimizer.early_step_in_backward", "the planner updates after the backward pass")
    _schedule_of_lr(config)


def _schedule_of_lr(config: Conversion) -> None:
    s = "lr_scheduler."
    warmup = config.read_whole(f"{s}warmup_steps")
    config.set_value("optim.warmup_steps", 200 if warmup is None else warmup, f"{s}warmup_steps")
    kind, ratio = config.read_word(f"{s}decay_type") or "linear", config.read_number(f"{s}decay_ratio")
    if kind == "cosine" and ratio is None:
        config.set_value("optim.schedule", "cosine", f"{s}decay_type")
    else:
        config.set_value(
            "optim.schedule", "wsd", f"{s}decay_type", f"{s}decay_ratio", note=f"warm-up, then {kind} decay"
        )
        config.set_value("optim.decay", 1.0 if ratio is None else ratio, f"{s}decay_ratio", f"{s}decay_type")
    for key in (f"{s}lr_min", f"{s}min_lr_factor"):
        if (last := config.read_number(key)) is not None:
            config.set_value("optim.final_lr", last, key)
    config.assume_default("optim.final_lr", 0.0)


def _read_checkpoint(config: Conversion) -> None:
    c = "checkpoint."
    switch = f"{c}enable_checkpoint" if config.has_leaf(f"{c}enable_checkpoint") else f"{c}enable"
    is_enabled = bool(config.read_flag(switch))
    steps = config.read_whole(f"{c}interval")
    if is_enabled:
        config.set_value("checkpoint.steps", steps or 500, f"{c}interval", switch)
    else:
        config.set_value("checkpoint.steps", NEVER, switch, note="checkpoints are off")
        config.practice["saves"] = False
        config.skip_leaf(f"{c}interval", "checkpoints are off")
    config.copy_keys({f"{c}folder": ("checkpoint.path", _path_text)})
    keep = config.read_whole(f"{c}keep_latest_k")
    note = "0 keeps all" if keep == 0 else ""
    config.set_value("checkpoint.keep", 10**6 if keep == 0 else keep or 10, f"{c}keep_latest_k", note=note)
    mode = config.read_word(f"{c}async_mode") or "disabled"
    config.set_value("checkpoint.async", mode != "disabled", f"{c}async_mode")


def _path_text(config: Conversion, name: str) -> str:
    leaf = config.find_leaf(name)
    text = str(leaf.value) if leaf is not None else ""
    return text if text.isprintable() and len(text) < 1000 else ""


def _read_faults(config: Conversion) -> None:
    config.copy_keys(
        {
            "comm.init_timeout_seconds": ("comm.init_timeout_s", Conversion.read_number),
            "comm.train_timeout_seconds": ("train.timeout_s", Conversion.read_number),
        }
    )
    config.assume_default("comm.init_timeout_s", 300)
    config.assume_default("train.timeout_s", 100)
    if config.read_flag("fault_tolerance.enable"):
        config.set_value(
            "fault.recovery", "shrink", "fault_tolerance.enable", note="torchft: replica groups come and go"
        )
        config.practice |= {"step_transaction": True}
    elif config.has_leaf("fault_tolerance.enable"):
        config.mark_used("fault_tolerance.enable", by="fault.recovery")
